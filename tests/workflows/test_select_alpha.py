from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells, make_wells

from scbd import check_assumption, select_alpha
from scbd._workflows.select_alpha import Criterion, choose_alpha
from scbd.model import SCBDModel
from scbd.model._objective import SCBDModule

pytestmark = pytest.mark.filterwarnings("ignore:z_c has", "ignore:No training cell is a control")
QUICK: dict[str, Any] = {"max_steps": 6, "batch_size": 24, "lr": 1e-3, "enable_progress_bar": False} | {
    "accelerator": "cpu"
}
CELLS: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": {"encoder": "small", "n_latent": 8}}


def test_select_alpha_called_again_returns_equal_runs_without_training(tmp_path, monkeypatch):
    how: dict[str, Any] = CELLS | QUICK | {"alphas": (0.01, 0), "n_seeds": 2}
    found = select_alpha(make_cells(), **how, out=tmp_path / "sweep")
    assert found.alpha in (0.0, 0.01) and found.criterion == "kept"
    assert list(zip(found.runs["seed"], found.runs["alpha"], strict=True)) == [(0, 0), (0, 0.01), (1, 0), (1, 0.01)]
    # scored on the validation cells, a tenth of all cells
    assert found.runs["cells"].between(9, 12).all()
    right = found.runs[["accuracy", "chance"]].mul(found.runs["cells"], axis=0)
    np.testing.assert_allclose(right, right.round(), atol=1e-9)
    assert found.runs[["e from z_c", "e from r_c", "e chance"]].notna().all(axis=None)
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"runs", "runs.csv", "curve.csv", "curve.png"}
    monkeypatch.setattr(SCBDModel, "train", None)  # nothing is left to train
    again = select_alpha(make_cells(), **how, out=tmp_path / "sweep")
    pd.testing.assert_frame_equal(again.runs, found.runs)


def test_select_alpha_interrupted_trains_only_remaining_models(tmp_path, monkeypatch):
    how: dict[str, Any] = CELLS | QUICK | {"alphas": (0, 0.01, 0.1)}
    trained: list[float] = []
    whole, train = select_alpha(make_cells(), **how), SCBDModel.train

    def train_once_then_interrupt(self, **training):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(self.module.alpha)
        train(self, **training)

    with monkeypatch.context() as patch:
        patch.setattr(SCBDModel, "train", train_once_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            select_alpha(make_cells(), **how, out=tmp_path)
    found = select_alpha(make_cells(), **how, out=tmp_path)
    assert trained == [0]
    pd.testing.assert_frame_equal(found.runs, whole.runs)


@pytest.mark.parametrize("what", ["labels", "environments", "pixels", "split"])
def test_select_alpha_directory_of_other_cells_raises(tmp_path, what):
    """The sweep is run again into the same directory after the cells were changed."""
    how: dict[str, Any] = CELLS | QUICK | {"alphas": (0, 0.01), "max_steps": 2, "split": "part"}
    cells = make_cells()
    cells.obs["part"] = np.where(np.arange(96) % 4, "train", "validation")
    select_alpha(cells, out=tmp_path, **how)
    if what == "pixels":
        cells.obsm["single_cell_images"] = 255 - cells.obsm["single_cell_images"]
    else:
        column = {"labels": "gene", "environments": "well", "split": "part"}[what]
        cells.obs[column] = cells.obs[column].to_numpy()[::-1]
    with pytest.raises(ValueError, match="alpha-0-seed-0.* other"):
        select_alpha(cells, out=tmp_path, **how)


@pytest.mark.parametrize("criterion", ["kept", "unseen"])
def test_select_alpha_features_returns_an_alpha(criterion):
    """`split=None` means no split, since the command line passes every option."""
    setup = {"layer": "X", "control": "DMSO", "position_key": "well"}
    training: dict[str, Any] = {"max_steps": 2, "enable_progress_bar": False, "accelerator": "cpu", "split": None}
    columns: dict[str, Any] = {"y_key": "compound", "e_key": "plate", "setup_kwargs": setup}
    found = select_alpha(make_wells(), **columns, alphas=(0, 0.1), criterion=criterion, **training)
    assert found.alpha in (0, 0.1) and found.runs["accuracy"].notna().all()


def test_select_alpha_unseen_holds_out_each_environment_in_turn(monkeypatch):
    cells, seen = make_cells(), []
    train = SCBDModel.train

    def train_and_record(self, **kwargs):
        train(self, **kwargs)
        wells = cells.obs["well"].to_numpy()
        seen.append((set(wells[self.train_indices]), set(wells[self.test_indices])))

    monkeypatch.setattr(SCBDModel, "train", train_and_record)
    found = select_alpha(cells, **CELLS, alphas=(0, 0.01), criterion="unseen", **QUICK)
    wells = set(cells.obs["well"])
    assert [held for _, held in seen[::2]] == [held for _, held in seen[1::2]]  # equal folds for both alphas
    assert set.union(*(held for _, held in seen)) == wells and all(a == wells - b for a, b in seen)
    assert len(found.runs) == 2 * len(wells) and found.runs["cells"].sum() == 2 * len(cells)


def test_select_alpha_diverging_alpha_warns_and_is_not_chosen(monkeypatch):
    losses = SCBDModule.forward

    def forward_with_nan_loss(self, *args, **kwargs):
        found = losses(self, *args, **kwargs)
        return found._replace(loss=found.loss * float("nan")) if self.alpha == 0.1 else found

    monkeypatch.setattr(SCBDModule, "forward", forward_with_nan_loss)
    with pytest.warns(UserWarning, match=r"alpha=0\.1: "):
        found = select_alpha(make_cells(), **CELLS | QUICK, alphas=(0, 0.1))
    assert found.alpha == 0 and found.runs["accuracy"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"alphas": (1.0,)}, "at least two"),
        ({"alphas": (-1.0, 1.0)}, "none negative"),
        ({"alphas": (0.0, 1.0, float("nan"))}, "not a number"),
        ({"alphas": (0, "auto")}, "auto"),
        ({"criterion": "test"}, "criterion='test'"),
        ({"n_folds": 2}, "n_folds"),
        ({"criterion": "unseen", "n_folds": 1}, "n_folds=1"),
        ({"criterion": "unseen", "n_folds": 2}, "n_folds=2"),
        ({"criterion": "unseen", "split": "split"}, "split"),
        ({"criterion": "unseen", "e_key": "half"}, "it needs three, there are 2"),
        ({"n_seeds": 0}, "n_seeds=0"),
        ({"seed": 3}, "seed"),
        ({"model_kwargs": {"alpha": 1.0}}, "alpha"),
        ({"model_kwargs": {"encoder": object()}}, "encoder"),
        ({"train_size": 1.0}, "no validation cells"),
        ({"validation_size": 0.0}, "no validation cells"),
        ({"split": "train_only"}, "no validation cells"),
    ],
)
def test_select_alpha_invalid_settings_raises_before_training(monkeypatch, settings, named):
    monkeypatch.setattr(SCBDModel, "train", None)
    cells = make_cells()
    cells.obs["train_only"], cells.obs["half"] = "train", np.where(np.arange(96) % 2, "a", "b")
    with pytest.raises(ValueError, match=named):
        select_alpha(cells, **CELLS | QUICK | settings)


