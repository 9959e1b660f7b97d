from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import digamma, polygamma

from scbd.nn import ChannelSums, Moments, align


def summed(values: torch.Tensor, groups: torch.Tensor | None = None, n_groups: int = 1, batch: int = 7) -> Moments:
    sums = ChannelSums(n_groups)
    for start in range(0, len(values), batch):
        part = slice(start, start + batch)
        sums.add(values[part], None if groups is None else groups[part])
    return sums.moments()


def exact(mean, variance) -> Moments:
    """Of so many cells that there is no sampling error."""
    mean, variance = (torch.tensor(part, dtype=torch.float64) for part in (mean, variance))
    return Moments(mean, variance, torch.zeros_like(mean), torch.zeros_like(mean))


@given(shape=st.sampled_from([(30, 3), (30, 3, 4, 5)]), seed=st.integers(0, 99), n_groups=st.integers(1, 5))
def test_moments_are_those_of_cells_within_groups(shape, seed, n_groups):
    """Sums over batches beside the naive form: loops over groups and cells."""
    rng = np.random.default_rng(seed)
    groups = np.arange(30) % n_groups
    values = rng.normal(2, 3, shape) + 5 * groups.reshape(-1, *[1] * (len(shape) - 1))
    found = summed(torch.from_numpy(values), torch.from_numpy(groups), n_groups)
    pixels = values.reshape(30, 3, -1)
    cells = pixels.mean(2)
    within_cells = pixels.var(2).mean(0)
    among = np.zeros(3)
    scatter = np.zeros(3)
    for group in range(n_groups):
        chosen = groups == group
        centre = cells[chosen].mean(0)
        among += ((cells[chosen] - centre) ** 2).sum(0)
        distances = ((pixels[chosen] - centre[None, :, None]) ** 2).mean(2)
        scatter += ((distances - distances.mean(0)) ** 2).sum(0)
    freedom = 30 - n_groups
    np.testing.assert_allclose(found.mean, cells.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.variance, within_cells + among / freedom, rtol=1e-4)
    np.testing.assert_allclose(found.mean_error, among / freedom / 30, rtol=1e-4)
    of_log = polygamma(1, freedom / 2) + (digamma(freedom / 2) - np.log(freedom / 2)) ** 2
    least = (among / freedom) ** 2 * of_log
    np.testing.assert_allclose(found.variance_error, np.maximum(scatter / 30 / freedom, least), rtol=1e-3)


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 4]])
def test_cells_nearly_alone_in_their_groups_are_one_group(groups):
    values = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    alone, together = summed(values, torch.tensor(groups), 6), summed(values)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)


def test_of_no_cells_there_are_no_moments():
    with pytest.raises(ValueError, match="There are no cells"):
        ChannelSums().moments()


@given(seed=st.integers(0, 99))
def test_aligned_values_have_the_mean_and_variance_of_the_reference(seed):
    rng = np.random.default_rng(seed)
    reference, new = (
        exact(rng.normal(size=4), rng.uniform(0.5, 2, 4)),
        exact(rng.normal(size=4), rng.uniform(0.5, 2, 4)),
    )
    shift, ratio = align(reference, new)
    torch.testing.assert_close((new.mean - shift) / ratio, reference.mean)
    torch.testing.assert_close(new.variance / ratio**2, reference.variance)


def test_without_scale_means_alone_are_aligned():
    reference, new = exact([0.0, 1.0], [1.0, 1.0]), exact([2.0, 3.0], [4.0, 4.0])
    shift, ratio = align(reference, new, scale=False)
    assert ratio.tolist() == [1, 1]
    torch.testing.assert_close(new.mean - shift, reference.mean)


def test_channels_that_do_not_vary_stay():
    shift, ratio = align(exact([0.0, 1.0], [1.0, 0.0]), exact([2.0, 5.0], [4.0, 1.0]))
    assert (shift[1], ratio[1]) == (0, 1)
    torch.testing.assert_close((shift[0], ratio[0]), (torch.tensor(2.0).double(), torch.tensor(2.0).double()))
    nothing = align(exact([0.0], [0.0]), exact([3.0], [1.0]))
    assert (nothing.shift.item(), nothing.ratio.item()) == (0, 1)


def test_few_cells_that_differ_by_chance_change_little():
    """Twenty cells of the same kind: unshrunk, the mean would move by 1 / sqrt(20) = .22 on the average."""
    generator = torch.Generator().manual_seed(0)
    reference = summed(torch.randn(20_000, 256, generator=generator))
    few = align(reference, summed(torch.randn(20, 256, generator=generator)))
    assert few.shift.square().mean().sqrt() < 0.07
    assert few.ratio.log().square().mean().sqrt() < 0.07
    moved = align(reference, summed(torch.randn(20, 256, generator=generator) + 2))
    torch.testing.assert_close(moved.shift.mean(), torch.tensor(2.0).double(), atol=0.1, rtol=0)


@given(n_groups=st.sampled_from([1, 2, 8]), size=st.integers(2, 6), seed=st.integers(0, 99))
def test_cells_that_are_too_few_for_a_variance_leave_it(n_groups, size, seed):
    """Of two cells a variance may be anything, and of pairs their distances from the mean are the same."""
    generator = torch.Generator().manual_seed(seed)
    reference = summed(torch.randn(2_000, 256, generator=generator))
    groups = torch.arange(n_groups).repeat_interleave(size)
    few = summed(torch.randn(len(groups), 256, generator=generator), groups, n_groups)
    found = align(reference, few).ratio
    assert found.log().square().mean().sqrt() < 0.2
    assert found.min() > 0.5
