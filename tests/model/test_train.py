"""Runs: what they learn from, that they go on where they stopped, and what is left of those that fail."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scvi
import torch
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, PressCtrlC, Worsen, assert_same, make_model, weights
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from scvi.train import SaveCheckpoint

from scbd import SCBDModel
from scbd.baselines import ERMModel, FishModel, VAEModel
from scbd.data import ArraySource, ImageDataModule, Split, open_screen, write_screen
from scbd.model import TrainingDiverged
from scbd.model._callbacks import find_checkpoint
from scbd.model._train import default_validation_interval

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")
# runs of different lengths have the same rates
SAME_LR: dict[str, Any] = {"plan_kwargs": {"lr_decay": False}}


class Stop(Callback):
    """Something goes wrong after so many steps."""

    def __init__(self, step: int, error: type[Exception] = RuntimeError) -> None:
        self.step, self.error = step, error

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            raise self.error("out of memory")


class Spoil(Callback):
    """Make the weights something else before a step."""

    def __init__(self, step: int, value: float = float("nan")) -> None:
        self.step, self.value = step, value

    def on_train_batch_start(self, trainer, plan, *args):
        if trainer.global_step == self.step - 1:
            for parameter in plan.module.parameters():
                parameter.data.fill_(self.value)


class Batches(Callback):
    """What was trained on."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer, plan, batch, *args):
        self.seen.append(batch["inputs"].float().mean((1, 2, 3)))


def with_controls() -> SCBDModel:
    cells = make_cells()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", control="gene_0")
    return SCBDModel(cells, encoder="small", n_latent=6)


def of_class(model_class: Any, **how: Any) -> Any:
    cells = make_cells()
    model_class.setup_anndata(cells, y_key="gene", e_key="well")
    scvi.settings.seed = 0
    return model_class(cells, **how)


def finite(model: Any) -> bool:
    return all(bool(value.isfinite().all()) for value in model.module.state_dict().values())


# ---- what is trained on


def test_train_same_seed_gives_equal_model_from_training_cells_only():
    split, runs = Split(train=np.arange(60), validation=np.arange(60, 96)), []
    for other in (False, False, True):
        cells = make_cells()
        if other:
            cells.obsm["single_cell_images"][60:] = 255 - cells.obsm["single_cell_images"][60:]
        model = make_model(cells, augment=True, alpha=0.01)  # "auto" looks at validation cells
        model.train(**QUICK, split=split)
        runs.append(weights(model))
    assert_same(*runs[:2])
    assert_same(*runs[1:])


def test_train_split_is_disjoint_and_stratified(trained):
    train, validation, test = trained.train_indices, trained.validation_indices, trained.test_indices
    assert sorted(np.concatenate([train, validation, test])) == list(range(96))
    assert 80 <= len(train) <= 92
    assert len(test) == 0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_train_second_run_draws_next_batches(accumulated):
    whole, halves = Batches(), Batches()
    how: dict[str, Any] = QUICK | {"accumulate_grad_batches": accumulated}
    make_model().train(**how | {"max_steps": 8}, callbacks=whole)
    model = make_model()
    model.train(**how | {"max_steps": 3}, callbacks=halves)
    tracked = int(model.module.content.encoder[1].num_batches_tracked)
    assert not model.module.training
    model.train(**how | {"max_steps": 5}, callbacks=[halves])
    assert len(whole.seen) == len(halves.seen) == 8 * accumulated
    for one, two in zip(whole.seen, halves.seen, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    # in training mode, and behind what there was
    assert int(model.module.content.encoder[1].num_batches_tracked) == tracked + 5 * accumulated
    assert model.history["train_loss"].index[-1] == model.training_settings_["steps"] == 8


def test_train_second_run_augments_differently(monkeypatch):
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


def test_train_second_run_keeps_split():
    model = make_model()
    model.train(**QUICK, seed=0)
    first = Split(model.train_indices, model.validation_indices)
    model.train(**QUICK, seed=1)
    np.testing.assert_array_equal(model.validation_indices, first.validation)
    # another one may be asked for, with a word where it tells nothing
    with pytest.warns(UserWarning, match="validation cells were trained on in an earlier run"):
        model.train(**QUICK, seed=1, train_size=0.5)
    assert 40 < len(model.train_indices) < 56
    model.train(**QUICK, train_size=1.0)
    assert len(model.train_indices) == 96


def test_train_other_cells_draws_new_split():
    model = make_model()
    model.train(**QUICK)
    model.adata = make_cells(60, seed=4)
    model.train(**QUICK)
    assert max(model.train_indices.max(), model.validation_indices.max()) == 59
    assert len(model.train_indices) + len(model.validation_indices) == 60


def test_train_seed_defaults_to_scvi_settings(monkeypatch):
    monkeypatch.setattr(scvi.settings, "_seed", 0)  # and set back
    splits = []
    for seed in (None, 5):
        model = make_model()
        if seed is None:
            scvi.settings.seed = 5
        model.train(**QUICK | {"max_steps": 1}, seed=seed)
        splits.append(model.validation_indices)
    np.testing.assert_array_equal(*splits)


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 6), (2, 3)])
def test_max_epochs_counts_passes_over_training_cells(accumulated, steps):
    model = make_model(make_cells(60))
    how: dict[str, Any] = QUICK | {"max_steps": None, "max_epochs": 3, "batch_size": 20}
    model.train(**how, accumulate_grad_batches=accumulated)
    assert model.trainer.global_step == steps


