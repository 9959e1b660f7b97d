from __future__ import annotations

import numpy as np
import pytest

import scbd.metrics._principal_axes as module
from scbd.metrics._principal_axes import principal_axes


@pytest.mark.parametrize("shape", [(200, 5), (6, 20)])
def test_features_along_their_axes_have_that_variance_and_no_other(shape, monkeypatch):
    """Of some rows, more or fewer than features; the last feature is another's double."""
    monkeypatch.setattr(module, "_BLOCK", 7)
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1) + 1e5
    x[:, -1] = 2 * x[:, 0]
    rows = np.arange(1, shape[0])
    found = principal_axes(x, rows)
    np.testing.assert_allclose(found.mean, x[rows].mean(axis=0))
    np.testing.assert_allclose(found.sd, x[rows].std(axis=0))
    n_axes = min(shape[1] - 1, shape[0] - 2)
    assert found.axes.shape == (shape[1], n_axes) and (np.diff(found.variance) <= 0).all()
    np.testing.assert_allclose(found.axes.T @ found.axes, np.eye(n_axes), atol=1e-8)
    standard = (x[rows] - found.mean) / found.sd
    np.testing.assert_allclose(np.cov((standard @ found.axes).T, ddof=0), np.diag(found.variance), atol=1e-8)
    np.testing.assert_allclose(standard @ found.axes @ found.axes.T, standard, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_a_point_has_one_axis_without_variance(shape):
    found = principal_axes(np.ones(shape), np.arange(shape[0]))
    assert found.variance.tolist() == [0] and found.sd.tolist() == [1] * shape[1]
    assert np.isfinite(found.axes).all()
