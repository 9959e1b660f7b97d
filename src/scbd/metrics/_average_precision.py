"""Average precision of one query among a gallery, and what random orders give.

Items that are equally near have no order. Scores here are the mean over all their orders, so that they follow from
positions in the embedding alone: where all rows are the same vector, every score is that of chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

# cosines that differ by less are equal: far above the rounding of a product, far below what noise moves them by
_DECIMALS = 9
# positives that are compared with all negatives, where to sort these would take longer
_FEW = 16
# cosines held at a time, and numbers drawn at a time
_BLOCK = 1 << 22
# a score that was reached by another sum of the same fractions
_ROUNDING = 1e-12


class Scores(NamedTuple):
    """Of queries that have something to find, and something else to tell it from."""

    rows: np.ndarray
    """Their rows, ``(Q,)``."""
    average_precision: np.ndarray
    """float64 ``(Q,)``."""
    n_positives: np.ndarray
    """``(Q,)``."""
    n_negatives: np.ndarray
    """``(Q,)``."""


def unit_rows(x: np.ndarray) -> np.ndarray:
    """Rows of length 1, float64; a row of zeros stays one, and its cosine to any other is 0."""
    unit = x.astype(np.float64)
    length = np.sqrt(np.einsum("nd,nd->n", unit, unit))
    unit /= np.where(length > 0, length, 1)[:, None]
    return unit


def score_queries(
    unit: np.ndarray,
    queries: np.ndarray,
    gallery: np.ndarray,
    positives: Callable[[int], np.ndarray],
    negatives: Callable[[np.ndarray], np.ndarray],
) -> Scores:
    """Average precision of each query by cosine, block by block.

    Parameters
    ----------
    unit
        Rows of length 1, ``(N, D)``.
    queries, gallery
        Row numbers ``(Q,)`` and ``(G,)``.
    positives
        From the row of a query to the rows that it should find; these need not be in the gallery.
    negatives
        From rows of queries ``(B,)`` to a mask ``(B, G)`` of those of the gallery that it should not find.
    """
    against = unit[gallery]
    found: list[tuple[int, float, int, int]] = []
    size = max(1, _BLOCK // max(1, len(gallery)))
    for start in range(0, len(queries), size):
        block = queries[start : start + size]
        cosine, mask = rounded(unit[block] @ against.T), negatives(block)
        for row, values, wrong in zip(block, cosine, mask, strict=True):
            right, others = positives(row), values[wrong]
            if len(right) and len(others):
                score = average_precision(rounded(unit[right] @ unit[row]), others)
                found.append((row, score, len(right), len(others)))
    rows, scores, n_positives, n_negatives = zip(*found, strict=True) if found else ((), (), (), ())
    return Scores(
        np.array(rows, dtype=np.int64),
        np.array(scores, dtype=np.float64),
        np.array(n_positives, dtype=np.int64),
        np.array(n_negatives, dtype=np.int64),
    )


def average_precision(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Mean precision at the positives, expected over all orders of what is equal.

    Parameters
    ----------
    positives
        Similarities to what should be found, ``(P,)``, at least one.
    negatives
        Similarities to what should not, ``(M,)``.
    """
    ranked = np.sort(positives)[::-1]
    above, at_least = _counts_from(ranked, negatives)
    tied = at_least - above
    if not tied.any():
        found = np.arange(1, len(ranked) + 1)
        return float(np.mean(found / (found + above)))
    _, first, size = np.unique(-ranked, return_index=True, return_counts=True)
    parts = [_among_equals(p, tied[i], i, i + above[i]) for i, p in zip(first, size, strict=True)]
    return float(sum(parts) / len(ranked))


def _counts_from(thresholds: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many values are above each threshold, and how many are not below it."""
    if len(thresholds) <= _FEW:
        counts = [(np.count_nonzero(values > limit), np.count_nonzero(values >= limit)) for limit in thresholds]
        above, at_least = np.array(counts).T
        return above, at_least
    ordered = np.sort(values)
    above = len(values) - np.searchsorted(ordered, thresholds, side="right")
    at_least = len(values) - np.searchsorted(ordered, thresholds, side="left")
    return above, at_least


def chance(n_positives: int, n_negatives: int) -> float:
    """Average precision of a random order, expected."""
    return _among_equals(n_positives, n_negatives, 0, 0) / n_positives


def _among_equals(n_positives: int, n_negatives: int, positives_above: int, all_above: int) -> float:
    """Precision summed over the positives of a group of equal similarities, expected over its orders."""
    n = n_positives + n_negatives
    before = np.arange(n)
    found = positives_above + 1 + before * (n_positives - 1) / max(1, n - 1)
    return float(n_positives / n * np.sum(found / (all_above + before + 1)))


class Null:
    """Average precision of random orders, drawn once for each number of positives and negatives.

    Parameters
    ----------
    n_permutations
        Random orders of each.
    seed
        Of them; those of one pair of numbers do not depend on which others are drawn.
    """

    def __init__(self, n_permutations: int, seed: int) -> None:
        self._n, self._seed = n_permutations, seed
        self._drawn: dict[tuple[int, int], np.ndarray] = {}

    def p_value(self, score: float, n_positives: ArrayLike, n_negatives: ArrayLike) -> float:
        """How often the mean over some queries is at least this high.

        Queries of one perturbation find each other and are far from independent. Their null scores are therefore added
        in rising order, as if they were one and the same: p is rather too large than too small.
        """
        pairs, counts = np.unique(
            np.stack([np.asarray(n_positives), np.asarray(n_negatives)], axis=1), axis=0, return_counts=True
        )
        total = sum(count * self._scores(*map(int, pair)) for pair, count in zip(pairs, counts, strict=True))
        below = np.searchsorted(total / counts.sum(), score - _ROUNDING, side="left")
        return float((1 + self._n - below) / (1 + self._n))

    def _scores(self, n_positives: int, n_negatives: int) -> np.ndarray:
        """In rising order, ``(n_permutations,)``."""
        key = n_positives, n_negatives
        if key not in self._drawn:
            rng = np.random.default_rng([self._seed, *key])
            size = max(1, _BLOCK // (n_positives + 1))
            parts = [min(size, self._n - start) for start in range(0, self._n, size)]
            self._drawn[key] = np.sort(np.concatenate([_random_scores(*key, n, rng) for n in parts]))
        return self._drawn[key]


def _random_scores(n_positives: int, n_negatives: int, n: int, rng: np.random.Generator) -> np.ndarray:
    # of positives at random places of a line, a negative falls into a gap as often as that is long: nothing is shuffled
    gaps = rng.dirichlet(np.ones(n_positives + 1), n)
    before = rng.multinomial(n_negatives, gaps)[:, :-1].cumsum(axis=1)
    found = np.arange(1, n_positives + 1)
    return (found / (found + before)).mean(axis=1)


def rounded(cosine: np.ndarray) -> np.ndarray:
    """Cosines without the rounding of their product, in place: what is equally near compares equal."""
    return np.round(cosine, _DECIMALS, out=cosine)
