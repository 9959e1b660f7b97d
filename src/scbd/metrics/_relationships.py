"""Do genes that work together look alike? Precision, recall and average precision against networks of known relations.

Similarity is the cosine of two profiles. A threshold on it predicts a relation in *both* tails, as genes of one complex
may have opposite effects; average precision alone looks at one, the high cosines.

References
----------
Makino et al. (2025), appendix, CORUM prediction; Celik et al. (2024), Building, benchmarking, and exploring
perturbative maps of transcriptional and morphological data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.metrics._known_pairs import NetKind
from scbd.metrics._relations import Relations, Universe, relations_of
from scbd.metrics._thresholds import count_outside, thresholds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# the published script's percentiles; the text says up to 100, where nothing is predicted and precision is not defined
PERCENTILES = tuple(range(80, 100))


def relationship_curve(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    diagonal: bool = True,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
) -> pd.DataFrame:
    """Precision and recall of known relations at a series of thresholds: the paper's protocol.

    Both tails count, opposite profiles as much as equal ones; genes are those with a known partner by default. At
    percentile ``i``, a pair is predicted to be related if its cosine is at least the ``i``-th percentile of all
    cosines, or at most the ``100 - i``-th.

    Parameters
    ----------
    profiles
        One row a gene (or :class:`Relations`, which several metrics can share).
    net
        Frame with ``source`` and ``target``.
    percentiles
        Thresholds; 80 to 99 as in the published script.
    diagonal
        Take percentiles over the full square matrix, each gene's cosine of 1 with itself included, as the published
        script does; ``False`` takes them over pairs of different genes.
    net_kind, gene_key, universe
        See :class:`Relations`: genes with a known partner by default. Not beside :class:`Relations`, which have a
        network and a universe of their own, and may be without large sets.

    Returns
    -------
    Frame ``percentile, precision, recall``. An embedding without information has a precision of the prevalence of
    relations and a recall of ``2 (100 - percentile) / 100``.

    Raises
    ------
    ValueError
        If no gene has a known partner, genes repeat, profiles are not finite, it is not plain what ``net`` holds, or
        something is given beside :class:`Relations` that these have already.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> curve = scbd.metrics.relationship_curve(profiles, net)
    >>> curve.columns.to_list()
    ['percentile', 'precision', 'recall']
    """
    relations = relations_of(profiles, net, net_kind, gene_key, universe)
    ordered, known = relations.ranked
    grid = np.asarray(percentiles, dtype=float)
    limits = both_limits(relations, grid, diagonal)
    n_predicted, n_found = count_outside(ordered, *limits), count_outside(known, *limits)
    with np.errstate(invalid="ignore"):
        precision = np.where(n_predicted > 0, n_found / n_predicted, np.nan)
    return pd.DataFrame({"percentile": grid, "precision": precision, "recall": n_found / len(known)})


def relationship_area(curve: pd.DataFrame) -> float:
    """Area under a precision-recall curve by the trapezoid rule, over the recalls that the curve spans.

    With the default percentiles an embedding without information spans 0.38 of all recalls, from 0.02 to 0.40, and has
    an area of 0.38 times the prevalence of relations: see :func:`relationship_chance`. Areas of maps whose prevalence
    differs compare as multiples of that alone.

    Parameters
    ----------
    curve
        From :func:`relationship_curve`.

    Raises
    ------
    ValueError
        If the curve has fewer than two points.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> curve = scbd.metrics.relationship_curve(profiles, net)
    >>> 0 <= scbd.metrics.relationship_area(curve) <= 1
    True
    """
    # recall rises as the percentile falls; sorted by recall, points of equal recall could change places
    curve = curve.dropna().sort_values("percentile", ascending=False)
    if len(curve) < 2:
        msg = f"An area needs at least two points of a curve, there are {len(curve)}: give more percentiles."
        raise ValueError(msg)
    return float(np.trapezoid(curve["precision"], curve["recall"]))


def relationship_recall(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    tail: float = 0.05,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
) -> float:
    """Fraction of known relations whose cosine is in one of both tails of all pairs' cosines.

    Two-tailed, over genes with a known partner by default; published map benchmarks report it over all profiles, which
    is ``universe="profiles"`` here (0.450 against 0.377 for the maps of Funk et al. and CORUM). Ranks are taken in the
    sorted cosines of all pairs of different genes; ties count for neither tail.

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`relationship_curve`.
    tail
        Size of each tail; an embedding without information recovers ``2 tail``.

    Raises
    ------
    ValueError
        If ``tail`` is not between 0 and 0.5, or see :func:`relationship_curve`.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> 0 <= scbd.metrics.relationship_recall(profiles, net, tail=0.05) <= 1
    True
    """
    check_tail(tail)
    ordered, known = relations_of(profiles, net, net_kind, gene_key, universe).ranked
    first = ordered.searchsorted(known, side="left")
    last = ordered.searchsorted(known, side="right") - 1
    return float(np.mean(is_in_a_tail(first, last, len(ordered), tail)))


def relationship_average_precision(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
) -> float:
    """Average precision of known relations when pairs are ranked by cosine; without information, their prevalence.

    One-tailed: only a *high* cosine predicts a relation, while curve and recall count opposite profiles, too. Genes are
    those with a known partner by default; over all profiles, ``universe="profiles"``, the prevalence is lower and so is
    the score (0.063 against 0.197 for the maps of Funk et al. and CORUM).

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`relationship_curve`.

    Raises
    ------
    ValueError
        See :func:`relationship_curve`.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> 0 <= scbd.metrics.relationship_average_precision(profiles, net) <= 1
    True
    """
    ordered, known = relations_of(profiles, net, net_kind, gene_key, universe).ranked
    # precision just below each known relation, ties taken together as scikit-learn does
    values = np.unique(known)
    n_at_least = len(ordered) - ordered.searchsorted(values, side="left")
    n_known = len(known) - np.searchsorted(known, values, side="left")
    gained = n_known - np.append(n_known[1:], 0)
    return float(np.sum(gained * n_known / n_at_least) / len(known))


def both_limits(relations: Relations, grid: np.ndarray, diagonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Cosines at or below, and at or above which a pair is predicted, at each percentile."""
    if not ((grid >= 0) & (grid <= 100)).all():
        msg = f"percentiles={grid.tolist()} must lie between 0 and 100."
        raise ValueError(msg)
    n_genes = len(relations.genes) if diagonal else None
    ordered = relations.ranked[0]
    return thresholds(ordered, 100 - grid, n_genes), thresholds(ordered, grid, n_genes)


def is_in_a_tail(first: np.ndarray, last: np.ndarray, n: int, tail: float) -> np.ndarray:
    """Whether values lie in one of both tails of ``n``, by the first and last place of what equals them."""
    end = max(1, n - 1)
    return (first / end > 1 - tail) | (last / end < tail)


def check_tail(tail: float) -> None:
    """Raise ``ValueError`` unless there is room for two tails and something between."""
    if not 0 < tail < 0.5:
        msg = f"tail={tail} must lie between 0 and 0.5: the fraction of pairs in each tail."
        raise ValueError(msg)
