"""Runs that follow each other, and what a run takes over from the one before."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, assert_same, make_model, weights

from scbd import SCBDModel
from scbd.baselines import FishModel
from scbd.data import Split

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


class Batches(Callback):
    """What was trained on: images as they are after the augmentation, and labels."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, plan, batch, *args):
        self.seen.append(batch["inputs"].float().mean((1, 2, 3)))


class PressCtrlC(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_run_sees_the_batches_that_come_next():
    whole, halves = Batches(), Batches()
    make_model().train(**QUICK | {"max_steps": 8}, callbacks=whole)
    model = make_model()
    model.train(**QUICK | {"max_steps": 3}, callbacks=halves)
    model.train(**QUICK | {"max_steps": 5}, callbacks=halves)
    assert len(whole.seen) == len(halves.seen) == 8
    for one, two in zip(whole.seen, halves.seen, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_second_run_turns_its_images_another_way(monkeypatch):
    seeds: list[int] = []

    class Noted(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeds.append(seed)
            return super().manual_seed(seed)

    monkeypatch.setattr(torch, "Generator", Noted)
    model = make_model()
    for _ in range(2):
        model.train(**QUICK | {"max_steps": 2}, seed=3)
    assert [s for s in seeds if s >= 3_000_009] == [3_000_009 + step for step in range(4)]


def test_a_second_run_keeps_the_split_of_the_first():
    model = make_model()
    model.train(**QUICK, seed=0)
    first = Split(model.train_indices, model.validation_indices)
    model.train(**QUICK, seed=1)
    np.testing.assert_array_equal(model.validation_indices, first.validation)
    # another one may be asked for, with a word where it tells nothing
    said = r"\d+ of 4[89] validation cells were trained on in an earlier run"
    with pytest.warns(UserWarning, match=said):
        model.train(**QUICK, seed=1, train_size=0.5)
    assert 40 < len(model.train_indices) < 56
    model.train(**QUICK, train_size=1.0)
    assert len(model.train_indices) == 96


def test_other_cells_get_a_split_of_their_own():
    model = make_model()
    model.train(**QUICK)
    model.adata = make_cells(60, seed=4)
    SCBDModel.setup_anndata(model.adata, y_key="gene", e_key="well")
    model.train(**QUICK)
    assert max(model.train_indices.max(), model.validation_indices.max()) == 59
    assert len(model.train_indices) + len(model.validation_indices) == 60


@pytest.mark.parametrize("model_class", [SCBDModel, FishModel])
def test_a_second_run_that_was_interrupted_goes_on_exactly(tmp_path, model_class):
    how: dict[str, Any] = QUICK | {"max_steps": 5, "validate_every": 2, "log_every_n_steps": 1}

    def first():
        cells = make_cells()
        scvi.settings.seed = 0
        model_class.setup_anndata(cells, y_key="gene", e_key="well")
        steps = {"pretrain_steps": 6} if model_class is FishModel else {"augment": True}
        model = model_class(cells, encoder="small", **steps)
        model.train(**how | {"max_steps": 4})
        return model

    whole, resumed = first(), first()
    resumed.save(str(tmp_path / "model"))
    whole.train(**how)
    with pytest.raises(KeyboardInterrupt):
        resumed.train(**how, checkpoint_dir=tmp_path / "run", callbacks=PressCtrlC(3))
    assert resumed.training_settings_["steps"] == 7
    again = [resumed, model_class.load(str(tmp_path / "model"), make_cells())]
    for model, directory in zip(again, ("run", "copy"), strict=True):
        if directory == "copy":
            os.makedirs(tmp_path / "copy")
            os.link(tmp_path / "first.ckpt", tmp_path / "copy" / "last.ckpt")
            os.link(tmp_path / "first.csv", tmp_path / "copy" / "history.csv")
        else:
            os.link(tmp_path / "run" / "last.ckpt", tmp_path / "first.ckpt")
            os.link(tmp_path / "run" / "history.csv", tmp_path / "first.csv")
        model.train(**how, checkpoint_dir=tmp_path / directory, ckpt_path="last")
        assert_same(weights(model), weights(whole))
        assert model.training_settings_["steps"] == 9
        assert model.history["train_loss"].index.tolist() == list(range(1, 10))


def test_fish_counts_the_steps_of_runs_before():
    """Or it would take batches of single environments for plain ones."""
    cells = make_cells()
    FishModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = FishModel(cells, encoder="small", pretrain_steps=3)
    model.train(**QUICK | {"max_steps": 3})
    model.train(**QUICK | {"max_steps": 2})
    optimiser: Any = model.trainer.optimizers[0]
    assert optimiser.param_groups[0]["n_steps"] == 5
    assert any("ahead" in state for state in optimiser.state.values())


def test_the_seed_is_that_of_scvi_tools(monkeypatch):
    monkeypatch.setattr(scvi.settings, "_seed", 0)  # and set back
    splits = []
    for seed in (None, 5):
        model = make_model()
        if seed is None:
            scvi.settings.seed = 5
        model.train(**QUICK | {"max_steps": 1}, seed=seed)
        splits.append(model.validation_indices)
    np.testing.assert_array_equal(splits[0], splits[1])
    scvi.settings.seed = None
    model = make_model()
    scvi.settings.seed = None
    model.train(**QUICK | {"max_steps": 1})
    assert model.training_settings_["seed"] == 0
