"""How sure a score of known relations is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from scbd.metrics._relations import Relations, Universe, relations_of
from scbd.metrics._relationships import PERCENTILES

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scbd.metrics._known_pairs import NetKind

Score = Literal["area", "recall", "average_precision"]


def relationship_interval(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    score: Score = "average_precision",
    tail: float = 0.05,
    level: float = 0.95,
    n_bootstrap: int = 200,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Confidence interval of a score by bootstrap over genes.

    Genes are drawn with replacement; a pair then counts as often as both of its genes were drawn, and a gene's pairs
    with its own copies do not count.

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`~scbd.metrics.relationship_curve`.
    score
        ``"area"``, ``"recall"`` (with ``tail``) or ``"average_precision"``.
    tail
        See :func:`~scbd.metrics.relationship_recall`.
    level
        Coverage.
    n_bootstrap
        Number of resamples.
    seed
        Seed of the resamples.

    Returns
    -------
    Lower and upper end.

    Raises
    ------
    ValueError
        If the score is not known, see also :func:`~scbd.metrics.relationship_curve`.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> low, high = scbd.metrics.relationship_interval(profiles, net, n_bootstrap=20)
    >>> low <= high
    True
    """
    if score not in get_args(Score):
        msg = f"score={score!r} is not known: use one of {', '.join(get_args(Score))}."
        raise ValueError(msg)
    relations = relations_of(profiles, net, net_kind, gene_key, universe)
    n = len(relations.genes)
    one, two = np.triu_indices(n, k=1)
    cosine, related = relations.pairs()
    order = np.argsort(cosine, kind="stable")
    ordered = _Ordered(cosine[order], related[order], one[order], two[order])
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(n_bootstrap):
        weight = np.bincount(rng.integers(n, size=n), minlength=n)
        values.append(ordered.score(weight, score, tail))
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


class _Ordered:
    """Pairs in order of their cosine: every score of a resample is a few cumulative sums."""

    def __init__(self, cosine: np.ndarray, related: np.ndarray, one: np.ndarray, two: np.ndarray) -> None:
        self._cosine, self._related, self._one, self._two = cosine, related, one, two

    def score(self, weight: np.ndarray, score: Score, tail: float) -> float:
        """One score when gene ``i`` was drawn ``weight[i]`` times."""
        pairs = (weight[self._one] * weight[self._two]).astype(np.float64)
        known = pairs * self._related
        up_to, known_up_to = np.cumsum(pairs), np.cumsum(known)
        if known_up_to[-1] == 0:
            return np.nan
        if score == "average_precision":
            above, known_above = up_to[-1] - up_to + pairs, known_up_to[-1] - known_up_to + known
            return float(np.sum(known * known_above / np.maximum(above, 1)) / known_up_to[-1])
        if score == "recall":
            first, last = (up_to - pairs) / (up_to[-1] - 1), (up_to - 1) / (up_to[-1] - 1)
            return float(np.sum(known[(first > 1 - tail) | (last < tail)]) / known_up_to[-1])
        # percentiles over the square matrix: each pair twice, and a gene's cosine of 1 with each of its copies
        n_square = 2 * up_to[-1] + np.square(weight.astype(np.float64)).sum()
        points = np.array([_outside(pairs, up_to, known_up_to, n_square, p) for p in PERCENTILES])
        precision, recall = points[:, 1] / np.maximum(points[:, 0], 1), points[:, 1] / known_up_to[-1]
        return float(-np.trapezoid(precision, recall))


def _outside(
    pairs: np.ndarray, up_to: np.ndarray, known: np.ndarray, n_square: float, percentile: float
) -> tuple[float, float]:
    """Weight of all pairs, and of related ones, outside of the two percentiles of the square matrix.

    There a pair of weight w takes 2 w places in a row, the first at ``2 (up_to - w)``.
    """
    below = np.searchsorted(2 * (up_to - pairs), np.floor((100 - percentile) / 100 * (n_square - 1)), side="right")
    under = np.searchsorted(2 * up_to, np.ceil(percentile / 100 * (n_square - 1)) + 1, side="left")
    all_pairs, related = np.append(0.0, up_to), np.append(0.0, known)
    return (
        all_pairs[below] + all_pairs[-1] - all_pairs[under],
        related[below] + related[-1] - related[under],
    )
