"""Harmony, as harmonypy has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd._linear_maps import LinearMap, covariance, mean_and_factor
from scbd.baselines._tables import read_environments

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import ArrayLike


def harmony(
    features: ArrayLike, environments: ArrayLike, *, n_components: int | None = 100, seed: int = 0
) -> np.ndarray:
    """Harmony: move soft clusters of each environment onto those of the others.

    Computed by harmonypy at its defaults. It sees all rows by construction: there is no ``fit``, and nothing that it
    could be applied to later; perturbations play no part.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``; at least two, of two cells or more.
    n_components
        Principal components of the features, scaled to variance 1, that it moves; fewer where there are fewer features
        or cells. `None` takes the features as they are: for an embedding, whose columns have a common unit.
    seed
        Seed of the clusters.

    Returns
    -------
    float32 ``(N, n_components)``, or ``(N, D)`` with `None`.

    Raises
    ------
    ImportError
        If harmonypy is not installed.
    ValueError
        If features are no finite numbers, shapes do not match, there is one environment or one of fewer than two cells,
        or there are not more cells than columns.

    References
    ----------
    Korsunsky et al. (2019), Fast, sensitive and accurate integration of single-cell data with Harmony.

    Examples
    --------
    >>> scbd.baselines.harmony(adata.obsm["X_scbd_c"], adata.obs["well"])  # doctest: +SKIP
    """
    harmonypy = _harmonypy()
    values, codes = read_environments(features, environments)
    if n_components is not None:
        check_count("n_components", n_components)
        values = _principal_map(values, min(n_components, len(values) - 1))(values).astype(np.float64)
    if len(values) <= values.shape[1]:
        msg = f"Harmony needs more rows than columns, got {values.shape}: give n_components."
        raise ValueError(msg)
    obs = pd.DataFrame({"environment": codes.astype(str)})
    moved = harmonypy.run_harmony(values, obs, "environment", random_state=seed, verbose=False).Z_corr
    moved = moved if moved.shape == values.shape else moved.T  # before its version 2
    return np.ascontiguousarray(moved, dtype=np.float32)


def _harmonypy() -> ModuleType:
    try:
        import harmonypy
    except ImportError as error:
        msg = "Harmony needs one more package: pip install harmonypy."
        raise ImportError(msg) from error
    return harmonypy


def _principal_map(values: np.ndarray, n_components: int) -> LinearMap:
    """To the first principal components of features that are scaled to variance 1."""
    mean, factor = mean_and_factor(values)
    _, axes = np.linalg.eigh(covariance(values) * np.outer(factor, factor))
    matrix = factor[:, None] * axes[:, ::-1][:, :n_components]
    return LinearMap(matrix, -mean @ matrix)
