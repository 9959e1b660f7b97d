"""Compare terms, gradients and sizes of the mcVAE with Multi-ContrastiveVAE of Genentech/contrastive-ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.known_answers import Known, known_answers, put
from torch import Tensor, nn

from scbd.baselines._latent import Gaussian, LatentDecoder, LatentPlan, MCVAEModule, Posterior
from scbd.model._interfaces import PreparedInputs
from scbd.nn import Preprocess

TOLERANCE: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-6}


class Fixed(nn.Module):
    """Network that returns given outputs."""

    def __init__(self, *outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs
        self.asked: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Any:
        self.asked.append(inputs)
        return Gaussian(*self.outputs) if len(self.outputs) == 2 else self.outputs[0]


def make_network(known: Known) -> tuple[MCVAEModule, dict[str, Tensor]]:
    """Return a module with the posteriors and reconstructions of the original, and the tensors to differentiate by."""
    by = {
        f"{what}_{block}": known.tensor(f"{what}_{block}").requires_grad_()
        for what in ("mu", "logvar")
        for block in ("salient", "background")
    }
    sizes: dict[str, Any] = {"n_labels": 6, "n_environments": 2, "n_latent": 5, "likelihood": "gaussian"}
    found = MCVAEModule(Preprocess((2, 8, 8), "float32", standardize=False), control=0, **sizes)
    found.content = Fixed(by["mu_salient"], by["logvar_salient"])
    found.style = Fixed(by["mu_background"], by["logvar_background"])
    found.decoder.network = Fixed(known.tensor("decoder_output"))  # type: ignore[assignment]
    put([known.tensor("log_scale")], [found.decoder.log_scale])
    for block, prior in (("salient", found.salient_prior), ("background", found.background_prior)):
        put([known.tensor(f"prior_mean_{block}")], [prior.mean.weight])
        by[f"prior_mean_{block}"] = prior.mean.weight
    return found, by


def inputs(known: Known) -> tuple[Tensor, Tensor, Tensor]:
    y = known.tensor("label")
    return known.tensor("x"), y, torch.arange(16) % 2


@pytest.mark.parametrize("ramp", [0.0, 0.5, 1.0])
def test_mcvae_module_loss_and_gradients_are_equal_to_original(ramp):
    known = known_answers("mcvae")
    found, by = make_network(known)
    loss = found(*inputs(known), ramp=ramp).loss
    name = str(ramp).replace(".", "_")
    torch.testing.assert_close(loss.detach(), known.tensor(f"loss_ramp{name}"), **TOLERANCE)
    gradients = torch.autograd.grad(loss, list(by.values()), allow_unused=True)
    for key, gradient in zip(by, gradients, strict=True):
        expected = known.tensor(f"grad_{key}_ramp{name}")
        torch.testing.assert_close(torch.zeros_like(expected) if gradient is None else gradient, expected, **TOLERANCE)


def test_mcvae_module_terms_of_controls_and_targets_equal_original():
    known = known_answers("mcvae")
    found, _ = make_network(known)
    x, y, e = inputs(known)
    controls = known.tensor("is_control").bool()
    with torch.no_grad():
        salient, background = found.posteriors(PreparedInputs(x, x), e)
        of_salient, of_background = found.priors(y, e)
        terms = {
            "reconstruction": found.decoder.negative_log_likelihood(x, x),
            "kl_background": background.divergence(of_background).sum(1),
            "kl_salient": salient.divergence(of_salient).sum(1),
        }
        penalty = found.penalties((salient, background), y)["background"]
    for name, nats in terms.items():
        for group, rows in (("controls", controls), ("targets", ~controls)):
            torch.testing.assert_close(nats[rows], known.tensor(f"{group}_{name}"), **TOLERANCE)
    expected = float(known["penalty_weight"]) * known.tensor("controls_penalty_unweighted")
    torch.testing.assert_close(penalty[controls], expected, **TOLERANCE)
    assert (penalty[~controls] == 0).all()


def test_mcvae_module_code_and_embedding_are_equal_to_original():
    """The original has the blocks in reverse order, which makes no difference to the first layer of a decoder."""
    known = known_answers("mcvae")
    found, by = make_network(known)
    _, y, e = inputs(known)
    samples = [
        torch.cat([known.tensor(f"{group}_sample_{block}") for group in ("controls", "targets")])
        for block in ("salient", "background")
    ]
    theirs = known.tensor("decoder_input")
    torch.testing.assert_close(found.code((samples[0], samples[1]), y, e), theirs.roll(5, 1), rtol=0, atol=0)
    both = torch.cat([by["mu_salient"], by["mu_background"]], 1).detach()
    torch.testing.assert_close(both, known.tensor("embedding_order_salient_then_background"), rtol=0, atol=0)
    blocks = [network(x).mean for network, x in ((found.content, both), (found.style, both))]
    torch.testing.assert_close(torch.cat(blocks, 1), both, rtol=0, atol=0)


def n_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.ndim)  # the scale is a scalar


def test_posterior_and_decoder_64_pixels_have_sizes_of_original():
    """In the original, one network has two heads, and the decoder also gets 32 numbers for the batch."""
    known = known_answers("mcvae")
    encoder, decoder = Posterior((4, 64, 64), 32), LatentDecoder((32, 32 + 32), (4, 64, 64), "gaussian")
    assert n_parameters(encoder) == int(known["encoder_n_parameters"])
    assert n_parameters(decoder) == int(known["decoder_n_parameters"])
    first, *_, last = [p.shape for p in decoder.parameters() if p.ndim]
    shapes = [tuple(int(side) for side in text.split(",") if side.strip()) for text in known["decoder_shapes"]]
    assert first == shapes[0] and last == shapes[-1]
    convolutions = [p.shape for p in encoder.maps.parameters()]
    theirs = [tuple(int(side) for side in text.split(",") if side.strip()) for text in known["encoder_shapes"]]
    assert [tuple(shape) for shape in convolutions] == theirs[: len(convolutions)]


def test_latent_plan_ramp_equals_first_cycle_of_original():
    known = known_answers("mcvae")
    for schedule, steps, ahead in (("cyclic", 4500, 0), ("ramp", 3000, 1)):
        plan = LatentPlan(make_network(known)[0], n_steps_alpha_warmup=steps)
        calls, theirs = known[f"kl_weight_{schedule}_calls"], known[f"kl_weight_{schedule}"]
        ours = np.array([plan.ramp(int(call) + ahead) for call in calls])
        once = calls < 9000  # the first cycle of the original ends at 9,000 steps
        np.testing.assert_allclose(ours[once], theirs[once], rtol=0, atol=1e-6)
        assert (ours[~once] == 1).all() and (schedule == "ramp" or theirs[~once].min() == 0)
