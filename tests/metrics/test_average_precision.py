from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import retrieval as naive

from scbd.metrics import _average_precision as ap
from scbd.metrics._average_precision import (
    NullDistribution,
    average_precision,
    expected_average_precision,
    scale_to_unit_length,
    score_queries,
)

# few values, so that many are equal
few = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)


@given(few.filter(lambda items: any(positive for _, positive in items)))
def test_average_precision_ties_are_equal_to_mean_of_all_orders(items):
    similarity, relevant = map(list, zip(*items, strict=True))
    positives = np.array([value for value, positive in items if positive], dtype=float)
    negatives = np.array([value for value, positive in items if not positive], dtype=float)
    expected = pytest.approx(naive.over_all_orders(similarity, relevant))
    assert average_precision(positives, negatives) == expected
    with mock.patch.object(ap, "_MAX_POSITIVES_WITHOUT_SORTING", 0):
        assert average_precision(positives, negatives) == expected


@given(st.integers(1, 4), st.integers(1, 4))
def test_expected_average_precision_is_equal_to_mean_of_all_orders(n_positives, n_negatives):
    relevant = [True] * n_positives + [False] * n_negatives
    assert expected_average_precision(n_positives, n_negatives) == pytest.approx(
        naive.over_all_orders([0.0] * len(relevant), relevant)
    )


def test_null_distribution_scores_match_random_orders():
    """All 15 orders of two positives among six items occur equally often."""
    orders = [naive.average_precision([i in found for i in range(6)]) for found in itertools.combinations(range(6), 2)]
    values, counts = np.unique(np.round(orders, 9), return_counts=True)
    drawn, found = np.unique(np.round(NullDistribution(60_000, 0)._scores(2, 4), 9), return_counts=True)
    np.testing.assert_array_equal(drawn, values)
    sd = np.sqrt(60_000 * counts / 15 * (1 - counts / 15))
    assert (np.abs(found - 60_000 * counts / 15) < 4 * sd).all()


def test_null_distribution_scores_ignore_previous_draws(monkeypatch):
    null = NullDistribution(1000, 3)
    null._scores(1, 9)
    np.testing.assert_array_equal(null._scores(4, 50), NullDistribution(1000, 3)._scores(4, 50))
    assert null._scores(4, 50).mean() == pytest.approx(expected_average_precision(4, 50), abs=0.02)
    monkeypatch.setattr(ap, "_MAX_NUMBERS_IN_MEMORY", 500)  # the null is computed in several blocks
    assert len(NullDistribution(1000, 3)._scores(4, 50)) == 1000


def test_p_value_known_null_returns_expected():
    null = NullDistribution(999, 0)
    assert null.p_value(1.0, [5], [200]) == pytest.approx(0.001)
    assert null.p_value(0.0, [5], [200]) == 1
    # one positive among ten comes first by chance in one case of ten, however many queries there are
    assert null.p_value(1.0, [1], [9]) == pytest.approx(0.1, abs=0.04)
    assert null.p_value(1.0, [1, 1, 1], [9, 9, 9]) == null.p_value(1.0, [1], [9])
    both = (null._scores(1, 9) + null._scores(2, 30)) / 2
    assert null.p_value(0.5, [1, 2], [9, 30]) == pytest.approx((1 + (both >= 0.5).sum()) / 1000)


def test_p_value_random_ranking_is_uniform():
    rng = np.random.default_rng(0)
    scores = [average_precision(rng.random(3), rng.random(40)) for _ in range(800)]
    null = NullDistribution(5000, 0)
    p = np.array([null.p_value(score, [3], [40]) for score in scores])
    for level in (0.05, 0.2, 0.5):
        assert abs((p <= level).mean() - level) < 4 * np.sqrt(level * (1 - level) / 800)


def test_score_queries_small_blocks_are_equal_to_whole(monkeypatch):
    rng = np.random.default_rng(0)
    unit, label = scale_to_unit_length(rng.normal(size=(40, 5))), rng.integers(8, size=40)
    rows = np.arange(40)

    def score():
        return score_queries(
            unit,
            rows,
            rows,
            positives=lambda row: rows[(label == label[row]) & (rows != row)],
            negatives=lambda block: label[block][:, None] != label,
        )

    whole = score()
    monkeypatch.setattr(ap, "_MAX_NUMBERS_IN_MEMORY", 130)
    pd.testing.assert_frame_equal(whole, score(), check_exact=True)


def test_scale_to_unit_length_zero_row_stays_zero():
    unit = scale_to_unit_length(np.array([[3, 4], [0, 0]], dtype=np.float16))
    np.testing.assert_allclose(unit, [[0.6, 0.8], [0.0, 0.0]])
    assert unit.dtype == np.float64
