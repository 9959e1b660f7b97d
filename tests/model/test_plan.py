from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_models import QUICK, PressCtrlC, assert_same, make_model, weights

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


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
