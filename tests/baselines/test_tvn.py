from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from small_tables import wells

from scbd.baselines import tvn


def test_controls_are_white_and_alike():
    cells, well, control = wells(30_000)
    found = tvn(cells, well, controls=control, regularization=1e-6)
    np.testing.assert_allclose(np.cov(found[control].T), np.eye(4), atol=0.02)
    for w in "012":
        here = found[(well == w) & control]
        np.testing.assert_allclose(here.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(np.cov(here.T), np.eye(4), atol=0.03)
    # what perturbed cells have over controls is there in every well, and the same
    shifts = np.stack([np.linalg.norm(found[(well == w) & ~control].mean(0)) for w in "012"])
    assert shifts.min() > 1 and np.ptp(shifts) / shifts.mean() < 0.1
    # all controls together stay white, however little single wells are trusted
    for regularization in (0.5, 100):
        found = tvn(cells, well, controls=control, regularization=regularization)
        np.testing.assert_allclose(np.cov(found[control].T), np.eye(4), atol=0.02)


def naive(cells: np.ndarray, well: np.ndarray, control: np.ndarray, regularization: float) -> np.ndarray:
    """In the space where controls are white, up to a rotation."""
    identity = np.eye(cells.shape[1])
    centred = cells.astype(float)
    for w in set(well):
        centred[well == w] -= centred[(well == w) & control].mean(0)
    free = control.sum() - len(set(well))
    centred /= np.sqrt((centred[control] ** 2).sum(0) / free)
    share = len(identity) / (len(identity) + free)
    pooled = (1 - share) * centred[control].T @ centred[control] / free + share * identity
    root = np.linalg.inv(sqrtm(pooled))
    expected, total = np.empty_like(centred), np.zeros_like(identity)
    for w in set(well):
        own = centred[(well == w) & control]
        spread = root @ ((1 - share) * np.cov(own.T) + share * identity) @ root
        aligned = np.linalg.inv(sqrtm(spread + regularization * identity))
        expected[well == w] = centred[well == w] @ root @ aligned
        total += (len(own) - 1) / free * aligned @ spread @ aligned
    return expected @ np.linalg.inv(sqrtm(total))


@given(st.integers(0, 100), st.sampled_from([0.01, 0.5, 10.0]), st.sampled_from([90, 300]))
def test_it_is_whitening_and_correlation_alignment(seed, regularization, n):
    cells, well, control = wells(n, seed=seed)
    found, expected = (
        tvn(cells, well, controls=control, regularization=regularization),
        naive(cells, well, control, regularization),
    )
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-3)


def test_units_do_not_matter():
    cells, well, control = wells()
    found = tvn(cells, well, controls=control)
    other = tvn(cells * [1e4, 1e-3, 1, 1e-9], well, controls=control)
    assert other.shape == found.shape
    np.testing.assert_allclose(other @ other.T, found @ found.T, rtol=1e-3, atol=1e-3)


def test_few_controls_are_not_trusted():
    """With as many controls as features, directions in which no control varies were blown up to a variance of 3,000."""
    rng = np.random.default_rng(0)
    cells, control = rng.normal(size=(1_000, 24)), np.arange(1_000) < 24
    found = tvn(cells, ["plate"] * 1_000, controls=control)
    assert 0.5 < found[~control].var() < 3
    two = tvn(cells, ["plate"] * 1_000, controls=[0, 1])
    assert np.isfinite(two).all()


def test_features_that_tell_nothing_are_left_out(caplog):
    cells, well, control = wells()
    flat = np.concatenate([cells, np.where(control, 0.3, cells[:, 0])[:, None]], axis=1)
    with caplog.at_level(logging.INFO, logger="scbd"):
        found = tvn(flat, well, controls=control)
    assert "Left out 1 of 5 features that are constant among controls" in caplog.text
    np.testing.assert_allclose(found, tvn(cells, well, controls=control), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="No feature varies among the controls"):
        tvn(np.ones((30, 2)), well[:30], controls=control[:30])


def test_test_plates_take_part_with_their_controls():
    cells, well, control = wells()
    seen = (well != "2") | control
    changed = np.where(seen[:, None], cells, 7.0)
    np.testing.assert_array_equal(
        tvn(changed, well, controls=control, fit=seen)[seen], tvn(cells, well, controls=control, fit=seen)[seen]
    )
    with pytest.raises(ValueError, match="1 environments have fewer than two controls in fit \\(such as '2'\\)"):
        tvn(cells, well, controls=control, fit=well != "2")
    with pytest.raises(ValueError, match="regularization=0"):
        tvn(cells, well, controls=control, regularization=0)