def test_train_cells_on_disk_equals_cells_in_memory(tmp_path):
    on_disk = write_screen(tmp_path / "cells.zarr", make_cells(), y_key="gene")
    found = []
    for table in (on_disk.to_memory(), on_disk):
        model = make_model(table)
        model.train(**QUICK, batch_kwargs={"neighbours": False})  # else those of a disk are drawn in stretches
        found.append(weights(model) | {"z": torch.from_numpy(model.get_latent_representation(indices=[5, 90, 5]))})
    assert_same(*found)


def test_train_preload_device_gives_equal_model(tmp_path):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    found = []
    for preload in (None, "device"):
        model = make_model(open_screen(tmp_path / "cells.h5ad"))
        model.train(**QUICK, batch_kwargs={"preload": preload})
        found.append(weights(model))
        trainer: Any = model.trainer
        assert isinstance(trainer.datamodule.train_dataloader()._source, ArraySource)  # given back
    assert_same(*found)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
def test_train_any_image_dtype_succeeds(dtype):
    model = make_model(make_cells(dtype=dtype), image_size=12)
    model.train(**QUICK | {"max_steps": 2})
    assert np.isfinite(model.get_latent_representation()).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on the way to its compiler
def test_train_compiled_encoder_gives_equal_model(tmp_path):
    found = []
    # what compiled code computes is torch's affair, and a compiler not always there
    with torch.compiler.set_stance("force_eager"):
        for compiled in (False, True):
            model = make_model()
            if compiled:
                model.module.content.compile()
            model.train(**QUICK)
            found.append(weights(model))
        assert_same(*found)
        model.save(str(tmp_path / "model"))
        loaded = SCBDModel.load(str(tmp_path / "model"), adata=make_cells())
        np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())


@pytest.mark.parametrize(
    ("n_validation", "batch_size", "max_steps", "every"),
    [
        (8, 24, 400, 20),  # twenty times
        (40, 24, 10, 10),  # a tenth of the time allows for one and a half
        (20, 24, 10, 3),
        (8, 24, 5, 1),
        (0, 24, 400, 20),
    ],
)
def test_default_validation_interval_limits_time_of_validation(cells, n_validation, batch_size, max_steps, every):
    split = Split(train=np.arange(48), validation=np.arange(48, 48 + n_validation))
    labels = np.zeros(96, dtype=int)
    source = ArraySource(cells.obsm["single_cell_images"])
    data = ImageDataModule(source, labels, labels, split, batch_size=batch_size, max_steps=max_steps)
    assert default_validation_interval(data) == every


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"check_val_every_n_epoch": 2, "early_stopping": True}, [6, 12, 18]),
        ({"check_val_every_n_epoch": 2, "accumulate_grad_batches": 2}, [3, 6, 9]),
        ({"check_val_every_n_epoch": 7}, [18]),  # longer than the run: at its end
        ({"check_val_every_n_epoch": None, "val_check_interval": 5}, [5, 10, 15]),
        ({"val_check_interval": 1.0}, [3, 6, 9, 12, 15, 18]),
        ({"val_check_interval": 0.7}, [2, 4, 6, 8, 10, 12, 14, 16, 18]),
        ({"val_check_interval": 8, "accumulate_grad_batches": 2}, [4, 8]),
        ({"val_check_interval": 5_000}, [18]),
        ({"validate_every": 9, "limit_val_batches": 1}, [9, 18]),
        ({"validate_every": 9, "num_sanity_val_steps": 1}, [0, 9, 18]),
        ({"validate_every": 9, "reload_dataloaders_every_n_epochs": 1}, [9, 18]),
    ],
)
def test_validation_interval_of_lightning_is_converted_to_steps(given, expected):
    """In passes over the training cells (3 batches), although a run is one epoch of Lightning."""
    model = make_model()
    model.train(**QUICK | {"max_steps": None, "max_epochs": 6} | given)
    assert model.history["validation_loss"].index.tolist() == expected


def test_train_without_validation_writes_checkpoints(tmp_path):
    model = make_model()
    model.train(**QUICK, limit_val_batches=0, validate_every=2, checkpoint_dir=tmp_path)
    assert "validation_loss" not in model.history
    state = find_checkpoint(tmp_path, resume=True)
    assert state is not None and state.step == 6


