"""Whether wells find replicates of their perturbation in other environments, and what position alone finds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd._seen import warn_of_seen
from scbd.metrics._average_precision import Null, Scores, score_queries, unit_rows
from scbd.metrics._retrieval_result import ReplicateRetrieval, by_label
from scbd.metrics._table import chosen_rows, control_names, label_names, learned_rows, representation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike


def replicate_retrieval(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    control: object | Sequence[object],
    position_key: str | Sequence[str] | None = None,
    queries: ArrayLike | None = None,
    trained_on: str | ArrayLike | None = None,
    n_permutations: int = 10_000,
    seed: int = 0,
) -> ReplicateRetrieval:
    """Average precision with which wells find their replicates in other environments, among controls there.

    Each well of a perturbation ranks wells by cosine: those of its perturbation in *other* environments should come
    before controls of *these* environments. Controls of environments that the perturbation is not in are left out:
    where several layouts are in batches of their own, what a batch adds would tell them apart. Means over its wells are
    a perturbation's score, and over perturbations the mean average precision.

    Where all plates share a layout, a perturbation is a position, and wells find each other by it. The **floor** says
    how far: controls are scored as if each position were a perturbation, against controls at other positions. It is
    what a perturbation without effect gets, if the embedding was not trained on it: of trained ones an encoder knows
    the label by heart, and neither the floor nor q values show that. An embedding with a higher score *and* a higher
    floor has learned positions. **Across positions**, where some perturbations have several, position cannot help:
    wells of the same perturbation at another position and environment are looked for among the wells of all other
    perturbations, of all environments that it is in.

    Parameters
    ----------
    adata
        Wells (or cells). What is not in the table is not in the gallery: for replicates on unseen plates alone, give
        the wells of these plates.
    rep
        Key of ``obsm``, or an array ``(N, D)``, for example ``adata.X``.
    y_key, e_key
        Columns of ``obs`` with the perturbation and with the environment, each one or several for their cross.
    control
        Value or values of ``y_key`` for wells that were not perturbed.
    position_key
        Column of ``obs`` with the position on a plate, or several (row and column). Needed for floor and
        cross-position.
    queries
        Mask ``(N,)`` or row numbers of wells to score, for example those of perturbations that a model has not seen.
        Replicates and controls are still found among all rows. All wells of perturbations by default. The floor has
        controls of the same environments as queries.
    trained_on
        Rows that the embedding, or a transform of it, was trained or fitted on: a mask ``(N,)``, row numbers, or a
        column of ``obs`` that says ``True`` or ``"train"`` there. By default, of the z_c that ``scbd run`` wrote, what
        ``obs["scbd_seen"]`` says.
    n_permutations
        Random orders for p values, of which none is below ``1 / (n_permutations + 1)``: with more than a twentieth as
        many perturbations, a single one cannot be called.
    seed
        Seed of these orders.

    Returns
    -------
    :class:`ReplicateRetrieval`: tables with a row a perturbation, and their means. Orders of equal cosines are averaged
    over, so that an embedding that is a point has the score of chance. P values hold against random orders, not
    against the floor: see how many positions of controls are called.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, there is no control, or no perturbation has a replicate and controls in one other
        environment.

    Warns
    -----
    UserWarning
        If perturbations that are scored were trained on; if a transform was fitted on controls that serve as negatives
        (on some of them, or on nothing else); or if every perturbation has a single position.

    References
    ----------
    Kalinin et al. (2025), A versatile information retrieval framework for evaluating profile strength and similarity.

    Examples
    --------
    >>> keys = {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    >>> found = scbd.metrics.replicate_retrieval(adata, "X_scbd_c", **keys, n_permutations=100)
    >>> found.table.columns.to_list()[:4]
    ['average_precision', 'chance', 'p_value', 'q_value']
    >>> bool(found.mean_average_precision > found.chance)
    True
    """
    check_count("n_permutations", n_permutations)
    x = representation(adata, rep)
    wells = _wells(adata, unit_rows(x), y_key, e_key, control, position_key)
    asked = chosen_rows("queries", queries, len(x)) & ~wells.is_control
    learned = learned_rows(adata, x, trained_on)
    if learned is not None and trained_on is not None:
        _warn_of_fitted(wells, learned)
    null = Null(n_permutations, seed)
    scores = _against_controls(wells, np.flatnonzero(asked))
    if not len(scores.rows):
        msg = (
            f"None of {asked.sum()} wells has both a replicate and controls in another environment of {e_key!r}: a "
            "replicate score needs perturbations in two environments or more, with controls beside them."
        )
        raise ValueError(msg)
    table = by_label(scores, wells.y.of_rows, null)
    warn_of_seen(wells.y.of_rows, learned, table.index)
    floor = across = pd.DataFrame()
    if wells.position is not None:
        _warn_of_single_positions(wells, wells.position, scores.rows)
        floor = by_label(_floor(wells, wells.position, scores.rows), wells.position.of_rows, null)
        across = by_label(_across_positions(wells, wells.position, np.flatnonzero(asked)), wells.y.of_rows, null)
    left_out = sorted(set(wells.y.of_rows[asked]) - set(table.index))
    return ReplicateRetrieval(table, tuple(left_out), floor_table=floor, cross_position_table=across)


class _Labels:
    """Labels of rows, as text and as numbers, which compare faster."""

    def __init__(self, of_rows: np.ndarray) -> None:
        self.of_rows = of_rows
        self.codes = pd.factorize(of_rows)[0]
        order = np.argsort(self.codes, kind="stable")
        self._rows = np.split(order, np.bincount(self.codes).cumsum()[:-1])

    def rows_like(self, row: int) -> np.ndarray:
        """Rows of the same label, itself included."""
        return self._rows[self.codes[row]]

    def differ(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Mask ``(len(rows), len(others))`` of pairs with different labels."""
        return self.codes[rows][:, None] != self.codes[others]


@dataclass(frozen=True)
class _Wells:
    unit: np.ndarray
    y: _Labels
    e: _Labels
    position: _Labels | None
    is_control: np.ndarray

    def elsewhere(self, row: int, alike: _Labels) -> np.ndarray:
        """Rows of the same label in other environments."""
        rows = alike.rows_like(row)
        return rows[self.e.codes[rows] != self.e.codes[row]]

    def beside(self, alike: _Labels, among: np.ndarray, gallery: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """From rows ``(B,)`` to a mask ``(B, G)`` of the gallery in environments that have their label, ``among`` some.

        What an environment adds is in both, so that it tells none of the gallery from replicates.
        """
        holds = np.zeros((alike.codes.max() + 1, self.e.codes.max() + 1), dtype=bool)
        holds[alike.codes[among], self.e.codes[among]] = True
        return lambda rows: holds[alike.codes[rows]][:, self.e.codes[gallery]]


def _wells(
    adata: AnnData,
    unit: np.ndarray,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    control: object | Sequence[object],
    position_key: str | Sequence[str] | None,
) -> _Wells:
    y = label_names(adata, y_key)
    names = control_names(control, y, y_key)
    position = None if position_key is None else _Labels(label_names(adata, position_key))
    return _Wells(unit, _Labels(y), _Labels(label_names(adata, e_key)), position, np.isin(y, names))


def _against_controls(wells: _Wells, queries: np.ndarray) -> Scores:
    """The same perturbation in other environments, among controls there."""
    controls = np.flatnonzero(wells.is_control)
    beside = wells.beside(wells.y, np.arange(len(wells.unit)), controls)
    return score_queries(
        wells.unit,
        queries,
        controls,
        positives=lambda row: wells.elsewhere(row, wells.y),
        negatives=lambda rows: wells.e.differ(rows, controls) & beside(rows),
    )


def _floor(wells: _Wells, position: _Labels, scored: np.ndarray) -> Scores:
    """Controls at the same position in other environments, among controls at other positions there."""
    controls = np.flatnonzero(wells.is_control)
    queries = controls[np.isin(wells.e.codes[controls], wells.e.codes[scored])]
    beside = wells.beside(position, controls, controls)

    def positives(row: int) -> np.ndarray:
        rows = wells.elsewhere(row, position)
        return rows[wells.is_control[rows]]

    def negatives(rows: np.ndarray) -> np.ndarray:
        return wells.e.differ(rows, controls) & position.differ(rows, controls) & beside(rows)

    return score_queries(wells.unit, queries, controls, positives, negatives)


def _across_positions(wells: _Wells, position: _Labels, queries: np.ndarray) -> Scores:
    """The same perturbation at another position and environment, among all others of its environments."""
    perturbed = np.flatnonzero(~wells.is_control)
    places = pd.Series(position.codes[perturbed]).groupby(wells.y.codes[perturbed]).nunique()
    several = queries[np.isin(wells.y.codes[queries], places.index[places > 1])]
    beside = wells.beside(wells.y, perturbed, perturbed)

    def positives(row: int) -> np.ndarray:
        rows = wells.elsewhere(row, wells.y)
        return rows[position.codes[rows] != position.codes[row]]

    def negatives(rows: np.ndarray) -> np.ndarray:
        return wells.y.differ(rows, perturbed) & beside(rows)

    return score_queries(wells.unit, several, perturbed, positives, negatives)


def _warn_of_fitted(wells: _Wells, fitted: np.ndarray) -> None:
    n, n_fitted = wells.is_control.sum(), (wells.is_control & fitted).sum()
    # all controls, and perturbations: an encoder, which has controls for one label of many
    if n_fitted and (n_fitted < n or not (fitted & ~wells.is_control).any()):
        msg = (
            f"Negatives were used in the fit: {n_fitted} of {n} controls. A correction that was fitted on controls, "
            "such as sphering, sets these apart, and scores against them rise by themselves. Fit it on half of the "
            "positions of controls, and leave these wells out here. (An encoder has them for one label of many.)"
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def _warn_of_single_positions(wells: _Wells, position: _Labels, scored: np.ndarray) -> None:
    places = pd.Series(position.codes[scored]).groupby(wells.y.codes[scored]).nunique()
    if (places == 1).all():
        msg = (
            "Every perturbation is at one position: wells may find each other by it, whatever was done to them. Look "
            "at the floor, and at the floor-corrected score."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
