from __future__ import annotations

import pytest
import torch
from torch import nn

from scbd.nn import ENCODERS, Block, build_encoder


@pytest.mark.parametrize(
    ("name", "channels", "n_parameters", "n_features"),
    [
        # torchvision's counts, with conv1 widened by 64 * 7 * 7 a channel
        ("resnet18", 3, 11_176_512, 512),
        ("resnet18", 5, 11_176_512 + 2 * 64 * 49, 512),
        ("resnet50", 3, 23_508_032, 2048),
        ("densenet121", 3, 6_953_856, 1024),
        ("small", 4, None, 256),
    ],
)
def test_named_encoders(name, channels, n_parameters, n_features):
    block = Block(name, (channels, 32, 32), 7)
    assert block.n_features == n_features
    assert block.n_latent == 7
    if n_parameters:
        assert sum(p.numel() for p in block.encoder.parameters()) == n_parameters
    assert block(torch.rand(3, channels, 32, 32)).shape == (3, 7)


def test_the_small_encoder_halves_maps_four_times():
    encoder = build_encoder("small", 2)
    sizes: list[int] = []
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _module, _inputs, maps: sizes.append(maps.shape[-1]))
    encoder(torch.rand(2, 2, 64, 64))
    assert sizes == [32, 16, 8, 4]


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_lie_on_the_sphere_in_float32(name):
    block = Block(name, (1, 32, 32), 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = block(torch.rand(4, 1, 32, 32))
    assert z.dtype == torch.float32
    torch.testing.assert_close(z.norm(dim=1), torch.ones(4), rtol=1e-5, atol=1e-5)


def test_a_module_is_copied_for_each_block():
    mine = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    one, two = build_encoder(mine, 2), build_encoder(mine, 2)
    next(one.parameters()).data.zero_()
    for other in (mine, two):
        assert next(other.parameters()).abs().sum() > 0


def test_the_dry_run_moves_no_statistics():
    block = Block("small", (1, 16, 16), 4)
    assert block.state_dict()["encoder.1.num_batches_tracked"] == 0
    assert block.encoder.training


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="There is no encoder 'vgg': use one of small, resnet18"):
        Block("vgg", (3, 32, 32), 4)
    with pytest.raises(TypeError, match=r"a name or a torch\.nn\.Module, got int"):
        Block(3, (3, 32, 32), 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"does not take images of shape \(3, 32, 32\)"):
        Block(nn.Conv2d(4, 8, 3), (3, 32, 32), 4)
    with pytest.raises(ValueError, match=r"must return features \(batch, n_features\), it returned \(2, 8, 30, 30\)"):
        Block(nn.Conv2d(3, 8, 3), (3, 32, 32), 4)
