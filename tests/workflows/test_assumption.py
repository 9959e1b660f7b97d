from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells

from scbd.workflows import check_assumption, in_out_correlation

QUICK: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu"}


def test_runs_of_erm_in_and_out_of_distribution():
    cells = make_cells()
    frame = check_assumption(
        cells,
        y_key="gene",
        e_key="well",
        held_out=["well_2"],
        lrs=(1e-5, 3e-3),
        weight_decays=(0.0,),
        max_steps=(2, 30),
        batch_size=16,
        model_kwargs={"encoder": "small"},
        **QUICK,
    )
    assert list(frame) == ["lr", "weight_decay", "max_steps", "own in", "own out"] and len(frame) == 4
    # brightness tells the perturbation in every well, so who learns it does better in both
    assert frame.loc[frame["own in"].idxmax(), "max_steps"] == 30
    with pytest.raises(ValueError, match="No cell is in the held-out environment 'well_9'"):
        check_assumption(cells, y_key="gene", e_key="well", held_out=["well_9"])


@pytest.mark.parametrize("held_out", [2, 2.0, "2"])
@pytest.mark.parametrize("dtype", ["int64", "float64", "category"])
def test_environments_that_are_numbers_are_held_out(held_out, dtype):
    cells = make_cells()
    cells.obs["batch"] = cells.obs["well"].cat.codes.astype(dtype)
    how = {"lrs": (1e-3,), "weight_decays": (0.0,), "max_steps": (1,), "batch_size": 16, **QUICK}
    frame = check_assumption(
        cells, y_key="gene", e_key="batch", held_out=[held_out], model_kwargs={"encoder": "small"}, **how
    )
    assert len(frame) == 1 and frame["own out"].notna().all()


def test_correlations_are_those_of_pandas():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"own in": rng.random(20), "own out": rng.random(20)})
    found = in_out_correlation(frame)
    assert found["pearson"] == pytest.approx(frame["own in"].corr(frame["own out"]))
    assert found["spearman"] == pytest.approx(frame["own in"].corr(frame["own out"], method="spearman"))
    strong = frame[frame["own in"] >= frame["own in"].median()]
    assert found["strong"] == pytest.approx(strong["own in"].corr(strong["own out"])) and found["n"] == 20


def test_what_weak_runs_do_does_not_hide_a_trade():
    frame = pd.DataFrame({"a": [0.1, 0.2, 0.3, 0.9, 0.95, 1.0], "b": [0.1, 0.2, 0.3, 0.8, 0.7, 0.6]})
    found = in_out_correlation(frame, ins="a", outs="b")
    assert found["pearson"] > 0.5 and found["strong"] == pytest.approx(-1)


def test_no_correlation_without_variation_or_runs():
    assert np.isnan(in_out_correlation(pd.DataFrame({"own in": [1.0] * 4, "own out": [0.1, 0.2, 0.3, 0.4]}))["pearson"])
    with pytest.raises(ValueError, match="A correlation needs at least three runs, there are 2"):
        in_out_correlation(pd.DataFrame({"own in": [1, 2], "own out": [1, 2]}))
