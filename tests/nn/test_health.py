from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from scbd.nn import effective_rank, explained_variance, invariance_statistic, spread


def test_a_point():
    z = F.normalize(torch.ones(50, 8), dim=1)
    assert spread(z) == pytest.approx(0, abs=1e-12)
    assert effective_rank(z) == 0


def test_equal_axes_use_all_directions():
    z = torch.cat([torch.eye(6), -torch.eye(6)])
    assert spread(z) == pytest.approx(1)
    assert effective_rank(z) == pytest.approx(6)


def test_a_line_has_rank_one():
    angles = torch.linspace(0, 1e-3, 40)
    z = torch.stack([angles.cos(), angles.sin(), torch.zeros(40)], dim=1)
    assert effective_rank(z) == pytest.approx(1, abs=1e-3)


def test_directions_that_are_not_used_have_no_say():
    """Their share of the variance is zero but for rounding, on either side."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(40, 2, generator=generator) @ torch.randn(2, 8, generator=generator)
        assert 1 < effective_rank(z) <= 2 + 1e-6


def test_what_is_not_finite_has_no_rank():
    z = torch.cat([torch.eye(6), torch.full((1, 6), float("nan"))])
    assert math.isnan(effective_rank(z)) and math.isnan(spread(z))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [3, (3, 2)], ids=["a cell", "a value"])
def test_no_measure_hides_what_is_not_a_number(bad, where):
    """Of an embedding that is none, "invariant" would be wrong; training stops at the loss that it makes."""
    z, label, well = torch.randn(64, 8, generator=torch.manual_seed(0)), torch.arange(64) % 4, torch.arange(64) // 4 % 4
    broken = z.clone()
    broken[where] = bad
    assert math.isnan(effective_rank(broken))
    for partners in ("within", "across"):
        assert math.isnan(explained_variance(broken, well, label, partners=partners).share)
    assert math.isnan(invariance_statistic([broken], well, label))
    assert math.isnan(invariance_statistic([z, broken, z], well, label))
