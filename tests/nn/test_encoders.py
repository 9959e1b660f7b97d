from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scbd.nn import Block, Encoder, build_encoder
from scbd.nn._encoders import ENCODERS, SmallMapConv2d, average_over_pixels, find_stages, on_sphere


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
def test_block_named_encoder_has_expected_shapes(name, channels, n_parameters, n_features):
    block = Block(name, (channels, 32, 32), 7)
    assert block.n_features == n_features
    assert block.n_latent == 7
    if n_parameters:
        assert sum(p.numel() for p in block.encoder.parameters()) == n_parameters
    assert block(torch.rand(3, channels, 32, 32)).shape == (3, 7)


def test_small_encoder_halves_maps_four_times():
    encoder = build_encoder("small", 2)
    sizes: list[int] = []
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _module, _inputs, maps: sizes.append(maps.shape[-1]))
    encoder(torch.rand(2, 2, 64, 64))
    assert sizes == [32, 16, 8, 4]


@pytest.mark.parametrize("name", ENCODERS)
def test_block_embeddings_are_float32_of_unit_length(name):
    block = Block(name, (1, 32, 32), 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = block(torch.rand(4, 1, 32, 32))
    assert z.dtype == torch.float32
    torch.testing.assert_close(z.norm(dim=1), torch.ones(4), rtol=1e-5, atol=1e-5)


def test_block_module_as_encoder_is_copied():
    mine = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    one, two = build_encoder(mine, 2), build_encoder(mine, 2)
    next(one.parameters()).data.zero_()
    for other in (mine, two):
        assert next(other.parameters()).abs().sum() > 0


def test_encoder_trial_run_keeps_batchnorm_statistics():
    block = Block("small", (1, 16, 16), 4)
    assert block.state_dict()["encoder.1.num_batches_tracked"] == 0
    assert block.encoder.training


def test_encoder_invalid_arguments_raise():
    with pytest.raises(ValueError, match="There is no encoder 'vgg': use one of small, resnet18"):
        Block("vgg", (3, 32, 32), 4)
    with pytest.raises(TypeError, match=r"a name or a torch\.nn\.Module, got int"):
        Block(3, (3, 32, 32), 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"does not take images of shape \(3, 32, 32\)"):
        Block(nn.Conv2d(4, 8, 3), (3, 32, 32), 4)
    with pytest.raises(ValueError, match=r"must return features \(batch, n_features\), it returned \(2, 8, 30, 30\)"):
        Block(nn.Conv2d(3, 8, 3), (3, 32, 32), 4)


KINDS = {"batch": nn.BatchNorm2d, "instance": nn.InstanceNorm2d, "group": nn.GroupNorm}


@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("name", ENCODERS)
def test_build_encoder_norm_replaces_all_normalisation_layers(name, norm):
    encoder = build_encoder(name, 4, norm=norm)
    found = [module for module in encoder.modules() if isinstance(module, tuple(KINDS.values()))]
    assert len(found) >= 4 and {type(module) for module in found} == {KINDS[norm]}
    n_parameters = [sum(p.numel() for p in build_encoder(name, 4, norm=one).parameters()) for one in ("batch", norm)]
    assert n_parameters[0] == n_parameters[1]


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_build_encoder_instance_and_group_norm_ignore_gain_of_image(norm):
    """What a brighter lamp does to all channels; statistics of training cells would let it through."""
    torch.manual_seed(0)
    images = torch.rand(3, 2, 64, 64)
    own, shared = (build_encoder("small", 2, norm=one).eval() for one in (norm, "batch"))
    with torch.no_grad():
        torch.testing.assert_close(own(3 * images), own(images), rtol=1e-3, atol=1e-3)
        assert (shared(3 * images) - shared(images)).norm() > shared(images).norm()


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_build_encoder_instance_and_group_norm_embed_cells_independently(norm):
    torch.manual_seed(0)
    block = Block("small", (2, 32, 32), n_latent=4, norm=norm)
    images = torch.randn(6, 2, 32, 32)
    torch.testing.assert_close(block(images)[:2], block(images[:2]))
    assert not list(block.encoder.buffers())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"encoder": "small", "norm": "layer"}, "norm='layer' is not known: use 'batch', 'instance', 'group'"),
        (
            {"encoder": nn.Flatten(), "norm": "group"},
            "norm='group' is for encoders of images by name, and not",
        ),
        ({"encoder": "mlp", "of_features": True, "norm": "instance"}, "and not for encoders of features: leave it out"),
        ({"encoder": "resnet18", "weights": "w.pt", "norm": "instance"}, "and not for weights"),
    ],
)
def test_build_encoder_invalid_norm_raises(how, message):
    with pytest.raises(ValueError, match=message):
        build_encoder(n_channels=3, **how)


