"""Features in which wells of one perturbation vary alike in all directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scbd._checks import check_weight
from scbd._linear_maps import LinearMap, covariance, label_means, mean_and_factor, within_covariance
from scbd.baselines._sphering import white_map
from scbd.baselines._tables import Table, as_codes, read_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def wccn(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    fit: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    position_weight: float = 1.0,
    regularization: float = 3.0,
) -> np.ndarray:
    r"""Within-class covariance normalisation: whiten by how cells of one perturbation differ.

    Features are scaled to the standard deviation of the controls, or of all rows in ``fit`` where none are given. With
    :math:`S` the covariance of rows around the mean of their label, the result is :math:`(x - \bar x) V (\Lambda +
    \lambda I)^{-1/2}`, where :math:`S = V \Lambda V^T` and :math:`\bar x` is the mean of the controls, or of all in
    ``fit``. Given positions, :math:`S` has :math:`w` times the covariance of the controls' means by position added:
    where replicates share a well, position looks like perturbation, and only controls can tell.

    Parameters
    ----------
    features
        ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, controls included. Cells that are not in ``fit`` may have none.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers; those in ``fit`` are used.
    positions
        Position of each cell on its plate (its well), ``(N,)``; only those of controls matter.
    position_weight
        :math:`w`; 0 is without positions.
    regularization
        :math:`\lambda`, in units of a scaled feature's variance.

    Returns
    -------
    float32 ``(N, D)``, the direction in which replicates vary most first. A feature that is constant in the rows that
    it is scaled by counts as 0.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, every label has one row, positions come without
        controls or controls have one position, a weight is negative, or the regularization is 0 where replicates do not
        vary in all directions.

    References
    ----------
    Hatch, Kajarekar and Stolcke (2006), Within-class covariance normalization for SVM-based speaker recognition.

    Examples
    --------
    >>> genes, seen = adata.obs["gene"].to_numpy(), np.arange(240) < 200
    >>> controls = genes == "nontargeting"
    >>> white = scbd.baselines.wccn(adata.obsm["X_scbd_c"], genes, fit=seen, controls=controls)
    >>> float(abs(white[seen & controls].mean()).round(3))  # the controls are the origin
    0.0
    """
    table = read_table(features, fit=fit, controls=controls)
    where = Positions(positions, position_weight)
    return within_map(table, labels, where, regularization).white(table.features)


class Positions(NamedTuple):
    """Where cells lie on their plates, and how much that is taken for noise."""

    values: ArrayLike | None
    weight: float


class Within(NamedTuple):
    """Where replicates are white, and the labels' means there."""

    white: LinearMap
    means: np.ndarray
    """``(L, D)``, float64, without offset."""


def within_map(table: Table, labels: ArrayLike, positions: Positions, regularization: float) -> Within:
    """Learn where rows of a label vary alike in all directions."""
    codes, names = as_codes("labels", labels, table.fit)
    learned, codes = table.features[table.fit], codes[table.fit]
    _, means, counts = label_means(learned, codes)
    if counts.max() < 2:
        msg = f"Each of {len(counts)} labels has one row to learn from: how rows of a label differ is not known."
        raise ValueError(msg)
    spread = within_covariance(learned, codes) + _of_positions(table, positions)
    mean, factor = mean_and_factor(table.features[table.reference])
    white = white_map(mean, factor, spread, regularization)
    return Within(white, means @ white.matrix)


def _of_positions(table: Table, positions: Positions) -> np.ndarray | float:
    """Covariance of the controls' means by position, weighted; 0 without positions."""
    check_weight("position_weight", positions.weight, "is how much of the positions' covariance is added")
    if positions.values is None:
        return 0.0
    if table.controls is None:
        msg = "positions tell something where the perturbation is the same: say which rows are controls (controls=...)."
        raise ValueError(msg)
    codes, _ = as_codes("positions", positions.values, table.controls)
    _, means, counts = label_means(table.features[table.controls], codes[table.controls])
    if len(counts) < 2:
        msg = "Controls have one position: what positions do is not known. Leave positions out."
        raise ValueError(msg)
    return positions.weight * covariance(means)
