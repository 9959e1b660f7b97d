"""Which labels are asked whether they are mixed, before cells that lie together are drawn together."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells
from small_models import QUICK, make_model

from scbd.data import write_screen
from scbd.model._parts import codes_of_few, values_of_few

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def test_labels_are_columns_of_few_values():
    n = 40
    obs = pd.DataFrame(
        {
            "guide": pd.Categorical(np.arange(n) % 3),
            "plate": ["a", None] * (n // 2),
            "row": np.arange(n) // 10,
            "control": np.arange(n) < 5,
            "cell": [f"cell {i}" for i in range(n)],
            "number": np.arange(n),
            "area": np.linspace(0, 1, n),
            "day": pd.Timestamp("2026-01-01"),
        }
    )
    obs = pd.concat([obs, obs[["row"]]], axis=1)  # a name that is there twice
    found = list(codes_of_few(obs))
    assert [len(np.unique(codes)) for codes in found] == [3, 2, 4, 2, 4]
    assert all(codes.min() >= 0 for codes in found)
    np.testing.assert_array_equal(found[1] == 0, obs["plate"].isna())
    known = values_of_few(obs)
    assert list(known) == ["guide", "plate", "row", "control"]
    assert known["guide"] == ["0", "1", "2"] and known["plate"] == ["a"]


@pytest.mark.parametrize("mixed", [True, False])
def test_cells_are_drawn_in_stretches_only_if_every_label_is_mixed(cells, tmp_path, mixed):
    cells.obs["guide"] = np.random.default_rng(1).integers(4, size=cells.n_obs).astype(str)
    screen = write_screen(tmp_path / "screen.h5ad", cells, y_key="gene")
    if not mixed:  # as if the table had been sorted by gene and guide
        order = np.lexsort([screen.obs["guide"], screen.obs["gene"]])
        screen.obs["guide"] = screen.obs["guide"].to_numpy()[order]
    model = make_model(screen)
    how: dict[str, Any] = QUICK | {"perturbations_per_batch": 3}
    model.train(**how)
    assert model.training_settings_["neighbours"] is mixed


@pytest.mark.filterwarnings("ignore:y and e are confounded")
def test_single_cells_of_a_perturbation_are_named(caplog):
    cells = make_cells()
    cells.obs["gene"] = cells.obs["gene"].cat.add_categories("lonely")
    cells.obs.loc["cell_7", "gene"] = "lonely"
    model = make_model(cells)
    with caplog.at_level(logging.WARNING, logger="scbd"):
        model.train(**QUICK | {"max_steps": 2}, train_size=1.0)
    assert "1 of 5 perturbations have a single training cell (lonely)" in caplog.text


@pytest.mark.filterwarnings("ignore:y and e are confounded")
def test_perturbations_without_positives_in_other_environments_are_named(caplog):
    cells = make_cells()
    lonely = cells.obs["gene"].cat.categories[0]
    cells.obs["well"] = np.where(cells.obs["gene"] == lonely, "A", cells.obs["well"])
    model = make_model(cells, positives="other_environments")
    with caplog.at_level(logging.WARNING, logger="scbd"):
        model.train(**QUICK)
    assert f"in one environment only ({lonely})" in caplog.text
    cells.obs["well"] = "well of " + cells.obs["gene"].astype(str)
    model = make_model(cells, positives="other_environments")
    with pytest.raises(ValueError, match="training cells of each lie in one: use positives='all', or a coarser e_key"):
        model.train(**QUICK)
    assert not model.is_trained_
