from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import relationships as naive

from scbd.metrics._thresholds import count_outside, thresholds

GRID = np.array([0, 0.1, 1, 2.5, 5, 37.3, 50, 80, 86, 93, 99, 99.9, 100])


def cosines(seed: int, dtype: str) -> tuple[np.ndarray, int]:
    """Of each pair, some of profiles that repeat or are zero; rounding makes some larger than 1."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    n_kinds = int(rng.integers(1, n + 1))
    x = rng.normal(size=(n_kinds, 3)) if rng.integers(2) else rng.integers(-1, 2, (n_kinds, 3))
    x = x[rng.integers(0, n_kinds, n)]
    unit = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)).astype(dtype)
    return np.sort((unit @ unit.T)[np.triu_indices(n, 1)]), n


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=st.integers(0, 100_000), square=st.booleans())
def test_limits_are_those_of_the_whole_matrix_to_the_last_bit(dtype, seed, square):
    ordered, n = cosines(seed, dtype)
    n_genes = n if square else None
    np.testing.assert_array_equal(thresholds(ordered, GRID, n_genes), naive.limits(ordered, GRID, n_genes))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=st.integers(0, 100_000), exact=st.booleans())
def test_counts_are_those_of_a_comparison_in_double_precision(dtype, seed, exact):
    ordered, _ = cosines(seed, dtype)
    rng = np.random.default_rng(seed)
    lower, upper = np.sort(rng.choice(ordered, (2, 20)).astype(np.float64), axis=0)
    if not exact:
        lower, upper = np.nextafter(lower, -2), np.nextafter(upper, rng.choice([-2, 2], 20))
    expected = [
        ((ordered.astype(float) <= a) | (ordered.astype(float) >= b)).sum() for a, b in zip(lower, upper, strict=True)
    ]
    np.testing.assert_array_equal(count_outside(ordered, lower, upper), expected)
