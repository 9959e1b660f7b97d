"""A run beside the user's own loggers and callbacks, and runs that do not come to their end."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from scvi.train import SaveCheckpoint
from small_models import QUICK, PressCtrlC, Worsen, assert_same, make_model, weights

from scbd import SCBDModel
from scbd.data import ArraySource, ImageDataModule, Split
from scbd.model import TrainingDiverged
from scbd.model._checkpoints import find_state
from scbd.model._fit import _steps_between_validations

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


class Seen(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        self.steps.append(trainer.global_step)


def test_loggers_come_beside_ours(tmp_path):
    for logger in (
        False,
        True,
        None,
        CSVLogger(tmp_path / "one"),
        [CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")],
    ):
        model = make_model()
        model.train(**QUICK | {"max_steps": 1}, logger=logger)
        assert np.isfinite(model.history["train_loss"].to_numpy()).all()
        assert model.history["validation_loss"].index[-1] == 1
    for name in ("one", "a", "b"):
        assert "train_loss" in next((tmp_path / name).rglob("metrics.csv")).read_text()


def test_callbacks_are_none_one_or_several():
    one, two = Seen(), Seen()
    for callbacks in (None, one, [one, two], (two,)):
        make_model().train(**QUICK | {"max_steps": 2}, callbacks=callbacks)
    assert one.steps == [1, 2, 1, 2]
    assert two.steps == [1, 2, 1, 2]


def test_lightnings_own_checkpoints_come_beside_ours(tmp_path):
    theirs = ModelCheckpoint(tmp_path / "theirs", monitor="validation_loss")
    model = make_model()
    model.train(**QUICK, validate_every=3, checkpoint_dir=tmp_path / "ours", callbacks=theirs)
    assert len(list((tmp_path / "theirs").glob("*.ckpt"))) == 1
    state = find_state(theirs.best_model_path, None)
    assert state is not None and state.step in (3, 6)


@pytest.mark.filterwarnings("ignore:.*was not fully:UserWarning")
def test_scvi_tools_saves_models_on_the_way(tmp_path):
    saving = SaveCheckpoint(str(tmp_path), filename="best", monitor="validation_loss")
    model = make_model()
    model.train(**QUICK, validate_every=3, callbacks=[saving], enable_checkpointing=True)
    assert model.is_trained and not model.module.training
    saved = SCBDModel.load(saving.best_model_path, make_cells())
    assert np.isfinite(saved.get_latent_representation()).all()
    assert "SCBDModel" in repr(saved)


def test_what_is_saved_on_the_way_says_nothing_of_the_run_before(tmp_path):
    """It was found of other weights, and stays where a run makes no step."""

    class Save(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                model.save(tmp_path / "on the way")

    cells = make_cells()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", control="gene_0")
    model = SCBDModel(cells, encoder="small", n_latent=6)
    model.train(**QUICK)
    model.adapt(cells, ["plate", "well"])
    found = {name: getattr(model, name) for name in model._of_weights}
    assert all(found.values())

    class Stop(Callback):
        def on_train_start(self, *args):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model.train(**QUICK, callbacks=[Stop()])
    assert {name: getattr(model, name) for name in model._of_weights} == found
    model.train(**QUICK, callbacks=[Save()])
    saved = SCBDModel.load(tmp_path / "on the way", adata=False)
    assert saved.is_trained and not any(getattr(saved, name) for name in model._of_weights)
    assert model.health and model.looks_ and model.adaptations.empty


@pytest.mark.filterwarnings("ignore:.*fast_dev_run.*")
def test_a_dry_run(tmp_path):
    model = make_model()
    model.train(**QUICK, fast_dev_run=True, checkpoint_dir=tmp_path / "run", load_best=True)
    assert model.training_settings_["steps"] == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_stops_early_keeps_what_it_did(error):
    class Stop(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                if error is RuntimeError:
                    raise RuntimeError("out of memory")
                os.kill(os.getpid(), signal.SIGINT)

    done = 3 if error is RuntimeError else 4  # the step at hand is finished first
    model, same = make_model(), make_model()
    with pytest.raises(error):
        model.train(**QUICK, log_every_n_steps=1, callbacks=[Stop()])
    same.train(**QUICK | {"max_steps": done})
    assert_same(weights(model), weights(same))
    assert model.is_trained and model.training_settings_["steps"] == done
    assert model.history["train_loss"].index.tolist() == [*range(1, done + 1)]
    np.testing.assert_array_equal(model.train_indices, same.train_indices)
    assert f"trained for {done} steps" in repr(model)
    assert model.get_latent_representation().shape == (96, 6)
    assert model.health == {}  # nobody has looked
    assert not model.module.training


def test_a_second_run_that_does_nothing_leaves_what_is_known_of_the_first():
    class Breaks(Callback):
        def on_train_batch_start(self, *args):
            raise RuntimeError("out of memory")

    model = make_model()
    model.train(**QUICK)
    before, settings, rows = weights(model), model.training_settings_, model.train_indices
    with pytest.raises(RuntimeError, match="out of memory"):
        model.train(**QUICK | {"lr": 1.0}, train_size=1.0, callbacks=Breaks())
    assert_same(weights(model), before)
    assert model.training_settings_ == settings and model.train_indices is rows
    assert model.history["train_loss"].index[-1] == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_embeddings_are_centred_however_a_run_ended(error):
    class Breaks(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                raise error("no space left on device")

    cells = make_cells()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", control="gene_0")
    model = SCBDModel(cells, encoder="small", n_latent=6)
    with pytest.raises(error):
        model.train(**QUICK, callbacks=Breaks())
    controls = model.train_indices[(cells.obs["gene"] == "gene_0").to_numpy()[model.train_indices]]
    centred = model.get_latent_representation(indices=controls, center="controls")
    np.testing.assert_allclose(centred.mean(0), 0, atol=1e-6)
    assert set(model.looks_) == {"all", "controls"}


def test_what_a_run_failed_at_is_said_even_if_nothing_can_be_embedded(monkeypatch):
    class Breaks(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                monkeypatch.setattr(ArraySource, "read", lambda *args: 1 / 0)
                raise OSError("the disk is gone")

    cells = make_cells()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", control="gene_0")
    with pytest.raises(OSError, match="the disk is gone"):
        SCBDModel(cells, encoder="small").train(**QUICK, callbacks=Breaks())


def test_a_run_that_makes_no_step_leaves_decoder_and_health():
    model = make_model()
    model.train(**QUICK)
    model.train_decoder(**QUICK | {"max_steps": 12}, width=4)
    health, images, names = model.health, model.reconstruct(), set(model.history)
    assert health and "decoder_train_loss" in names
    with pytest.raises(Exception, match="limit_val_batches"):
        model.train(**QUICK, limit_val_batches=0.1)
    with pytest.raises(TrainingDiverged):
        model.train(**QUICK | {"lr": 1e30}, validate_every=6)
    assert model.health == health and set(model.history) == names
    assert model.history["decoder_train_loss"].index[-1] == 12
    np.testing.assert_array_equal(model.reconstruct(), images)


def test_processes_of_their_own_are_refused():
    model = make_model()
    for strategy in ("ddp_notebook", "ddp_spawn"):
        with pytest.raises(ValueError, match=f"'{strategy}' trains in processes of its own.*strategy='ddp'"):
            model.train(**QUICK, strategy=strategy, devices=2)
    with pytest.raises(ValueError, match="batch_size=25 cannot be shared equally by 2 devices"):
        model.train(**QUICK | {"batch_size": 25}, strategy="ddp", devices=2)


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
def test_validation_takes_a_tenth_of_the_time_at_most(cells, n_validation, batch_size, max_steps, every):
    split = Split(train=np.arange(48), validation=np.arange(48, 48 + n_validation))
    labels = np.zeros(96, dtype=int)
    source = ArraySource(cells.obsm["single_cell_images"])
    data = ImageDataModule(source, labels, labels, split, batch_size=batch_size, max_steps=max_steps)
    assert _steps_between_validations(data) == every


@pytest.mark.parametrize("setting", ["early_stopping", "load_best"])
def test_what_watches_validation_cells_needs_some(setting):
    with pytest.raises(ValueError, match=f"{setting} .* there are no validation cells: lower train_size"):
        make_model().train(**QUICK, train_size=1.0, **{setting: True})


def test_an_interrupted_run_ends_with_its_best_weights(tmp_path):
    how: dict[str, Any] = QUICK | {"max_steps": 8, "lr": 1e-2, "validate_every": 1, "load_best": True}
    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        model.train(**how, checkpoint_dir=tmp_path, callbacks=[Worsen(), PressCtrlC(6)])
    losses = model.history["validation_loss"]["validation_loss"]
    best, last = (torch.load(tmp_path / name, weights_only=True) for name in ("best.ckpt", "last.ckpt"))
    assert best["global_step"] == losses.idxmin() < last["global_step"] == 6
    assert_same(weights(model), {name.removeprefix("module."): value for name, value in best["state_dict"].items()})
    resumed, whole = make_model(), make_model()
    whole.train(**how, callbacks=Worsen())
    resumed.train(**how, checkpoint_dir=tmp_path, ckpt_path="last", callbacks=Worsen())
    assert_same(weights(resumed), weights(whole))


@pytest.mark.parametrize("load_best", [False, True])
def test_a_run_that_had_stopped_does_not_go_on_unless_it_is_to_wait_for_longer(tmp_path, load_best):
    how: dict[str, Any] = QUICK | {"max_steps": 50, "lr": 3.0, "validate_every": 1, "load_best": load_best}
    how |= {"early_stopping": True, "checkpoint_dir": tmp_path}
    model, again, longer = make_model(), make_model(), make_model()
    model.train(**how, early_stopping_patience=2)
    steps = model.training_settings_["steps"]
    for _ in range(2):
        again.train(**how, early_stopping_patience=2, ckpt_path="last")
        assert again.training_settings_["steps"] == steps < 10
        assert_same(weights(again), weights(model))
    longer.train(**how, early_stopping_patience=4, ckpt_path="last")
    assert longer.training_settings_["steps"] == steps + 2


def test_early_stopping_stops():
    model = make_model()
    model.train(
        **QUICK | {"max_steps": 50, "lr": 3.0}, validate_every=1, early_stopping=True, early_stopping_patience=2
    )
    assert model.trainer.global_step < 10
