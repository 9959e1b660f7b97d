"""What a step is: of the plan, and of the head beside the encoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, PressCtrlC, assert_same, make_model, weights
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F

from scbd import SCBDModel
from scbd.baselines import ERMModel, IVAEModel, VAEModel
from scbd.model._plan import OnlineHead

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def test_ramp_rises_linearly_over_warmup_steps():
    model = make_model(alpha=100.0, smoothing=0)
    model.train(**QUICK | {"max_steps": 4}, validate_every=1, plan_kwargs={"n_steps_alpha_warmup": 2})
    h = {name: frame.iloc[:, 0].astype(float) for name, frame in model.history.items()}
    weight = (h["train_loss"] - h["train_supervised_c"] - h["train_supervised_s"]) / h["train_invariance_c"]
    np.testing.assert_allclose(weight, [0, 50, 100, 100], atol=1e-2)


def test_train_mixed_precision_computes_losses_in_float32():
    model = make_model()
    model.train(**QUICK | {"precision": "bf16-mixed"})
    assert model.training_settings_["precision"] == "bf16-mixed"
    assert all(p.dtype == torch.float32 for p in model.module.parameters())
    assert np.isfinite(model.history["train_loss"].to_numpy(dtype=float)).all()


def test_train_clipped_gradients_use_unfused_optimiser():
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
def test_train_augments_each_batch_with_its_own_seed(accumulated):
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


class Rates(Callback):
    """Those of all steps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer, *args):
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_lr_decays_along_half_a_cosine_in_each_run(tmp_path):
    """As far as they had come, in a run that is resumed."""
    model, rates = make_model(), Rates()
    expected = 1e-4 * (1 + np.cos(np.pi * np.arange(6) / 6)) / 2
    for _ in range(2):
        model.train(**QUICK, callbacks=[rates])
    np.testing.assert_allclose(rates.seen, np.tile(expected, 2), rtol=1e-6)
    how: dict[str, Any] = QUICK | {"validate_every": 2, "checkpoint_dir": tmp_path}
    before, after = Rates(), Rates()
    with pytest.raises(KeyboardInterrupt):
        make_model().train(**how, callbacks=[before, PressCtrlC(4)])
    make_model().train(**how, resume=True, callbacks=[after])
    np.testing.assert_allclose(before.seen[:4] + after.seen, expected, rtol=1e-6)
    steady = Rates()
    make_model().train(**QUICK, plan_kwargs={"lr_decay": False}, callbacks=[steady])
    assert steady.seen == [1e-4] * 6
    accumulated = Rates()
    make_model().train(**QUICK, accumulate_grad_batches=2, callbacks=[accumulated])
    np.testing.assert_allclose(accumulated.seen, np.repeat(expected, 2), rtol=1e-6)


