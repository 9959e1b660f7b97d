from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from scbd.metrics import _random_sets as module
from scbd.metrics._random_sets import mean_cosine, sequential_p_values


def unit(n: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(n, 3))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("width", [7, 2_048])
def test_p_values_are_those_of_all_sets(monkeypatch, width):
    """Of seven genes, every set of two, three and seven is known."""
    monkeypatch.setattr(module, "_ORDERS", width)
    x, n = unit(7, 0), 4_000
    given = [np.array(rows) for size in (2, 3, 7) for rows in list(combinations(range(7), size))[::4]]
    observed = np.array([mean_cosine(x[rows]) for rows in given])
    sizes = np.array([len(rows) for rows in given])
    p = sequential_p_values(x, sizes, observed, n, n, np.random.default_rng(0))
    for rows, score, ours in zip(given, observed, p, strict=True):
        all_sets = [mean_cosine(x[list(other)]) for other in combinations(range(7), len(rows))]
        exact = np.mean(np.array(all_sets) >= score - 1e-12)
        assert ours == pytest.approx(exact, abs=4.5 * np.sqrt(exact * (1 - exact) / n) + 1 / n)


def test_mean_cosine_is_that_of_all_pairs():
    x = unit(5, 1)
    assert mean_cosine(x) == pytest.approx((x @ x.T)[np.triu_indices(5, k=1)].mean())


def test_what_is_common_is_counted_no_longer_than_needed(monkeypatch):
    """Three sets: one that each random set reaches, one that one in four does, and one that none does."""
    rounds = []
    real = module._count_as_alike

    def counted(unit, sizes, observed, n, rng):
        rounds.append((n, len(sizes)))
        return real(unit, sizes, observed, n, rng)

    monkeypatch.setattr(module, "_count_as_alike", counted)
    x = unit(40, 2)
    observed = np.array([-1.0, np.quantile((x @ x.T)[np.triu_indices(40, k=1)], 0.75), 2.0])
    p = sequential_p_values(x, np.array([2, 2, 2]), observed, 8, 400, np.random.default_rng(0))
    assert [n for n, _ in rounds] == [8, 8, 16, 32, 64, 128, 144]
    assert rounds[0][1] == 3 and rounds[-1][1] == 1
    assert p[0] == 1 and 0.1 < p[1] < 0.5 and p[2] == pytest.approx(1 / 401)
