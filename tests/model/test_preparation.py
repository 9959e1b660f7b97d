"""What suits the machine: a model stays what it was made as."""

from __future__ import annotations

import pytest
import torch
from conftest import make_cells
from small_models import make_model

from scbd import SCBDModel
from scbd.baselines import ERMModel
from scbd.model._preparation import encoder_for


@pytest.fixture
def machine(monkeypatch):
    def has(accelerator: bool) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)

    return has


def name_of(model: SCBDModel) -> str:
    return next(line for line in repr(model).splitlines() if "blocks" in line)


@pytest.mark.parametrize(("accelerated", "name"), [(True, "resnet18"), (False, "small")])
def test_the_default_is_what_the_machine_bears(machine, accelerated, name):
    machine(accelerated)
    assert name in name_of(make_model(encoder="auto", style_target=None))


def test_a_model_is_the_same_elsewhere(machine, tmp_path):
    machine(False)
    model = make_model(encoder="auto")
    model.is_trained_ = True
    model.save(str(tmp_path / "model"))
    machine(True)
    assert "small" in name_of(SCBDModel.load(str(tmp_path / "model"), make_cells(), accelerator="cpu"))


def test_models_of_before_it_was_asked_are_large():
    assert encoder_for({"image_shape": (1, 8, 8)}, "auto") == "resnet18"
    assert encoder_for({"image_shape": (1, 8, 8), "accelerated": False}, "densenet121") == "densenet121"


@pytest.mark.parametrize("system", [SCBDModel, ERMModel])
def test_a_small_encoder_has_a_short_run(machine, system, monkeypatch):
    """By default: what is asked for stays."""
    machine(False)
    cells = make_cells()
    system.setup_anndata(cells, y_key="gene", e_key="well")
    model, found = system(cells), []
    monkeypatch.setattr(type(model), "_train", lambda self, objective, settings: found.append(settings))
    monkeypatch.setattr(type(model), "_finish", lambda self, run: None)
    model.train()
    model.train(max_epochs=3, lr=0.01)
    assert [(s.max_steps, s.max_epochs, s.lr) for s in found] == [(300, None, 1e-3), (None, 3, 0.01)]


@pytest.mark.parametrize(("n_rows", "encoder"), [(9_999, "linear"), (10_000, "mlp")])
def test_a_network_needs_rows_to_learn_from(n_rows, encoder):
    assert encoder_for({"features": ["a"], "n_rows": n_rows}, "auto") == encoder
    assert encoder_for({"features": ["a"], "n_rows": n_rows}, "linear") == "linear"