def moved(before, after):
    """Names of what training has changed."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_encoder_lr_zero_keeps_weights_and_statistics_of_encoders():
    model = make_model()
    before = weights(model)
    model.train(**QUICK | {"plan_kwargs": {"encoder_lr": 0}})
    changed = moved(before, weights(model))
    assert any(".projection." in name for name in changed)
    assert not any(".encoder." in name for name in changed)
    before = weights(model)
    model.train(**QUICK)  # again as ever
    assert any(".encoder." in name for name in moved(before, weights(model)))


def test_encoder_lr_keeps_frozen_parameters_of_custom_encoder():
    """Before, between and after runs with frozen encoders."""
    network = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten())
    network[0].requires_grad_(False)
    model = make_model(encoder=network)
    for rate, moves in ((None, True), (0, False), (None, True)):
        before = weights(model)
        model.train(**QUICK | {"plan_kwargs": {"encoder_lr": rate}})
        changed = moved(before, weights(model))
        assert not any(".encoder.0." in name for name in changed)
        assert any(".encoder.1." in name for name in changed) == moves


def test_encoder_lr_applies_to_encoders_only():
    """The first step of AdamW moves a weight by its rate, whatever its gradient."""
    cells = make_cells()
    one = QUICK | {"max_steps": 1, "weight_decay": 0.0, "lr": 1e-2}
    distances = {}
    for rate in (None, 1e-4):
        model = make_model(cells)
        before = weights(model)
        model.train(**one | {"plan_kwargs": {"encoder_lr": rate}})
        after = weights(model)
        for part in ("encoder.0.weight", "projection.0.weight"):
            (name,) = [name for name in before if name.startswith("content") and name.endswith(part)]
            distances[rate, part] = float((after[name] - before[name]).abs().median())
    assert distances[None, "encoder.0.weight"] == pytest.approx(1e-2, rel=0.05)
    assert distances[1e-4, "encoder.0.weight"] == pytest.approx(1e-4, rel=0.05)
    assert distances[None, "projection.0.weight"] == distances[1e-4, "projection.0.weight"]


def test_encoder_lr_unsuitable_raises():
    cells = make_cells()
    with pytest.raises(ValueError, match="encoder_lr"):
        make_model(cells).train(**QUICK | {"plan_kwargs": {"encoder_lr": -1}})
    VAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    with pytest.raises(ValueError, match="encoder_lr"):
        VAEModel(cells, n_latent=4).train(**QUICK | {"plan_kwargs": {"encoder_lr": 0.1}})
    wells = make_wells()
    SCBDModel.setup_anndata(wells, y_key="compound", e_key="plate", control="DMSO")
    with pytest.raises(ValueError, match="leaves nothing to learn"):
        SCBDModel(wells, encoder="linear", n_latent=4).train(**QUICK | {"plan_kwargs": {"encoder_lr": 0}})
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    before = weights(model)
    model.train(**QUICK | {"plan_kwargs": {"encoder_lr": 0}})
    assert all(name.startswith(("head.", "preprocess.")) for name in moved(before, weights(model)))


# ---- the head that learns beside the encoder

LONGER = QUICK | {"max_steps": 12, "validate_every": 2}


class Seen(Callback):
    """What a head is to learn from, by a way of its own: the encoder as it was before each step, embedding again."""

    def __init__(self, model) -> None:
        self.model = model
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_train_batch_start(self, trainer, plan, batch, batch_idx):
        content = self.model.module.content
        buffers = {name: value.clone() for name, value in content.named_buffers()}
        with torch.no_grad():
            within = self.model.module.prepare(batch["inputs"], batch["e"]).within
            r = content.represent(within, "intermediate")
        content.load_state_dict(buffers, strict=False)
        self.batches.append((r, batch["y"]))


@pytest.mark.parametrize("settings", [{}, {"invariance": "listing", "alpha": 1.0, "smoothing": 0}])
def test_online_head_learns_from_r_c_before_step_of_encoder(settings):
    model = make_model(**settings, augment=False)
    seen = Seen(model)
    how = QUICK | {"seed": 3, "lr": 0.01, "weight_decay": 0.2}
    model.train(**how, online_head=True, callbacks=[seen])
    torch.manual_seed(3)
    head = nn.Linear(model.module.content.n_features, 4)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01, weight_decay=0.2)
    losses = []
    for r, y in seen.batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(head(r), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 6
    for name, values in head.state_dict().items():
        np.testing.assert_allclose(model.online_head_[name], values, atol=1e-6)
    assert float(model.history["train_online_head"].iloc[-1, 0]) == pytest.approx(losses[-1], abs=1e-5)


@pytest.mark.parametrize(
    ("model_class", "network", "how"),
    [
        (SCBDModel, {"encoder": "small"}, {"gradient_clip_val": 0.01}),
        (SCBDModel, {"encoder": "small"}, {"precision": "bf16-mixed", "load_best": True}),
        (IVAEModel, {}, {}),
    ],
)
def test_online_head_does_not_change_encoders(model_class, network, how):
    found = []
    for online_head in (False, True):
        torch.manual_seed(0)
        cells = make_cells()
        model_class.setup_anndata(cells, y_key="gene", e_key="well")
        model = model_class(cells, n_latent=6, **network)
        model.train(**QUICK | {"validate_every": 2} | how, online_head=online_head)
        found.append((weights(model), torch.get_rng_state(), model.history["train_loss"]))
        assert model.can_predict is online_head
    (without, random, losses), (beside, same_random, same_losses) = found
    assert_same(beside, without)
    torch.testing.assert_close(same_random, random, rtol=0, atol=0)
    assert losses.equals(same_losses)


def test_online_head_is_saved_predicts_and_continues(tmp_path):
    model = make_model()
    model.train(**LONGER | {"max_steps": 60, "lr": 1e-3}, online_head=True)
    genes = model.adata.obs["gene"].to_numpy()
    assert np.mean(model.predict() == genes) > 0.5
    proba = model.predict(indices=[3, 1], return_proba=True)
    assert proba.shape == (2, 4)
    r = model.get_latent_representation(indices=[3, 1], representation="intermediate")
    logits = r @ model.online_head_["weight"].T + model.online_head_["bias"]
    np.testing.assert_allclose(proba, np.exp(logits) / np.exp(logits).sum(1, keepdims=True), atol=1e-5)
    model.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), model.adata)
    np.testing.assert_array_equal(loaded.predict(), model.predict())
    # a decoder on frozen blocks leaves it; a run goes on from it; one without leaves none
    loaded.train_decoder(max_steps=1, width=8, enable_progress_bar=False, accelerator="cpu")
    assert loaded.can_predict
    before = loaded.online_head_["weight"]
    loaded.train(**QUICK | {"max_steps": 1, "lr": 1e-3}, online_head=True)
    assert 0 < np.abs(loaded.online_head_["weight"] - before).max() < 0.01
    loaded.train(**QUICK | {"max_steps": 1})
    with pytest.raises(ValueError, match="online_head=True"):
        loaded.predict()


def test_online_head_new_labels_keep_earlier_weights():
    model = make_model()
    model.train(**QUICK, online_head=True)
    before = model.online_head_
    cells = make_cells()
    cells.obs["gene"] = np.where(np.arange(len(cells)) < 24, "a gene of later", cells.obs["gene"].astype(str))
    model.adata = cells
    model.train(**QUICK | {"max_steps": 1, "lr": 1e-6}, online_head=True)
    for name, values in model.online_head_.items():
        assert len(values) == 5
        np.testing.assert_allclose(values[:4], before[name], atol=1e-4)


def test_online_head_non_finite_r_c_is_skipped():
    model = make_model()
    head = OnlineHead(model.module.network("c"), 4, lr=0.1, weight_decay=0.0, seed=0)
    before = head.linear.weight.clone()
    head.on_train_start(None, None)  # type: ignore[arg-type]
    head._features = torch.full((2, model.module.content.n_features), torch.nan)
    trainer: Any = SimpleNamespace(global_step=1, log_every_n_steps=10)
    head.on_train_batch_end(trainer, None, None, {"y": torch.tensor([0, 1])}, 0)  # type: ignore[arg-type]
    head.teardown(None, None, "fit")  # type: ignore[arg-type]
    assert torch.equal(head.linear.weight, before)


def test_online_head_of_classifier_is_not_created():
    cells = make_cells()
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    model.train(**QUICK, online_head=True)
    assert model.can_predict and not model.online_head_
    assert "train_online_head" not in model.history
