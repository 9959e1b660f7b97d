from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tables import plates

from scbd.baselines import sphering


@given(st.integers(0, 100), st.sampled_from([0.01, 1.0, 30.0]), st.booleans())
def test_distances_are_those_of_an_inverse_covariance(seed, regularization, held_out):
    wells = plates(seed=seed)
    fit = wells.plates != "plate 0" if held_out else np.ones(len(wells.plates), dtype=bool)
    reference = wells.features[wells.controls & fit]
    scaled = (wells.features - reference.mean(0)) / reference.std(0, ddof=1)
    metric = np.linalg.inv(np.corrcoef(reference.T) + regularization * np.eye(6))
    found = sphering(wells.features, controls=wells.controls, fit=fit, regularization=regularization)
    np.testing.assert_allclose(found @ found.T, scaled @ metric @ scaled.T, rtol=1e-3, atol=1e-3)


def test_controls_are_white_and_the_origin():
    wells = plates(n_plates=40)
    white = sphering(wells.features, controls=wells.controls, regularization=0)[wells.controls]
    np.testing.assert_allclose(np.cov(white.T), np.eye(6), atol=1e-4)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-5)
    part = sphering(wells.features, controls=wells.controls, regularization=1)[wells.controls]
    assert (np.diff(part.var(0)) < 0).all()  # what varied most still does


def test_a_feature_that_no_control_varies_in_counts_nothing():
    wells = plates()
    flat = np.concatenate([wells.features, np.where(wells.controls, 0.3, 5)[:, None]], axis=1)
    found = sphering(flat, controls=wells.controls, regularization=0)
    np.testing.assert_allclose(found[:, :6], sphering(wells.features, controls=wells.controls, regularization=0))
    assert (found[:, 6] == 0).all()
    with pytest.raises(ValueError, match="features are constant in all rows that they would be scaled by"):
        sphering(flat[:, 6:], controls=wells.controls)


def test_few_controls_need_regularization():
    wells = plates(d=40)
    with pytest.raises(ValueError, match="regularization=0: the covariance has no inverse, as rows are fewer"):
        sphering(wells.features, controls=wells.controls, regularization=0)
    with pytest.raises(ValueError, match="regularization=-1: give"):
        sphering(wells.features, controls=wells.controls, regularization=-1)
    assert np.isfinite(sphering(wells.features, controls=wells.controls, regularization=1e-3)).all()
