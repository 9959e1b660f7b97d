"""Corrections that are computed by other packages: ComBat (by scanpy) and Harmony (by harmonypy)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._shared.checks import check_count
from scbd._shared.linear_maps import (
    column_means,
    covariance,
    inverse_deviations,
    label_means,
    principal_components_map,
)
from scbd.corrections._tables import log_constant_features, read_environments, reference_scaling

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def combat(features: ArrayLike, environments: ArrayLike) -> np.ndarray:
    """Apply ComBat: shift and scale each feature in each environment, with parameters estimated by empirical Bayes.

    In each environment, the shift and the scale of a feature are shrunk towards those of the other features.

    The correction is computed by :func:`scanpy.pp.combat`, without covariates. ComBat is estimated from all cells:
    there is no argument ``fit``, and the correction cannot be applied to new cells later. If environments contain
    different perturbations, effects that are common to the perturbations of an environment are removed, too.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``. At least two environments are needed, with at least two cells each.

    Returns
    -------
    Corrected features, float32 ``(N, D)``. Features that are constant in every environment are set to their mean over
    all cells.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, there is only one environment, an environment has fewer
        than two cells, or fewer than two features vary within environments.

    References
    ----------
    Johnson, Li and Rabinovic (2007), Adjusting batch effects in microarray expression data using empirical Bayes
    methods.

    Examples
    --------
    >>> features = adata.obsm["X_scbd_c"]
    >>> scbd.corrections.combat(features, adata.obs["well"]).shape == features.shape
    True
    """
    import scanpy
    from anndata import AnnData

    table, codes = read_environments(features, environments)
    _, means, _ = label_means(table.features, codes)
    sd = np.sqrt(((table.features - means[codes]) ** 2).mean(0))
    varying = inverse_deviations(sd, table.features) > 0
    if varying.sum() < 2:
        msg = f"{varying.sum()} features vary within environments: ComBat learns from one feature about the others."
        raise ValueError(msg)
    log_constant_features(table, ~varying)
    corrected = np.broadcast_to(column_means(table.features), table.features.shape).astype(np.float32)
    obs = pd.DataFrame({"environment": pd.Categorical(codes.astype(str))}, index=np.arange(len(codes)).astype(str))
    cells = AnnData(table.features[:, varying].astype(np.float64), obs=obs)
    # The convergence test of scanpy may divide by parameter estimates that are 0. Warnings of numpy about divisions by
    # 0 are suppressed.
    with np.errstate(divide="ignore", invalid="ignore"):
        corrected[:, varying] = scanpy.pp.combat(cells, key="environment", inplace=False)
    return corrected


def harmony(
    features: ArrayLike, environments: ArrayLike, *, n_components: int | None = 100, seed: int = 0
) -> np.ndarray:
    """Apply Harmony: cluster all cells softly, and align the environments within each cluster.

    The correction is computed by harmonypy with its default settings. Harmony is estimated from all cells: there is no
    argument ``fit``, and the correction cannot be applied to new cells later. Harmony does not use perturbations.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``. At least two environments are needed, with at least two cells each.
    n_components
        Number of principal components to correct; fewer if there are fewer features or cells. The components are
        computed from features scaled to variance 1. `None` corrects the features without computing components, which
        suits embeddings, whose columns have a common unit.
    seed
        Seed of the clustering.

    Returns
    -------
    Corrected principal components, float32 ``(N, n_components)``, or corrected features ``(N, D)`` with
    ``n_components=None``.

    Raises
    ------
    ImportError
        If harmonypy is not installed.
    ValueError
        If features are not finite numbers, shapes do not match, there is only one environment, an environment has fewer
        than two cells, or there are not more cells than columns to correct.

    References
    ----------
    Korsunsky et al. (2019), Fast, sensitive and accurate integration of single-cell data with Harmony.

    Examples
    --------
    >>> scbd.corrections.harmony(adata.obsm["X_scbd_c"], adata.obs["well"])  # doctest: +SKIP
    """
    try:
        import harmonypy
    except ImportError as error:
        msg = "Harmony needs one more package: pip install harmonypy."
        raise ImportError(msg) from error
    table, codes = read_environments(features, environments)
    values = table.features
    if n_components is not None:
        check_count("n_components", n_components)
        mean, factor = reference_scaling(table)
        n_kept = min(n_components, len(values) - 1)
        values = principal_components_map(mean, factor, covariance(values, mean), n_kept)(values)
    values = values.astype(np.float64)
    if len(values) <= values.shape[1]:
        msg = f"Harmony needs more rows than columns, got {values.shape}: give n_components."
        raise ValueError(msg)
    obs = pd.DataFrame({"environment": codes.astype(str)})
    moved = harmonypy.run_harmony(values, obs, "environment", random_state=seed, verbose=False).Z_corr
    # harmonypy before version 2 returns the corrected table transposed, with one column per cell
    moved = moved if moved.shape == values.shape else moved.T
    return np.ascontiguousarray(moved, dtype=np.float32)
