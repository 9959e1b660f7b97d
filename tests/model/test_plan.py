from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells, make_wells
from small_models import QUICK, PressCtrlC, assert_same, make_model, weights

from scbd import SCBDModel
from scbd.baselines import ERMModel, VAEModel

pytestmark = pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(")


def test_history_has_one_frame_a_metric(trained):
    names = {"loss", "supervised_c", "learned_c", "supervised_s", "invariance_c", "interaction_c", "environment_c"}
    expected = {f"{part}_{name}" for part in ("train", "validation") for name in names}
    assert set(trained.history) == expected | {"alpha", "z_c_spread", "z_c_effective_rank"}
    for name, frame in trained.history.items():
        assert list(frame.columns) == [name]
        assert frame.index.name == "step"
        assert frame.index.is_monotonic_increasing
        assert frame.index[-1] == 12
        assert np.isfinite(frame.to_numpy(dtype=float)).all()


def test_alpha_warms_up():
    model = make_model(alpha=100.0, smoothing=0)
    model.train(**QUICK | {"max_steps": 4}, validate_every=1, plan_kwargs={"n_steps_alpha_warmup": 2}, load_best=False)
    h = {name: frame.iloc[:, 0].astype(float) for name, frame in model.history.items()}
    weight = (h["train_loss"] - h["train_supervised_c"] - h["train_supervised_s"]) / h["train_invariance_c"]
    np.testing.assert_allclose(weight, [0, 50, 100, 100], atol=1e-2)


def test_mixed_precision_trains_with_losses_in_float32():
    model = make_model()
    model.train(**QUICK | {"precision": "bf16-mixed"})
    assert model.training_settings_["precision"] == "bf16-mixed"
    assert all(p.dtype == torch.float32 for p in model.module.parameters())
    assert np.isfinite(model.history["train_loss"].to_numpy(dtype=float)).all()


def test_fused_optimiser_gives_way_to_clipped_gradients():
    """Lightning refuses to clip the gradients of a fused optimiser under mixed precision."""
    model = make_model()
    mixed = QUICK | {"precision": "bf16-mixed"}
    model.train(**mixed)
    assert model.trainer.optimizers[0].defaults["fused"]
    model.train(**mixed, gradient_clip_val=1.0)
    assert not model.trainer.optimizers[0].defaults["fused"]


class Watched(torch.nn.Module):
    """Notes what every training batch is drawn by, and what is in it."""

    def __init__(self, preprocess: torch.nn.Module) -> None:
        super().__init__()
        self.preprocess = preprocess
        self.seeds: list[int] = []
        self.batches: list[float] = []

    def forward(self, inputs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        if generator is not None:
            self.seeds.append(generator.initial_seed())
            self.batches.append(inputs.double().mean().item())
        return self.preprocess(inputs, generator)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("preprocess"), name)


@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_every_batch_of_a_run_is_another_one_and_turned_in_another_way(accumulated):
    """Those whose gradients are accumulated too; one a step is drawn as it always was."""
    model = make_model(augment=True)
    watched: Any = Watched(model.module.preprocess)
    model.module.preprocess = watched
    how: dict[str, Any] = QUICK | {"max_steps": 4, "validate_every": 2, "accumulate_grad_batches": accumulated}
    model.train(**how)
    assert watched.seeds == list(range(4 * accumulated))
    assert len(set(watched.batches)) == 4 * accumulated
    assert model.history["validation_loss"].index.tolist() == [2, 4]
    watched.seeds.clear()
    model.train(**how, seed=3)  # goes on with what was not seen
    assert watched.seeds == [3 * 1_000_003 + i for i in range(4 * accumulated, 8 * accumulated)]


@pytest.mark.parametrize(("interrupted", "validate_every"), [(2, 2), (3, 2), (3, 5)])
def test_a_run_that_accumulates_gradients_resumes_where_a_step_ends(tmp_path, interrupted, validate_every):
    how: dict[str, Any] = QUICK | {"max_steps": 5, "accumulate_grad_batches": 2, "validate_every": validate_every}
    with pytest.raises(KeyboardInterrupt):
        make_model(augment=True).train(**how, checkpoint_dir=tmp_path, callbacks=PressCtrlC(interrupted))
    resumed, whole = make_model(augment=True), make_model(augment=True)
    resumed.train(**how, checkpoint_dir=tmp_path, ckpt_path="last")
    whole.train(**how)
    assert_same(weights(resumed), weights(whole))


def moved(before, after):
    """Names of what training has changed."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_frozen_encoders_stay_as_they_are_statistics_included():
    model = make_model()
    before = weights(model)
    model.train(**QUICK | {"encoder_lr": 0})
    changed = moved(before, weights(model))
    assert any(".projection." in name for name in changed)
    assert not any(".encoder." in name for name in changed)
    before = weights(model)
    model.train(**QUICK)  # again as ever
    assert any(".encoder." in name for name in moved(before, weights(model)))


def test_what_was_frozen_in_an_encoder_of_ones_own_stays_so():
    """Before, between and after runs with frozen encoders."""
    network = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten())
    network[0].requires_grad_(False)
    model = make_model(encoder=network)
    for rate, moves in ((None, True), (0, False), (None, True)):
        before = weights(model)
        model.train(**QUICK | {"encoder_lr": rate})
        changed = moved(before, weights(model))
        assert not any(".encoder.0." in name for name in changed)
        assert any(".encoder.1." in name for name in changed) == moves


def test_encoders_learn_at_a_rate_of_their_own():
    """The first step of AdamW moves a weight by its rate, whatever its gradient."""
    cells = make_cells()
    one = QUICK | {"max_steps": 1, "weight_decay": 0.0, "lr": 1e-2}
    distances = {}
    for rate in (None, 1e-4):
        model = make_model(cells)
        before = weights(model)
        model.train(**one | {"encoder_lr": rate})
        after = weights(model)
        for part in ("encoder.0.weight", "projection.0.weight"):
            (name,) = [name for name in before if name.startswith("content") and name.endswith(part)]
            distances[rate, part] = float((after[name] - before[name]).abs().median())
    assert distances[None, "encoder.0.weight"] == pytest.approx(1e-2, rel=0.05)
    assert distances[1e-4, "encoder.0.weight"] == pytest.approx(1e-4, rel=0.05)
    assert distances[None, "projection.0.weight"] == distances[1e-4, "projection.0.weight"]


def test_a_rate_of_encoders_that_cannot_be_gets_a_sentence():
    cells = make_cells()
    with pytest.raises(ValueError, match="encoder_lr=-1: give"):
        make_model(cells).train(**QUICK | {"encoder_lr": -1})
    VAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    with pytest.raises(ValueError, match="encoder_lr is for models with an encoder by name"):
        VAEModel(cells, n_latent=4).train(**QUICK | {"encoder_lr": 0.1})
    wells = make_wells()
    SCBDModel.setup_anndata(wells, y_key="compound", e_key="plate", control="DMSO")
    with pytest.raises(ValueError, match="leaves nothing to learn"):
        SCBDModel(wells, encoder="linear", n_latent=4).train(**QUICK | {"encoder_lr": 0})
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    before = weights(model)
    model.train(**QUICK | {"encoder_lr": 0})
    assert all(name.startswith(("head.", "preprocess.")) for name in moved(before, weights(model)))
