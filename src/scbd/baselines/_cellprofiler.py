"""CellProfiler's features as an embedding: standardised on each well's controls, and reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._labels import label_values
from scbd.baselines._standardize import standardize_by_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# standard deviations, beyond which a value is a segmentation gone wrong
_CLIPPED = 10.0


def cellprofiler_pca(
    adata: AnnData,
    *,
    e_key: str | Sequence[str] | None,
    y_key: str = "gene",
    control: str | None = "nontargeting",
    features_key: str = "X_cellprofiler",
    n_components: int = 64,
    seed: int = 0,
) -> np.ndarray:
    """Embed cells by the principal components of a table of measured features.

    Features are standardised within each environment on its controls, clipped at ten standard deviations, and reduced.
    Features that are missing in a cell count as typical there; those that are nowhere, or never vary, are left out.

    Parameters
    ----------
    adata
        Cells with features in ``obsm``, such as those of :func:`scbd.datasets.funk22_cellprofiler`.
    e_key
        Column or columns of the environment; `None` where the table has been standardised already.
    y_key, control
        Column of the perturbation, and its value for controls; ``control=None`` standardises on all cells.
    features_key
        Key of the features.
    n_components
        Number of components, at most; the paper takes 64.
    seed
        Seed of the randomised decomposition.

    Returns
    -------
    float32 ``(N, n_components)``.

    Raises
    ------
    KeyError
        If the features or a column are missing.
    ValueError
        If an environment has fewer than two controls, or no feature varies.

    References
    ----------
    Stirling et al. (2021), CellProfiler 4. Makino et al. (2025), section 4.2.

    Examples
    --------
    >>> adata.obsm["X_cellprofiler"] = np.random.default_rng(0).normal(size=(240, 100))
    >>> scbd.baselines.cellprofiler_pca(adata, e_key="plate", n_components=8).shape
    (240, 8)
    """
    from sklearn.decomposition import PCA

    if features_key not in adata.obsm:
        msg = f"obsm has no {features_key!r} (it has: {', '.join(adata.obsm) or 'nothing'}): name the features' key."
        raise KeyError(msg)
    features = np.array(adata.obsm[features_key], dtype=np.float64)
    features[~np.isfinite(features)] = np.nan
    features = features[:, ~np.isnan(features).all(0)]
    features = np.where(np.isnan(features), np.nanmedian(features, axis=0), features) if features.size else features
    if e_key is not None:
        environments = label_values(adata.obs, e_key)
        controls = None if control is None else label_values(adata.obs, y_key).astype(str).to_numpy() == control
        features = standardize_by_environment(features, environments.to_numpy(), controls=controls)
        features = features.clip(-_CLIPPED, _CLIPPED)
    features = features[:, np.ptp(features, axis=0) > 0] if features.size else features
    if not features.shape[1]:
        msg = f"obsm[{features_key!r}] has no feature that varies between cells."
        raise ValueError(msg)
    n_components = min(n_components, *features.shape)
    return PCA(n_components, svd_solver="randomized", random_state=seed).fit_transform(features).astype(np.float32)
