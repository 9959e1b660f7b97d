"""Losses that are no numbers: where the run stops, what it says, and what is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, assert_same, make_model, weights

from scbd import SCBDModel
from scbd.baselines import ERMModel, VAEModel
from scbd.model import TrainingDiverged
from scbd.model._divergence import Divergence

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


class Spoil(Callback):
    """Make the weights something else before a step."""

    def __init__(self, step: int, value: float = float("nan")) -> None:
        self.step, self.value = step, value

    def on_train_batch_start(self, trainer, plan, *args):
        if trainer.global_step == self.step - 1:
            for parameter in plan.module.parameters():
                parameter.data.fill_(self.value)


def make_erm(cells=None) -> ERMModel:
    cells = make_cells() if cells is None else cells
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    torch.manual_seed(0)
    return ERMModel(cells, encoder="small")


def finite(model: Any) -> bool:
    return all(bool(value.isfinite().all()) for value in model.module.state_dict().values())


@pytest.mark.parametrize("make", [make_model, make_erm], ids=["SCBD", "ERM"])
def test_a_run_stops_at_its_first_loss_that_is_no_number(make, tmp_path):
    model, half = make(), make()
    how: dict[str, Any] = QUICK | {"max_steps": 9, "validate_every": 2}
    said = (
        r"The training loss became nan at step 6 of 9 \(lr 0\.0001, precision 32-true\)\. Try lr=1e-05, or "
        r"gradient_clip_val.* The weights are those of step 4, the last found good; history has the losses\."
    )
    with pytest.raises(TrainingDiverged, match=said):
        model.train(**how, checkpoint_dir=tmp_path, callbacks=[Spoil(6)])
    half.train(**how | {"max_steps": 4})
    assert_same(weights(model), weights(half))
    assert not model.module.training
    # trained, as far as it got, and the loss says how it ended
    assert model.is_trained
    assert model.training_settings_["steps"] == 4
    assert "4 steps" in repr(model)
    assert len(model.train_indices) == len(half.train_indices) > 0
    losses = model.history["train_loss"]["train_loss"]
    assert losses.index[-1] == 6 and np.isnan(losses.loc[6]) and np.isfinite(losses.loc[:5]).all()
    # the state to resume from is a good one
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    # and training goes on from there
    model.train(**how | {"max_steps": 2})
    assert model.training_settings_["steps"] == 6
    assert np.isfinite(model.history["train_loss"].to_numpy()).all()


def test_a_run_that_never_was_good_leaves_the_model_as_it_was():
    model = make_model()
    before = weights(model)
    said = r"step 1 of 6.* No update .* look for missing or extreme values.*from before the"
    with pytest.raises(TrainingDiverged, match=said):
        model.train(**QUICK, callbacks=[Spoil(1)])
    after = weights(model)
    assert_same(*({k: v for k, v in w.items() if "preprocess" not in k} for w in (before, after)))
    assert not model.is_trained and "not trained" in repr(model)


@pytest.mark.parametrize(
    ("validate_every", "seen"),
    [(None, "The training loss became nan at step 2"), (1, "The validation loss is nan at step 1")],
)
def test_a_rate_that_is_far_too_high_is_said(validate_every, seen):
    model = make_erm()
    with pytest.raises(TrainingDiverged, match=rf"{seen} of 6 \(lr 1e\+30, .*Try lr=1e\+29"):
        model.train(**QUICK | {"lr": 1e30}, validate_every=validate_every)
    assert finite(model)


def test_a_pixel_that_is_no_number_spoils_neither_weights_nor_statistics():
    cells = make_cells(dtype="float32")
    model = make_erm(cells)
    cells.obsm["single_cell_images"][:, 0, 0, 0] = np.nan
    model.module.preprocess.fit([torch.zeros(2, 2, 16, 16)])
    with pytest.raises(TrainingDiverged):
        model.train(**QUICK)
    assert finite(model)


@pytest.mark.parametrize("validated", [True, False])
def test_what_the_last_step_spoils_is_seen(validated):
    class SpoilLast(Callback):
        def on_train_batch_end(self, trainer, plan, *args):
            if trainer.global_step == 6:
                next(plan.module.content.parameters()).data.fill_(float("nan"))

    model = make_model()
    sizes: dict[str, Any] = {} if validated else {"train_size": 1.0}
    said = "The validation loss is nan at step 6" if validated else "Weights became NaN or infinite at step 6"
    with pytest.raises(TrainingDiverged, match=f"{said} .* those of step [34]"):
        model.train(**QUICK, **sizes, validate_every=3 if validated else 4, callbacks=[SpoilLast()])
    assert finite(model)


def test_weights_without_validation_are_good_once_the_next_loss_is():
    """Weights that are numbers, and too large to compute with."""
    model, half = make_erm(), make_erm()
    with pytest.raises(TrainingDiverged, match="those of step 2"):
        model.train(**QUICK, train_size=1.0, validate_every=2, callbacks=[Spoil(5, 1e38)])
    half.train(**QUICK | {"max_steps": 2}, train_size=1.0)
    assert_same(weights(model), weights(half))


def test_losses_on_a_gpu_are_looked_at_later_and_the_first_is_named(monkeypatch):
    """Asked for every loss, a GPU would wait for each."""
    monkeypatch.setattr("scbd.model._divergence._waits", lambda device: True)
    asked: list[int] = []
    check = Divergence._check_training

    def noted(self, trainer, plan):
        asked.append(trainer.global_step)
        check(self, trainer, plan)

    monkeypatch.setattr(Divergence, "_check_training", noted)
    model = make_model()
    with pytest.raises(TrainingDiverged, match="at step 6 of 30 .* those of step 4"):
        model.train(**QUICK | {"max_steps": 30}, validate_every=4, callbacks=[Spoil(6)])
    assert set(asked) == {4, 8}
    assert model.history["train_loss"].index[-1] == 8


def test_a_model_that_leaves_wild_gradients_out_bears_some_losses():
    VAEModel.setup_anndata(cells := make_cells(), y_key="gene", e_key="well")

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
    model = VAEModel(cells)
    model.train(**how, callbacks=[Drop({1, 2, 3})])
    assert np.isnan(model.history["train_loss"]["train_loss"]).sum() == 3
    assert model.history["skipped_gradients"].iloc[-1, 0] == 3
    with pytest.raises(TrainingDiverged, match="at step 2 of 14"):
        VAEModel(cells).train(**how, callbacks=[Drop(range(1, 14))])


def test_a_joint_decoder_that_diverges_leaves_good_blocks():
    model: SCBDModel = make_model()
    model.train(**QUICK)
    before = weights(model)
    with pytest.raises(TrainingDiverged):
        model.train_decoder(**QUICK, joint=True, width=4, callbacks=[Spoil(2)])
    assert_same(weights(model), before)
    assert model.training_settings_["steps"] == 6
