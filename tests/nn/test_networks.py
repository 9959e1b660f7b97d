from __future__ import annotations

import pytest
import torch
from torch import nn

from scbd.nn import ENCODERS, Block, Features, build_encoder

KINDS = {"batch": nn.BatchNorm2d, "instance": nn.InstanceNorm2d, "group": nn.GroupNorm}


@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("name", ENCODERS)
def test_all_activations_of_a_network_have_the_norm(name, norm):
    encoder = build_encoder(name, 4, norm=norm)
    found = [module for module in encoder.modules() if isinstance(module, tuple(KINDS.values()))]
    assert len(found) >= 4 and {type(module) for module in found} == {KINDS[norm]}
    n_parameters = [sum(p.numel() for p in build_encoder(name, 4, norm=one).parameters()) for one in ("batch", norm)]
    assert n_parameters[0] == n_parameters[1]


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_the_gain_of_an_image_is_gone(norm):
    """What a brighter lamp does to all channels; statistics of training cells would let it through."""
    torch.manual_seed(0)
    images = torch.rand(3, 2, 64, 64)
    own, shared = (build_encoder("small", 2, norm=one).eval() for one in (norm, "batch"))
    with torch.no_grad():
        torch.testing.assert_close(own(3 * images), own(images), rtol=1e-3, atol=1e-3)
        assert (shared(3 * images) - shared(images)).norm() > shared(images).norm()


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_a_cell_is_embedded_without_regard_to_others_while_training(norm):
    torch.manual_seed(0)
    block = Block("small", (2, 32, 32), n_latent=4, norm=norm)
    images = torch.randn(6, 2, 32, 32)
    torch.testing.assert_close(block(images)[:2], block(images[:2]))
    assert not list(block.encoder.buffers())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"encoder": "small", "norm": "layer"}, "norm='layer' is not known: use one of batch, instance, group"),
        (
            {"encoder": nn.Flatten(), "norm": "group"},
            "norm='group' is for encoders of images by name, and not",
        ),
        ({"encoder": "mlp", "of_features": True, "norm": "instance"}, "and not for encoders of features: leave it out"),
        ({"encoder": "resnet18", "weights": "w.pt", "norm": "instance"}, "and not for weights"),
    ],
)
def test_a_norm_that_cannot_be_is_said(how, message):
    with pytest.raises(ValueError, match=message):
        build_encoder(n_channels=3, **how)


def test_maps_of_one_pixel_have_no_variance():
    with pytest.raises(ValueError, match=r"does not take images of shape \(3, 32, 32\).*more than 1 spatial element"):
        Features("resnet18", (3, 32, 32), norm="instance")
    assert Features("resnet18", (3, 64, 64), norm="instance").n_features == 512
