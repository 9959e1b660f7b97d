from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scbd._linear_maps import between_normals, covariance


def normal(rng: np.random.Generator, width: int) -> tuple[np.ndarray, np.ndarray]:
    factor = rng.normal(size=(width, width))
    return rng.normal(size=width), factor @ factor.T + 0.1 * np.eye(width)


@given(seed=st.integers(0, 99), width=st.integers(1, 6))
def test_rows_come_to_the_other_mean_and_covariance(seed, width):
    rng = np.random.default_rng(seed)
    rows, there = rng.normal(size=(200, width)) @ rng.normal(size=(width, width)), normal(rng, width)
    mapped = between_normals((rows.mean(0), covariance(rows)), there, 0.0)(rows)
    np.testing.assert_allclose(mapped.mean(0), there[0], atol=1e-3)
    np.testing.assert_allclose(covariance(mapped), there[1], rtol=1e-3, atol=1e-3 * there[1].max())


@given(seed=st.integers(0, 99))
def test_nothing_is_moved_further_than_it_must(seed):
    """Of all linear maps between two normal distributions this one alone is symmetric, and has no negative axis."""
    rng = np.random.default_rng(seed)
    here, there = normal(rng, 4), normal(rng, 4)
    matrix = between_normals(here, there, 0.0).matrix
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-8 * np.abs(matrix).max())
    assert np.linalg.eigvalsh(matrix).min() > 0
    still = between_normals(here, here, 0.3)
    np.testing.assert_allclose(still.matrix, np.eye(4), atol=1e-6)
    np.testing.assert_allclose(still.offset, 0, atol=1e-5)


def test_shrunk_to_the_end_it_is_a_scale():
    rng = np.random.default_rng(0)
    here, there = normal(rng, 3), normal(rng, 3)
    scale = np.sqrt(np.trace(there[1]) / np.trace(here[1]))
    np.testing.assert_allclose(between_normals(here, there, 1.0).matrix, scale * np.eye(3), atol=1e-10)


def test_axes_without_variance_lead_nowhere():
    flat = np.zeros(2), np.diag([1.0, 0.0])
    np.testing.assert_allclose(
        between_normals(flat, (np.ones(2), np.diag([4.0, 1.0])), 0.0).matrix, np.diag([2.0, 0.0])
    )
