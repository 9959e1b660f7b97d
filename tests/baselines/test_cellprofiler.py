from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from small_tables import wells

from scbd.baselines import cellprofiler_pca


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
