"""Runs that follow each other, and what a run takes over from the one before."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, PressCtrlC, assert_same, make_model, weights
from torch import nn

from scbd import SCBDModel
from scbd.baselines import FishModel
from scbd.data import ArraySource, Split, open_screen, write_screen

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


class Batches(Callback):
    """What was trained on: images as they are after the augmentation, and labels."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, plan, batch, *args):
        self.seen.append(batch["inputs"].float().mean((1, 2, 3)))


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


def test_split_indices_are_disjoint_and_stratified(trained):
    train, validation, test = trained.train_indices, trained.validation_indices, trained.test_indices
    assert sorted(np.concatenate([train, validation, test])) == list(range(96))
    assert 80 <= len(train) <= 92
    assert len(test) == 0


def test_validation_rows_move_nothing(cells):
    """Statistics and weights come from training cells alone."""
    split = Split(train=np.arange(60), validation=np.arange(60, 96))
    one = make_model(cells)
    one.train(**QUICK, split=split, load_best=False)
    other = make_cells()
    other.obsm["single_cell_images"][60:] = 255 - other.obsm["single_cell_images"][60:]
    two = make_model(other)
    two.train(**QUICK, split=split, load_best=False)
    assert_same(weights(one), weights(two))


def test_training_twice_is_the_same(cells):
    runs = []
    for _ in range(2):
        model = make_model(make_cells(), augment=True)
        model.train(**QUICK)
        runs.append(weights(model))
    assert_same(*runs)


def test_a_second_training_goes_on_in_training_mode():
    model = make_model()
    model.train(**QUICK)
    tracked = int(model.module.content.encoder[1].num_batches_tracked)
    model.train(**QUICK, load_best=False)
    assert int(model.module.content.encoder[1].num_batches_tracked) == tracked + 6
    assert not model.module.training
    assert model.history["train_loss"].index[-1] == 12
    assert model.training_settings_["steps"] == 12


def test_epochs_and_default_length():
    model = make_model(make_cells(60))
    model.train(max_epochs=3, batch_size=20, enable_progress_bar=False, accelerator="cpu")
    assert model.trainer.global_step == 3 * 2
    # of two batches a step there are half as many: as many passes over the cells
    model.train(max_epochs=3, batch_size=20, accumulate_grad_batches=2, enable_progress_bar=False, accelerator="cpu")
    assert model.trainer.global_step == 3


def test_cells_on_disk_train_like_those_in_memory(tmp_path):
    on_disk = write_screen(tmp_path / "cells.h5ad", make_cells(), y_key="gene")
    in_memory = on_disk.copy()
    sharded = write_screen(tmp_path / "cells.zarr", make_cells(), y_key="gene", compression="lz4", block_size=20)
    trained = []
    for table in (in_memory, on_disk, sharded):
        model = make_model(table)
        model.train(**QUICK, neighbours=False)  # else those of a disk are drawn in stretches
        trained.append(weights(model) | {"z": torch.from_numpy(model.get_latent_representation(indices=[5, 90, 5]))})
    assert_same(*trained[:2])
    assert_same(*trained[1:])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
def test_all_image_types_train(dtype):
    model = make_model(make_cells(dtype=dtype), image_size=12)
    model.train(**QUICK | {"max_steps": 2})
    assert np.isfinite(model.get_latent_representation()).all()


def test_images_on_the_device_change_nothing_but_where_they_are(tmp_path):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    trained = []
    for preload in (None, "device"):
        model = make_model(open_screen(tmp_path / "cells.h5ad"))
        model.train(**QUICK, preload=preload)
        trained.append(weights(model))
        trainer: Any = model.trainer
        assert isinstance(trainer.datamodule.train_dataloader()._source, ArraySource)  # given back
    assert_same(*trained)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on the way to its compiler
def test_compiling_keeps_names_and_numbers(tmp_path):
    trained = []
    # what compiled code computes is torch's affair, and a compiler not always there
    with torch.compiler.set_stance("force_eager"):
        for compile in (False, True):
            model = make_model()
            model.train(**QUICK, compile=compile)
            trained.append(weights(model))
            assert (model.module.content._compiled_call_impl is not None) == compile
        assert_same(*trained)
        model.save(str(tmp_path / "model"))
        loaded = SCBDModel.load(str(tmp_path / "model"), adata=make_cells())
        np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())


@pytest.mark.parametrize(
    ("encoder", "instructions", "asked", "used"),
    [
        ("small", True, "auto", "bf16-mixed"),
        ("small", False, "auto", "32-true"),
        ("small", True, "32-true", "32-true"),
        ("densenet121", True, "auto", "32-true"),  # nobody has looked
        (nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten()), True, "auto", "32-true"),
    ],
)
def test_bfloat16_is_the_default_where_it_is_known_to_do_no_harm(monkeypatch, encoder, instructions, asked, used):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions, raising=False)
    model = make_model(make_cells(shape=(2, 32, 32)), encoder=encoder)
    assert "precision auto" in repr(model)
    model.train(**QUICK | {"precision": asked, "max_steps": 1})
    assert model.training_settings_["precision"] == used
    assert f"precision {used}" in repr(model)
    assert model.get_latent_representation().dtype == np.float32
    assert model._precision("auto", torch.device("cuda")) == "32-true"
