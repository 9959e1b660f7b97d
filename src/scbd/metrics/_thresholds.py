"""Percentiles of all cosines, and how many pairs lie beyond them, read off one sorted vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scbd.metrics._ranks import Ranks


def thresholds(ordered: np.ndarray | Ranks, grid: np.ndarray, n_genes: int | None = None) -> np.ndarray:
    """Percentiles as :func:`numpy.percentile` gives them to the last bit, without another copy of the values.

    Parameters
    ----------
    ordered
        Cosine of each pair once, in rising order, ``(P,)``.
    grid
        Percentiles, 0 to 100.
    n_genes
        Of the full square matrix: each pair twice, and a 1 for each gene with itself. `None`: of the pairs.
    """
    if n_genes is None:
        size = len(ordered)
    else:
        size = 2 * len(ordered) + n_genes
        # the ones of the diagonal stand before cosines that rounding made larger
        ones = 2 * ordered.searchsorted(ordered.dtype.type(1), side="right")

    def at(place: np.ndarray) -> np.ndarray:
        if n_genes is None:
            return ordered[place]
        off = np.where(place < ones, place, np.maximum(place - n_genes, 0)) // 2
        return np.where((place < ones) | (place >= ones + n_genes), ordered[off].astype(np.float64), 1.0)

    place = (size - 1) * (grid / 100)
    first = np.floor(place).astype(np.int64)
    low, high, share = at(first), at(np.minimum(first + 1, size - 1)), place - first
    # numpy counts from the nearer end, which may differ in the last bit
    return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))


def count_outside(ordered: np.ndarray | Ranks, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """How many sorted values are at most ``lower`` or at least ``upper``, each limit once where the two meet."""
    # limits in the type of the values: else all of these would be cast to that of the limits
    low, high = lower.astype(ordered.dtype), upper.astype(ordered.dtype)
    low = np.where(low > lower, np.nextafter(low, -np.inf, dtype=low.dtype), low)
    high = np.where(high < upper, np.nextafter(high, np.inf, dtype=high.dtype), high)
    n_low = ordered.searchsorted(low, side="right")
    n_high = len(ordered) - ordered.searchsorted(high, side="left")
    return np.minimum(n_low + n_high, len(ordered))
