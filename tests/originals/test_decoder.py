"""Compare the additive decoder and its likelihoods with those of Genentech/SCBD."""

from __future__ import annotations

import torch
from helpers.known_answers import known_answers, put

from scbd.nn import AdditiveDecoder
from scbd.nn._decoders import Likelihood


def make_decoder(likelihood: Likelihood) -> tuple[AdditiveDecoder, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    known = known_answers("scbd_losses")
    found = AdditiveDecoder((6, 6), (3, 32, 32), width=8, likelihood=likelihood)
    for part, name in zip(found.parts, "cs", strict=True):
        put(known.tensors(f"dec_{name}_").values(), part.parameters())
    put([known.tensor("dec_pixel_w"), known.tensor("dec_pixel_b")], found.pixels.parameters())
    put([known.tensor("dec_logsd")], [found.log_scale])
    return found, (known.tensor("dec_z_c"), known.tensor("dec_z_s")), known.tensor("dec_x_uint8").float() / 255


def test_additive_decoder_bernoulli_is_equal_to_original():
    known = known_answers("scbd_losses")
    bernoulli, z, x = make_decoder("bernoulli")
    with torch.no_grad():
        torch.testing.assert_close(bernoulli(*z), known.tensor("dec_logits"), rtol=0, atol=5e-6)
        torch.testing.assert_close(bernoulli.mean(*z), known.tensor("dec_bernoulli_mean"), rtol=0, atol=5e-6)
        nats = bernoulli.negative_log_likelihood(x, *z)
    torch.testing.assert_close(nats, known.tensor("dec_bernoulli_loss"), rtol=0, atol=5e-6)


def test_additive_decoder_gaussian_loss_and_scale_gradient_equal_original():
    known = known_answers("scbd_losses")
    gaussian, z, x = make_decoder("gaussian")
    nats = gaussian.negative_log_likelihood(x, *z)
    nats.backward()
    torch.testing.assert_close(nats.detach(), known.tensor("dec_gaussian_loss"), rtol=0, atol=5e-6)
    assert gaussian.log_scale.grad is not None
    torch.testing.assert_close(gaussian.log_scale.grad, known.tensor("dec_gaussian_logsd_grad")[0], rtol=0, atol=5e-6)
