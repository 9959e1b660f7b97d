from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells, make_wells

import scbd
from scbd.model import SCBDModel
from scbd.workflows import AlphaSelection, select_alpha
from scbd.workflows._cells import UserCells

QUICK: dict[str, Any] = {"max_steps": 6, "batch_size": 24, "lr": 1e-3, "enable_progress_bar": False} | {
    "accelerator": "cpu"
}
CELLS: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": {"encoder": "small", "n_latent": 8}}


def test_a_sweep_trains_chooses_keeps_and_goes_on(tmp_path, monkeypatch):
    cells = make_cells()
    assert scbd.select_alpha is select_alpha
    found = select_alpha(cells, **CELLS, alphas=(0.01, 0), out=tmp_path / "sweep", n_seeds=2, **QUICK)
    assert isinstance(found, AlphaSelection) and found.alpha in (0.0, 0.01)
    assert len(found.runs) == 4 and set(found.runs["seed"]) == {0, 1} and found.runs["style_target"].isna().all()
    # scored on what the split leaves: a tenth
    assert found.runs["cells"].between(9, 12).all()
    right = found.runs[["accuracy", "chance"]].mul(found.runs["cells"], axis=0)
    np.testing.assert_allclose(right, right.round(), atol=1e-9)
    assert found.runs[["e from z_c", "e from r_c", "e chance"]].notna().all(axis=None)
    ax = found.plot()
    assert f"chosen: alpha {found.alpha:g}" in ax.get_title() and len(ax.get_legend_handles_labels()[1]) == 3
    assert {path.name for path in (tmp_path / "sweep").iterdir()} >= {
        "rows.jsonl",
        "runs.csv",
        "curve.csv",
        "curve.png",
    }
    monkeypatch.setattr(SCBDModel, "train", None)  # nothing is left to train
    again = select_alpha(cells, **CELLS, alphas=(0.01, 0), out=tmp_path / "sweep", n_seeds=2, **QUICK)
    pd.testing.assert_frame_equal(again.runs, found.runs)


@pytest.mark.filterwarnings("ignore:No training cell is a control")
@pytest.mark.parametrize("criterion", ["kept", "unseen"])
def test_no_split_is_as_none_given(criterion):
    """The command line hands on every option."""
    training: dict[str, Any] = {"max_steps": 2, "enable_progress_bar": False, "accelerator": "cpu", "split": None}
    columns: dict[str, Any] = {"y_key": "compound", "e_key": "plate", "setup_kwargs": {"layer": "X"}}
    found = select_alpha(make_wells(), **columns, alphas=(0, 0.1), criterion=criterion, **training)
    assert found.runs["accuracy"].notna().all()


@pytest.mark.filterwarnings("ignore:No training cell is a control")
def test_alpha_is_chosen_for_features(tmp_path):
    wells = make_wells()
    setup = {"layer": "X", "control": "DMSO", "position_key": "well"}
    columns: dict[str, Any] = {"y_key": "compound", "e_key": "plate", "setup_kwargs": setup}
    told: dict[str, Any] = {"y_key": "compound", "e_key": "plate", "setup": setup}
    digest = UserCells(wells, **told).trial("SCBD", 0, {}, {}).data["digest"]
    training: dict[str, Any] = {"max_steps": 3, "enable_progress_bar": False, "accelerator": "cpu"}
    how = {"alphas": (0, 0.1), "out": tmp_path, **training}
    found = select_alpha(wells, **columns, **how)
    assert found.alpha in (0, 0.1) and found.runs["accuracy"].notna().all()
    wells.obs["well"] = wells.obs["well"].astype(str).str.replace("W00", "W17")
    assert UserCells(wells, **told).trial("SCBD", 0, {}, {}).data["digest"] != digest
    wells.X[0] += 1
    with pytest.warns(UserWarning, match="2 belong to other cells"):
        select_alpha(wells, **columns, **how)


@pytest.mark.parametrize("what", ["labels", "environments", "pixels", "split"])
def test_a_sweep_answers_for_the_cells_it_was_given(tmp_path, what):
    """Labels are mended, and the sweep is run again into the same directory."""
    how: dict[str, Any] = CELLS | QUICK | {"alphas": (0, 0.01), "max_steps": 2, "split": "part"}
    cells = make_cells()
    cells.obs["part"] = np.where(np.arange(96) % 4, "train", "validation")
    before = select_alpha(cells, out=tmp_path / "sweep", **how)
    mended = cells.copy()
    if what == "pixels":
        mended.obsm["single_cell_images"] = 255 - mended.obsm["single_cell_images"]
    else:
        column = {"labels": "gene", "environments": "well", "split": "part"}[what]
        mended.obs[column] = mended.obs[column].to_numpy()[::-1]
    with pytest.warns(
        UserWarning, match=r"Of the runs in .*sweep, 2 belong to other cells than these.*kept, and not used"
    ):
        after = select_alpha(mended, out=tmp_path / "sweep", **how)
    fresh = select_alpha(mended, **how)
    scores = ["alpha", "accuracy", "e from r_c", "supervised_c"]
    pd.testing.assert_frame_equal(after.runs[scores], fresh.runs[scores])
    assert not before.runs[scores].equals(after.runs[scores])
    # nothing was lost: the first cells have their answer still
    with pytest.warns(UserWarning, match="2 belong to other cells"):
        pd.testing.assert_frame_equal(select_alpha(cells, out=tmp_path / "sweep", **how).runs, before.runs)