def test_encoder_instance_norm_single_pixel_maps_raise():
    with pytest.raises(ValueError, match=r"does not take images of shape \(3, 32, 32\).*more than 1 spatial element"):
        Encoder("resnet18", (3, 32, 32), norm="instance")
    assert Encoder("resnet18", (3, 64, 64), norm="instance").n_features == 512


@pytest.mark.parametrize(
    ("encoder", "channels"),
    [("small", [32, 64, 128]), ("resnet18", [64, 64, 128, 256]), ("densenet121", [64, 128, 256, 512])],
)
def test_encoder_named_encoder_has_expected_stages(encoder, channels):
    block = Block(encoder, (2, 64, 64), 5)
    h, passed = block.eval().forward_with_intermediates(images := torch.rand(3, 2, 64, 64))
    assert [tuple(p.shape) for p in passed[:-1]] == [(3, c) for c in channels]
    torch.testing.assert_close(passed[-1], block.encoder(images))
    torch.testing.assert_close(on_sphere(h), block(images))


def test_find_stages_returns_last_map_of_each_resolution():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten())
    images = torch.rand(2, 1, 16, 16)
    features, stages = find_stages(layers.eval(), images)
    assert stages == [layers[1], layers[2]]
    torch.testing.assert_close(features, layers(images))


def test_encoder_without_maps_has_no_stages():
    block = Encoder(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), (1, 8, 8))
    assert block.n_stages == 0
    assert [p.shape for p in block.forward_with_intermediates(torch.rand(2, 1, 8, 8))[1]] == [(2, 3)]


def test_find_stages_removes_its_hooks():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())
    find_stages(layers.eval(), torch.rand(2, 1, 8, 8))
    assert not any(module._forward_hooks for module in layers.modules())


def test_encoder_forward_stores_no_intermediates():
    block = Encoder("small", (1, 16, 16))
    _, passed = block.forward_with_intermediates(torch.rand(2, 1, 16, 16))
    block(torch.rand(5, 1, 16, 16))
    assert len(passed) == block.n_stages + 1
    assert {len(p) for p in passed} == {2}


def test_encoder_copy_stores_its_own_intermediates():
    block = Encoder("small", (1, 16, 16)).eval()
    other = copy.deepcopy(block)
    images = torch.rand(2, 1, 16, 16)
    _, passed = other.forward_with_intermediates(images)
    assert len(passed) == block.n_stages + 1
    # an encoder that has served elsewhere brings no eavesdropper along
    again = Encoder(block.encoder, (1, 16, 16)).eval()
    assert (
        len(again.forward_with_intermediates(images)[1])
        == again.n_stages + 1
        == len(block.forward_with_intermediates(images)[1])
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on the way to its compiler
def test_block_compiled_returns_intermediates():
    block = Block("small", (1, 16, 16), 4).eval()
    images = torch.rand(3, 1, 16, 16)
    expected = block.forward_with_intermediates(images)
    block.compile(backend="eager")  # traced as for a compiler, without one
    block(images)
    for _ in range(2):
        torch.testing.assert_close(block.forward_with_intermediates(images), expected)


def test_average_over_pixels_equals_mean():
    maps = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(average_over_pixels(maps), maps.mean((2, 3)))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, torch.Tensor]:
    """Kernels, strides and paddings of any shape, on maps from a single pixel up."""
    pair = lambda low, high: draw(st.tuples(st.integers(low, high), st.integers(low, high)))
    kernel, stride, padding, smallest = pair(1, 4), pair(1, 3), pair(0, 3), pair(1, 6)
    size = [max(s, k - 2 * p) for s, k, p in zip(smallest, kernel, padding, strict=True)]
    torch.manual_seed(draw(st.integers(0, 1000)))
    convolution = nn.Conv2d(3, 5, kernel, stride, padding, bias=draw(st.booleans())).double()
    return convolution, torch.randn(2, 3, *size, dtype=torch.float64)


