"""Cheap corrections of any features: what a reviewer asks for before a network is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# of the features' standard deviation, below which a feature is constant
_CONSTANT = 1e-6


def standardize_by_environment(
    features: np.ndarray, environments: ArrayLike, *, controls: ArrayLike | None = None, scale: bool = True
) -> np.ndarray:
    """Give every environment mean 0 and variance 1, feature by feature.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Which cells mean and variance are taken from, boolean ``(N,)``; all by default. With controls, an environment
        that holds other perturbations keeps what those do.
    scale
        Also divide by the standard deviation; `False` centres only. A feature that is constant in an environment is
        centred only.

    Returns
    -------
    float32 ``(N, D)``.

    Raises
    ------
    ValueError
        If the shapes do not match, or an environment has fewer than two controls.

    Examples
    --------
    >>> features = np.array([[1.0], [3.0], [11.0], [13.0]])  # the second well is brighter
    >>> scbd.baselines.standardize_by_environment(features, ["A1", "A1", "A2", "A2"], scale=False).ravel().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    features, environments, controls = _checked(features, environments, controls)
    corrected = np.empty(features.shape, dtype=np.float32)
    for environment in np.unique(environments):
        here = environments == environment
        reference = features[here & controls]
        centred = features[here] - reference.mean(0)
        if scale:
            sd = reference.std(0, ddof=1)
            centred /= np.where(sd > _CONSTANT, sd, 1)
        corrected[here] = centred
    return corrected


def tvn(
    features: np.ndarray, environments: ArrayLike, *, controls: ArrayLike, regularization: float = 1.0
) -> np.ndarray:
    r"""Typical variation normalisation: make controls white, and alike in all environments.

    Features are rotated and scaled such that all controls together have mean 0 and unit covariance: what varies among
    controls is no phenotype, and directions in which they vary little count as much as the others. Then each
    environment is centred on its own controls, and their covariance :math:`C_e` is aligned with that of all, :math:`C`
    (after that centring), by :math:`(C_e + \lambda I)^{-1/2} (C + \lambda I)^{1/2}` (correlation alignment).

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Which cells are controls, boolean ``(N,)``.
    regularization
        :math:`\lambda`, in units of the white controls' variance: how far covariances are trusted.

    Returns
    -------
    float32 ``(N, D)``; fewer columns where controls do not vary in all directions.

    Raises
    ------
    ValueError
        If the shapes do not match, an environment has fewer than two controls, or the regularization is not above 0.

    References
    ----------
    Ando, McLean and Berndl (2017), Improving phenotypic measurements in high-content imaging screens. Sun, Feng and
    Saenko (2016), Return of frustratingly easy domain adaptation.

    Examples
    --------
    >>> features = scbd.baselines.pixel_pca(adata, n_components=8)
    >>> controls = (adata.obs["gene"] == "nontargeting").to_numpy()
    >>> scbd.baselines.tvn(features, np.repeat("plate 1", 240), controls=controls).shape
    (240, 8)
    """
    if not regularization > 0:
        msg = f"regularization={regularization}: a covariance of few controls cannot be inverted, give it more than 0."
        raise ValueError(msg)
    features, environments, controls = _checked(features, environments, controls)
    reference = features[controls]
    variances, axes = np.linalg.eigh(np.cov(reference, rowvar=False))
    kept = variances > variances.max() * _CONSTANT
    white = (features - reference.mean(0)) @ (axes[:, kept] / np.sqrt(variances[kept]))
    white = standardize_by_environment(white, environments, controls=controls, scale=False).astype(np.float64)
    target = _power(np.cov(white[controls], rowvar=False), 0.5, regularization)
    corrected = np.empty(white.shape, dtype=np.float32)
    for environment in np.unique(environments):
        here = environments == environment
        own = np.cov(white[here & controls], rowvar=False)
        corrected[here] = white[here] @ _power(own, -0.5, regularization) @ target
    return corrected


def _power(covariance: np.ndarray, exponent: float, regularization: float) -> np.ndarray:
    covariance = np.atleast_2d(covariance)
    values, vectors = np.linalg.eigh(covariance + regularization * np.eye(len(covariance)))
    return (vectors * values**exponent) @ vectors.T


def _checked(
    features: np.ndarray, environments: ArrayLike, controls: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    features, environments = np.asarray(features, dtype=np.float64), np.asarray(environments).astype(str)
    controls = np.ones(len(features), dtype=bool) if controls is None else np.asarray(controls, dtype=bool)
    if features.ndim != 2 or environments.shape != features.shape[:1] or controls.shape != features.shape[:1]:
        shapes = f"{features.shape}, {environments.shape} and {controls.shape}"
        msg = f"features must be (N, D), environments and controls (N,), got {shapes}."
        raise ValueError(msg)
    names, counts = np.unique(environments[controls], return_counts=True)
    few = set(environments) - set(names[counts > 1])
    if few:
        msg = (
            f"{len(few)} environments have fewer than two controls (such as {str(min(few))!r}): mean and variance are "
            "not known there; leave these environments out, or take all cells (controls=None)."
        )
        raise ValueError(msg)
    return features, environments, controls
