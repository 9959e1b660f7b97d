"""ComBat, as scanpy has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._linear_maps import inverse_of_varying, label_means
from scbd.baselines._tables import read_environments

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def combat(features: ArrayLike, environments: ArrayLike) -> np.ndarray:
    """ComBat: shift and scale each feature of each environment, shrunk towards those of the other features.

    Computed by :func:`scanpy.pp.combat`, without covariates. It sees all rows by construction: there is no ``fit``, and
    nothing that it could be applied to later. Perturbations that are only in some environments lose what these share.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``; at least two, of two cells or more.

    Returns
    -------
    float32 ``(N, D)``. A feature that is constant in every environment is constant.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, there is one environment or one of fewer than two cells,
        or fewer than two features vary within environments.

    References
    ----------
    Johnson, Li and Rabinovic (2007), Adjusting batch effects in microarray expression data using empirical Bayes
    methods.

    Examples
    --------
    >>> features = adata.obsm["X_scbd_c"]
    >>> scbd.baselines.combat(features, adata.obs["well"]).shape == features.shape
    True
    """
    values, codes = read_environments(features, environments)
    _, means, _ = label_means(values, codes)
    sd = np.sqrt(((values - means[codes]) ** 2).mean(0))
    varying = inverse_of_varying(sd, values) > 0
    if varying.sum() < 2:
        msg = f"{varying.sum()} features vary within environments: ComBat learns from one feature about the others."
        raise ValueError(msg)
    corrected = np.broadcast_to(values.mean(0), values.shape).astype(np.float32)
    corrected[:, varying] = _by_scanpy(values[:, varying], codes)
    return corrected


def _by_scanpy(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    import scanpy
    from anndata import AnnData

    obs = pd.DataFrame({"environment": pd.Categorical(codes.astype(str))}, index=np.arange(len(codes)).astype(str))
    with np.errstate(divide="ignore", invalid="ignore"):  # it measures change relative to what may be 0
        return scanpy.pp.combat(AnnData(values, obs=obs), key="environment", inplace=False)
