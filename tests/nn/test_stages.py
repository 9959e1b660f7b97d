from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scbd.nn import Block, Features
from scbd.nn._stages import find_stages, pooled


@pytest.mark.parametrize(
    ("encoder", "channels"),
    [("small", [32, 64, 128]), ("resnet18", [64, 64, 128, 256]), ("densenet121", [64, 128, 256, 512])],
)
def test_stages_of_known_encoders(encoder, channels):
    block = Block(encoder, (2, 64, 64), 5)
    z, passed = block.eval().watched(images := torch.rand(3, 2, 64, 64))
    assert [tuple(p.shape) for p in passed[:-1]] == [(3, c) for c in channels]
    torch.testing.assert_close(passed[-1], block.encoder(images))
    torch.testing.assert_close(z, block(images))


def test_a_stage_is_the_last_map_at_its_resolution():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten())
    images = torch.rand(2, 1, 16, 16)
    features, stages = find_stages(layers.eval(), images)
    assert stages == [layers[1], layers[2]]
    torch.testing.assert_close(features, layers(images))


def test_a_module_without_maps_has_no_stage():
    block = Features(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), (1, 8, 8))
    assert block.n_stages == 0
    assert [p.shape for p in block.watched(torch.rand(2, 1, 8, 8))[1]] == [(2, 3)]


def test_finding_stages_leaves_no_hook():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())
    find_stages(layers.eval(), torch.rand(2, 1, 8, 8))
    assert not any(module._forward_hooks for module in layers.modules())


def test_nothing_is_kept_unless_asked():
    block = Features("small", (1, 16, 16))
    _, passed = block.watched(torch.rand(2, 1, 16, 16))
    block(torch.rand(5, 1, 16, 16))
    assert len(passed) == block.n_stages + 1
    assert {len(p) for p in passed} == {2}


def test_copies_keep_their_own():
    block = Features("small", (1, 16, 16)).eval()
    other = copy.deepcopy(block)
    images = torch.rand(2, 1, 16, 16)
    _, passed = other.watched(images)
    assert len(passed) == block.n_stages + 1
    # an encoder that has served elsewhere brings no eavesdropper along
    again = Features(block.encoder, (1, 16, 16)).eval()
    assert len(again.watched(images)[1]) == again.n_stages + 1 == len(block.watched(images)[1])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on the way to its compiler
def test_stages_are_seen_by_compiled_code():
    block = Block("small", (1, 16, 16), 4).eval()
    images = torch.rand(3, 1, 16, 16)
    expected = block.watched(images)
    block.compile(backend="eager")  # traced as for a compiler, without one
    block(images)
    for _ in range(2):
        torch.testing.assert_close(block.watched(images), expected)


def test_averages_are_over_pixels():
    maps = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(pooled(maps), maps.mean((2, 3)))
