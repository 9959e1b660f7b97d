from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import QUICK, make_model

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def test_history_has_one_frame_a_metric(trained):
    names = {"loss", "supervised_c", "learned_c", "supervised_s", "invariance_c"}
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
