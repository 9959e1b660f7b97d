from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from reference import relationships as naive
from scipy import sparse

from scbd.metrics import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_recall,
)
from scbd.metrics import _resampling as module
from scbd.metrics._relationships import PERCENTILES
from scbd.metrics._resampling import (
    Resampled,
    ScoreName,
    bootstrap_interval,
    bootstrap_p_value,
    divide_into_blocks,
    mean_cosine,
    permute_within_groups,
    sequential_p_values,
    weight_outside,
    weighted_percentiles,
)

GRID = np.array([0, 0.1, 1, 2.5, 5, 37.3, 50, 80, 86, 93, 99, 99.9, 100])


def unit_rows(x: np.ndarray, dtype: str) -> np.ndarray:
    return (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)).astype(dtype)


def make_cosines(seed: int, dtype: str) -> tuple[np.ndarray, int]:
    """Make cosines of all pairs of profiles that may repeat or be zero; rounding makes some larger than 1."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    n_kinds = int(rng.integers(1, n + 1))
    x = rng.normal(size=(n_kinds, 3)) if rng.integers(2) else rng.integers(-1, 2, (n_kinds, 3))
    unit = unit_rows(x[rng.integers(0, n_kinds, n)], dtype)
    return np.sort((unit @ unit.T)[np.triu_indices(n, 1)]), n


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=st.integers(0, 100_000), square=st.booleans())
def test_weighted_percentiles_are_equal_to_naive(dtype, seed, square):
    ordered, n = make_cosines(seed, dtype)
    n_genes = n if square else None
    np.testing.assert_array_equal(weighted_percentiles(ordered, GRID, n_genes), naive.limits(ordered, GRID, n_genes))
    once = np.arange(len(ordered) + 1.0)
    np.testing.assert_array_equal(
        weighted_percentiles(ordered, GRID, n_genes, before=once), weighted_percentiles(ordered, GRID, n_genes)
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=st.integers(0, 100_000), exact=st.booleans())
def test_weight_outside_counts_are_equal_to_double_precision(dtype, seed, exact):
    ordered, _ = make_cosines(seed, dtype)
    rng = np.random.default_rng(seed)
    lower, upper = np.sort(rng.choice(ordered, (2, 20)).astype(np.float64), axis=0)
    if not exact:
        lower, upper = np.nextafter(lower, -2), np.nextafter(upper, rng.choice([-2, 2], 20))
    outside = (ordered.astype(float) <= lower[:, None]) | (ordered.astype(float) >= upper[:, None])
    np.testing.assert_array_equal(weight_outside(ordered, lower, upper), outside.sum(axis=1))
    weight = rng.integers(0, 3, len(ordered))
    before = np.append(0.0, np.cumsum(weight))
    np.testing.assert_array_equal(weight_outside(ordered, lower, upper, before=before), outside @ weight)


def make_relation_matrix(pairs: list[tuple[int, int]], n: int) -> sparse.csr_array:
    one, two = np.array(pairs).T
    square = np.zeros((n, n), dtype=bool)
    square[one, two] = square[two, one] = True
    return sparse.csr_array(square)


def test_divide_into_blocks_sets_and_hubs_return_expected():
    sets = make_relation_matrix([(0, 1), (0, 2), (1, 2), (3, 4)], 6)
    assert divide_into_blocks(sets).tolist() == [0, 0, 0, 1, 1, 2]
    # gene 4 has the most partners; of the remaining genes 0, 1 and 2, gene 1 has the most
    chain = make_relation_matrix([(4, 3), (4, 5), (4, 6), (0, 1), (1, 2), (2, 3)], 7)
    assert divide_into_blocks(chain).tolist() == [1, 1, 1, 0, 0, 0, 0]


def make_relations(seed: int, ties: bool = False, dtype: Any = np.float64) -> Relations:
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, (18, 3)) if ties else rng.normal(size=(18, 3))
    genes = [f"G{i}" for i in range(18)]
    rows = [(f"c{k}", g) for k in range(5) for g in rng.choice(genes, 4, replace=False)]
    return Relations(
        AnnData(X=x.astype(dtype), obs=pd.DataFrame(index=genes)), pd.DataFrame(rows, columns=["source", "target"])
    )


def make_resampled(relations: Relations, tail: float = 0.05) -> tuple[Resampled, np.ndarray]:
    blocks = divide_into_blocks(relations.known)
    return Resampled(*relations.pairs(), blocks, tail=tail, percentiles=PERCENTILES), blocks


@given(st.integers(0, 1_000), st.booleans(), st.sampled_from([np.float32, np.float64]))
def test_resampled_score_each_block_once_is_equal_to_score(seed, ties, dtype):
    relations = make_relations(seed, ties, dtype)
    pairs, blocks = make_resampled(relations)
    once = np.ones(blocks.max() + 1)
    assert pairs.score(once, "average_precision") == pytest.approx(relationship_average_precision(relations))
    assert pairs.score(once, "recall") == pytest.approx(relationship_recall(relations))
    assert pairs.score(once, "area") == pytest.approx(relationship_area(relationship_curve(relations)))


def test_resampled_score_small_blocks_are_equal_to_whole(monkeypatch):
    pairs, blocks = make_resampled(make_relations(3), 0.1)
    drawn = np.random.default_rng(0).integers(0, 3, blocks.max() + 1).astype(float)
    whole = [pairs.score(drawn, score, 1.2) for score in get_args(ScoreName)]
    monkeypatch.setattr(module, "_PAIRS_PER_BLOCK", 7)
    assert [pairs.score(drawn, score, 1.2) for score in get_args(ScoreName)] == pytest.approx(whole)


@given(st.integers(0, 1_000))
def test_resampled_score_drawn_blocks_is_equal_to_naive(seed):
    """The average precision is equal to that of a loop over all pairs of the drawn blocks."""
    relations = make_relations(seed)
    pairs, blocks = make_resampled(relations)
    square, related = relations.unit @ relations.unit.T, relations.known.toarray()
    n = blocks.max() + 1
    drawn = np.random.default_rng(seed).integers(n, size=n)
    copies = [(copy, gene) for copy, block in enumerate(drawn) for gene in np.flatnonzero(blocks == block)]
    listed = [
        (square[a, b], related[a, b])
        for (copy, a), (other, b) in combinations(copies, 2)
        if copy == other or blocks[a] != blocks[b]
    ]
    cosine, known = map(np.array, zip(*listed, strict=True)) if listed else (np.zeros(0), np.zeros(0, dtype=bool))
    ours = pairs.score(np.bincount(drawn, minlength=n).astype(float), "average_precision")
    if known.any():
        assert ours == pytest.approx(np.mean([known[cosine >= limit - 1e-12].mean() for limit in cosine[known]]))
    else:
        assert np.isnan(ours)


def test_bootstrap_interval_few_blocks_is_wider():
    values = np.arange(1_001.0)
    few, many = bootstrap_interval(values, 0.95, 5), bootstrap_interval(values, 0.95, 1e6)
    assert many == pytest.approx((25, 975), abs=0.1)
    assert few[0] < 5 and few[1] > 995
    assert bootstrap_interval(values, 0, 5) == pytest.approx((500, 500)) and bootstrap_interval(values, 1, 5) == (
        0,
        1000,
    )


def test_bootstrap_p_value_is_level_of_interval_that_ends_at_zero():
    values = np.arange(1_001.0) - 40
    p = bootstrap_p_value(values, 12)
    assert bootstrap_interval(values, 1 - p, 12)[0] == pytest.approx(0, abs=2)
    assert bootstrap_p_value(values, 3) > p and bootstrap_p_value(values - 460, 12) == 1


def make_unit_rows(n: int, seed: int) -> np.ndarray:
    return unit_rows(np.random.default_rng(seed).normal(size=(n, 3)), "float64")


@pytest.mark.parametrize("width", [7, 2_048])
def test_sequential_p_values_few_genes_are_equal_to_enumeration(monkeypatch, width):
    """With seven genes, all sets of two, three and seven genes can be enumerated."""
    monkeypatch.setattr(module, "_MAX_ORDERS", width)
    x, n = make_unit_rows(7, 0), 4_000
    given = [np.array(rows) for size in (2, 3, 7) for rows in list(combinations(range(7), size))[::4]]
    observed = np.array([mean_cosine(x[rows]) for rows in given])
    sizes = np.array([len(rows) for rows in given])
    p = sequential_p_values(x, sizes, observed, n, n, np.random.default_rng(0))
    for rows, score, ours in zip(given, observed, p, strict=True):
        all_sets = [mean_cosine(x[list(other)]) for other in combinations(range(7), len(rows))]
        exact = np.mean(np.array(all_sets) >= score - 1e-12)
        assert ours == pytest.approx(exact, abs=4.5 * np.sqrt(exact * (1 - exact) / n) + 1 / n)


def test_mean_cosine_is_equal_to_mean_of_all_pairs():
    x = make_unit_rows(5, 1)
    assert mean_cosine(x) == pytest.approx((x @ x.T)[np.triu_indices(5, k=1)].mean())


def test_sequential_p_values_common_scores_stop_early(monkeypatch):
    """The scores of the three sets are reached by each random set, by one in four, and by none."""
    rounds = []
    real = module._count_sets_as_similar

    def count_and_record(unit, sizes, observed, n, rng):
        rounds.append((n, len(sizes)))
        return real(unit, sizes, observed, n, rng)

    monkeypatch.setattr(module, "_count_sets_as_similar", count_and_record)
    x = make_unit_rows(40, 2)
    observed = np.array([-1.0, np.quantile((x @ x.T)[np.triu_indices(40, k=1)], 0.75), 2.0])
    p = sequential_p_values(x, np.array([2, 2, 2]), observed, 8, 400, np.random.default_rng(0))
    assert [n for n, _ in rounds] == [8, 8, 16, 32, 64, 128, 144]
    assert rounds[0][1] == 3 and rounds[-1][1] == 1
    assert p[0] == 1 and 0.1 < p[1] < 0.5 and p[2] == pytest.approx(1 / 401)


@given(seed=st.integers(0, 1000))
def test_permute_within_groups_labels_stay_in_their_groups(seed):
    rng = np.random.default_rng(seed)
    e, labels = rng.integers(3, size=20), rng.integers(4, size=20)
    for permuted in permute_within_groups(labels, e, 5, rng):
        for environment in range(3):
            of = e == environment
            assert sorted(permuted[of]) == sorted(labels[of])


def test_permute_within_groups_all_orders_are_equally_likely():
    permuted = permute_within_groups(np.arange(3), np.zeros(3, dtype=int), 6_000, np.random.default_rng(0))
    assert (np.abs(np.unique(permuted, axis=0, return_counts=True)[1] - 1000) < 150).all()
