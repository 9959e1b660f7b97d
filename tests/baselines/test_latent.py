from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from torch.distributions import Independent, Normal, kl_divergence

from scbd import pl
from scbd.baselines import IVAEModel, MCVAEModel, VAEModel
from scbd.baselines._batches import ControlPairedSampler, EndlessPermutation
from scbd.baselines._latent import Gaussian, LatentDecoder, Posterior
from scbd.model._interfaces import PreparedInputs, ReferenceBatches

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
def test_latent_models_learn_save_load_and_report_components(model_class, tmp_path):
    model = make(model_class)
    model.train(max_steps=16, **QUICK)
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


def test_latent_health_is_reset_when_weights_change():
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
def test_latent_models_resumed_run_equals_uninterrupted(model_class, tmp_path):
    half, resumed, whole = (make(model_class) for _ in range(3))
    how: dict[str, Any] = QUICK | {"plan_kwargs": {"lr_decay": False}}  # the same rates in runs of any length
    half.train(max_steps=3, checkpoint_dir=tmp_path, **how)
    resumed.train(max_steps=5, checkpoint_dir=tmp_path, resume=True, **how)
    whole.train(max_steps=5, **how)
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(resumed.module.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_gaussian_divergence_equals_torch():
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
def test_vae_loss_is_reconstruction_plus_divergence(likelihood):
    model = make(IVAEModel, likelihood=likelihood, intensity="scale", standardize=False)
    images, y, e = batch()
    with torch.no_grad():
        found = model.module.eval()(images, y, e, ramp=0.5)
        x = images.float() / 255
        q_c, q_s = model.module.posteriors(PreparedInputs(x, x), e)
        predicted = model.module.decoder(torch.cat([q_c.mean, q_s.mean], 1))
        if likelihood == "bernoulli":
            nats = torch.nn.functional.softplus(predicted) - x * predicted
        else:
            nats = -Normal(predicted, model.module.decoder.log_scale.exp()).log_prob(x)
        expected = nats.flatten(1).sum(1).mean()
        kl_c, kl_s = (q.divergence(p).sum(1).mean() for q, p in zip((q_c, q_s), model.module.priors(y, e), strict=True))
    torch.testing.assert_close(found.parts["reconstruction"], expected)
    torch.testing.assert_close(found.loss, expected + 0.5 * (kl_c + kl_s))


@pytest.mark.parametrize("model_class", [VAEModel, IVAEModel])
def test_latent_models_with_style_reconstruct_environment_differences(model_class):
    module = make(model_class, likelihood="gaussian").module.eval()
    images, y, e = batch()
    images[e == 1] //= 4
    codes = e[:, None].numpy()
    module.estimate_environment_statistics(ReferenceBatches(lambda: [images], codes, np.ones_like(codes, dtype=bool)))
    with torch.no_grad():
        whole = module.preprocess(images)
        within = module.preprocess.environments(whole, e[:, None])
        assert (within[e == 1] - whole[e == 1]).abs().mean() > 0.1
        means = [module.content(within).mean]
        if model_class is IVAEModel:
            means.append(module.style(whole, e).mean)
        drawn = Normal(module.decoder(torch.cat(means, 1)), module.decoder.log_scale.exp())
        expected = -drawn.log_prob(whole if model_class is IVAEModel else within).flatten(1).sum(1).mean()
        torch.testing.assert_close(module(images, y, e).parts["reconstruction"], expected)


def test_ivae_priors_use_labels_and_style_uses_expert():
    model = make(IVAEModel, augment=False)
    images, y, e = batch()
    p_c, p_s = model.module.priors(y, e)
    assert len(p_c.mean.unique(dim=0)) == 4 and len(p_s.mean.unique(dim=0)) == 3
    x = model.module.prepare(images, e)
    experts = torch.stack([model.module.posteriors(x, torch.full((12,), k))[1].mean for k in range(3)])
    torch.testing.assert_close(model.module.posteriors(x, e)[1].mean, experts[e, torch.arange(12)])
    # what is embedded reads no label
    torch.testing.assert_close(model.module.embed(images, "s", "embedding"), experts.mean(0))
    plain = make(IVAEModel, style_posterior="x").module
    torch.testing.assert_close(plain.posteriors(x, e)[1].mean, plain.posteriors(x, 0 * e)[1].mean)


@pytest.mark.parametrize(("size", "halvings"), [(64, 3), (32, 2), (16, 1), (100, 3), (33, 2)])
def test_latent_networks_equal_paper_at_64_pixels(size, halvings):
    posterior, decoder = Posterior((4, size, size), 64), LatentDecoder((64, 64), (4, size, size), "gaussian")
    strides = [layer.stride[0] for layer in posterior.maps if isinstance(layer, torch.nn.Conv2d)]
    assert np.prod(strides) == 2**halvings and len(strides) == 5
    ups = [layer for layer in decoder.network if isinstance(layer, torch.nn.ConvTranspose2d)]
    assert len(ups) == halvings
    images = torch.zeros(2, 4, size, size)
    assert posterior(images).mean.shape == (2, 64) and decoder(torch.zeros(2, 128)).shape == images.shape
    if size == 64:
        assert posterior.heads.in_features == 64 * 8**2 and posterior.heads.out_features == 2 * 64


@pytest.mark.parametrize("y", [[0, 0, 1, 2, 3, 1], [0] * 6, [1, 2, 3, 1, 2, 3]])
def test_mcvae_average_equals_naive_means_of_present_groups(y):
    module = make(MCVAEModel).module
    nats = torch.randn(6, generator=torch.Generator().manual_seed(0))
    groups = [[float(n) for n, label in zip(nats, y, strict=True) if (label == 0) == held] for held in (True, False)]
    expected = sum(np.mean(group) for group in groups if group)
    assert module.average(nats, torch.tensor(y)).item() == pytest.approx(expected, abs=1e-6)


# without clipping by Lightning, the optimiser is fused, and skips a step by itself
@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_val": 1e9}])
def test_latent_plan_skips_extreme_gradients_and_warms_up(clipping):
    model = make(VAEModel, kl_warmup_steps=4)
    decoder = model.module.decoder
    likelihood = decoder.negative_log_likelihood
    calls: list[int] = []

    def wild(images: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return likelihood(images, z) * (float("nan") if len(calls) == 2 else 1e20 if len(calls) == 3 else 1)

    decoder.negative_log_likelihood = wild
    model.train(max_steps=4, train_size=1.0, **QUICK | {"precision": "32-true"} | clipping, log_every_n_steps=1)
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
def test_latent_models_invalid_settings_raise(model_class, settings, message):
    with pytest.raises(ValueError, match=message):
        make(model_class, **settings)


def make_mcvae(cells=None, control="gene_2", **kwargs) -> Any:
    cells = make_cells() if cells is None else cells
    scvi.settings.seed = 0
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    return MCVAEModel(cells, control=control, n_latent=5, **kwargs)


def test_mcvae_controls_have_zero_salient_code():
    module = make_mcvae().module
    _, y, e = batch()
    code = module.code((torch.ones(12, 5), torch.full((12, 5), 2.0)), y, e)
    assert (code[y == 2, :5] == 0).all() and (code[y != 2, :5] == 1).all() and (code[:, 5:] == 2).all()
    assert not module.salient_prior.log_variance.weight.requires_grad
    with pytest.raises(ValueError, match="no cell is 'nontargeting': name their perturbation"):
        make_mcvae(control="nontargeting")


def test_mcvae_default_control_is_that_of_setup():
    cells = make_cells()
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well", control="gene_1")
    assert MCVAEModel(cells, n_latent=5).module.control == 1
    assert MCVAEModel(cells, n_latent=5, control="gene_3").module.control == 3
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well", control=["gene_1", "gene_2"])
    with pytest.raises(ValueError, match="mcVAE contrasts with one control, and setup_anndata received 2"):
        MCVAEModel(cells, n_latent=5)


@pytest.mark.parametrize("ramp", [0.0, 0.5, 1.0])
def test_mcvae_loss_equals_mean_over_all_pairs(ramp):
    """Written out: each of three controls beside each of nine perturbed cells."""
    module = make_mcvae().module.eval()
    images, y, e = batch()
    with torch.no_grad():
        losses = module(images, y, e, ramp=ramp)
        x = module.prepare(images, e)
        salient, background = module.posteriors(x, e)
        of_salient, of_background = module.priors(y, e)
        nats = module.decoder.negative_log_likelihood(x.whole, module.code((salient.mean, background.mean), y, e))
        kl_salient, kl_background = salient.divergence(of_salient).sum(1), background.divergence(of_background).sum(1)
        size = (salient.mean**2 + salient.log_variance.exp()).sum(1)
        pairs = [
            nats[i] + nats[j] + ramp * (kl_salient[j] + kl_background[i] + kl_background[j] + 8 * size[i])
            for i in torch.nonzero(y == 2)[:, 0]
            for j in torch.nonzero(y != 2)[:, 0]
        ]
    assert len(pairs) == 27
    torch.testing.assert_close(losses.loss, torch.stack(pairs).mean())
    torch.testing.assert_close(losses.parts["divergence_c"], kl_salient[y != 2].mean())
    torch.testing.assert_close(losses.parts["background"], 8 * size[y == 2].mean())


@pytest.mark.parametrize("kept", [2, 1])
def test_mcvae_batch_of_one_kind_has_loss_of_that_kind(kept):
    module = make_mcvae().module.eval()
    images, _, e = batch()
    with torch.no_grad():
        losses = module(images, torch.full((12,), kept), e)
    assert torch.isfinite(losses.loss)
    assert (float(losses.parts["divergence_c"]) == 0) == (kept == 2) == (float(losses.parts["background"]) > 0)


def test_mcvae_n_environment_latent_is_given_to_decoder(tmp_path):
    model = make_mcvae(n_environment_latent=3, standardize_by=None)
    _, y, e = batch()
    code = model.module.code((torch.ones(12, 5), torch.ones(12, 5)), y, e)
    assert code.shape == (12, 13) and len(code[:, 10:].unique(dim=0)) == 3
    before = model.module.environment.weight.detach().clone()
    model.train(max_steps=3, **QUICK)
    assert (model.module.environment.weight.detach() != before).all()
    model.save(str(tmp_path / "model"))
    cells = model.adata.copy()
    cells.obs["well"] = "a new one"
    loaded = MCVAEModel.load(str(tmp_path / "model"), adata=cells)
    np.testing.assert_array_equal(loaded.get_latent_representation(), model.get_latent_representation())
    cells.obs["well"] = np.where(np.arange(cells.n_obs) < 9, "a new one", "well_0")
    with pytest.raises(ValueError, match="a new one"):
        loaded.train(max_steps=1, **QUICK)
    with pytest.raises(ValueError, match="n_environment_latent=-1: give a whole number, 0 or larger"):
        make_mcvae(n_environment_latent=-1)


def test_control_paired_batches_have_half_controls(monkeypatch):
    model = make_mcvae()
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    forward = model.module.forward

    def watched(inputs, y, e, **kwargs):
        seen[model.module.training].append(y)
        return forward(inputs, y, e, **kwargs)

    monkeypatch.setattr(model.module, "forward", watched)
    model.train(max_steps=3, train_size=0.5, **QUICK)
    assert all(len(y) == 24 and int((y == 2).sum()) == 12 for y in seen[True]) and len(seen[True]) == 3
    validated = (model.adata.obs["gene"].to_numpy()[model.validation_indices] != "gene_2").sum()
    assert len(seen[False]) == validated // 12 and all(int((y == 2).sum()) == 12 for y in seen[False])
    assert (model.latent_health["divergence"] >= 0).all()


def test_mcvae_training_without_controls_raises():
    model = make_mcvae()
    model.adata.obs["gene"] = model.adata.obs["gene"].astype(str).replace("gene_2", "gene_1")
    with pytest.raises(ValueError, match="0 of .* cells to draw from are controls: pairs .* need both"):
        model.train(max_steps=1, **QUICK)


def test_mcvae_resume_with_other_control_raises(tmp_path):
    make_mcvae().train(max_steps=1, checkpoint_dir=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="other settings .*contrasted_label: 2 → 1"):
        make_mcvae(control="gene_1").train(max_steps=2, checkpoint_dir=tmp_path, resume=True, **QUICK)


@given(n=st.integers(1, 40), first=st.integers(0, 100), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_endless_permutation_continues_and_has_each_row_once_per_turn(n, first, sizes):
    rows = np.arange(n) + 100
    ends = np.cumsum([first, *sizes])
    order = EndlessPermutation(rows, [1])
    parts = [order.take(start, size) for start, size in zip(ends, sizes, strict=False)]
    whole = EndlessPermutation(rows, [1]).take(0, int(ends[-1]))
    np.testing.assert_array_equal(np.concatenate(parts), whole[first:])
    for start in range(0, len(whole) - n + 1, n):
        np.testing.assert_array_equal(np.sort(whole[start : start + n]), rows)


@given(n_controls=st.integers(1, 30), n_others=st.integers(1, 30), size=st.integers(2, 40), seed=st.integers(0, 9))
def test_control_paired_sampler_composes_pairs(n_controls, n_others, size, seed):
    n = n_controls + n_others
    controls = np.random.default_rng(seed).permutation(n) < n_controls
    size = min(size, n)
    sampler = ControlPairedSampler(np.arange(n) + 7, size, controls=controls, seed=seed)
    batches = list(sampler)
    assert len(batches) == sampler.steps_per_epoch >= 1
    assert all(controls[rows - 7].tolist() == [True] * (size // 2) + [False] * (size - size // 2) for rows in batches)
    resumed = ControlPairedSampler(np.arange(n) + 7, size, controls=controls, seed=seed, start=1)
    for one, other in zip(batches[1:], resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    if n_others >= n_controls + 1:  # no perturbed cell twice, before all were there
        drawn = np.concatenate([rows[size // 2 :] for rows in batches])[:n_others]
        assert len(np.unique(drawn)) == len(drawn)


def test_control_paired_sampler_devices_share_batch():
    controls = np.arange(40) < 8
    shares = [
        next(iter(ControlPairedSampler(np.arange(40), 16, controls=controls, rank=rank, world_size=2)))
        for rank in (0, 1)
    ]
    assert [int(controls[share].sum()) for share in shares] == [4, 4]


class Halves(torch.nn.Module):
    """Draws the first component of z_c in the upper half of a picture, and of z_s in the lower one, as logits."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        shown = torch.stack([z[:, 0], z[:, 5]], 1).repeat_interleave(8, 1)
        return shown[:, None, :, None].expand(-1, 2, -1, 16)


def trained(model_class: Any, **settings: Any) -> Any:
    model = make(model_class, **{"likelihood": "bernoulli"} | settings)
    model.train(max_steps=2, train_size=1.0, **QUICK)
    return model


def own_codes(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means of the posteriors of all cells, each with its own labels, written out."""
    module, obs = model.module, model.adata.obs
    y, e = (torch.from_numpy(obs[key].cat.codes.to_numpy().astype(np.int64)) for key in ("gene", "well"))
    with torch.no_grad():
        images = module.prepare(torch.from_numpy(model.adata.obsm["single_cell_images"]), e)
        z_c, z_s = (posterior.mean for posterior in module.posteriors(images, e))
    return (z_c * (y != module.control)[:, None] if model.__class__ is MCVAEModel else z_c).numpy(), z_s.numpy()


@pytest.mark.parametrize(
    ("model_class", "settings"), [(IVAEModel, {}), (IVAEModel, {"style_posterior": "x"}), (MCVAEModel, {})]
)
def test_latent_models_swap_blocks_uses_environment_of_each_cell(model_class, settings):
    model = trained(model_class, **settings)
    model.module.decoder.network = Halves()
    content, style = np.random.default_rng(0).permutation(96)[:20], np.random.default_rng(1).permutation(96)[:20]
    z_c, z_s = (1 / (1 + np.exp(-z[:, 0])) for z in own_codes(model))
    images = model.swap_blocks(content, style, batch_size=7)
    assert images.shape == (20, 2, 16, 16) and images.dtype == np.float32
    expected = np.stack([z_c[content], z_s[style]], 1).repeat(8, 1)[:, None, :, None]
    np.testing.assert_allclose(images, np.broadcast_to(expected, images.shape), atol=1e-5)
    assert z_c.std() > 1e-4 and z_s.std() > 1e-4
    np.testing.assert_allclose(model.swap_blocks(content, content), model.reconstruct(indices=content), atol=1e-6)


def test_ivae_reconstruct_uses_expert_of_environment():
    """The same pictures, said to be of another well, have another z_s; their z_c stays, if nothing is standardised."""
    model = trained(IVAEModel, standardize_by=None)
    model.module.decoder.network = Halves()
    moved = model.adata.copy()
    moved.obs["well"] = moved.obs["well"].cat.rename_categories({"well_0": "well_1", "well_1": "well_0"})
    here, there = model.reconstruct(), model.reconstruct(moved)
    np.testing.assert_allclose(here[:, :, :8], there[:, :, :8], atol=1e-6)
    same = (model.adata.obs["well"] == "well_2").to_numpy()
    apart = np.abs(here - there)[:, :, 8:].max((1, 2, 3))
    assert apart[same].max() < 1e-6 and np.median(apart[~same]) > 1e-4


@pytest.mark.parametrize("model_class", SETTINGS)
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_latent_models_reconstruct_returns_expected_images_in_stored_units(model_class, likelihood, tmp_path):
    model = trained(model_class, likelihood=likelihood, standardize=likelihood == "gaussian", standardize_by=None)
    codes = own_codes(model) if model_class is not VAEModel else (model.get_latent_representation(center=None),)
    with torch.no_grad():
        expected = model.module.decoder(torch.from_numpy(np.concatenate(codes, 1)))
        to_units = torch.sigmoid if likelihood == "bernoulli" else model.module.preprocess.intensities
        expected = to_units(expected)
    images = model.reconstruct()
    np.testing.assert_allclose(images, expected, atol=1e-5)
    np.testing.assert_allclose(model.decode(*codes, batch_size=7), images, atol=1e-5)
    cells = model.adata.obsm["single_cell_images"] / np.float32(255)
    np.testing.assert_allclose(model.get_intensities(), cells, atol=1e-6)
    model.save(str(tmp_path / "model"))
    loaded = model_class.load(str(tmp_path / "model"), adata=model.adata)
    np.testing.assert_array_equal(loaded.reconstruct(indices=[5, -1]), model.reconstruct(indices=[5, -1]))
    if model_class is VAEModel:
        with pytest.raises(ValueError, match="single block"):
            model.swap_blocks([0], [1])
    else:
        axes = pl.counterfactuals(model, [0, 1, 2], channels=[0])
        assert axes.shape == (5, 3)
        plt.close("all")


def test_mcvae_swap_blocks_takes_environment_from_style():
    model = trained(MCVAEModel, n_environment_latent=3, standardize_by=None)
    given: list[torch.Tensor] = []
    mean = model.module.decoder.mean

    def spy(z_c: torch.Tensor, z_s: torch.Tensor) -> torch.Tensor:
        given.append(z_s)
        return mean(z_c, z_s)

    model.module.decoder.mean = spy
    model.swap_blocks([0, 1, 2], [3, 4, 5])
    wells = model.adata.obs["well"].cat.codes.tolist()[3:6]
    np.testing.assert_allclose(given[0][:, 5:], model.module.environment.weight.detach()[wells], atol=1e-6)


def test_latent_models_reconstruct_new_cells_needs_only_required_labels():
    new = make_cells(8, seed=3)
    del new.obs["gene"]
    assert trained(IVAEModel).reconstruct(new).shape == (8, 2, 16, 16)
    del new.obs["well"]
    assert trained(IVAEModel, style_posterior="x").reconstruct(new, [1, 2]).shape == (2, 2, 16, 16)
    assert trained(VAEModel).reconstruct(new, []).shape == (0, 2, 16, 16)


def test_latent_models_invalid_reconstruct_arguments_raise():
    with pytest.raises(ValueError, match="not trained"):
        make(IVAEModel).reconstruct()
    model, new = trained(IVAEModel), make_cells(8, seed=3)
    new.obs["well"] = ["a new one", *new.obs["well"].astype(str)[1:]]
    assert len(model.reconstruct(new, [1, 2])) == 2
    with pytest.raises(ValueError, match=r"'well', and 1 cell \(rows 0\) has none, or an environment that was not"):
        model.swap_blocks([1, 2], [0, 3], new)
    del new.obs["well"]
    with pytest.raises(ValueError, match=r"8 cells \(rows 0, 1"):
        model.reconstruct(new)
    with pytest.raises(ValueError, match="20 × 20 pixels, the model was trained on 16 × 16"):
        model.reconstruct(make_cells(8, shape=(2, 20, 20)))
    with pytest.raises(ValueError, match="equally many"):
        model.swap_blocks([1, 2], [0])
    z = model.get_latent_representation(indices=[0, 1])
    with pytest.raises(ValueError, match=r"The decoder takes \(N, 5\) and \(N, 5\), the embeddings are \(2, 5\)"):
        model.decode(z)
    z[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"NaN or infinite values in 1 rows \(1\)"):
        model.decode(z, z)


def test_ivae_reconstruct_unseen_environment_raises():
    model = make(IVAEModel)
    well = model.adata.obs["well"].astype(str)
    model.adata.obs["split"] = np.where(well == "well_1", "test", "train")
    model.train(max_steps=2, split="split", **QUICK)
    seen = np.flatnonzero(well != "well_1")
    assert len(model.reconstruct(indices=seen)) == len(seen)
    with pytest.raises(ValueError, match="not trained on"):
        model.reconstruct()
