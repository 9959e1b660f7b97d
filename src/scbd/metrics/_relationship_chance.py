"""What the scores of known relations are without information."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd.metrics._relations import Relations, Universe, relations_of
from scbd.metrics._relationships import PERCENTILES, both_limits, check_tail, is_in_a_tail
from scbd.metrics._thresholds import count_outside

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from anndata import AnnData

    from scbd.metrics._known_pairs import NetKind


def relationship_chance(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    diagonal: bool = True,
    tail: float = 0.05,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
) -> dict[str, float]:
    """Scores that known relations have by chance: had as many fallen on random pairs of the same map.

    Expected values, exact and without a draw. Ties of the map count as in the scores, so that a map of a single point
    scores its chance, too. Maps of different prevalence compare by how many times their chance they reach.

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`~scbd.metrics.relationship_curve`.
    percentiles, diagonal
        Of the curve whose area is asked for.
    tail
        See :func:`~scbd.metrics.relationship_recall`.

    Returns
    -------
    ``area`` (about 0.38 of the prevalence of relations with the default percentiles; NaN of fewer than two points),
    ``recall`` (about ``2 tail``) and ``average_precision`` (the prevalence, and more where pairs are few).

    Raises
    ------
    ValueError
        If ``tail`` is not between 0 and 0.5, or see :func:`~scbd.metrics.relationship_curve`.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> relations = scbd.metrics.Relations(profiles, net)
    >>> by_chance = scbd.metrics.relationship_chance(relations)
    >>> times = scbd.metrics.relationship_average_precision(relations) / by_chance["average_precision"]
    >>> sorted(by_chance)
    ['area', 'average_precision', 'recall']
    """
    check_tail(tail)
    relations = relations_of(profiles, net, net_kind, gene_key, universe)
    ordered, known = relations.ranked
    n = len(ordered)
    # how likely another pair is known, too, given that one is
    other = (len(known) - 1) / max(1, n - 1)
    # places of equal cosines
    values = np.asarray(ordered)
    first = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    size = np.diff(np.append(first, n))
    in_a_tail = is_in_a_tail(first, first + size - 1, n, tail)
    # one of the pairs that are predicted down to a known one is that one itself
    itself = float(np.sum(size / (n - first)) / n)
    grid = np.sort(np.asarray(percentiles, dtype=float))[::-1]
    n_predicted = count_outside(ordered, *both_limits(relations, grid, diagonal))
    return {
        "area": _area(n_predicted[n_predicted > 0], n, other),
        "recall": float(size[in_a_tail].sum() / n),
        "average_precision": itself + other * (1 - itself),
    }


def _area(n_predicted: np.ndarray, n: int, other: float) -> float:
    """Trapezoids under points of which each predicts what the one before it does, and more."""
    if len(n_predicted) < 2:
        return float("nan")
    # known pairs among those predicted, given that one of them is
    found = 1 + (n_predicted - 1) * other
    before, after = found[:-1], found[1:]
    return float(np.sum(2 * after - before - n_predicted[:-1] / n_predicted[1:] * after) / (2 * n))
