"""Directions in which perturbations differ more than their replicates do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._checks import check_count, check_number
from scbd._linear_maps import LinearMap, covariance, discriminants
from scbd.baselines._tables import Table, read_table
from scbd.baselines._wccn import Positions, Within, within_map

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def lda(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    n_components: int = 128,
    fit: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    position_weight: float = 1.0,
    regularization: float = 1.0,
) -> np.ndarray:
    r"""Linear discriminants: the directions in which labels differ most, where rows of a label are white.

    After :func:`wccn`, the principal axes of the labels' means; every label counts alike, however many rows it has.
    ``regularization`` makes of it the shrinkage form: another way to write :math:`(1 - s) S + s \bar v I`, with
    :math:`\lambda = s \bar v / (1 - s)` and :math:`\bar v` the mean variance of scaled features within labels.

    Parameters
    ----------
    features
        ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, controls included. Cells that are not in ``fit`` may have none.
    n_components
        How many directions, at most: one less than there are labels in ``fit``.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers: features are scaled to those in ``fit``, and their
        mean is the origin. All in ``fit`` where none are given.
    positions, position_weight
        Position of each cell on its plate, and how much of the covariance of the controls' means by position counts as
        variation within labels; see :func:`wccn`.
    regularization
        :math:`\lambda`, added to all variances within labels, in units of a scaled feature's variance.

    Returns
    -------
    float32 ``(N, K)``, the direction in which labels differ most first.

    Raises
    ------
    ValueError
        As :func:`wccn`; or if ``fit`` has one label.

    References
    ----------
    Friedman (1989), Regularized discriminant analysis.

    Examples
    --------
    >>> genes = adata.obs["gene"].to_numpy()
    >>> scbd.baselines.lda(adata.obsm["X_scbd_c"], genes, n_components=2, fit=np.arange(240) < 200).shape
    (240, 2)
    """
    check_count("n_components", n_components)
    table = read_table(features, fit=fit, controls=controls)
    within = within_map(table, labels, Positions(positions, position_weight), regularization)
    between = _between(within)
    axes = discriminants(between, n_components=min(n_components, len(within.means) - 1, len(between)))
    return _along(table, within, axes)


def plda(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    fit: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    position_weight: float = 1.0,
    regularization: float = 1.0,
    shrinkage: float = 0.1,
) -> np.ndarray:
    r"""Probabilistic linear discriminants: each direction counts by how much of it belongs to the label.

    After :func:`wccn`, where the variance within labels is about 1, each principal axis of the labels' means is scaled
    by :math:`b / (b + 1)`, with :math:`b` its variance between labels: what is to be expected of the label, given one
    row. Shrinkage of :math:`b` towards its mean keeps directions that only labels outside of ``fit`` may use.

    Parameters
    ----------
    features
        ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, controls included. Cells that are not in ``fit`` may have none.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers: features are scaled to those in ``fit``, and their
        mean is the origin. All in ``fit`` where none are given.
    positions, position_weight
        Position of each cell on its plate, and how much of the covariance of the controls' means by position counts as
        variation within labels; see :func:`wccn`.
    regularization
        Added to all variances within labels, in units of a scaled feature's variance.
    shrinkage
        Of variances between labels towards their mean, from 0 to 1.

    Returns
    -------
    float32 ``(N, D)``, the direction in which labels differ most first.

    Raises
    ------
    ValueError
        As :func:`wccn`; or if ``fit`` has one label, or the shrinkage is not from 0 to 1.

    References
    ----------
    Ioffe (2006), Probabilistic linear discriminant analysis.

    Examples
    --------
    >>> genes = adata.obs["gene"].to_numpy()
    >>> z = scbd.baselines.plda(adata.obsm["X_scbd_c"], genes, controls=genes == "nontargeting")
    >>> z.shape == adata.obsm["X_scbd_c"].shape
    True
    """
    check_number("shrinkage", shrinkage, most=1)
    table = read_table(features, fit=fit, controls=controls)
    within = within_map(table, labels, Positions(positions, position_weight), regularization)
    return _along(table, within, discriminants(_between(within), shrinkage=shrinkage, gains=True))


def _between(within: Within) -> np.ndarray:
    if len(within.means) < 2:
        msg = "There is one label to learn from: in what labels differ is not known."
        raise ValueError(msg)
    return covariance(within.means)


def _along(table: Table, within: Within, axes: np.ndarray) -> np.ndarray:
    return within.white.then(LinearMap(axes, np.zeros(axes.shape[1])))(table.features)
