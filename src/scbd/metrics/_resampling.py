"""Scores of pairs when whole blocks of genes are drawn again, and random sets and orders. Arrays alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scipy import sparse

Score = Literal["area", "recall", "average_precision"]

# pairs whose weights are added at a time
_PART = 1 << 15
# random sets that are as alike as a given one after which its p value is known well enough
_ENOUGH = 20
# random orders that are dealt at a time, and numbers that these hold
_ORDERS, _BLOCK = 2_048, 1 << 24
# the same genes added in another order
_ROUNDING = 1e-9


def percentiles_of(
    ordered: np.ndarray, grid: np.ndarray, n_genes: float | None = None, *, before: np.ndarray | None = None
) -> np.ndarray:
    """Percentiles as :func:`numpy.percentile` gives them to the last bit, without another copy of the values.

    Parameters
    ----------
    ordered
        Cosine of each pair once, in rising order, ``(P,)``.
    grid
        Percentiles, 0 to 100, of any shape.
    n_genes
        Of the full square matrix: each pair twice, and a 1 for each gene with itself. `None`: of the pairs.
    before
        Weight of all pairs before each place, ``(P + 1,)``; `None`: each counts once.
    """
    copies, ones = (1, 0.0) if n_genes is None else (2, n_genes / 2)
    total = len(ordered) if before is None else before[-1]
    # the ones of the diagonal stand before cosines that rounding made larger
    start = ordered.searchsorted(ordered.dtype.type(1), side="right")
    if before is not None:
        start = before[start]

    def at(place: np.ndarray) -> np.ndarray:
        place = place / copies
        beyond = place >= start + ones
        among_pairs = place - ones * beyond
        if before is None:
            pair = among_pairs.astype(np.int64)
        else:
            pair = np.searchsorted(before, among_pairs, side="right") - 1
        cosine = ordered[np.minimum(pair, len(ordered) - 1)]
        return cosine if n_genes is None else np.where((place < start) | beyond, cosine.astype(np.float64), 1.0)

    place = (copies * (total + ones) - 1) * (grid / 100)
    first = np.floor(place)
    low, high, share = at(first), at(first + 1), place - first
    # numpy counts from the nearer end, which may differ in the last bit
    return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))


def weight_outside(
    ordered: np.ndarray, lower: np.ndarray, upper: np.ndarray, *, before: np.ndarray | None = None
) -> np.ndarray:
    """Weight of sorted values at most ``lower`` or at least ``upper``, once where both; see :func:`percentiles_of`."""
    # limits in the type of the values: else all of these would be cast to that of the limits
    low, high = lower.astype(ordered.dtype), upper.astype(ordered.dtype)
    low = np.where(low > lower, np.nextafter(low, -np.inf, dtype=low.dtype), low)
    high = np.where(high < upper, np.nextafter(high, np.inf, dtype=high.dtype), high)
    n_low, n_high = ordered.searchsorted(low, side="right"), ordered.searchsorted(high, side="left")
    if before is None:
        return np.minimum(n_low + len(ordered) - n_high, len(ordered))
    return np.minimum(before[n_low] + before[-1] - before[n_high], before[-1])


def is_in_a_tail(first: np.ndarray, last: np.ndarray, n: float, tail: float) -> np.ndarray:
    """Whether values lie in one of both tails of ``n``, by the first and last place of what equals them."""
    if n <= 1:  # a single value is beyond no percentile of itself
        return np.zeros(np.shape(first), dtype=bool)
    return (first / (n - 1) > 1 - tail) | (last / (n - 1) < tail)


def blocks_of(related: sparse.csr_array) -> np.ndarray:
    """Code ``(G,)`` of the group of genes that each is drawn with.

    The gene with the most partners and these are one, then that with the most of those left, and so on. Of complexes
    without common genes these are the complexes; many that overlap are one; of pairs, it is a hub and its partners.
    """
    n = related.shape[0]
    codes = np.full(n, -1)
    n_partners = np.diff(related.indptr).astype(np.int64)
    for code in range(n):
        hub = int(n_partners.argmax())
        if n_partners[hub] < 1:
            break
        partners = related.indices[related.indptr[hub] : related.indptr[hub + 1]]
        block = np.append(hub, partners[codes[partners] < 0])
        codes[block] = code
        for gene in block:
            n_partners[related.indices[related.indptr[gene] : related.indptr[gene + 1]]] -= 1
        n_partners[block] = -1
    alone = np.flatnonzero(codes < 0)
    codes[alone] = codes.max(initial=-1) + 1 + np.arange(len(alone))
    return codes


class Resampled:
    """Pairs in order of their cosine: a score of a resample is a cumulative sum of weights.

    A pair of one block counts as often as that was drawn. A pair of two blocks counts as often as both of them, and
    copies of a block are no pairs of each other.

    Parameters
    ----------
    cosine, related
        Of each pair once, row by row of the upper triangle, ``(G (G - 1) / 2,)``.
    blocks
        From :func:`blocks_of`.
    tail, percentiles
        Of recall and area.
    """

    def __init__(
        self, cosine: np.ndarray, related: np.ndarray, blocks: np.ndarray, *, tail: float, percentiles: Sequence[float]
    ) -> None:
        order = np.argsort(cosine)
        one, two = np.triu_indices(len(blocks), k=1)
        codes = blocks.astype(np.int32)
        self._one, self._two = codes[one][order], codes[two][order]
        self._inside = np.flatnonzero(self._one == self._two)
        self._before = np.zeros(len(order) + 1)
        self._ordered = cosine[order]
        self._known = np.flatnonzero(related[order])
        self._known_cosine = self._ordered[self._known]
        self._known_one, self._known_two = self._one[self._known], self._two[self._known]
        self._known_inside = self._known_one == self._known_two
        # places of equal cosines, from the first pair to after the last
        self._first = np.searchsorted(self._ordered, self._known_cosine, side="left")
        self._last = np.searchsorted(self._ordered, self._known_cosine, side="right")
        self._n_genes = np.bincount(blocks)
        self._tail, self._percentiles = tail, np.asarray(percentiles, dtype=float)

    def n_effective(self) -> float:
        """How many blocks of equally many relations would be as uncertain: at most the blocks that hold any."""
        known = np.bincount(self._known_one[self._known_inside], minlength=len(self._n_genes))
        return float(known.sum() ** 2 / np.square(known, dtype=float).sum())

    def score(self, drawn: np.ndarray, score: Score, across: float = 1.0) -> float:
        """One score when block ``c`` was drawn ``drawn[c]`` times, float ``(C,)``; NaN if no relation was drawn.

        Pairs of two blocks weigh ``across`` more: drawn with replacement they are ``(C - 1) / C`` as frequent as they
        are.
        """
        before = self._weight_before(drawn, across)
        known = np.where(self._known_inside, 1, across * drawn[self._known_two]) * drawn[self._known_one]
        known_before = np.append(0.0, np.cumsum(known))
        total, n_known = before[-1], known_before[-1]
        if n_known == 0:
            return np.nan
        if score == "average_precision":
            at_least = total - before[self._first]
            found = n_known - known_before[np.searchsorted(self._known, self._first)]
            precision = np.divide(found, at_least, out=np.zeros_like(known), where=known > 0)
            return float(np.sum(known * precision) / n_known)
        if score == "recall":
            in_a_tail = is_in_a_tail(before[self._first], before[self._last] - 1, total, self._tail)
            return float(np.sum(known[in_a_tail]) / n_known)
        grid = np.stack([100 - self._percentiles, self._percentiles])
        limits = percentiles_of(self._ordered, grid, float(drawn @ self._n_genes), before=before)
        predicted = weight_outside(self._ordered, *limits, before=before)
        found = weight_outside(self._known_cosine, *limits, before=known_before)
        return float(-np.trapezoid(found / np.maximum(predicted, 1), found / n_known))

    def _weight_before(self, drawn: np.ndarray, across: float) -> np.ndarray:
        """Weight of all pairs before each place, ``(P + 1,)``: in parts that stay in the processor's cache."""
        before = self._before
        for start in range(0, len(self._one), _PART):
            part = slice(start, start + _PART)
            weight = np.take(drawn, self._one[part], mode="clip")
            weight *= np.take(across * drawn, self._two[part], mode="clip")
            inside = self._inside[slice(*np.searchsorted(self._inside, [start, start + _PART]))]
            weight[inside - start] = drawn[self._one[inside]]
            weight[0] += before[start]
            np.cumsum(weight, out=before[start + 1 : start + len(weight) + 1])
        return before


