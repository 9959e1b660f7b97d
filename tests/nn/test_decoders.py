from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Bernoulli, Normal

from scbd.nn import AdditiveDecoder
from scbd.nn._decoders import BlockDecoder


def test_additive_decoder_width_of_paper_has_number_of_parameters_of_paper():
    """The table of appendix A at 32 pixels: one linear layer, four pairs of convolutions, a 1 x 1 convolution."""
    n, w = 64, 256
    linear = (n + 1) * w * 2 * 2
    pairs = 4 * (w * w * 9 + w) + 3 * (w * w * 9 + w) + (w * 128 * 9 + 128)
    decoder = AdditiveDecoder((n, n), (3, 32, 32), width=w, likelihood="bernoulli")
    assert sum(p.numel() for p in decoder.parts[0].parameters()) == linear + pairs
    trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    assert trained == 2 * (linear + pairs) + 128 * 3 + 3


@pytest.mark.parametrize("shape", [(3, 32, 32), (4, 64, 64), (1, 16, 16), (2, 28, 28), (5, 100, 90), (1, 5, 33)])
def test_additive_decoder_any_image_size_returns_that_size(shape):
    decoder = AdditiveDecoder((4, 6), shape, width=4)
    assert decoder(torch.randn(3, 4), torch.randn(3, 6)).shape == (3, *shape)


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_additive_decoder_is_sum_of_blocks(likelihood):
    """f(a, b) - f(a, b') does not depend on a: no pixel can look at both blocks at once."""
    decoder = AdditiveDecoder((4, 4), (2, 16, 16), width=8, likelihood=likelihood).double()
    a, a2, b, b2 = torch.randn(4, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(decoder(a, b) - decoder(a, b2), decoder(a2, b) - decoder(a2, b2))
    assert (decoder(a, b) - decoder(a, b2)).abs().max() > 1e-3


def test_additive_decoder_likelihoods_equal_torch():
    z = torch.randn(3, 4), torch.randn(3, 4)
    x = torch.rand(3, 2, 16, 16)
    bernoulli = AdditiveDecoder((4, 4), (2, 16, 16), width=4, likelihood="bernoulli")
    expected = -Bernoulli(logits=bernoulli(*z), validate_args=False).log_prob(x).mean()
    torch.testing.assert_close(bernoulli.negative_log_likelihood(x, *z), expected)
    torch.testing.assert_close(bernoulli.mean(*z), bernoulli(*z).sigmoid())
    gaussian = AdditiveDecoder((4, 4), (2, 16, 16), width=4, likelihood="gaussian")
    torch.nn.init.constant_(gaussian.log_scale, -0.7)
    expected = -Normal(gaussian(*z), math.exp(-0.7)).log_prob(x).mean()
    torch.testing.assert_close(gaussian.negative_log_likelihood(x, *z), expected)
    torch.testing.assert_close(gaussian.mean(*z), gaussian(*z))
    gaussian.negative_log_likelihood(x, *z).backward()
    assert gaussian.log_scale.grad != 0


@pytest.mark.parametrize("width", [16, 64])
def test_additive_decoder_untrained_decodes_different_embeddings_differently(width):
    """With torch's default weights they differ by a millionth, and learn as slowly."""
    torch.manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(64, 32), dim=1)
    maps = BlockDecoder(32, (32, 32), width)(z)
    assert 0.05 < maps.std(0).mean() < 2


def test_block_decoder_larger_map_is_cropped_around_centre():
    block = BlockDecoder(3, (20, 32), 4)
    whole = torch.nn.Sequential.forward(block, torch.ones(1, 3))
    assert whole.shape[-2:] == (32, 32)
    torch.testing.assert_close(block(torch.ones(1, 3)), whole[..., 6:26, :])


def test_additive_decoder_invalid_settings_raise():
    with pytest.raises(ValueError, match="likelihood='poisson' is not known: use 'bernoulli', 'gaussian'"):
        AdditiveDecoder((4,), (3, 32, 32), likelihood="poisson")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width=7: the decoder's number of channels is even"):
        AdditiveDecoder((4,), (3, 32, 32), width=7)
    with pytest.raises(ValueError, match="zip"):
        AdditiveDecoder((4, 4), (3, 32, 32), width=4)(torch.ones(1, 4))
