"""Features in which controls vary alike in all directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._checks import check_number
from scbd._linear_maps import LinearMap, covariance, mean_and_factor, whitening
from scbd.baselines._tables import read_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def sphering(
    features: ArrayLike, *, controls: ArrayLike, fit: ArrayLike | None = None, regularization: float = 1.0
) -> np.ndarray:
    r"""Whiten by the covariance of controls: what varies among them is no phenotype.

    Features are scaled to the controls' standard deviation. With :math:`V \Lambda V^T` the covariance of the scaled
    controls, the result is :math:`(x - \bar x) V (\Lambda + \lambda I)^{-1/2}`.

    Controls that this was fitted on lie close together: they are no negatives for a score of replicates. Keep some out
    of ``fit`` to score with.

    Parameters
    ----------
    features
        ``(N, D)``.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default. Only the controls among
        them matter.
    regularization
        :math:`\lambda`, in units of a feature's variance among controls: how far their covariance is trusted. With
        fewer controls than features it has to be large: on 904 features of wells and 160 controls, 30 was best.

    Returns
    -------
    float32 ``(N, D)``, the direction in which controls vary most first. A feature that is constant among controls
    counts as 0.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, fewer than two controls are in ``fit``, or controls do
        not vary in all directions and the regularization is 0.

    References
    ----------
    Kessy, Lewin and Strimmer (2018), Optimal whitening and decorrelation.

    Examples
    --------
    >>> controls = (adata.obs["gene"] == "nontargeting").to_numpy()
    >>> seen = (adata.obs["plate"] != "plate_1").to_numpy()
    >>> z = scbd.baselines.sphering(adata.obsm["X_scbd_c"], controls=controls, fit=seen)
    >>> z.shape == adata.obsm["X_scbd_c"].shape
    True
    """
    table = read_table(features, fit=fit, controls=controls)
    reference = table.features[table.reference]
    mean, factor = mean_and_factor(reference)
    return white_map(mean, factor, covariance(reference), regularization)(table.features)


def white_map(mean: np.ndarray, factor: np.ndarray, spread: np.ndarray, regularization: float) -> LinearMap:
    """From features to where a covariance of theirs, once they are scaled by ``factor``, is white; ``mean`` becomes 0.

    Raises
    ------
    ValueError
        If no feature varies, the regularization is negative, or it is 0 and the covariance has no inverse.
    """
    check_number("regularization", regularization)
    varying = np.flatnonzero(factor)
    scaled = spread[np.ix_(varying, varying)] * np.outer(factor[varying], factor[varying])
    if not varying.size:
        msg = "features are constant in all rows that they would be scaled by: nothing can be learned from these."
        raise ValueError(msg)
    matrix = np.zeros_like(spread)
    matrix[varying, : len(varying)] = factor[varying, None] * whitening(scaled, regularization)
    return LinearMap(matrix, -mean @ matrix)
