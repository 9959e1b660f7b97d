"""CellProfiler's features as an embedding: standardised on each well's controls, and reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._labels import control_names, label_text, label_values
from scbd._linear_maps import inverse_of_varying
from scbd._matrices import dense
from scbd.baselines._tables import environment_codes, read_table

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
    control: object | Sequence[object] | None = "nontargeting",
    features_key: str = "X_cellprofiler",
    n_components: int = 64,
    seed: int = 0,
) -> np.ndarray:
    """Embed cells by the principal components of a table of measured features.

    Features are standardised within each environment on its controls, clipped at ten standard deviations, and reduced.
    A feature that is missing in a cell, or has no two values among an environment's controls, counts as typical there,
    which is 0; features that are nowhere, or never vary, are left out.

    Parameters
    ----------
    adata
        Cells with features in ``obsm``, such as those of :func:`scbd.datasets.funk22_cellprofiler`.
    e_key
        Column or columns of the environment; `None` where the table has been standardised already, and typical is the
        median.
    y_key, control
        Column of the perturbation, and its value, or values, for controls; ``control=None`` standardises on all cells.
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
    TypeError
        If a column of features holds no numbers.
    ValueError
        If features are sparse, no cell is a control, an environment has fewer than two, or no feature varies.

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
    features = np.array(dense(adata.obsm[features_key], f"obsm[{features_key!r}]"), dtype=np.float64)
    features[~np.isfinite(features)] = np.nan
    features = features[:, ~np.isnan(features).all(0)]
    if features.size and e_key is None:
        features = np.where(np.isnan(features), np.nanmedian(features, axis=0), features)
    elif features.size and e_key is not None:
        controls = None if control is None else _is_control(adata, y_key, control)
        features = _standardized(features, label_values(adata.obs, e_key).to_numpy(), controls)
        features = features.clip(-_CLIPPED, _CLIPPED)
    features = features[:, np.ptp(features, axis=0) > 0] if features.size else features
    if not features.shape[1]:
        msg = f"obsm[{features_key!r}] has no feature that varies between cells."
        raise ValueError(msg)
    n_components = min(n_components, *features.shape)
    return PCA(n_components, svd_solver="randomized", random_state=seed).fit_transform(features).astype(np.float32)


def _is_control(adata: AnnData, y_key: str, control: object | Sequence[object]) -> np.ndarray:
    labels = label_values(adata.obs, y_key).cat
    texts = [label_text(label) for label in labels.categories]
    return np.isin(texts, control_names(control, texts, y_key))[labels.codes]


def _standardized(features: np.ndarray, environments: np.ndarray, controls: np.ndarray | None) -> np.ndarray:
    """Standardised on the present values of each environment's controls; 0 where these are one, or it is missing."""
    present = ~np.isnan(features)
    table = read_table(np.where(present, features, 0), controls=controls)
    codes, names = environment_codes(environments, table)
    standard = np.zeros_like(features)
    for code in range(len(names)):
        here = codes == code
        learned = here & table.reference
        n = present[learned].sum(0)
        mean = table.features[learned].sum(0) / np.maximum(n, 1)
        centred = np.where(present[learned], features[learned] - mean, 0)
        sd = np.sqrt((centred**2).sum(0) / np.maximum(n - 1, 1))
        # a factor of 0 where no two values are known: one of 1 would leave raw units beside standard deviations
        standard[here] = (features[here] - mean) * inverse_of_varying(sd, table.features[learned])
    return np.where(present, standard, 0)