def test_rows_that_do_not_say_of_which_cells_they_are_are_not_used(tmp_path):
    how: dict[str, Any] = CELLS | QUICK | {"alphas": (0, 0.01), "max_steps": 2}
    select_alpha(make_cells(), out=tmp_path, **how)
    path, old = tmp_path / "rows.jsonl", []
    for row in map(json.loads, path.read_text().splitlines()):
        del row["trial"]["data"]["digest"], row["run"]["digest"]
        old.append(json.dumps(row | {"key": f"{row['key']}-old"}))
    path.write_text("\n".join(old))
    with pytest.warns(UserWarning, match="2 belong to other cells"):
        assert len(select_alpha(make_cells(), out=tmp_path, **how).runs) == 2


def test_a_file_is_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(SCBDModel, "train", None)
    (tmp_path / "cells.h5ad").write_text("precious")
    for out in (tmp_path / "cells.h5ad", tmp_path / "cells.h5ad" / "sweep"):
        with pytest.raises(FileExistsError, match="cells.h5ad is a file: give a directory to write to"):
            select_alpha(make_cells(), **CELLS, **QUICK, out=out)


def test_environments_are_held_out_in_turn(monkeypatch):
    cells, seen = make_cells(), []
    train = SCBDModel.train

    def watched(self, **kwargs):
        train(self, **kwargs)
        wells = cells.obs["well"].to_numpy()
        seen.append((set(wells[self.train_indices]), set(wells[self.test_indices])))

    monkeypatch.setattr(SCBDModel, "train", watched)
    found = select_alpha(cells, **CELLS, alphas=(0, 0.01), criterion="unseen", **QUICK)
    wells = set(cells.obs["well"])
    assert [held for _, held in seen[::2]] == [held for _, held in seen[1::2]]  # both alphas on the same
    assert set.union(*(held for _, held in seen)) == wells and all(a == wells - b for a, b in seen)
    assert (
        found.criterion == "unseen"
        and len(found.runs) == 2 * len(wells)
        and found.runs["cells"].sum() == 2 * len(cells)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alphas": (1.0,)}, "give at least two different ones"),
        ({"alphas": (-1.0, 1.0)}, "none negative"),
        ({"alphas": (0.0, 1.0, float("nan"))}, "none negative, infinite or not a number"),
        ({"alphas": (0, "auto")}, "alphas must be numbers: alpha='auto' finds its own"),
        ({"criterion": "test"}, "criterion='test' is not known: use one of kept, unseen"),
        ({"n_folds": 2}, "n_folds is for criterion='unseen'"),
        ({"criterion": "unseen", "n_folds": 1}, "n_folds=1, 3 environments"),
        ({"criterion": "unseen", "n_folds": 2}, "hold out at least one at a time, and learn from two"),
        ({"criterion": "unseen", "split": "split"}, "split is set by the sweep itself"),
        ({"n_seeds": 0}, "run at least one seed"),
        ({"seed": 3}, "seed is set by the sweep itself"),
        ({"model_kwargs": {"alpha": 1.0}}, "alpha is set by the sweep itself"),
        ({"model_kwargs": {"encoder": object()}}, "give encoder by name"),
        ({"split": np.arange(3)}, "give split as a column of obs"),
        ({"train_size": 1.0}, "no validation cells to choose by"),
        ({"validation_size": 0.0}, "no validation cells to choose by"),
        ({"split": "train_only"}, "no validation cells to choose by"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_trained(monkeypatch, settings, message):
    monkeypatch.setattr(SCBDModel, "train", None)
    with pytest.raises(ValueError, match=message):
        cells = make_cells()
        cells.obs["train_only"] = "train"
        select_alpha(cells, **CELLS | QUICK | settings)


def test_two_environments_cannot_be_held_out():
    cells = make_cells()
    cells.obs["plate"] = np.where(np.arange(len(cells)) % 2, "a", "b")
    with pytest.raises(ValueError, match="it needs three, there are 2; use criterion='kept'"):
        select_alpha(cells, **CELLS | {"e_key": "plate"}, criterion="unseen", **QUICK)
    with pytest.raises(KeyError, match="nowhere"):
        select_alpha(cells, **CELLS | {"e_key": "nowhere"}, **QUICK)