@given(convolutions())
@settings(max_examples=200)
def test_small_map_conv2d_any_convolution_equals_torch(case):
    convolution, images = case
    ours = SmallMapConv2d.of(copy.deepcopy(convolution)) or convolution
    results = []
    for module in (convolution, ours):
        x = images.clone().requires_grad_()
        y = module(x)
        (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("name", ENCODERS)
def test_build_encoder_with_small_map_convolutions_equals_plain_convolutions(name):
    """A whole step in float64: outputs, all gradients, and BatchNorm's statistics."""
    torch.manual_seed(0)
    plain = ENCODERS[name](3).double()
    torch.manual_seed(0)
    ours = build_encoder(name, 3).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert any(isinstance(module, SmallMapConv2d) for module in ours.modules())
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for network in (plain, ours):
        network(images.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    assert plain.state_dict().keys() == ours.state_dict().keys()
    for one, two in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    for (parameter, one), two in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        # against the largest of the parameter: single entries are what is left where large terms cancel
        scale = one.grad.abs().max().item()
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-8 * scale, msg=parameter)


def test_small_map_conv2d_skips_padding():
    """On a single pixel eight of nine taps are never touched: whatever they hold, even NaN, is not seen."""
    convolution = SmallMapConv2d.of(nn.Conv2d(2, 2, 3, padding=1))
    assert convolution is not None
    with torch.no_grad():
        convolution.weight[:, :, 0] = torch.nan
    assert torch.isfinite(convolution(torch.randn(1, 2, 1, 1))).all()


def test_small_map_conv2d_unsupported_convolution_is_not_replaced():
    class Own(nn.Conv2d):
        pass

    kept = [
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3),
        Own(4, 4, 3, padding=1),
    ]
    assert [SmallMapConv2d.of(module) for module in kept] == [None] * len(kept)


def test_build_encoder_module_keeps_its_convolutions():
    mine = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert type(Block(mine, (1, 4, 4), 2).encoder[0]) is nn.Conv2d  # type: ignore[index]


def test_small_map_conv2d_under_autocast_returns_bfloat16():
    convolution = SmallMapConv2d.of(nn.Conv2d(8, 8, 3, padding=1))
    assert convolution is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolution(torch.randn(2, 8, 2, 2)).dtype == torch.bfloat16


def as_torchvision(name: str, path: Path, *, old: bool = False) -> Path:
    """An encoder of random weights as torchvision would keep it, classifier included."""
    state = build_encoder(name, 3).state_dict()
    if name == "densenet121":
        state = {re.sub(r"^0\.", "features.", key).replace(".layers.", "."): value for key, value in state.items()}
    if old:  # as in the files that torchvision has on its server
        state = {re.sub(r"(norm|conv)([12])\.", r"\1.\2.", key): value for key, value in state.items()}
        state = {key: value for key, value in state.items() if "num_batches" not in key}
    linear = {f"{'classifier' if name == 'densenet121' else 'fc'}.weight": torch.zeros(1000, 8)}
    torch.save(state | linear, path)
    return path


@pytest.mark.parametrize(("name", "old"), [("resnet18", False), ("densenet121", False), ("densenet121", True)])
def test_build_encoder_weights_are_loaded_from_file(name, old, tmp_path):
    torch.manual_seed(1)
    path = as_torchvision(name, tmp_path / "weights.pth", old=old)
    torch.manual_seed(1)
    wanted = build_encoder(name, 3).eval()
    found = build_encoder(name, 3, weights=path).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(found(images), wanted(images), rtol=0, atol=0)
        assert not torch.equal(build_encoder(name, 3).eval()(images), wanted(images))


@pytest.mark.parametrize(("name", "channels"), [("resnet50", 3), ("resnet18", 4)])
def test_build_encoder_weights_of_other_network_raise(name, channels, tmp_path):
    path = as_torchvision("resnet18", tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=f"no weights of torchvision's {name}"):
        build_encoder(name, channels, weights=path)


@pytest.mark.parametrize("encoder", ["small", nn.Flatten()])
def test_build_encoder_weights_for_encoder_not_in_torchvision_raise(encoder, tmp_path):
    with pytest.raises(ValueError, match="weights"):
        build_encoder(encoder, 3, weights=tmp_path / "weights.pth")


@pytest.mark.parametrize("content", [torch.zeros(3), {"conv1.weight": 1}, b"nothing", b""])
def test_build_encoder_weights_not_a_state_dict_raise(content, tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=r"weights\.pth holds no weights"):
        build_encoder("resnet18", 3, weights=path)


def test_build_encoder_weights_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.pth"):
        build_encoder("resnet18", 3, weights=tmp_path / "none.pth")