def interval(values: np.ndarray, level: float, n_effective: float) -> tuple[float, float]:
    """Quantiles of resampled scores, as far out as Student's t asks of so few blocks.

    Plain percentiles of few draws are too narrow: they lack the factor ``n / (n - 1)`` of a variance, and the heavier
    tails of a mean whose spread is not known (Hesterberg (2015)).
    """
    wide = _widening(n_effective) * stats.t.ppf((1 + level) / 2, n_effective - 1)
    tail = float(stats.norm.sf(wide))
    low, high = np.nanquantile(values, [tail, 1 - tail])
    return float(low), float(high)


def p_value(values: np.ndarray, n_effective: float) -> float:
    """Of a difference that is 0 in truth, two-sided: one less the level of the :func:`interval` that ends at 0.

    Where no value is beyond 0, one more might be: of very few blocks, p stays large.
    """
    beyond = min((values <= 0).sum(), (values >= 0).sum())
    wide = stats.norm.isf((1 + beyond) / (1 + len(values)))
    return float(min(1.0, 2 * stats.t.sf(wide / _widening(n_effective), n_effective - 1)))


def _widening(n_effective: float) -> float:
    """Of a standard error that was taken over so few."""
    return float(np.sqrt(n_effective / (n_effective - 1)))


def mean_cosine(unit: np.ndarray) -> float:
    """Mean cosine over pairs of rows of length 1, ``(size, D)``: no pair is formed."""
    return float(_mean_cosine(unit.sum(axis=0)[None], np.square(unit).sum(), len(unit))[0])


