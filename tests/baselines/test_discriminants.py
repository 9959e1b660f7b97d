from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.rivals import means_of, within
from scipy.linalg import eigh, sqrtm
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from small_tables import plates

from scbd.baselines import lda, plda, wccn


def test_discriminants_are_those_of_scikit_learn():
    wells = plates(n_controls=1)  # as many rows a label
    features = wells.features / wells.features.std(0)
    n, n_labels = len(wells.features), len(set(wells.compounds))
    theirs = LinearDiscriminantAnalysis(solver="eigen", n_components=3).fit(features, wells.compounds)
    expected = theirs.transform(features) * np.sqrt((n - n_labels) / n)  # its covariance is the biased one
    found = lda(wells.features, wells.compounds, n_components=3, regularization=0)
    expected -= expected.mean(0)
    np.testing.assert_allclose(found * np.sign((found * expected).sum(0)), expected, rtol=1e-3, atol=1e-4)


@given(st.integers(0, 100), st.sampled_from([0.1, 1.0]), st.sampled_from([0.0, 2.0]))
def test_lda_is_a_generalised_eigenproblem(seed, regularization, weight):
    wells = plates(seed=seed)
    fit = (wells.plates != "plate 0") & (wells.compounds != "3")
    scaled, spread = within(wells, fit, weight, by_controls=True)
    between = np.cov(means_of(scaled, wells, fit).T)
    _, axes = eigh(between, spread + regularization * np.eye(6))
    expected = scaled @ axes[:, ::-1][:, :3]
    how = {"controls": wells.controls, "positions": wells.positions, "position_weight": weight}
    found = lda(wells.features, wells.compounds, n_components=3, fit=fit, regularization=regularization, **how)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-3)


@given(st.integers(0, 100), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 2.0]))
def test_plda_scales_by_what_belongs_to_the_label(seed, shrinkage, weight):
    wells = plates(seed=seed)
    fit = (wells.plates != "plate 0") & (wells.compounds != "3")
    scaled, spread = within(wells, fit, weight, by_controls=True)
    root = np.linalg.inv(sqrtm(spread + np.eye(6)))
    between = root @ np.cov(means_of(scaled, wells, fit).T) @ root
    between = (1 - shrinkage) * between + shrinkage * np.trace(between) / 6 * np.eye(6)
    gains = between @ np.linalg.inv(between + np.eye(6))
    expected = scaled @ root @ gains
    how = {"controls": wells.controls, "positions": wells.positions, "position_weight": weight}
    found = plda(wells.features, wells.compounds, fit=fit, shrinkage=shrinkage, **how)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-3)


def test_there_are_no_more_directions_than_differences():
    wells = plates(n_compounds=2)
    assert lda(wells.features, wells.compounds).shape == (40, 2)  # of two compounds and controls
    assert plda(wells.features, wells.compounds).shape == (40, 6)
    whole = lda(wells.features, wells.compounds, n_components=2)
    np.testing.assert_allclose(lda(wells.features, wells.compounds, n_components=1), whole[:, :1], rtol=1e-5)


def test_all_directions_that_count_alike_are_wccn():
    wells = plates()
    white = wccn(wells.features, wells.compounds, regularization=1)
    found = lda(wells.features, wells.compounds, n_components=6)
    np.testing.assert_allclose(found @ found.T, white @ white.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rival", [lda, plda])
def test_one_label_differs_from_none(rival):
    wells = plates()
    with pytest.raises(ValueError, match="There is one label to learn from"):
        rival(wells.features, wells.compounds, fit=wells.controls)


def test_settings_out_of_range_are_refused():
    wells = plates()
    with pytest.raises(ValueError, match="n_components=0: give"):
        lda(wells.features, wells.compounds, n_components=0)
    with pytest.raises(ValueError, match="shrinkage=2: give a number from 0 to 1"):
        plda(wells.features, wells.compounds, shrinkage=2)