# ---- arguments


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"max_steps": "10"}, "max_steps"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": None, "max_epochs": 1.5}, "max_epochs"),
        ({"max_epochs": 2}, "max_steps or max_epochs"),
        ({"batch_size": 24.0}, "batch_size"),
        ({"batch_size": 200}, "batch_size"),
        ({"perturbations_per_batch": 0}, "perturbations_per_batch"),
        ({"validate_every": 0}, "validate_every"),
        ({"seed": -1}, "seed"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": 1e-2, "plan_kwargs": {"lr": 1e-5}}, "lr.* give one of them"),
        ({"weight_decay": 0.1, "plan_kwargs": {"weight_decay": 0.01}}, "weight_decay.* give one of them"),
        ({"plan_kwargs": 3}, "plan_kwargs.*dictionary"),
        ({"log_every_n_steps": 0}, "log_every_n_steps"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches"),
        ({"weight_decay": "0.1"}, "weight_decay"),
        ({"train_size": 1.5}, "train_size"),
        ({"split": "fold"}, "fold"),
        ({"split": 0.9}, "split"),
        ({"split": Split(train=np.arange(90, 120))}, "row 119"),
        ({"train_size": 1.0, "early_stopping": True}, "early_stopping"),
        ({"train_size": 1.0, "load_best": True}, "load_best"),
        ({"limit_val_batches": 0, "early_stopping": True}, "early_stopping.*limit_val_batches"),
        ({"limit_val_batches": 0.0, "load_best": True}, "load_best.*limit_val_batches"),
        ({"check_val_every_n_epoch": 2, "train_size": 1.0}, "check_val_every_n_epoch=2.*train_size"),
        ({"val_check_interval": 2, "limit_val_batches": 0}, "val_check_interval=2.*limit_val_batches"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch"),
        ({"check_val_every_n_epoch": 2, "validate_every": 2}, "validate_every=2 and check_val_every_n_epoch=2"),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, "give one of them"),
        ({"val_check_interval": "00:00:10:00"}, "validate_every"),
        ({"val_check_interval": 1.5}, "up to 1.0"),
        ({"val_check_interval": 0}, "number of batches"),
        ({"limit_train_batches": 4}, "use max_steps"),
        ({"overfit_batches": 2}, "use split"),
        ({"min_epochs": 2}, "use min_steps"),
        ({"barebones": True}, "validation"),
        ({"enable_checkpointing": False}, "checkpoint_dir"),
        ({"precision": "64-true"}, "precision"),
        ({"resume": True}, "checkpoint_dir"),
        ({"plan_kwargs": {"n_steps_alpha_warmup": 1.5}}, "n_steps_alpha_warmup"),
        ({"plan_kwargs": {"warmup": 3}}, "'warmup'.*It has: encoder_lr, lr, lr_decay, n_steps_alpha_warmup"),
        ({"plan_kwargs": {"n_epochs_kl_warmup": 3}}, "use n_steps_alpha_warmup.*It has: "),
        ({"plan_kwargs": {"seed": 3}}, "train itself"),
        ({"batch_kwargs": {"num_workers": 3}}, "read ahead"),
        ({"batch_kwargs": {"max_steps": 3}}, "train itself"),
        ({"batch_kwargs": {"drop_last": True}}, "drawn at random"),
        ({"batch_kwargs": ["preload"]}, "batch_kwargs.*dictionary"),
        ({"plan_kwargs": {"num_workers": 3}}, "read ahead"),
        ({"plan_kwargs": {"gradient_clip_val": 1.0}}, "train itself"),
        ({"num_workers": 3}, "read ahead"),
        ({"control": "nontargeting"}, "setup_anndata"),
        ({"batch_key": "well"}, "setup_anndata, use e_key"),
        ({"early_stopping_patience": 3}, "early_stopping=True"),
        ({"early_stopping": True, "early_stopping_patience": 0}, "early_stopping_patience"),
        ({"batch_kwargs": {"preload": "disk"}}, "preload"),
        ({"max_step": 3}, "max_step.*Did you mean 'max_steps'"),
        ({"augment": True}, r"augment.*SCBDModel\(adata, augment="),
        ({"accelerator": "foo"}, "foo.*This machine has: cpu"),
        ({"accelerator": "tpu"}, "'tpu'.*This machine has: cpu"),
        ({"devices": [7]}, r"devices=\[7\].*This machine has: cpu"),
        ({"strategy": "ddp_spawn", "devices": 2}, "ddp_spawn"),
    ],
)
def test_train_invalid_settings_raise_before_training(tmp_path, how, said):
    model = make_model()
    before = weights(model)
    with pytest.raises((TypeError, ValueError, KeyError), match=said):
        model.train(**QUICK | {"checkpoint_dir": None if "resume" in how else tmp_path / "run"} | how)
    assert_same(weights(model), before)
    assert not model.is_trained and not model.module.preprocess.fitted
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:y and e are confounded")
@pytest.mark.parametrize("e_key", ["cell", ["cell", "row"]])
@pytest.mark.parametrize("make", [make_cells, make_wells])
def test_train_environment_of_its_own_for_each_cell_raises_with_the_column(tmp_path, make, e_key):
    cells = make()
    cells.obs["cell"] = cells.obs["row"] = [f"cell {row}" for row in range(cells.n_obs)]
    keys: dict[str, Any] = {"y_key": "gene"} if make is make_cells else {"y_key": "compound", "layer": "X"}
    SCBDModel.setup_anndata(cells, e_key=e_key, **keys)
    with pytest.raises(ValueError, match="environment of its own .*'cell'"):
        SCBDModel(cells).train(max_steps=2, checkpoint_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_train_model_made_in_double_precision_raises():
    torch.set_default_dtype(torch.float64)
    try:
        model = make_model()
        with pytest.raises(ValueError, match="set_default_dtype"):
            model.train(**QUICK)
    finally:
        torch.set_default_dtype(torch.float32)


def test_train_positional_length_raises():
    """The first argument of scvi-tools' train is max_epochs: a copied line would train for steps in place of epochs."""
    with pytest.raises(TypeError, match="positional argument"):
        make_model().train(400)  # type: ignore[call-arg]


def test_train_decoder_uses_own_defaults(monkeypatch):
    model, seen = make_model(), []

    def noted(objective, settings, *, contrastive):
        length = settings.max_steps, settings.max_epochs
        seen.append((settings.plan["lr"], settings.batch_size, settings.perturbations_per_batch, *length))
        raise ZeroDivisionError

    monkeypatch.setattr(model, "_fit", noted)
    model.is_trained_ = True
    cases: list[dict[str, Any]] = [
        {},
        {"batch_size": None, "perturbations_per_batch": 4, "lr": 0.1},
        {"joint": True},
        {"joint": True, "max_epochs": 2, "plan_kwargs": {"lr": 0.2}},
    ]
    for given in cases:
        with pytest.raises(ZeroDivisionError):
            model.train_decoder(width=4, **given)
    assert seen == [
        (1e-3, 48, None, None, None),  # of 96 cells two batches
        (0.1, 48, 4, None, None),
        (1e-3, None, "auto", 300, None),
        (0.2, None, "auto", None, 2),
    ]


def test_train_lr_of_plan_kwargs_replaces_default():
    model = make_model()
    model.train(**{name: value for name, value in QUICK.items() if name != "lr"}, plan_kwargs={"lr": 1e-5})
    assert model.training_settings_["lr"] == 1e-5


# ---- beside Lightning and scvi-tools


def test_train_keeps_loggers_and_callbacks_of_user(tmp_path):
    theirs = ModelCheckpoint(tmp_path / "theirs", monitor="validation_loss")
    model = make_model()
    model.train(
        **QUICK,
        validate_every=3,
        checkpoint_dir=tmp_path / "ours",
        callbacks=[theirs, callbacks.LearningRateMonitor(), callbacks.EarlyStopping("validation_loss", patience=1)],
        logger=[CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")],
    )
    assert np.isfinite(model.history["train_loss"].to_numpy()).all()
    assert len(list((tmp_path / "theirs").glob("*.ckpt"))) == 1
    for name in ("a", "b"):
        assert "train_loss" in next((tmp_path / name).rglob("metrics.csv")).read_text()


@pytest.mark.filterwarnings("ignore:.*was not fully:UserWarning")
def test_save_checkpoint_of_scvi_tools_saves_models_during_training(tmp_path):
    saving = SaveCheckpoint(str(tmp_path), filename="best", monitor="validation_loss")
    model = make_model()
    model.train(**QUICK, validate_every=3, callbacks=[saving])
    assert model.is_trained and not model.module.training
    saved = SCBDModel.load(saving.best_model_path, make_cells())
    assert np.isfinite(saved.get_latent_representation()).all()
    assert "SCBDModel" in repr(saved)


def test_model_saved_during_training_has_no_earlier_results(tmp_path):
    """It was found of other weights, and stays where a run makes no step."""

    class Save(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                model.save(tmp_path / "on the way")

    model = with_controls()
    model.train(**QUICK)
    found = model.results_
    assert found.centers and found.offsets and found.diagnostics
    with pytest.raises(RuntimeError, match="out of memory"):
        model.train(**QUICK, callbacks=[Stop(0)])
    assert model.results_ is found
    model.train(**QUICK, callbacks=[Save()])
    saved = SCBDModel.load(tmp_path / "on the way", adata=False)
    assert saved.is_trained and saved.results_ == type(found)()
    assert model.health and model.results_.offsets and model.results_.centers


@pytest.mark.filterwarnings("ignore:.*fast_dev_run.*")
def test_train_fast_dev_run_succeeds(tmp_path):
    model = make_model()
    model.train(**QUICK, fast_dev_run=True, checkpoint_dir=tmp_path / "run", load_best=True)
    assert model.training_settings_["steps"] == 1
    assert not list(tmp_path.rglob("*.ckpt"))


def test_progress_bar_shows_steps_and_losses(capsys):
    make_model().train(**QUICK | {"enable_progress_bar": True})
    shown = capsys.readouterr()
    assert "6/6" in shown.out + shown.err and "train_loss" in shown.out + shown.err


def test_history_has_one_frame_per_metric(trained):
    names = {"loss", "invariance_c", "interaction_c", "environment_c"}
    names |= {f"{name}_{block}" for name in ("supervised", "learned") for block in "cs"}
    expected = {f"{part}_{name}" for part in ("train", "validation") for name in names}
    assert set(trained.history) == expected | {"alpha", "z_c_spread", "z_c_effective_rank"}
    for name, frame in trained.history.items():
        assert list(frame.columns) == [name]
        assert frame.index.name == "step" and frame.index.is_monotonic_increasing and frame.index[-1] == 12
        assert np.isfinite(frame.to_numpy(dtype=float)).all()


# ---- resuming


@pytest.mark.parametrize(
    ("interrupted", "model_class", "model_kwargs", "how"),
    [
        (4, SCBDModel, {"augment": True}, {"online_head": True}),
        (5, SCBDModel, {"augment": True}, {"accumulate_grad_batches": 2}),
        (5, SCBDModel, {}, {"train_size": 1.0, "accumulate_grad_batches": 2}),  # nothing to validate
        (3, FishModel, {"pretrain_steps": 4}, {}),
    ],
    ids=["head", "accumulated", "unvalidated", "Fish"],
)
def test_resume_gives_equal_model_to_uninterrupted_run(tmp_path, interrupted, model_class, model_kwargs, how):
    """A second run, at a step with a validation or between, by the model that made it or by one that was saved."""
    how = QUICK | {"validate_every": 2, "log_every_n_steps": 1} | how

    def first() -> Any:
        model = of_class(model_class, encoder="small", **model_kwargs)
        model.train(**how | {"max_steps": 2})
        return model

    whole, again = first(), first()
    again.save(str(tmp_path / "model"))
    whole.train(**how)
    with pytest.raises(KeyboardInterrupt):
        again.train(**how, checkpoint_dir=tmp_path / "run", callbacks=PressCtrlC(interrupted))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # given back
    state = find_checkpoint(tmp_path / "run", resume=True)
    assert state is not None and state.step == interrupted // 2 * 2
    if interrupted == 4:
        again = model_class.load(str(tmp_path / "model"), make_cells())
    again.train(**how, checkpoint_dir=tmp_path / "run", resume=True)
    assert_same(weights(again), weights(whole))
    assert again.training_settings_["steps"] == 8
    assert set(again.history) == set(whole.history)
    for name, frame in whole.history.items():
        pd.testing.assert_frame_equal(again.history[name], frame)
    for name, values in whole.online_head_.items():
        np.testing.assert_array_equal(again.online_head_[name], values)


def test_resume_longer_run_continues_and_shorter_run_raises(tmp_path):
    model, how = make_model(), QUICK | SAME_LR | {"validate_every": 4, "checkpoint_dir": tmp_path, "resume": True}
    for steps in (4, 8):
        model.train(**how | {"max_steps": steps})
    assert model.training_settings_["steps"] == 8
    assert model.history["validation_loss"].index.tolist() == [4, 8]
    whole = make_model()
    whole.train(**QUICK | SAME_LR | {"max_steps": 8, "validate_every": 4})
    assert_same(weights(model), weights(whole))
    with pytest.raises(ValueError, match="max_steps=7"):
        make_model().train(**how | {"max_steps": 7})
    with pytest.raises(FileExistsError, match="resume=True"):
        make_model().train(**how | {"resume": False})


def brighter(cells):
    cells.obsm["single_cell_images"] += 1
    return cells


def relabelled(cells):
    cells.obs["gene"] = cells.obs["gene"].to_numpy()[::-1]
    return cells


def reordered(cells):
    """Labels as they were, each under another number."""
    cells.obs["gene"] = cells.obs["gene"].cat.reorder_categories(sorted(set(cells.obs["gene"]))[::-1])
    return cells


@pytest.mark.parametrize(
    ("change", "model_kwargs", "how", "said"),
    [
        (brighter, {}, {}, "other images"),
        (relabelled, {}, {}, "other labels"),
        (reordered, {}, {}, "other order of labels"),
        (None, {}, {"split": Split(np.arange(80), np.arange(80, 95))}, "other split"),
        (None, {"alpha": 2}, {}, "alpha: 'auto' → 2"),
        (None, {"temperature": 0.5}, {}, "temperature"),
        (None, {"include_self": True}, {}, "include_self"),
        (None, {"standardize_by": None}, {}, "standardize_by: 'auto' → None"),
        (None, {}, {"batch_size": 12}, "batch_size: 24 → 12"),
        (None, {}, {"plan_kwargs": {"n_steps_alpha_warmup": 3}}, "n_steps_alpha_warmup: None → 3"),
        (None, {}, SAME_LR, "lr_decay: None → False"),
        (None, {}, {"gradient_clip_val": 0.01}, "gradient_clip_val"),
        (None, {}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        (None, {}, {"precision": "bf16-mixed"}, "precision"),
        (None, {}, {"validate_every": 3}, "validate_every"),
        (None, {}, {"online_head": True}, "online_head"),
    ],
)
def test_resume_with_other_cells_or_settings_raises(begun, change, model_kwargs, how, said):
    cells = make_cells() if change is None else change(make_cells())
    model = make_model(cells, **model_kwargs)
    before = weights(model)
    settings: dict[str, Any] = {"max_steps": 4, "checkpoint_dir": begun, "resume": True, "split": SPLIT}
    with pytest.raises(ValueError, match=f"other settings .*{said}"):
        model.train(**QUICK | settings | how)
    assert_same(weights(model), before)


SPLIT = Split(np.arange(80), np.arange(80, 96))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    make_model().train(**QUICK | {"max_steps": 2, "checkpoint_dir": folder, "split": SPLIT})
    return folder


def test_checkpoints_are_not_written_to_temporary_folder(tmp_path, monkeypatch):
    """Where that is on another file system, a checkpoint would be copied over the one before."""
    monkeypatch.setattr(tempfile, "mkstemp", None)
    make_model().train(**QUICK, validate_every=2, load_best=True, checkpoint_dir=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt"]


# in a process of its own: a copy of this one may have threads of jax, which a test before started
CUT_OFF = """
import os, sys
sys.path[:0] = [{tests!r}]
import torch
torch.set_num_threads(1)
from helpers.small_models import QUICK, make_model

save = torch.save

def breaks_off(checkpoint, file):
    if checkpoint["global_step"] == 4:
        file.write(b"half")
        os._exit(9)  # as SIGKILL would
    save(checkpoint, file)

torch.save = breaks_off
make_model().train(**QUICK | {{"validate_every": 2, "checkpoint_dir": {out!r}}})
"""


def test_checkpoint_interrupted_write_keeps_earlier_file(tmp_path):
    how: dict[str, Any] = QUICK | {"validate_every": 2, "checkpoint_dir": tmp_path}
    code = CUT_OFF.format(tests=str(Path(__file__).parents[1]), out=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert len(list(tmp_path.glob(".last.ckpt.*.partial"))) == 1
    state = find_checkpoint(tmp_path, resume=True)
    assert state is not None and state.step == 2
    resumed, whole = make_model(), make_model()
    resumed.train(**how, resume=True)
    whole.train(**how | {"checkpoint_dir": None})
    assert_same(weights(resumed), weights(whole))
    assert os.listdir(tmp_path) == ["last.ckpt"]
    damaged = bytearray((tmp_path / "last.ckpt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "last.ckpt").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged"):
        make_model().train(**how | {"max_steps": 8}, resume=True)


def test_checkpoint_that_cannot_be_written_is_named_and_the_earlier_one_kept(tmp_path, monkeypatch):
    how: dict[str, Any] = QUICK | {"validate_every": 2, "checkpoint_dir": tmp_path}
    save, model = torch.save, make_model()

    def disk_full_at_the_second(checkpoint, file):
        if checkpoint["global_step"] == 4:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        save(checkpoint, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", disk_full_at_the_second)
        with pytest.raises(OSError, match=r"last\.ckpt could not be written .*disk.*earlier one is kept.*resume=True"):
            model.train(**how)
    state = find_checkpoint(tmp_path, resume=True)
    assert state is not None and state.step == 2 and os.listdir(tmp_path) == ["last.ckpt"]
    assert model.is_trained and model.training_settings_["steps"] == 4
    resumed, whole = make_model(), make_model()
    resumed.train(**how, resume=True)
    whole.train(**how | {"checkpoint_dir": None})
    assert_same(weights(resumed), weights(whole))


def test_train_two_runs_in_one_checkpoint_folder_second_raises(tmp_path):
    class TrainAnother(Callback):
        def on_train_start(self, *_: Any) -> None:
            with pytest.raises(BlockingIOError, match="is writing to"):
                make_model().train(**QUICK, checkpoint_dir=tmp_path)

    make_model().train(**QUICK, checkpoint_dir=tmp_path, callbacks=[TrainAnother()])
    assert os.listdir(tmp_path) == ["last.ckpt"]


# ---- the best weights, and stopping early


@pytest.mark.parametrize("on_disk", [False, True])
def test_load_best_restores_weights_and_online_head(tmp_path, on_disk):
    """A learning rate that ruins the model after the first validation."""
    how: dict[str, Any] = QUICK | SAME_LR | {"lr": 3.0, "validate_every": 1, "online_head": True}
    model, shorter = make_model(), make_model()
    model.train(**how, load_best=True, checkpoint_dir=tmp_path if on_disk else None)
    step = int(model.history["validation_loss"]["validation_loss"].idxmin())
    assert step < 6 and model.training_settings_["steps"] == 6
    shorter.train(**how | {"max_steps": step})
    assert_same(weights(model), weights(shorter))
    for name, values in shorter.online_head_.items():
        np.testing.assert_array_equal(model.online_head_[name], values)


@pytest.mark.parametrize("moved", [False, True])
def test_load_best_interrupted_run_restores_and_resumes(tmp_path, moved):
    how: dict[str, Any] = QUICK | {"lr": 1e-2, "validate_every": 1, "load_best": True}
    model, resumed, whole = (make_model(smoothing=0) for _ in range(3))  # the loss of a point is worse
    whole.train(**how, callbacks=Worsen())
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        model.train(**how, checkpoint_dir=folder, callbacks=[Worsen(), PressCtrlC(4)])
    saved = torch.load(folder / "best.ckpt", weights_only=True)
    assert saved["global_step"] == model.history["validation_loss"]["validation_loss"].idxmin() < 4
    assert_same(weights(model), {name.removeprefix("module."): value for name, value in saved["state_dict"].items()})
    if moved:
        folder = folder.rename(tmp_path / "elsewhere")
    resumed.train(**how, checkpoint_dir=folder, resume=True, callbacks=Worsen())
    assert_same(weights(resumed), weights(whole))


@pytest.mark.parametrize("load_best", [False, True])
def test_resume_early_stopped_run_ends_at_once(tmp_path, load_best):
    how: dict[str, Any] = QUICK | {"max_steps": 50, "lr": 3.0, "validate_every": 1, "load_best": load_best}
    how |= {"early_stopping": True, "early_stopping_patience": 2, "checkpoint_dir": tmp_path, "resume": True}
    model, again = make_model(), make_model()
    model.train(**how)
    again.train(**how)
    best = model.history["validation_loss"]["validation_loss"].idxmin()
    assert again.training_settings_["steps"] == model.training_settings_["steps"] == best + 2 < 10
    assert_same(weights(again), weights(model))


# ---- runs that do not come to their end


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_train_interrupted_keeps_weights_and_history(error):
    model, same = with_controls(), with_controls()
    before = weights(same)
    same.module.load_state_dict(weights(model) | {k: v for k, v in before.items() if "fitted" in k})
    # Lightning makes the step that was begun before SIGTERM, and none after Ctrl-C
    stops = {KeyboardInterrupt: PressCtrlC(3), OSError: Stop(3, OSError), SystemExit: PressCtrlC(2, signal.SIGTERM)}
    stop = stops[error]
    with pytest.raises(error):
        model.train(**QUICK | SAME_LR, log_every_n_steps=1, callbacks=stop)
    same.train(**QUICK | SAME_LR | {"max_steps": 3})
    assert_same(weights(model), weights(same))
    assert model.is_trained and model.training_settings_["steps"] == 3
    assert model.history["train_loss"].index.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(model.train_indices, same.train_indices)
    assert model.health == {}  # nobody has looked
    assert not model.module.training
    # and is centred as ever
    controls = model.train_indices[(model.adata.obs["gene"] == "gene_0").to_numpy()[model.train_indices]]
    centred = model.get_latent_representation(indices=controls, center="controls")
    np.testing.assert_allclose(centred.mean(0), 0, atol=1e-6)
    offsets = model.results_.offsets
    assert offsets is not None and (offsets.state["n_cells"] > 0).all()


class TerminateAtTheEnd(Callback):
    def on_train_end(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", [PressCtrlC(2, signal.SIGTERM), PressCtrlC(5, signal.SIGTERM), TerminateAtTheEnd()])
def test_train_terminated_exits_with_143_and_can_be_resumed(stop, tmp_path, caplog):
    """In Python, where Lightning would exit with status 0, or not at all after the last step."""
    how: dict[str, Any] = QUICK | {"validate_every": 2}
    whole, model, resumed = (make_model() for _ in range(3))
    whole.train(**how)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        model.train(**how, checkpoint_dir=tmp_path, callbacks=stop)
    assert raised.value.code == 143 and "SIGTERM" in caplog.text
    assert model.is_trained and signal.getsignal(signal.SIGTERM) is before
    resumed.train(**how, checkpoint_dir=tmp_path, resume=True)
    assert_same(weights(resumed), weights(whole))


def test_train_error_is_raised_even_if_evaluation_fails(monkeypatch):
    class Breaks(Stop):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                monkeypatch.setattr(ArraySource, "read", lambda *args: 1 / 0)
            super().on_train_batch_start(trainer, *args)

    with pytest.raises(OSError, match="out of memory"):
        with_controls().train(**QUICK, callbacks=Breaks(3, OSError))


def test_train_without_step_keeps_earlier_model():
    model = make_model()
    model.train(**QUICK)
    model.train_decoder(**QUICK | {"max_steps": 12}, width=4)
    before, settings, rows = weights(model), model.training_settings_, model.train_indices
    health, images, names = model.health, model.reconstruct(), set(model.history)
    assert health and "decoder_train_loss" in names
    with pytest.raises(RuntimeError, match="out of memory"):
        model.train(**QUICK, train_size=1.0, callbacks=Stop(0))
    with pytest.raises(TrainingDiverged):
        model.train(**QUICK | {"lr": 1e30}, validate_every=6)
    assert_same(weights(model), before)
    assert model.training_settings_ == settings and model.train_indices is rows
    assert model.health == health and set(model.history) == names
    assert model.history["decoder_train_loss"].index[-1] == 12
    np.testing.assert_array_equal(model.reconstruct(), images)


# ---- losses that are no numbers


@pytest.mark.parametrize("make", [make_model, lambda: of_class(ERMModel, encoder="small")], ids=["SCBD", "ERM"])
def test_train_diverged_restores_last_good_weights(make, tmp_path):
    model, half = make(), make()
    how: dict[str, Any] = QUICK | SAME_LR | {"max_steps": 9, "validate_every": 2}
    with pytest.raises(TrainingDiverged, match="step 6 .*lr 0.0001"):
        model.train(**how, checkpoint_dir=tmp_path, callbacks=[Spoil(6)])
    half.train(**how | {"max_steps": 4})
    assert_same(weights(model), weights(half))
    # trained, as far as it got, and the loss says how it ended
    assert model.is_trained and not model.module.training and model.training_settings_["steps"] == 4
    assert len(model.train_indices) == len(half.train_indices) > 0
    losses = model.history["train_loss"]["train_loss"]
    assert losses.index[-1] == 6 and np.isnan(losses.loc[6]) and np.isfinite(losses.loc[:5]).all()
    # the state to resume from is a good one
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    # and training goes on from there
    model.train(**how | {"max_steps": 2})
    assert model.training_settings_["steps"] == 6
    assert np.isfinite(model.history["train_loss"].to_numpy()).all()


@pytest.mark.parametrize(
    ("how", "spoil", "step"),
    [
        ({}, Spoil(1), 0),
        ({"lr": 1e30, "validate_every": 1}, None, 0),
        ({"lr": 1e30}, None, 0),
        ({"train_size": 1.0, "validate_every": 2}, Spoil(5, 1e38), 2),  # finite, and too large to compute with
    ],
)
def test_train_diverged_discards_weights_without_finite_loss(how, spoil, step):
    model, half = make_model(), make_model()
    before = weights(model)
    with pytest.raises(TrainingDiverged, match=f"weights of step {step}"):
        model.train(**QUICK | SAME_LR | how, callbacks=spoil)
    assert finite(model) and model.is_trained == (step > 0)
    if step:
        half.train(**QUICK | SAME_LR | how | {"max_steps": step})
        before = weights(half)
    parameters = [name for name, _ in model.module.named_parameters()]  # statistics have seen the batch that showed it
    assert_same(*({name: found[name] for name in parameters} for found in (before, weights(model))))


@pytest.mark.parametrize("validated", [True, False])
def test_train_non_finite_weights_after_last_step_raise(validated):
    class SpoilLast(Callback):
        def on_train_batch_end(self, trainer, plan, *args):
            if trainer.global_step == 6:
                next(plan.module.content.parameters()).data.fill_(float("nan"))

    model = make_model()
    sizes: dict[str, Any] = {} if validated else {"train_size": 1.0}
    what = "validation loss" if validated else "weights"
    with pytest.raises(TrainingDiverged, match=f"NaN or infinity in the {what} by step 6 .lr 0.0001"):
        model.train(**QUICK, **sizes, validate_every=3 if validated else 4, callbacks=[SpoilLast()])
    assert finite(model)


def test_train_non_finite_pixel_keeps_weights_and_statistics():
    cells = make_cells(dtype="float32")
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    cells.obsm["single_cell_images"][:, 0, 0, 0] = np.nan
    model.module.preprocess.fit([torch.zeros(2, 2, 16, 16)])
    with pytest.raises(TrainingDiverged):
        model.train(**QUICK)
    assert finite(model)


def test_tolerated_losses_allow_some_non_finite_losses():
    class Drop(Callback):
        """Losses that are none, of weights that are."""

        def __init__(self, steps):
            self.steps = steps

        def on_train_batch_start(self, trainer, plan, batch, *args):
            forward = type(plan.module).forward
            bad = trainer.global_step in self.steps
            plan.module.forward = lambda *a, **k: (
                losses := forward(plan.module, *a, **k),
                losses._replace(loss=losses.loss * float("nan")) if bad else losses,
            )[1]

    how: dict[str, Any] = QUICK | {"max_steps": 14, "train_size": 1.0, "log_every_n_steps": 1}
    model = of_class(VAEModel)
    model.train(**how, callbacks=[Drop({1, 2, 3})])
    assert np.isnan(model.history["train_loss"]["train_loss"]).sum() == 3
    assert model.history["skipped_gradients"].iloc[-1, 0] == 3
    with pytest.raises(TrainingDiverged):
        of_class(VAEModel).train(**how, callbacks=[Drop(range(1, 14))])


def test_train_decoder_joint_diverged_restores_encoders():
    model = make_model()
    model.train(**QUICK)
    before = weights(model)
    with pytest.raises(TrainingDiverged):
        model.train_decoder(**QUICK, joint=True, width=4, callbacks=[Spoil(2)])
    assert_same(weights(model), before)
    assert model.training_settings_["steps"] == 6


def test_train_linear_encoder_defaults_to_50_steps_on_all_wells():
    wells = make_wells()
    SCBDModel.setup_anndata(wells, y_key="compound", e_key="plate", control="DMSO")
    model = SCBDModel(wells, encoder="linear", n_latent=4)
    model.train(enable_progress_bar=False, accelerator="cpu")
    assert model.training_settings_["steps"] == 50 and len(model.train_indices) == wells.n_obs


@pytest.mark.filterwarnings("ignore:y and e are confounded")
def test_train_single_cell_perturbations_logs_their_names(caplog):
    cells = make_cells()
    cells.obs["gene"] = cells.obs["gene"].cat.add_categories("lonely")
    cells.obs.loc["cell_7", "gene"] = "lonely"
    model = make_model(cells)
    with caplog.at_level(logging.WARNING, logger="scbd"):
        model.train(**QUICK | {"max_steps": 2}, train_size=1.0)
    assert "lonely" in caplog.text
