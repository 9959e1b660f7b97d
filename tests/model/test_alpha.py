from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells
from small_models import QUICK, PressCtrlC, assert_same, make_model, weights

import scbd
from scbd import SCBDModel
from scbd.model import AutoAlpha

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def rule_of(model: SCBDModel) -> AutoAlpha:
    assert model.module.alpha_rule is not None
    return model.module.alpha_rule


def test_alpha_follows_what_is_learned(tmp_path):
    model = make_model(alpha="auto", style_target=None, smoothing=0)
    assert "alpha auto" in repr(model)
    model.train(**QUICK | {"max_steps": 80, "lr": 3e-3, "batch_size": 48}, validate_every=1)
    h = {name: frame.iloc[:, 0].astype(float) for name, frame in model.history.items()}
    learned, alpha = h["train_learned_c"].to_numpy(), h["alpha"].to_numpy()
    assert alpha[0] == 0 and len(alpha) == 80
    new_cells = h["validation_learned_c"].to_numpy()
    expected, mean, kept = [], 0.0, 1.0
    for share, share_of_new in zip(learned, new_cells, strict=True):
        expected.append(0.05 * mean * kept)
        mean += (max(share, 0) - mean) / 50
        if mean > 0.02:
            kept = min(max(share_of_new / mean, 0), 1)
    np.testing.assert_allclose(alpha, expected, atol=1e-6)
    assert alpha.max() > 0.005
    mean *= kept
    # that is what the statistic is weighed by
    np.testing.assert_allclose(h["train_loss"], h["train_supervised_c"] + alpha * h["train_invariance_c"], atol=1e-4)
    assert model.health["final_alpha"] == pytest.approx(0.05 * mean, rel=1e-3)
    assert f"alpha auto, {0.05 * mean:.2g} in the end" in repr(model)
    # it is saved with the weights, and what goes on with those goes on with it
    model.save(str(tmp_path / "model"))
    loaded: Any = SCBDModel.load(str(tmp_path / "model"), adata=model.adata)
    assert float(loaded.module.current_alpha) == pytest.approx(0.05 * mean, rel=1e-3)
    loaded.train(**QUICK | {"max_steps": 1}, validate_every=1)
    assert loaded.history["alpha"].iloc[-1, 0] == pytest.approx(0.05 * mean, rel=1e-3)


def test_what_was_learned_by_heart_bears_no_invariance():
    """Labels that images do not show: training cells are told apart all the same, new ones are not."""
    noise = make_cells(160)
    noise.obs["gene"] = np.random.default_rng(0).permutation(noise.obs["gene"])
    model = make_model(noise, alpha="auto", smoothing=0, style_target=None)
    # half of them: what a handful of validation cells says differs between processors
    training = QUICK | {"max_steps": 300, "lr": 3e-3, "batch_size": 48, "train_size": 0.5, "validation_size": 0.5}
    model.train(**training, validate_every=100)
    assert float(rule_of(model).learned) > 0.1
    assert float(model.module.current_alpha) < 0.2 * 0.05 * float(rule_of(model).learned)


@pytest.mark.parametrize(
    "told", [[], [0.0, 0.0]], ids=["no validation batches", "validation batches whose labels say nothing"]
)
def test_alpha_is_not_weighed_by_validation_cells_that_say_nothing(told):
    alpha = scbd.model.AutoAlpha()
    for _ in range(50):
        alpha.observe(torch.tensor(0.5))
    before = float(alpha.alpha)
    alpha.validate(torch.tensor(told))
    assert float(alpha.alpha) == before > 0.01
    alpha.validate(torch.tensor([0.1, 0.0, 0.1]))
    assert float(alpha.alpha) == pytest.approx(0.005)


def test_validation_has_no_say_before_anything_was_learned():
    """A ratio of two numbers that are nearly zero says nothing."""
    alpha = scbd.model.AutoAlpha()
    alpha.observe(torch.tensor(0.5))
    assert float(alpha.learned) == pytest.approx(0.01)
    alpha.validate(torch.tensor([0.001]))
    assert float(alpha.alpha) == pytest.approx(0.05 * 0.01)
    alpha.observe(torch.tensor(0.9))
    alpha.validate(torch.tensor([0.001]))
    assert float(alpha.alpha) == pytest.approx(0.05 * 0.001)


@pytest.mark.parametrize("interrupted", [4, 5, 6])
def test_a_resumed_run_goes_on_with_the_alpha_it_found(tmp_path, interrupted):
    """Wherever it was interrupted: at a step with a validation, or between."""
    settings: dict[str, Any] = QUICK | {"lr": 1e-2, "checkpoint_dir": tmp_path, "validate_every": 2, "max_steps": 9}

    def make():
        model = make_model(alpha="auto")
        rule_of(model).learned.fill_(0.9)  # more than new cells bear out
        return model

    half = make()
    with pytest.raises(KeyboardInterrupt):
        half.train(**settings, callbacks=PressCtrlC(interrupted))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == interrupted
    resumed, whole = make(), make()
    resumed.train(**settings, ckpt_path="last")
    whole.train(**settings | {"checkpoint_dir": None})
    assert_same(weights(resumed), weights(whole))
    assert weights(whole)["auto_alpha.kept"] < 1
    assert resumed.history["validation_loss"].index.tolist() == [2, 4, 6, 8]
    with pytest.raises(ValueError, match="alpha: 'auto' → 0.01"):
        make_model(alpha=0.01).train(**settings | {"ckpt_path": "last"})


def test_alpha_follows_what_is_learned_beside_a_decoder():
    model = make_model(alpha="auto")
    model.train(**QUICK | {"lr": 3e-3, "max_steps": 30})
    auto = rule_of(model)
    before = float(auto.learned), float(auto.kept)
    model.train_decoder(**QUICK | {"max_steps": 2}, width=8)
    assert (float(auto.learned), float(auto.kept)) == before
    model.train_decoder(**QUICK | {"max_steps": 2}, joint=True, width=8)
    assert float(auto.learned) > before[0] > 0
