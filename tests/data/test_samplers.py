from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data import PerturbationSampler, ShuffleSampler
from scbd.data.samplers import mixed_neighbours


@given(st.integers(2, 80), st.integers(2, 30), st.integers(0, 5))
def test_an_epoch_shows_every_cell_at_most_once(n, batch_size, seed):
    rows = np.arange(100, 100 + n)
    if batch_size > n:
        with pytest.raises(ValueError, match=f"larger than the {n} cells"):
            ShuffleSampler(rows, batch_size)
        return
    sampler = ShuffleSampler(rows, batch_size, seed=seed)
    batches = list(sampler)
    assert len(batches) == len(sampler) == n // batch_size
    seen = np.concatenate(batches)
    assert len(np.unique(seen)) == len(seen) == batch_size * (n // batch_size)
    assert np.isin(seen, rows).all()


def both(**kwargs):
    rows, labels = np.arange(90), np.repeat(np.arange(9), 10)
    yield ShuffleSampler(rows, 12, **kwargs)
    yield PerturbationSampler(rows, 12, labels=labels, perturbations_per_batch=4, **kwargs)


def test_a_resumed_sampler_goes_on_where_it_was():
    for whole, resumed in zip(both(n_steps=40, seed=3), both(n_steps=40, seed=3, start=17), strict=True):
        np.testing.assert_array_equal(np.array(list(whole))[17:], list(resumed))
        assert len(whole) == len(resumed) == 40


def test_seeds_and_epochs_differ():
    for one, two in zip(both(n_steps=20, seed=0), both(n_steps=20, seed=1), strict=True):
        batches = np.array(list(one))
        assert not np.array_equal(batches, list(two))
        assert not np.array_equal(batches[0], batches[one.steps_per_epoch])


def test_ranks_share_each_batch():
    shares = [both(n_steps=5, rank=rank, world_size=3) for rank in range(3)]
    for whole, *parts in zip(both(n_steps=5), *shares, strict=True):
        for batch, *pieces in zip(whole, *parts, strict=True):
            assert {len(piece) for piece in pieces} == {4}
            np.testing.assert_array_equal(batch, np.concatenate(pieces))
    with pytest.raises(ValueError, match="batch_size=12 cannot be shared equally by 5 devices"):
        next(both(world_size=5))


@given(st.lists(st.integers(1, 30), min_size=2, max_size=15), st.integers(2, 40), st.integers(1, 20), st.integers(0, 9))
def test_perturbation_batches_hold_distinct_cells_and_k_of_each(sizes, batch_size, per_batch, seed):
    labels = np.repeat(np.arange(len(sizes)) * 7, sizes)
    rows = np.arange(len(labels)) + 5
    try:
        sampler = PerturbationSampler(
            rows, batch_size, labels=labels, perturbations_per_batch=per_batch, seed=seed, n_steps=3
        )
    except ValueError as error:
        n = min(per_batch, sum(size > 1 for size in sizes))
        k = -(-batch_size // n) if n else 0
        assert batch_size > len(rows) or k < 2 or sum(min(s, k) for s in sizes if s > 1) < batch_size, error
        return
    k = sampler.cells_per_perturbation
    for batch in sampler:
        assert len(np.unique(batch)) == len(batch) == batch_size
        of_batch = labels[batch - 5]
        counts = {label: (of_batch == label).sum() for label in np.unique(of_batch)}
        full = [c for label, c in counts.items() if c == min(k, sizes[label // 7])]
        assert len(full) >= len(counts) - 1  # the last one may be cut where the batch is full
        assert max(counts.values()) <= k
        assert all(sizes[label // 7] > 1 for label in counts)


def test_perturbations_are_drawn_as_numpy_draws_without_replacement():
    sizes = np.array([100, 50, 25, 25, 12])
    labels = np.repeat(np.arange(5), sizes)
    sampler = PerturbationSampler(np.arange(len(labels)), 4, labels=labels, perturbations_per_batch=2, n_steps=4000)
    ours = np.bincount(np.concatenate([np.unique(labels[batch]) for batch in sampler]), minlength=5) / 4000
    rng = np.random.default_rng(0)
    p = sizes / sizes.sum()
    theirs = (
        np.bincount(np.concatenate([rng.choice(5, 2, replace=False, p=p) for _ in range(20000)]), minlength=5) / 20000
    )
    np.testing.assert_allclose(ours, theirs, atol=0.03)


def test_small_perturbations_are_filled_up_by_others():
    labels = np.array([0] * 2 + [1] * 20 + [2] * 20 + [3])
    sampler = PerturbationSampler(np.arange(43), 16, labels=labels, perturbations_per_batch=2, n_steps=50)
    drawn = [labels[batch] for batch in sampler]
    assert not any(3 in batch for batch in drawn)
    with_small = [batch for batch in drawn if 0 in batch]
    assert with_small
    assert all((batch == 0).sum() == 2 and len(batch) == 16 for batch in with_small if batch[-1] != 0)


def test_bad_input_gets_a_sentence():
    rows = np.arange(10)
    with pytest.raises(ValueError, match="batch_size=1: a contrastive loss compares cells"):
        ShuffleSampler(rows, 1)
    with pytest.raises(ValueError, match="No perturbation has two cells"):
        PerturbationSampler(rows, 4, labels=rows, perturbations_per_batch=2)
    with pytest.raises(ValueError, match="cannot fill a batch of 8 with 8 different cells each"):
        PerturbationSampler(rows, 8, labels=np.array([0, 0, 1, 1, 2, 3, 4, 5, 6, 7]), perturbations_per_batch=1)
    # as many perturbations as cells in a batch: nobody would have a partner
    with pytest.raises(ValueError, match="cannot fill a batch of 4 with 1 different cells"):
        PerturbationSampler(np.arange(40), 4, labels=np.arange(40) // 2, perturbations_per_batch=4)


@given(st.lists(st.integers(2, 30), min_size=2, max_size=15), st.integers(2, 40), st.integers(1, 20), st.integers(0, 9))
def test_neighbours_follow_each_other(sizes, batch_size, per_batch, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = np.random.default_rng(seed).permutation(len(labels))  # the order of rows given does not matter
    try:
        sampler = PerturbationSampler(
            shuffled + 5,
            batch_size,
            labels=labels[shuffled],
            perturbations_per_batch=per_batch,
            neighbours=True,
            n_steps=4,
            seed=seed,
        )
    except ValueError:
        return
    starts = set()
    for batch in sampler:
        assert len(batch) == len(set(batch)) == batch_size
        for label in np.unique(labels[batch - 5]):
            rows = batch[labels[batch - 5] == label]
            first = 5 + int(np.flatnonzero(labels == label)[0])
            starts.add(rows[0])
            # one stretch, or two: behind the last row comes the first
            breaks = np.flatnonzero(np.diff(rows) != 1)
            assert len(breaks) <= 1 and all(rows[b + 1] == first for b in breaks)
            assert len(rows) in (sampler.cells_per_perturbation, sizes[label]) or label == labels[batch[-1] - 5]
    assert len(starts) > 1 or len(sizes) * min(sizes) <= batch_size


def test_neighbours_are_mixed_only_where_wells_are():
    rng = np.random.default_rng(0)
    y, e = np.repeat(np.arange(20), 50), rng.integers(6, size=1000)
    assert mixed_neighbours(y, e)
    of_wells = np.lexsort([e, y])
    assert not mixed_neighbours(y[of_wells], e[of_wells])  # well after well inside a perturbation
    plates = np.lexsort([rng.random(1000), e > 2, y])
    assert not mixed_neighbours(y[plates], e[plates])  # written plate by plate
    mixed = rng.permutation(1000)
    assert not mixed_neighbours(y[mixed], e[mixed])  # not sorted by perturbation
    assert mixed_neighbours(y, np.zeros(1000, dtype=int))  # a single well is as mixed as can be
    assert not mixed_neighbours(np.arange(9), np.zeros(9, dtype=int))
