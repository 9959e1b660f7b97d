from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy.linalg import sqrtm

from scbd.baselines import cellprofiler_pca, standardize_by_environment, tvn


def wells(n: int = 900, d: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features with a shift, a scale and a mixing of their own in each of three wells; a third are controls."""
    rng = np.random.default_rng(seed)
    well, control = np.arange(n) % 3, np.arange(n) // 3 % 3 == 0
    cells = rng.normal(size=(n, d)) + 2.0 * ~control[:, None]
    for w in range(3):
        cells[well == w] = cells[well == w] @ (np.eye(d) + 0.4 * rng.normal(size=(d, d))) + 5 * rng.normal(size=d)
    return cells, well.astype(str), control


def test_wells_are_standardised_on_their_controls():
    cells, well, control = wells()
    found = standardize_by_environment(cells, well, controls=control)
    for w in "012":
        here = found[(well == w) & control]
        np.testing.assert_allclose(here.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(here.std(0, ddof=1), 1, atol=1e-5)
        own = cells[(well == w) & control]
        np.testing.assert_allclose(found[well == w], (cells[well == w] - own.mean(0)) / own.std(0, ddof=1), rtol=1e-4)
    centred = standardize_by_environment(cells, well, scale=False)
    np.testing.assert_allclose(
        centred[well == "1"], cells[well == "1"] - cells[well == "1"].mean(0), rtol=1e-4, atol=1e-5
    )
    constant = np.ones((6, 2))
    assert (standardize_by_environment(constant, ["a"] * 6) == 0).all()


def test_tvn_makes_controls_white_and_alike():
    cells, well, control = wells(30_000)
    found = tvn(cells, well, controls=control, regularization=1e-6)
    for w in "012":
        here = found[(well == w) & control]
        np.testing.assert_allclose(here.mean(0), 0, atol=1e-4)
        # the covariance of all controls after centring, which is that of none in particular
        np.testing.assert_allclose(np.cov(here.T), np.cov(found[control].T), atol=0.01)
    # what perturbed cells have over controls is there in every well, and the same
    shifts = np.stack([np.linalg.norm(found[(well == w) & ~control].mean(0)) for w in "012"])
    assert shifts.min() > 1 and np.ptp(shifts) / shifts.mean() < 0.1


def test_tvn_is_whitening_and_correlation_alignment():
    cells, well, control = wells()
    mean, covariance = cells[control].mean(0), np.cov(cells[control].T)
    values, vectors = np.linalg.eigh(covariance)
    white = (cells - mean) @ vectors / np.sqrt(values)
    for w in "012":
        white[well == w] -= white[(well == w) & control].mean(0)
    target = sqrtm(np.cov(white[control].T) + np.eye(4))
    expected = np.empty_like(white)
    for w in "012":
        own = np.cov(white[(well == w) & control].T) + np.eye(4)
        expected[well == w] = white[well == w] @ np.linalg.inv(sqrtm(own)) @ target
    np.testing.assert_allclose(tvn(cells, well, controls=control), expected, rtol=1e-3, atol=1e-4)
    # a direction in which no control varies says nothing of typical variation
    doubled = np.concatenate([cells, cells[:, :1]], axis=1)
    assert tvn(doubled, well, controls=control).shape == cells.shape


def test_what_cannot_be_corrected_is_refused():
    cells, well, control = wells(30)
    with pytest.raises(ValueError, match="1 environments have fewer than two controls \\(such as '2'\\)"):
        standardize_by_environment(cells, well, controls=control & (well != "2"))
    with pytest.raises(ValueError, match="environments and controls \\(N,\\), got"):
        standardize_by_environment(cells, well[:5])
    with pytest.raises(ValueError, match="regularization=0"):
        tvn(cells, well, controls=control, regularization=0)


def measured() -> AnnData:
    cells, well, control = wells()
    cells = np.concatenate([cells, np.full((900, 1), np.nan), np.ones((900, 1))], axis=1)
    cells[5, 0] = np.inf
    obs = pd.DataFrame(
        {"well": well, "gene": np.where(control, "nontargeting", "A")}, index=[f"{i}" for i in range(900)]
    )
    return AnnData(obs=obs, obsm={"X_cellprofiler": cells})


def test_cellprofiler_features_are_standardised_and_reduced():
    adata = measured()
    found = cellprofiler_pca(adata, e_key="well", n_components=3)
    assert found.shape == (900, 3) and found.dtype == np.float32 and np.isfinite(found).all()
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-4)
    assert (np.diff(found.var(0)) < 0).all()
    assert cellprofiler_pca(adata, e_key=None).shape == (900, 4)
    # wells cannot be told apart by their means any more
    means = np.stack([found[(adata.obs["well"] == w).to_numpy()].mean(0) for w in "012"])
    raw = cellprofiler_pca(adata, e_key=None)
    apart = np.stack([raw[(adata.obs["well"] == w).to_numpy()].mean(0) for w in "012"])
    assert np.ptp(means, axis=0).max() < 0.3 * np.ptp(apart, axis=0).max()
    with pytest.raises(KeyError, match="obsm has no 'features' \\(it has: X_cellprofiler\\)"):
        cellprofiler_pca(adata, e_key="well", features_key="features")
    adata.obsm["X_cellprofiler"] = np.ones((900, 2))
    with pytest.raises(ValueError, match="no feature that varies"):
        cellprofiler_pca(adata, e_key="well")