def sweep(accuracies: dict[float, list[float]], cells: int = 10_000) -> pd.DataFrame:
    return pd.DataFrame(
        [{"alpha": a, "accuracy": x, "chance": 0.1, "cells": cells} for a, runs in accuracies.items() for x in runs]
    )


def test_choose_alpha_returns_largest_alpha_above_threshold():
    found = choose_alpha(sweep({0.0: [0.9], 0.1: [0.92], 1.0: [0.91], 10.0: [0.6], 100.0: [0.2]}))
    assert found.alpha == 1.0 and found.criterion == "kept"
    # .1 + .97 × (.92 - .1), less the standard error of .92
    assert found.threshold == pytest.approx(0.1 + 0.97 * 0.82 - np.sqrt(0.92 * 0.08 / 10_000))
    assert list(found.curve.index) == [0, 0.1, 1, 10, 100] and list(found.curve["kept"]) == [True] * 3 + [False] * 2
    assert repr(found).startswith("alpha 1 (kept")
    ax = found.plot()
    assert "alpha 1" in ax.get_title() and [label.get_text() for label in ax.get_xticklabels()] == [
        "0",
        "0.1",
        "1",
        "10",
        "100",
    ]
    np.testing.assert_allclose(np.asarray(ax.containers[0][0].get_ydata(), dtype=float), [0.9, 0.92, 0.91, 0.6, 0.2])


@pytest.mark.parametrize("criterion", get_args(Criterion))
@pytest.mark.parametrize(
    ("accuracies", "chosen"),
    [
        # an alpha beyond one below the threshold is not chosen: it passes by chance
        ({0.0: [0.9], 1.0: [0.7], 10.0: [0.9]}, 0),
        ({0.0: [0.6], 0.003: [0.45], 0.01: [0.45], 0.03: [0.45], 0.1: [0.6]}, 0),
        # accuracy may be lower at alphas below the best one
        ({0.0: [0.5], 1.0: [0.8], 10.0: [0.9], 30.0: [0.5]}, 10),
        ({0.0: [0.5], 1.0: [0.8], 10.0: [0.9], 30.0: [0.899], 100.0: [0.5], 300.0: [0.9]}, 30),
        # an alpha of which a run failed is not chosen
        ({0.0: [0.8, 0.8], 1.0: [0.79, 0.81], 10.0: [0.95, np.nan], 100.0: [np.nan, np.nan]}, 1),
    ],
)
def test_choose_alpha_curve_with_gap_returns_alpha_before_the_gap(criterion, accuracies, chosen):
    assert choose_alpha(sweep(accuracies), criterion=criterion).alpha == chosen


