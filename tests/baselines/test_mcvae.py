"""mcVAE: what controls and perturbed cells each answer for, and who meets in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st

from scbd.baselines import MCVAEModel
from scbd.baselines._batches import EndlessOrder, PairedSampler

QUICK: dict[str, Any] = {"batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu", "lr": 1e-3}


def make(cells=None, control="gene_2", **kwargs) -> Any:
    cells = make_cells() if cells is None else cells
    scvi.settings.seed = 0
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    return MCVAEModel(cells, control=control, n_latent=5, **kwargs)


def batch(n: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (n, 2, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(n) % 4, torch.arange(n) % 3


def test_controls_have_no_salient_code():
    module = make().module
    _, y, e = batch()
    code = module.code((torch.ones(12, 5), torch.full((12, 5), 2.0)), y, e)
    assert (code[y == 2, :5] == 0).all() and (code[y != 2, :5] == 1).all() and (code[:, 5:] == 2).all()
    assert not module.salient_prior.log_variance.weight.requires_grad
    with pytest.raises(ValueError, match="no cell is 'nontargeting': name their perturbation"):
        make(control="nontargeting")


def test_the_control_is_the_one_that_the_set_up_was_told_of():
    cells = make_cells()
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well", control="gene_1")
    assert MCVAEModel(cells, n_latent=5).module.control == 1
    assert MCVAEModel(cells, n_latent=5, control="gene_3").module.control == 3
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well", control=["gene_1", "gene_2"])
    with pytest.raises(ValueError, match="mcVAE contrasts with one control, and setup_anndata was told of 2"):
        MCVAEModel(cells, n_latent=5)


@pytest.mark.parametrize("ramp", [0.0, 0.5, 1.0])
def test_the_loss_is_the_mean_over_all_pairs(ramp):
    """Written out: each of three controls beside each of nine perturbed cells."""
    module = make().module.eval()
    images, y, e = batch()
    with torch.no_grad():
        losses = module(images, y, e, ramp=ramp)
        x = module.preprocess(images)
        salient, background = module.posteriors(x, e)
        of_salient, of_background = module.priors(y, e)
        nats = module.decoder.negative_log_likelihood(x, module.code((salient.mean, background.mean), y, e))
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
def test_a_batch_of_one_kind_has_the_loss_of_that_kind(kept):
    module = make().module.eval()
    images, _, e = batch()
    with torch.no_grad():
        losses = module(images, torch.full((12,), kept), e)
    assert torch.isfinite(losses.loss)
    assert (float(losses.parts["divergence_c"]) == 0) == (kept == 2) == (float(losses.parts["background"]) > 0)


def test_the_decoder_may_be_given_the_environment(tmp_path):
    model = make(n_environment_latent=3)
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
        make(n_environment_latent=-1)


def test_half_of_each_batch_are_controls(monkeypatch):
    model = make()
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


def test_cells_of_one_kind_are_refused_before_training():
    model = make()
    model.adata.obs["gene"] = model.adata.obs["gene"].astype(str).replace("gene_2", "gene_1")
    with pytest.raises(ValueError, match="0 of .* cells to draw from are controls: pairs .* need both"):
        model.train(max_steps=1, **QUICK)


def test_a_run_is_not_resumed_with_other_controls(tmp_path):
    make().train(max_steps=1, checkpoint_dir=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="other settings .*contrasted_label: 2 → 1"):
        make(control="gene_1").train(max_steps=2, checkpoint_dir=tmp_path, ckpt_path="last", **QUICK)


@given(n=st.integers(1, 40), first=st.integers(0, 100), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_an_order_goes_on_where_it_stopped_and_shows_each_row_once_a_turn(n, first, sizes):
    rows = np.arange(n) + 100
    ends = np.cumsum([first, *sizes])
    order = EndlessOrder(rows, [1])
    parts = [order.take(start, size) for start, size in zip(ends, sizes, strict=False)]
    whole = EndlessOrder(rows, [1]).take(0, int(ends[-1]))
    np.testing.assert_array_equal(np.concatenate(parts), whole[first:])
    for start in range(0, len(whole) - n + 1, n):
        np.testing.assert_array_equal(np.sort(whole[start : start + n]), rows)


@given(n_controls=st.integers(1, 30), n_others=st.integers(1, 30), size=st.integers(2, 40), seed=st.integers(0, 9))
def test_pairs(n_controls, n_others, size, seed):
    n = n_controls + n_others
    controls = np.random.default_rng(seed).permutation(n) < n_controls
    size = min(size, n)
    sampler = PairedSampler(np.arange(n) + 7, size, controls=controls, seed=seed)
    batches = list(sampler)
    assert len(batches) == sampler.steps_per_epoch >= 1
    assert all(controls[rows - 7].tolist() == [True] * (size // 2) + [False] * (size - size // 2) for rows in batches)
    resumed = PairedSampler(np.arange(n) + 7, size, controls=controls, seed=seed, start=1)
    for one, other in zip(batches[1:], resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    if n_others >= n_controls + 1:  # no perturbed cell twice, before all were there
        drawn = np.concatenate([rows[size // 2 :] for rows in batches])[:n_others]
        assert len(np.unique(drawn)) == len(drawn)


def test_devices_share_controls():
    controls = np.arange(40) < 8
    shares = [
        next(iter(PairedSampler(np.arange(40), 16, controls=controls, rank=rank, world_size=2))) for rank in (0, 1)
    ]
    assert [int(controls[share].sum()) for share in shares] == [4, 4]