def sequential_p_values(
    unit: np.ndarray, sizes: np.ndarray, observed: np.ndarray, n_first: int, n_most: int, rng: np.random.Generator
) -> np.ndarray:
    """How often random sets are at least as alike as each given one, counted for longer where that is rare.

    The number of random sets doubles. A set is done with after the first round in which 20 of them reach it, and its
    ``p = (1 + reached) / (1 + drawn)`` stays. That is valid: let round ``r`` be the first with
    ``21 / (1 + drawn) <= t``, or the last. A set with ``p <= t`` was not done before it, and had
    ``(1 + reached) / (1 + drawn) <= t`` in it; so of sets without likeness a share of at most ``t`` has ``p <= t``,
    as in round ``r`` alone (Besag and Clifford (1991)).

    Parameters
    ----------
    unit
        float64 ``(G, D)``, rows of length 1 or 0.
    sizes, observed
        Genes and mean cosine of each set, ``(S,)``.
    n_first, n_most
        Random sets of the first round, and of all.
    rng
        Generator of their orders.
    """
    n_reached = np.zeros(len(sizes), dtype=np.int64)
    p = np.ones(len(sizes))
    n_drawn, n_wanted = 0, n_first
    left = np.arange(len(sizes))
    while True:
        n_reached[left] += _count_as_alike(unit, sizes[left], observed[left], n_wanted - n_drawn, rng)
        n_drawn = n_wanted
        p[left] = (1 + n_reached[left]) / (1 + n_drawn)
        left = left[n_reached[left] < _ENOUGH]
        if not len(left) or n_drawn >= n_most:
            return p
        n_wanted = min(2 * n_drawn, n_most)


def _count_as_alike(
    unit: np.ndarray, sizes: np.ndarray, observed: np.ndarray, n: int, rng: np.random.Generator
) -> np.ndarray:
    """How many of ``n`` random sets of its size are as alike as each given one, ``(S,)``.

    The first genes of one random order are a random set of every size: each order is dealt once, for all sizes.
    """
    counts = np.zeros(len(sizes), dtype=np.int64)
    of_size = {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
    length = np.einsum("gd,gd->g", unit, unit)
    width = min(n, _ORDERS, max(1, _BLOCK // len(unit)))
    # a column an order; what one block leaves behind is as good a start for the next
    deck = np.repeat(np.arange(len(unit), dtype=np.int32)[:, None], width, axis=1)
    for start in range(0, n, width):
        orders = np.arange(min(width, n - start))
        total, own = np.zeros((len(orders), unit.shape[1])), np.zeros(len(orders))
        for i in range(int(sizes.max())):
            genes = _deal(deck, i, orders, rng)
            total += unit[genes]
            own += length[genes]
            if (given := of_size.get(i + 1)) is not None:
                null = np.sort(_mean_cosine(total, own, i + 1))
                counts[given] += len(orders) - np.searchsorted(null, observed[given] - _ROUNDING)
    return counts


def _deal(deck: np.ndarray, i: int, orders: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The ``i``-th gene of each order, drawn from those that were not dealt before (Fisher and Yates)."""
    place = rng.integers(i, len(deck), size=len(orders))
    dealt = deck[place, orders]
    deck[place, orders] = deck[i, orders]
    deck[i, orders] = dealt
    return dealt


def _mean_cosine(total: np.ndarray, own: np.ndarray, size: int) -> np.ndarray:
    """From sums of ``size`` rows, ``(…, D)``, and of their squared lengths."""
    return (np.einsum("nd,nd->n", total, total) - own) / (size * (size - 1))


def permuted_within(labels: np.ndarray, groups: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Labels ``(N,)`` in ``n`` random orders, each within groups of integer codes ``(N,)``: ``(n, N)``."""
    order = np.argsort(rng.random((n, len(groups))) + groups, axis=1)
    permuted = np.empty((n, len(groups)), dtype=labels.dtype)
    np.put_along_axis(permuted, order, labels[np.argsort(groups, kind="stable")][None], axis=1)
    return permuted
