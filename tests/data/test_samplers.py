"""Tests of samplers: which cells share a batch, and whether rows are mixed enough to be drawn in stretches."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scbd.data import PerturbationSampler, ShuffleSampler
from scbd.data._samplers import _draw_stretches, are_rows_mixed


@given(st.integers(2, 80), st.integers(2, 30), st.integers(0, 5))
def test_shuffle_sampler_epoch_yields_each_row_at_most_once(n, batch_size, seed):
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


def make_samplers(**kwargs):
    rows, labels = np.arange(90), np.repeat(np.arange(9), 10)
    yield ShuffleSampler(rows, 12, **kwargs)
    yield PerturbationSampler(rows, 12, labels=labels, perturbations_per_batch=4, **kwargs)


def test_samplers_start_given_continue_with_the_same_batches():
    for whole, resumed in zip(
        make_samplers(n_steps=40, seed=3), make_samplers(n_steps=40, seed=3, start=17), strict=True
    ):
        np.testing.assert_array_equal(np.array(list(whole))[17:], list(resumed))
        assert len(whole) == len(resumed) == 40


def test_samplers_other_seed_or_epoch_yields_other_batches():
    for one, two in zip(make_samplers(n_steps=20, seed=0), make_samplers(n_steps=20, seed=1), strict=True):
        batches = np.array(list(one))
        assert not np.array_equal(batches, list(two))
        assert not np.array_equal(batches[0], batches[one.steps_per_epoch])


def test_samplers_ranks_partition_each_batch():
    shares = [make_samplers(n_steps=5, rank=rank, world_size=3) for rank in range(3)]
    for whole, *parts in zip(make_samplers(n_steps=5), *shares, strict=True):
        for batch, *pieces in zip(whole, *parts, strict=True):
            assert {len(piece) for piece in pieces} == {4}
            assert sorted(batch) == sorted(np.concatenate(pieces))
    with pytest.raises(ValueError, match="batch_size=12 cannot be shared equally by 5 devices"):
        next(make_samplers(world_size=5))


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("neighbours", [False, True])
def test_perturbation_sampler_each_rank_has_every_perturbation(neighbours, world_size):
    labels = np.repeat(np.arange(40), 50)
    settings: dict[str, Any] = {"labels": labels, "perturbations_per_batch": 16, "neighbours": neighbours, "n_steps": 5}
    shares = [
        list(PerturbationSampler(np.arange(2000), 128, **settings, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for pieces in zip(*shares, strict=True):
        assert len(np.unique(np.concatenate(pieces))) == 128
        for piece in pieces:
            np.testing.assert_array_equal(np.unique(labels[piece], return_counts=True)[1], np.full(16, 8 // world_size))


def test_perturbation_sampler_stretches_stay_on_one_rank():
    """If two ranks shared a stretch, each of them would read single rows of it."""
    labels = np.repeat(np.arange(9), 400)
    settings: dict[str, Any] = {"labels": labels, "perturbations_per_batch": 4, "neighbours": True, "n_steps": 30}
    for world_size in (2, 4):
        for rank in range(world_size):
            for piece in PerturbationSampler(np.arange(3600), 128, **settings, rank=rank, world_size=world_size):
                breaks = 1 + np.count_nonzero(np.diff(np.sort(piece)) != 1)
                assert breaks <= 4 * (4 // world_size + 1)  # a stretch may continue at the first cell of a perturbation


def can_fill(sizes: list[int], batch_size: int, per_batch: int) -> bool:
    """Return whether ``per_batch`` perturbations can fill a batch with at least two cells of each."""
    shared = [size for size in sizes if size > 1]
    if batch_size > sum(sizes) or not shared:
        return False
    k = -(-batch_size // min(per_batch, len(shared)))
    return k > 1 and sum(min(size, k) for size in shared) >= batch_size and (batch_size % 2 == 0 or max(shared) > 2)


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=15),
    st.integers(2, 40),
    st.integers(1, 20),
    st.integers(0, 9),
    st.booleans(),
)
def test_perturbation_sampler_batches_are_full_and_cells_have_partners(sizes, batch_size, per_batch, seed, neighbours):
    labels = np.repeat(np.arange(len(sizes)) * 7, sizes)
    rows = np.arange(len(labels)) + 5
    settings: dict[str, Any] = {"labels": labels, "perturbations_per_batch": per_batch, "neighbours": neighbours}
    if not can_fill(sizes, batch_size, per_batch):
        with pytest.raises(ValueError, match="batch|two cells"):
            PerturbationSampler(rows, batch_size, **settings)
        return
    sampler = PerturbationSampler(rows, batch_size, **settings, seed=seed, n_steps=5)
    k = sampler.cells_per_perturbation
    for batch in sampler:
        assert len(np.unique(batch)) == len(batch) == batch_size
        drawn, counts = np.unique(labels[batch - 5], return_counts=True)
        assert counts.min() > 1
        assert counts.max() <= max(k, 3)
        full = counts == np.minimum(k, np.array(sizes)[drawn // 7])
        assert np.count_nonzero(~full) <= 2  # the last may be cut short; another may then have one more


@pytest.mark.parametrize(
    ("sizes", "batch_size", "per_batch"),
    [
        ([20] * 40, 64, 30),  # three cells each of 21 perturbations, and one more cell
        ([9] * 3, 5, 3),  # two cells each, and one more cell
        ([2, 2, 2, 9], 7, 3),
        ([int(n) for n in np.random.default_rng(0).pareto(0.8, 300) * 4 + 2], 512, 64),
    ],
)
@pytest.mark.parametrize("neighbours", [False, True])
def test_perturbation_sampler_remainder_of_batch_leaves_no_single_cell(sizes, batch_size, per_batch, neighbours):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    settings: dict[str, Any] = {"labels": labels, "perturbations_per_batch": per_batch, "neighbours": neighbours}
    for batch in PerturbationSampler(np.arange(len(labels)), batch_size, **settings, n_steps=60):
        assert len(np.unique(batch)) == batch_size
        assert np.unique(labels[batch], return_counts=True)[1].min() > 1


def test_perturbation_sampler_frequencies_are_equal_to_numpy_choice():
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


def test_perturbation_sampler_small_perturbations_are_filled_up():
    labels = np.array([0] * 2 + [1] * 20 + [2] * 20 + [3])
    sampler = PerturbationSampler(np.arange(43), 16, labels=labels, perturbations_per_batch=2, n_steps=50)
    drawn = [labels[batch] for batch in sampler]
    assert not any(3 in batch for batch in drawn)
    with_small = [batch for batch in drawn if 0 in batch]
    assert with_small
    assert all((batch == 0).sum() == 2 and len(batch) == 16 for batch in with_small if batch[-1] != 0)


def count_stretches(rows: np.ndarray, first: int, size: int) -> int:
    """Count stretches of consecutive rows, in a ring of ``size`` rows that begins at row ``first``."""
    here = np.isin(np.arange(size), rows - first)
    return max(1, int(np.count_nonzero(here & ~np.roll(here, 1))))


@given(st.lists(st.integers(2, 60), min_size=2, max_size=9), st.integers(2, 60), st.integers(1, 12), st.integers(0, 9))
def test_perturbation_sampler_neighbours_form_at_most_four_stretches(sizes, batch_size, per_batch, seed):
    assume(can_fill(sizes, batch_size, per_batch))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    firsts = np.cumsum(sizes) - sizes
    shuffled = np.random.default_rng(seed).permutation(len(labels))  # the order of rows given does not matter
    settings: dict[str, Any] = {"labels": labels[shuffled], "perturbations_per_batch": per_batch, "neighbours": True}
    for batch in PerturbationSampler(shuffled + 5, batch_size, **settings, n_steps=4, seed=seed):
        for label in np.unique(labels[batch - 5]):
            rows = batch[labels[batch - 5] == label] - 5
            assert count_stretches(rows, firsts[label], sizes[label]) <= 4


def count_draws_and_partners(n_steps: int, *, neighbours: bool, n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Count draws of each of n cells of 8 perturbations, in batches of 4 × 8, and its distinct partners in batches."""
    labels = np.repeat(np.arange(8), n)
    settings: dict[str, Any] = {"labels": labels, "perturbations_per_batch": 4, "neighbours": neighbours}
    used, met = np.zeros(8 * n, dtype=int), np.zeros((8 * n, n), dtype=bool)
    for batch in PerturbationSampler(np.arange(8 * n), 32, **settings, n_steps=n_steps):
        used[batch] += 1
        for cells in batch.reshape(4, 8):
            met[cells[:, None], cells % n] = True
    return used, met.sum(axis=1) - 1


