"""The latent-variable models, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from lightning.pytorch import Callback
from torch.distributions import Independent, Normal, kl_divergence

from scbd.baselines import IVAEModel, MCVAEModel, VAEModel
from scbd.baselines._vae_networks import Decoder, Gaussian, Posterior

QUICK: dict[str, Any] = {"batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu", "lr": 1e-3}
SETTINGS: dict[Any, dict[str, Any]] = {VAEModel: {}, IVAEModel: {}, MCVAEModel: {"control": "gene_0"}}


def make(model_class, cells=None, **kwargs):
    cells = make_cells() if cells is None else cells
    scvi.settings.seed = 0
    model_class.setup_anndata(cells, y_key="gene", e_key="well")
    return model_class(cells, **{"n_latent": 5} | SETTINGS[model_class] | kwargs)


def batch(n: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (n, 2, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(n) % 4, torch.arange(n) % 3


@pytest.mark.parametrize("model_class", SETTINGS)
def test_each_learns_saves_loads_and_says_what_it_uses(model_class, tmp_path):
    model = make(model_class)
    model.train(max_steps=40, **QUICK)
    loss = model.history["train_reconstruction"].iloc[:, 0].astype(float)
    assert loss.iloc[-5:].mean() < loss.iloc[:5].mean()
    z = model.get_latent_representation()
    assert z.shape == (96, 5) and np.isfinite(z).all()
    model.save(str(tmp_path / "model"))
    loaded = model_class.load(str(tmp_path / "model"), adata=model.adata)
    np.testing.assert_array_equal(loaded.get_latent_representation(), z)
    health = model.latent_health
    blocks = ["c"] if model_class is VAEModel else ["c", "s"]
    assert health.groupby("block").size().to_dict() == dict.fromkeys(blocks, 5)
    assert (health["divergence"] >= 0).all() and ((health["variance"] > 0.01) == health["active"]).all()
    assert loaded.latent_health.equals(health)
    used = [f"{health.loc[health['block'] == block, 'active'].sum()} of 5 in z_{block}" for block in blocks]
    assert f"components in use: {', '.join(used)}\n" in repr(loaded) == repr(model)
    assert float(model.history["skipped_gradients"].iloc[-1, 0]) == 0
    if model_class is VAEModel:
        with pytest.raises(ValueError, match="single block"):
            model.get_latent_representation(block="s")
    else:
        assert model.get_latent_representation(block="s").shape == (96, 5)


def test_what_components_were_is_forgotten_once_weights_have_moved():
    class Stop(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 1:
                raise RuntimeError("out of memory")

    model = make(VAEModel)
    model.train(max_steps=2, **QUICK)
    assert len(model.latent_health) == 5
    with pytest.raises(RuntimeError, match="out of memory"):
        model.train(max_steps=2, callbacks=[Stop()], **QUICK)
    assert model.latent_health.empty and "trained for 3 steps" in repr(model)


@pytest.mark.parametrize("model_class", SETTINGS)
def test_a_resumed_run_equals_an_uninterrupted_one(model_class, tmp_path):
    half, resumed, whole = (make(model_class) for _ in range(3))
    half.train(max_steps=3, checkpoint_dir=tmp_path, **QUICK)
    resumed.train(max_steps=5, checkpoint_dir=tmp_path, ckpt_path="last", **QUICK)
    whole.train(max_steps=5, **QUICK)
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(resumed.module.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_divergences_are_those_of_torch():
    parts = torch.randn(4, 6, 5, dtype=torch.float64)
    posterior, prior = Gaussian(parts[0], parts[1]), Gaussian(parts[2], parts[3])
    ours, theirs = (Independent(Normal(g.mean, (0.5 * g.log_variance).exp()), 1) for g in (posterior, prior))
    torch.testing.assert_close(posterior.divergence(prior).sum(1), kl_divergence(ours, theirs))
    generator = torch.Generator().manual_seed(0)
    wide = Gaussian(torch.full((20_000, 1), 3.0), torch.full((20_000, 1), 2.0))
    drawn = wide.sample(generator)
    assert float(drawn.mean()) == pytest.approx(3, abs=0.1) and float(drawn.var()) == pytest.approx(np.e**2, rel=0.05)
    assert wide.sample(None) is wide.mean


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_the_bound_is_reconstruction_and_divergence(likelihood):
    model = make(IVAEModel, likelihood=likelihood, intensity="scale", standardize=False)
    images, y, e = batch()
    with torch.no_grad():
        found = model.module.eval()(images, y, e, ramp=0.5)
        x = images.float() / 255
        q_c, q_s = model.module.posteriors(x, e)
        predicted = model.module.decoder(torch.cat([q_c.mean, q_s.mean], 1))
        if likelihood == "bernoulli":
            nats = torch.nn.functional.softplus(predicted) - x * predicted
        else:
            nats = -Normal(predicted, model.module.decoder.log_scale.exp()).log_prob(x)
        expected = nats.flatten(1).sum(1).mean()
        kl_c, kl_s = (q.divergence(p).sum(1).mean() for q, p in zip((q_c, q_s), model.module.priors(y, e), strict=True))
    torch.testing.assert_close(found.parts["reconstruction"], expected)
    torch.testing.assert_close(found.loss, expected + 0.5 * (kl_c + kl_s))


def test_priors_of_the_ivae_know_labels_and_its_style_asks_an_expert():
    model = make(IVAEModel)
    images, y, e = batch()
    p_c, p_s = model.module.priors(y, e)
    assert len(p_c.mean.unique(dim=0)) == 4 and len(p_s.mean.unique(dim=0)) == 3
    x = model.module.preprocess(images)
    experts = torch.stack([model.module.posteriors(x, torch.full((12,), k))[1].mean for k in range(3)])
    torch.testing.assert_close(model.module.posteriors(x, e)[1].mean, experts[e, torch.arange(12)])
    # what is embedded reads no label
    torch.testing.assert_close(model.module.embed(images, "s", "embedding"), experts.mean(0))
    plain = make(IVAEModel, style_posterior="x").module
    torch.testing.assert_close(plain.posteriors(x, e)[1].mean, plain.posteriors(x, 0 * e)[1].mean)


@pytest.mark.parametrize(("size", "halvings"), [(64, 3), (32, 2), (16, 1), (100, 3), (33, 2)])
def test_networks_are_the_papers_at_64_and_halve_less_below(size, halvings):
    posterior, decoder = Posterior((4, size, size), 64), Decoder(128, (4, size, size), "gaussian")
    strides = [layer.stride[0] for layer in posterior.maps if isinstance(layer, torch.nn.Conv2d)]
    assert np.prod(strides) == 2**halvings and len(strides) == 5
    ups = [layer for layer in decoder.network if isinstance(layer, torch.nn.ConvTranspose2d)]
    assert len(ups) == halvings
    images = torch.zeros(2, 4, size, size)
    assert posterior(images).mean.shape == (2, 64) and decoder(torch.zeros(2, 128)).shape == images.shape
    if size == 64:
        assert posterior.heads.in_features == 64 * 8**2 and posterior.heads.out_features == 2 * 64


def test_wild_gradients_are_skipped_and_the_divergence_warms_up():
    model = make(VAEModel, kl_warmup_steps=4)
    decoder = model.module.decoder
    likelihood = decoder.negative_log_likelihood
    calls: list[int] = []

    def wild(images: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return likelihood(images, z) * (float("nan") if len(calls) == 2 else 1e20 if len(calls) == 3 else 1)

    decoder.negative_log_likelihood = wild
    model.train(max_steps=4, train_size=1.0, **QUICK | {"precision": "32-true"}, log_every_n_steps=1)
    assert model.history["skipped_gradients"].iloc[:, 0].astype(float).tolist() == [0, 1, 2, 2]
    assert all(torch.isfinite(p).all() for p in model.module.parameters())
    h = {name: frame.iloc[:, 0].astype(float) for name, frame in model.history.items()}
    weight = (h["train_loss"] - h["train_reconstruction"]) / h["train_divergence_c"]
    np.testing.assert_allclose(weight.loc[[1, 4]], [0, 0.75], atol=1e-2)


@pytest.mark.parametrize(
    ("model_class", "settings", "message"),
    [
        (VAEModel, {"likelihood": "poisson"}, "likelihood='poisson' is not known"),
        (VAEModel, {"kl_warmup_steps": -1}, "kl_warmup_steps=-1: give a whole number, 0 or larger"),
        (VAEModel, {"n_latent": 0}, "n_latent=0: give a whole number, 1 or larger"),
        (IVAEModel, {"n_latent": 2.5}, "n_latent=2.5: give a whole number, 1 or larger"),
        (MCVAEModel, {"n_latent": -1}, "n_latent=-1: give a whole number, 1 or larger"),
        (IVAEModel, {"style_posterior": "e"}, "style_posterior='e' is not known"),
    ],
)
def test_settings_that_are_not_known_are_refused(model_class, settings, message):
    with pytest.raises(ValueError, match=message):
        make(model_class, **settings)
