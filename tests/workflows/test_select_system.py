from __future__ import annotations

from typing import Any

import pytest
from conftest import make_cells
from torch import nn

from scbd.baselines import CORALModel
from scbd.workflows import MODEL_SPACE, SYSTEMS, TRAINING_SPACE, select
from scbd.workflows._select_system import settings_of

QUICK: dict[str, Any] = {"max_steps": 20, "batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu"}
CELLS: dict[str, Any] = {"y_key": "gene", "e_key": "well", "model_kwargs": {"encoder": "small"}}


def test_the_paper_s_space():
    """Appendix of the paper, table of the search space."""
    assert set(MODEL_SPACE) <= set(SYSTEMS)
    sizes = {system: len(settings_of(space)) for system, space in MODEL_SPACE.items()}
    assert sizes == {"ERM": 1, "CORAL": 3, "DANN": 3, "IRM": 4, "Fish": 6, "Group DRO": 1, "iVAE": 1}
    assert len(settings_of(TRAINING_SPACE)) == 9


def test_the_settings_of_the_best_validation_accuracy_are_chosen(tmp_path, monkeypatch):
    cells = make_cells()
    space: dict[str, Any] = {"model_space": {"penalty": (0.0, 0.1)}, "training_space": {"lr": (1e-6, 3e-3)}}
    found = select(cells, "CORAL", out=tmp_path / "search", **space, **CELLS, **QUICK)
    assert len(found.runs) == 4 and (tmp_path / "search" / "runs.csv").is_file()
    best = found.runs.loc[found.runs["accuracy"].idxmax()]
    assert found.accuracy == best["accuracy"] == found.runs["accuracy"].max()
    assert found.model["penalty"] == best["penalty"] and found.training["lr"] == best["lr"] == 3e-3
    assert found.model["encoder"] == "small" and found.training["max_steps"] == 20
    assert "lr=0.003" in repr(found) and repr(found).endswith("the best of 4 runs")
    monkeypatch.setattr(CORALModel, "train", None)  # nothing is left to train
    again = select(cells, "CORAL", out=tmp_path / "search", **space, **CELLS, **QUICK)
    assert again.model == found.model and again.training == found.training


def test_a_part_of_the_space_over_seeds():
    found = select(make_cells(), "ERM", n_trials=2, n_seeds=2, **CELLS, **QUICK | {"max_steps": 2})
    assert len(found.runs) == 4 and found.runs.groupby(["lr", "weight_decay"]).size().tolist() == [2, 2]


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ValueError, match="There is no system 'SVM': use one of"):
        select(make_cells(), "SVM", **CELLS)
    for nothing in ({"n_trials": 0}, {"model_space": {"penalty": ()}}):
        with pytest.raises(ValueError, match="nothing to search"):
            select(make_cells(), "CORAL", **CELLS, **nothing)
    # a module would go from run to run with what it has learned
    shared: Any = CELLS | {"model_kwargs": {"encoder": nn.Flatten()}}
    with pytest.raises(ValueError, match="give encoder by name"):
        select(make_cells(), "ERM", **shared)
    for settings, message in (({"n_seeds": 0}, "at least one seed"), ({"train_size": 1.0}, "no validation cells")):
        with pytest.raises(ValueError, match=message):
            select(make_cells(), "ERM", **CELLS, **settings)