def test_perturbation_sampler_neighbours_have_nearly_as_many_partners():
    """Compare partners per cell after twelve epochs; a single stretch of eight rows allowed only 13, later 14."""
    met = {neighbours: count_draws_and_partners(600, neighbours=neighbours)[1].mean() for neighbours in (False, True)}
    assert met[False] == pytest.approx(68.5, abs=1)
    assert met[True] > 0.88 * met[False]


def test_perturbation_sampler_cells_at_ends_are_drawn_equally_often():
    for n in (11, 40):
        used = count_draws_and_partners(1500, neighbours=True, n=n)[0].reshape(8, n).sum(axis=0)
        expected = 1500 * 4 * 8 / n
        assert np.abs(used - expected).max() < 5 * np.sqrt(expected * (1 - 8 / n))


@pytest.mark.parametrize(
    ("labels", "batch_size", "per_batch", "said"),
    [
        (range(10), 4, 2, "No perturbation has two cells"),
        ([0, 0, 1, 1, 2, 3, 4, 5, 6, 7], 8, 1, "batch of 8"),
        (np.arange(8) // 2, 5, 3, "batch_size=5"),
        (np.arange(40) // 2, 4, 4, "batch of 4"),  # as many perturbations as cells: no cell would have a partner
        (range(10), 1, 2, "batch_size=1"),
    ],
)
def test_perturbation_sampler_unfillable_batch_raises(labels, batch_size, per_batch, said):
    with pytest.raises(ValueError, match=said):
        PerturbationSampler(
            np.arange(len(labels)), batch_size, labels=np.array(labels), perturbations_per_batch=per_batch
        )


def test_draw_stretches_ring_omits_each_cell_equally_often():
    """Five cells of a ring of six are drawn in pairs; each of the six cells is omitted equally often."""
    rng = np.random.default_rng(0)
    left = [
        (set(range(6)) - set(_draw_stretches(rng, np.array([6]), np.array([5]))[0].tolist())).pop() for _ in range(3000)
    ]
    counts = np.bincount(left, minlength=6)
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500 * 5 / 6)


def test_draw_stretches_do_not_overlap_and_cover_the_ring():
    rng = np.random.default_rng(1)
    sizes, counts = np.array([100, 8, 30, 50]), np.array([8, 8, 9, 3])
    gaps = []
    for _ in range(200):
        groups = _draw_stretches(rng, sizes, counts)
        for cells, size, count in zip(groups, sizes, counts, strict=True):
            assert len(set(cells.tolist())) == len(cells) == count
            assert cells.min() >= 0
            assert cells.max() < size
        pairs = groups[0].reshape(4, 2)
        np.testing.assert_array_equal((pairs[:, 1] - pairs[:, 0]) % 100, np.ones(4))
        gaps.append(np.diff(np.sort(pairs[:, 0])))
    assert np.ptp(np.concatenate(gaps)) > 50


def make_screen_labels(seed: int = 0, n: int = 3000) -> dict[str, np.ndarray]:
    """Return labels of cells sorted by gene and shuffled within genes; many cells are controls, with one guide."""
    rng = np.random.default_rng(seed)
    gene = np.sort(np.where(rng.random(n) < 0.3, 0, rng.integers(1, 31, n)))
    plate, place = rng.integers(4, size=n), rng.integers(12, size=n)
    return {
        "gene": gene,
        "guide": np.where(gene == 0, 0, 1 + 4 * gene + rng.integers(4, size=n)),
        "plate": plate,
        "well name": place,
        "well": plate * 12 + place,
    }


def are_mixed_by(labels: dict[str, np.ndarray], *names: str) -> bool:
    return are_rows_mixed(labels["gene"], (labels[name] for name in names))


@pytest.mark.parametrize("seed", range(4))
def test_are_rows_mixed_shuffled_screen_returns_true(seed):
    labels = make_screen_labels(seed)
    assert are_mixed_by(labels, *labels)
    few = {name: codes[::60] for name, codes in make_screen_labels(seed).items()}
    assert are_mixed_by(few, *few)


@pytest.mark.parametrize(
    ("sorted_by", "not_mixed"),
    [("guide", ["guide"]), ("plate", ["plate", "well"]), ("well name", ["well name", "well"])],
)
def test_are_rows_mixed_sorted_by_another_label_returns_false(sorted_by, not_mixed):
    """Rows sorted by gene and another label are not mixed with respect to that label; names of wells repeat."""
    labels = make_screen_labels()
    order = np.lexsort([labels[sorted_by], labels["gene"]])
    labels = {name: codes[order] for name, codes in labels.items()}
    for name in labels:
        assert are_mixed_by(labels, name) == (name not in not_mixed), name
    assert not are_mixed_by(labels, *labels)


def test_are_rows_mixed_few_sorted_perturbations_returns_false():
    """All controls share one guide, which must not hide perturbations that are sorted by guide."""
    labels = make_screen_labels()
    assert np.mean(labels["gene"] == 0) > 0.25
    key = np.where(np.isin(labels["gene"], [3, 9]), labels["guide"], np.arange(3000))
    order = np.lexsort([key, labels["gene"]])
    assert not are_mixed_by({name: codes[order] for name, codes in labels.items()}, "guide")


def test_are_rows_mixed_not_sorted_by_perturbation_returns_false():
    labels = make_screen_labels()
    order = np.random.default_rng(0).permutation(3000)
    assert not are_mixed_by({name: codes[order] for name, codes in labels.items()})
    assert not are_rows_mixed(np.arange(9), [np.zeros(9, dtype=int)])  # no perturbation has two cells


def test_are_rows_mixed_stops_at_first_label_that_is_not_mixed():
    labels = make_screen_labels()
    order = np.lexsort([labels["plate"], labels["gene"]])
    asked = []

    def yield_labels():
        for name in ("guide", "plate", "well"):
            asked.append(name)
            yield labels[name][order]

    assert not are_rows_mixed(labels["gene"][order], yield_labels())
    assert asked == ["guide", "plate"]


def test_are_rows_mixed_limit_is_equal_to_all_permutations(monkeypatch):
    """The limit follows from mean and variance of the number of adjacent pairs of one label, over all orders."""
    label = np.array([0, 0, 0, 1, 1, 2, 0, 1, 1, 0])
    y = np.array([0] * 6 + [1] * 4)
    shared = [
        np.array([np.count_nonzero(np.diff(np.array(order)) == 0) for order in permutations(label[y == g])])
        for g in (0, 1)
    ]
    mean, sd = sum(s.mean() for s in shared), np.sqrt(sum(s.var() for s in shared))
    # the limit is the number of pairs at which the answer changes, for several maximal z-scores
    for z in (-1.5, 0.0, 0.5):
        monkeypatch.setattr("scbd.data._samplers._MAX_Z_SCORE", z)
        counted = {}
        for order in set(permutations(label[y == 0].tolist())):
            row = np.concatenate([order, label[y == 1]])
            n = np.count_nonzero((np.diff(row) == 0) & (np.diff(y) == 0))
            counted[n] = are_rows_mixed(y, [row])
        assert len(set(counted.values())) == 2
        assert counted == {n: bool(n <= mean + z * sd + 1) for n in counted}
