"""The head that learns beside the encoder: of what it learns, that it leaves no trace, and that it is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, PressCtrlC, assert_same, make_model, weights
from torch import nn
from torch.nn import functional as F

from scbd import SCBDModel
from scbd.baselines import ERMModel, IVAEModel

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")

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
            r = content.represent(self.model.module.preprocess(batch["inputs"]), "intermediate")
        content.load_state_dict(buffers, strict=False)
        self.batches.append((r, batch["y"]))


@pytest.mark.parametrize("settings", [{}, {"invariance": "listing", "alpha": 1.0, "smoothing": 0}])
def test_it_learns_from_each_batch_as_the_encoder_embedded_it_before_its_step(settings):
    model = make_model(**settings)
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
def test_it_changes_nothing_of_the_encoders(model_class, network, how):
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


def test_a_resumed_run_has_the_head_of_an_uninterrupted_one(tmp_path):
    whole, cut = make_model(), make_model()
    whole.train(**LONGER, online_head=True)
    with pytest.raises(KeyboardInterrupt):
        cut.train(**LONGER, online_head=True, checkpoint_dir=tmp_path, callbacks=[PressCtrlC(5)])
    assert cut.can_predict  # that of the weights which are kept
    resumed = make_model()
    resumed.train(**LONGER, online_head=True, checkpoint_dir=tmp_path, ckpt_path="last")
    for name, values in whole.online_head_.items():
        np.testing.assert_array_equal(resumed.online_head_[name], values)
    with pytest.raises(ValueError, match="other settings .*online_head: True → None"):
        make_model().train(**LONGER, checkpoint_dir=tmp_path, ckpt_path="last")


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_head_of_the_best_weights_is_kept(tmp_path, on_disk):
    """As if the run had ended there: with a rate that ruins the model later on."""
    how = LONGER | {"validate_every": 1, "lr": 3.0, "online_head": True}
    best, shorter = make_model(), make_model()
    best.train(**how, load_best=True, checkpoint_dir=tmp_path if on_disk else None)
    step = int(best.history["validation_loss"].iloc[:, 0].astype(float).idxmin())
    assert step < 12
    shorter.train(**how | {"max_steps": step})
    assert_same(weights(best), weights(shorter))
    for name, values in shorter.online_head_.items():
        np.testing.assert_array_equal(best.online_head_[name], values)


def test_it_is_saved_predicts_and_goes_on(tmp_path):
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
    with pytest.raises(ValueError, match=r"no head to predict with: train it with train\(online_head=True\)"):
        loaded.predict()


def test_labels_that_are_new_leave_it_what_it_knows():
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


def test_features_that_are_no_numbers_teach_it_nothing():
    model = make_model()
    model.train(**QUICK, online_head=True)
    head = model._head_beside(_settings(), 0)
    before = head.linear.weight.clone()
    head.on_train_start(None, None)
    head._features = torch.full((2, model.module.content.n_features), torch.nan)
    head.on_train_batch_end(None, None, None, {"y": torch.tensor([0, 1])}, 0)
    head.teardown(None, None, "fit")
    assert torch.equal(head.linear.weight, before)


def _settings():
    from scbd.model import TrainSettings

    return TrainSettings(online_head=True)


def test_a_classifier_has_a_head_already():
    cells = make_cells()
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    model.train(**QUICK, online_head=True)
    assert model.can_predict and not model.online_head_
    assert "train_online_head" not in model.history
