from __future__ import annotations

from typing import get_args

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from scbd.metrics import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_recall,
)
from scbd.metrics import _resampling as module
from scbd.metrics._resampling import Resampled, Score, blocks_of, interval


def partners(pairs: list[tuple[int, int]], n: int) -> sparse.csr_array:
    one, two = np.array(pairs).T
    square = np.zeros((n, n), dtype=bool)
    square[one, two] = square[two, one] = True
    return sparse.csr_array(square)


def test_complexes_are_blocks_and_hubs_take_their_partners():
    sets = partners([(0, 1), (0, 2), (1, 2), (3, 4)], 6)
    assert blocks_of(sets).tolist() == [0, 0, 0, 1, 1, 2]
    # 4 has the most partners; of 0, 1 and 2 that are left, 1 has two
    chain = partners([(4, 3), (4, 5), (4, 6), (0, 1), (1, 2), (2, 3)], 7)
    assert blocks_of(chain).tolist() == [1, 1, 1, 0, 0, 0, 0]


def a_map(seed: int, ties: bool, dtype: type = np.float64) -> Relations:
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, (18, 3)) if ties else rng.normal(size=(18, 3))
    genes = [f"G{i}" for i in range(18)]
    rows = [(f"c{k}", g) for k in range(5) for g in rng.choice(genes, 4, replace=False)]
    return Relations(
        AnnData(X=x.astype(dtype), obs=pd.DataFrame(index=genes)), pd.DataFrame(rows, columns=["source", "target"])
    )


@given(st.integers(0, 1_000), st.booleans(), st.sampled_from([np.float32, np.float64]))
def test_each_block_once_gives_the_scores_themselves(seed, ties, dtype):
    relations = a_map(seed, ties, dtype)
    pairs = Resampled(relations, blocks_of(relations.known))
    once = np.ones(pairs.n_blocks)
    expected = relationship_average_precision(relations)
    assert pairs.score(once, "average_precision", 0.05) == pytest.approx(expected)
    assert pairs.score(once, "recall", 0.05) == pytest.approx(relationship_recall(relations))
    area = relationship_area(relationship_curve(relations))
    assert pairs.score(once, "area", 0.05) == pytest.approx(area)


def test_pairs_are_added_in_parts_as_at_once(monkeypatch):
    relations = a_map(3, ties=False)
    blocks = blocks_of(relations.known)
    drawn = np.random.default_rng(0).integers(0, 3, blocks.max() + 1).astype(float)
    whole = [Resampled(relations, blocks).score(drawn, score, 0.1, 1.2) for score in get_args(Score)]
    monkeypatch.setattr(module, "_PART", 7)
    assert [Resampled(relations, blocks).score(drawn, score, 0.1, 1.2) for score in get_args(Score)] == pytest.approx(
        whole
    )


@given(st.integers(0, 1_000))
def test_weights_are_copies_of_blocks(seed):
    """Average precision as a loop over pairs of drawn blocks."""
    relations = a_map(seed, ties=False)
    blocks = blocks_of(relations.known)
    n = blocks.max() + 1
    drawn = np.random.default_rng(seed).integers(n, size=n)
    copies = [(copy, gene) for copy, block in enumerate(drawn) for gene in np.flatnonzero(blocks == block)]
    listed = []
    for i, (copy, a) in enumerate(copies):
        for other, b in copies[i + 1 :]:
            if copy == other or blocks[a] != blocks[b]:
                listed.append((relations.cosine[a, b], relations.related[a, b]))
    cosine, known = map(np.array, zip(*listed, strict=True)) if listed else (np.zeros(0), np.zeros(0, dtype=bool))
    ours = Resampled(relations, blocks).score(np.bincount(drawn, minlength=n).astype(float), "average_precision", 0.05)
    if not known.any():
        assert np.isnan(ours)
        return
    assert ours == pytest.approx(np.mean([known[cosine >= limit].mean() for limit in cosine[known]]))


def test_few_blocks_ask_for_more_of_the_tails():
    values = np.arange(1_001.0)
    few, many = interval(values, 0.95, 5), interval(values, 0.95, 1e6)
    assert many == pytest.approx((25, 975), abs=0.1)
    assert few[0] < 5 and few[1] > 995
    assert interval(values, 0, 5) == pytest.approx((500, 500)) and interval(values, 1, 5) == (0, 1000)
