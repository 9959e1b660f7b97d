from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from sklearn.decomposition import PCA
from small_tables import wells

from scbd.baselines import cellprofiler_pca, standardize_by_environment


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


def test_what_is_missing_is_typical_where_it_is_missing():
    """A well that lies far off: the median of all wells is not typical there."""
    adata = measured()
    cells = adata.obsm["X_cellprofiler"][:, :4]
    cells[5, 0] = 0
    cells[(adata.obs["well"] == "1").to_numpy()] += 30
    adata.obsm["X_cellprofiler"] = cells
    whole = cellprofiler_pca(adata, e_key="well", n_components=4)
    others = ((adata.obs["well"] == "1") & (adata.obs["gene"] != "nontargeting")).to_numpy()
    rows = np.flatnonzero(others)[:50]
    cells[rows, 2] = np.nan
    found = cellprofiler_pca(adata, e_key="well", n_components=4)
    lengths, before = (np.linalg.norm(z[rows], axis=1) for z in (found, whole))
    assert lengths.mean() < before.mean()
    # what is known of all other cells stays
    rest = np.setdiff1d(np.arange(900), rows)
    np.testing.assert_allclose(
        np.linalg.norm(found[rest] - found[rest[0]], axis=1),
        np.linalg.norm(whole[rest] - whole[rest[0]], axis=1),
        atol=0.05,
    )


def test_without_missing_values_it_is_the_standardised_table():
    adata = measured()
    cells = adata.obsm["X_cellprofiler"] = adata.obsm["X_cellprofiler"][:, :4]
    cells[5, 0] = 0
    controls = (adata.obs["gene"] == "nontargeting").to_numpy()
    table = standardize_by_environment(cells, adata.obs["well"].to_numpy(), controls=controls).clip(-10, 10)
    exact = PCA(4, svd_solver="full").fit_transform(table)
    np.testing.assert_allclose(np.abs(cellprofiler_pca(adata, e_key="well")), np.abs(exact), atol=1e-3)


def test_what_no_control_of_an_environment_has_is_typical_there():
    """Raw units, such as areas in pixels, would outweigh all that is standardised."""
    adata = measured()
    cells = adata.obsm["X_cellprofiler"] = adata.obsm["X_cellprofiler"][:, :4]
    cells[5, 0] = 0
    here, control = (adata.obs["well"] == "1").to_numpy(), (adata.obs["gene"] == "nontargeting").to_numpy()
    without = cells.copy()
    cells[:, 3] = np.random.default_rng(0).gamma(2, 200, 900)
    cells[here & control, 3] = 0
    without[:, 3] = np.where(here, cells[~here & control, 3].mean(), cells[:, 3])
    found = cellprofiler_pca(adata, e_key="well", n_components=4)
    assert np.abs(found).max() < 8
    # as if all cells had what is typical
    cells[here, 3] = 7
    np.testing.assert_array_equal(found, cellprofiler_pca(adata, e_key="well", n_components=4))


def test_several_controls_and_features_that_an_environment_lacks():
    adata = measured()
    adata.obsm["X_cellprofiler"][(adata.obs["well"] == "2").to_numpy(), 1] = np.nan
    one = cellprofiler_pca(adata, e_key="well")
    assert np.isfinite(one).all()
    adata.obs.loc[adata.obs.index[:300], "gene"] = adata.obs["gene"].iloc[:300].replace("nontargeting", "DMSO")
    with_both = cellprofiler_pca(adata, e_key="well", control=["nontargeting", "DMSO"])
    np.testing.assert_array_equal(with_both, one)
    with pytest.raises(ValueError, match="No row has the control 'untreated' in 'gene'"):
        cellprofiler_pca(adata, e_key="well", control="untreated")
    # as a number, in a column of numbers
    adata.obs["gene"] = adata.obs["gene"].map({"nontargeting": 0, "DMSO": 1, "A": 2}).astype(float)
    np.testing.assert_array_equal(cellprofiler_pca(adata, e_key="well", control=[0, 1]), one)
    with pytest.raises(ValueError, match="control=nan is no value: give control the value of 'gene'"):
        cellprofiler_pca(adata, e_key="well", control=np.nan)
    assert not np.array_equal(cellprofiler_pca(adata, e_key="well", control=None), one)
