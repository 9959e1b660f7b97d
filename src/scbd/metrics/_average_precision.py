"""Average precision of retrieval queries, and its null distribution over random rankings.

A query ranks items by their similarity to it. Its average precision is high if the positives, which are the items that
should be found, come before the negatives.

Items that are equally similar to a query (ties) have no order. The average precision is therefore averaged over all
orders of the ties, so that it depends on the embedding alone and not on the order of the rows. If all rows of the
embedding are the same vector, every query has the average precision that is expected by chance.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

# Number of decimals to which cosines are rounded before they are compared. The last of these decimals is far coarser
# than the rounding error of a matrix product, and far finer than differences that noise in the data causes.
_COSINE_DECIMALS = 9
# Maximum number of positives of a query for which each positive is compared with each negative. With more positives,
# sorting the negatives first is faster.
_MAX_POSITIVES_WITHOUT_SORTING = 16
# maximum number of array elements (cosines between queries and items, or random numbers) that are held in memory at
# once
_MAX_NUMBERS_IN_MEMORY = 1 << 22
# Mean average precisions count as equal if they differ by less than this value. Sums of the same fractions in a
# different order differ by rounding errors.
_SCORE_TOLERANCE = 1e-12


def scale_to_unit_length(x: np.ndarray) -> np.ndarray:
    """Return the rows of an array ``(N, D)`` scaled to Euclidean length 1, as float64.

    A row of zeros stays a row of zeros, so that its cosine with any other row is 0.
    """
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
) -> pd.DataFrame:
    """Compute the average precision of each query, with positives and negatives ranked by their cosine with the query.

    Queries without a positive or without a negative are omitted from the result. Cosines are computed for a block of
    queries at a time, which limits memory.

    Parameters
    ----------
    unit
        Embeddings of the queries and of all items, as rows of length 1, ``(N, D)``.
    queries
        Row numbers of the queries in ``unit``, ``(Q,)``.
    gallery
        Row numbers in ``unit`` of the items that may be negatives, ``(G,)``.
    positives
        Function from the row number of one query to the row numbers of its positives, the items that should be ranked
        first. Positives need not be in the gallery.
    negatives
        Function from the row numbers of several queries ``(B,)`` to a boolean mask ``(B, G)``. The mask marks the items
        of the gallery that are negatives of each query.

    Returns
    -------
    Frame with one row per query. Its index is the row number of the query in ``unit``, and its columns are
    ``average_precision``, ``chance`` (average precision of a random order), ``n_positives`` and ``n_negatives``.
    """
    against = unit[gallery]
    found: list[tuple[int, float, float, int, int]] = []
    size = max(1, _MAX_NUMBERS_IN_MEMORY // max(1, len(gallery)))
    for start in range(0, len(queries), size):
        block = queries[start : start + size]
        cosine, mask = round_cosines(unit[block] @ against.T), negatives(block)
        for row, values, wrong in zip(block, cosine, mask, strict=True):
            right, others = positives(row), values[wrong]
            if len(right) and len(others):
                score = average_precision(round_cosines(unit[right] @ unit[row]), others)
                found.append((row, score, expected_average_precision(len(right), len(others)), len(right), len(others)))
    types = [("row", int), ("average_precision", float), ("chance", float), ("n_positives", int), ("n_negatives", int)]
    return pd.DataFrame.from_records(np.array(found, dtype=types), index="row")


def average_precision(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Compute the average precision of one query from the similarities of its positives and negatives.

    The precision at a positive is the fraction of positives among all items up to this rank. The average precision is
    the mean of these precisions over all positives. If items have equal similarities (ties), the mean over all orders
    of the ties is returned.

    Parameters
    ----------
    positives
        Similarities of the query to its positives, ``(P,)``, at least one.
    negatives
        Similarities of the query to its negatives, ``(M,)``.
    """
    ranked = np.sort(positives)[::-1]
    above, at_least = _count_above_thresholds(ranked, negatives)
    tied = at_least - above
    if not tied.any():
        found = np.arange(1, len(ranked) + 1)
        return float(np.mean(found / (found + above)))
    _, first, size = np.unique(-ranked, return_index=True, return_counts=True)
    parts = [_sum_precision_of_ties(p, tied[i], i, i + above[i]) for i, p in zip(first, size, strict=True)]
    return float(sum(parts) / len(ranked))