def test_choose_alpha_variable_runs_threshold_uses_error_of_runs():
    runs = {0.0: [0.9, 0.5], 1.0: [0.62, 0.62], 10.0: [0.5, 0.5]}
    found = choose_alpha(sweep(runs), criterion="unseen")
    assert found.threshold == pytest.approx(0.7 - np.std([0.9, 0.5], ddof=1) / np.sqrt(2))
    assert found.alpha == 10


@pytest.mark.parametrize("columns", [["held_out"], ["held_out", "seed"]])
def test_choose_alpha_paired_environments_threshold_uses_differences(columns):
    """Differences between environments do not add to the error of the difference between alphas."""
    levels = np.array([0.95, 0.55, 0.75, 0.35])
    costs = {0.0: np.zeros(4), 0.01: np.array([0.012, -0.01, 0.01, -0.01]), 0.1: np.full(4, 0.08)}
    runs = pd.concat([sweep({alpha: list(levels - cost)}) for alpha, cost in costs.items()])
    runs = runs.assign(held_out=3 * [["a"], ["b"], ["c"], ["d"]], seed=3 * [0, 0, 1, 1])
    found = choose_alpha(runs[["alpha", "accuracy", "chance", "cells", *columns]], criterion="unseen")
    assert found.alpha == 0.01 and found.curve["kept"].to_list() == [True, True, False]
    assert found.threshold == pytest.approx(levels.mean() - np.std(costs[0.01], ddof=1) / 2)
    # runs on different environments cannot be paired
    other = choose_alpha(runs.assign(held_out=np.arange(12).astype(str)), criterion="unseen")
    assert other.threshold == pytest.approx(levels.mean() - np.std(levels, ddof=1) / 2)


@pytest.mark.parametrize(
    ("runs", "how", "error", "named"),
    [
        (sweep({1.0: [0.5, 0.6]}), {}, ValueError, "two alphas"),
        (sweep({1.0: [0.5]}).drop(columns="chance"), {}, KeyError, "chance"),
        (sweep({0.0: [0.8, np.nan], 1.0: [np.nan]}), {}, ValueError, "NaN"),
        (sweep({0.0: [0.4], 1.0: [0.5]}), {"criterion": "test"}, ValueError, "criterion='test'"),
    ],
)
def test_choose_alpha_invalid_input_raises(runs, how, error, named):
    with pytest.raises(error, match=named):
        choose_alpha(runs, **how)


ERM: dict[str, Any] = {"batch_size": 16, "enable_progress_bar": False, "accelerator": "cpu"} | {
    "model_kwargs": {"encoder": "small"}
}


def test_check_assumption_returns_accuracy_in_and_out_of_distribution():
    how: dict[str, Any] = {
        "y_key": "gene",
        "e_key": "well",
        "lrs": (1e-5, 3e-3),
        "weight_decays": (0.0,),
        "max_steps": (2, 90),
    }
    frame = check_assumption(make_cells(), held_out=["well_2"], **how, **ERM)
    assert list(frame) == ["lr", "weight_decay", "max_steps", "own in", "own out"] and len(frame) == 4
    # brightness predicts the perturbation in every well, so longer training is better in and out of distribution
    assert frame.loc[frame["own in"].idxmax(), "max_steps"] == 90
    with pytest.raises(ValueError, match="well_9"):
        check_assumption(make_cells(), y_key="gene", e_key="well", held_out=["well_9"])


@pytest.mark.parametrize("held_out", [2, 2.0, "2"])
@pytest.mark.parametrize("dtype", ["int64", "float64", "category"])
def test_check_assumption_numeric_environments_are_held_out(held_out, dtype):
    cells = make_cells()
    cells.obs["batch"] = cells.obs["well"].cat.codes.astype(dtype)
    how: dict[str, Any] = {
        "y_key": "gene",
        "e_key": "batch",
        "lrs": (1e-3,),
        "weight_decays": (0.0,),
        "max_steps": (1,),
    }
    frame = check_assumption(cells, held_out=[held_out], **how, **ERM)
    assert len(frame) == 1 and frame["own out"].notna().all()


@pytest.mark.filterwarnings("ignore:The smallest alpha", "ignore:.*alpha")
def test_select_alpha_preset_determines_default_alphas():
    how: dict[str, Any] = CELLS | QUICK | {"model_kwargs": {"preset": "paper", "encoder": "small", "n_latent": 8}}
    found = select_alpha(make_cells(), **how | {"max_steps": 2})
    assert sorted(found.runs["alpha"].unique()) == [0, 1, 3, 10, 30, 100]
