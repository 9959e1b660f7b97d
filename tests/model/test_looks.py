from __future__ import annotations

import numpy as np

from scbd.model._looks import _normal


def test_one_pair_among_cells_alone_in_their_groups_is_no_covariance():
    z = np.random.default_rng(0).normal(size=(64, 8))
    groups = np.arange(64)
    groups[1] = 0
    mean, covariance = _normal(z, groups)
    np.testing.assert_allclose(mean, z.mean(0))
    np.testing.assert_allclose(covariance, np.cov(z.T))