def _count_above_thresholds(thresholds: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count, for each threshold, the values above the threshold, and the values at or above the threshold."""
    if len(thresholds) <= _MAX_POSITIVES_WITHOUT_SORTING:
        counts = [(np.count_nonzero(values > limit), np.count_nonzero(values >= limit)) for limit in thresholds]
        above, at_least = np.array(counts).T
        return above, at_least
    ordered = np.sort(values)
    above = len(values) - np.searchsorted(ordered, thresholds, side="right")
    at_least = len(values) - np.searchsorted(ordered, thresholds, side="left")
    return above, at_least


@cache
def expected_average_precision(n_positives: int, n_negatives: int) -> float:
    """Compute the average precision that is expected if positives and negatives are ranked in random order."""
    return _sum_precision_of_ties(n_positives, n_negatives, 0, 0) / n_positives


def _sum_precision_of_ties(n_positives: int, n_negatives: int, positives_above: int, all_above: int) -> float:
    """Sum the precisions at the positives among tied items, which are equally similar to a query.

    The sum is averaged over all orders of the tied items. ``n_positives`` and ``n_negatives`` are the numbers of
    positives and negatives among the tied items. ``positives_above`` and ``all_above`` are the numbers of positives,
    and of all items, that are more similar to the query than the tied items.
    """
    n = n_positives + n_negatives
    before = np.arange(n)
    found = positives_above + 1 + before * (n_positives - 1) / max(1, n - 1)
    return float(n_positives / n * np.sum(found / (all_above + before + 1)))


class NullDistribution:
    """Null distribution of the average precision of a query, from random rankings of its positives and negatives.

    The distribution depends only on the number of positives and on the number of negatives. Null scores are drawn once
    for each combination of both numbers, and are reused for all queries with this combination.

    Parameters
    ----------
    n_permutations
        Number of random rankings that are drawn for each combination of numbers of positives and negatives.
    seed
        Seed of the random rankings. The rankings for one combination of numbers do not depend on which combinations
        were drawn before.
    """

    def __init__(self, n_permutations: int, seed: int) -> None:
        self._n, self._seed = n_permutations, seed
        self._drawn: dict[tuple[int, int], np.ndarray] = {}

    def p_value(self, score: float, n_positives: ArrayLike, n_negatives: ArrayLike) -> float:
        """Return the p value of the mean average precision of several queries, compared with random rankings.

        Queries of one perturbation retrieve each other, so that their scores are far from independent. The null scores
        of each query are therefore sorted before they are added over queries, as if all queries had the same rank in
        their null distributions. The sorting makes the p value conservative, that is, too large rather than too small.

        Parameters
        ----------
        score
            Mean average precision of the queries.
        n_positives, n_negatives
            Numbers of positives and of negatives of each query.
        """
        pairs, counts = np.unique(
            np.stack([np.asarray(n_positives), np.asarray(n_negatives)], axis=1), axis=0, return_counts=True
        )
        total = sum(count * self._scores(*map(int, pair)) for pair, count in zip(pairs, counts, strict=True))
        below = np.searchsorted(total / counts.sum(), score - _SCORE_TOLERANCE, side="left")
        return float((1 + self._n - below) / (1 + self._n))

    def _scores(self, n_positives: int, n_negatives: int) -> np.ndarray:
        """Return the null scores for a given number of positives and a given number of negatives.

        The null scores are the average precisions of random rankings, in ascending order, ``(n_permutations,)``.
        """
        key = n_positives, n_negatives
        if key not in self._drawn:
            rng = np.random.default_rng([self._seed, *key])
            size = max(1, _MAX_NUMBERS_IN_MEMORY // (n_positives + 1))
            parts = [min(size, self._n - start) for start in range(0, self._n, size)]
            self._drawn[key] = np.sort(np.concatenate([_random_scores(*key, n, rng) for n in parts]))
        return self._drawn[key]


def _random_scores(n_positives: int, n_negatives: int, n: int, rng: np.random.Generator) -> np.ndarray:
    # Instead of shuffling a ranking, draw the number of negatives between successive positives. Positives at random
    # places divide the unit interval into gaps, and a negative falls into a gap with a probability equal to the length
    # of the gap.
    gaps = rng.dirichlet(np.ones(n_positives + 1), n)
    before = rng.multinomial(n_negatives, gaps)[:, :-1].cumsum(axis=1)
    found = np.arange(1, n_positives + 1)
    return (found / (found + before)).mean(axis=1)


def round_cosines(cosine: np.ndarray) -> np.ndarray:
    """Round cosines in place, so that cosines which differ only by rounding errors of a matrix product become equal."""
    return np.round(cosine, _COSINE_DECIMALS, out=cosine)
