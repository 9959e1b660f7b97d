from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scbd.nn import ENCODERS, Block, build_encoder
from scbd.nn._small_maps import SmallMapConv2d, exact_small_maps


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
def test_any_convolution_is_exact(case):
    convolution, images = case
    ours = exact_small_maps(copy.deepcopy(convolution))
    results = []
    for module in (convolution, ours):
        x = images.clone().requires_grad_()
        y = module(x)
        (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_keep_their_numbers_and_names(name):
    """A whole step in float64: outputs, all gradients, and BatchNorm's statistics."""
    torch.manual_seed(0)
    plain = build_encoder(name, 3).double()
    ours = exact_small_maps(copy.deepcopy(plain)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert any(isinstance(module, SmallMapConv2d) for module in ours.modules())
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for network in (plain, ours):
        network(images.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    assert plain.state_dict().keys() == ours.state_dict().keys()
    for one, two in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    for (parameter, one), two in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=1e-9, msg=parameter)


def test_no_padding_is_multiplied():
    """On a single pixel eight of nine taps are never touched: whatever they hold, even NaN, is not seen."""
    convolution = exact_small_maps(nn.Conv2d(2, 2, 3, padding=1))
    with torch.no_grad():
        convolution.weight[:, :, 0] = torch.nan
    assert torch.isfinite(convolution(torch.randn(1, 2, 1, 1))).all()


def test_what_is_left_alone():
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
    types = [type(module) for module in kept]
    exact_small_maps(nn.Sequential(*kept))
    assert [type(module) for module in kept] == types


def test_a_user_s_module_is_not_touched():
    mine = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    block = Block(mine, (1, 4, 4), 2)
    assert type(mine[0]) is nn.Conv2d
    assert isinstance(block.encoder[0], SmallMapConv2d)  # type: ignore[index]


def test_autocast_reaches_small_maps():
    convolution = exact_small_maps(nn.Conv2d(8, 8, 3, padding=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolution(torch.randn(2, 8, 2, 2)).dtype == torch.bfloat16
