"""Scores of known relations when whole complexes are drawn again."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import sparse, stats

from scbd.metrics._relations import Relations
from scbd.metrics._relationships import PERCENTILES, is_in_a_tail

Score = Literal["area", "recall", "average_precision"]

# pairs whose weights are added at a time
_PART = 1 << 15


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
    """

    def __init__(self, relations: Relations, blocks: np.ndarray) -> None:
        cosine, related = relations.pairs()
        order = np.argsort(cosine)
        one, two = np.triu_indices(len(blocks), k=1)
        codes = blocks.astype(np.int32)
        self._one, self._two = codes[one][order], codes[two][order]
        self._inside = np.flatnonzero(self._one == self._two)
        self._before = np.zeros(len(order) + 1)
        self._known = np.flatnonzero(related[order])
        self._known_one, self._known_two = self._one[self._known], self._two[self._known]
        self._known_inside = self._known_one == self._known_two
        # places of equal cosines, from the first pair to after the last
        self._ordered = cosine[order]
        known = self._ordered[self._known]
        self._first, self._last = (np.searchsorted(self._ordered, known, side=side) for side in ("left", "right"))
        # in the square matrix the diagonal stands before cosines that rounding made larger than 1
        self._n_to_one = int(np.searchsorted(self._ordered, self._ordered.dtype.type(1), side="right"))
        self._n_genes = np.bincount(blocks)

    @property
    def n_blocks(self) -> int:
        """Blocks that are drawn."""
        return len(self._n_genes)

    def n_effective(self) -> float:
        """How many blocks of equally many relations would be as uncertain: at most the blocks that hold any."""
        known = np.bincount(self._known_one[self._known_inside], minlength=self.n_blocks)
        return float(known.sum() ** 2 / np.square(known, dtype=float).sum())

    def score(self, drawn: np.ndarray, score: Score, tail: float, across: float = 1.0) -> float:
        """One score when block ``c`` was drawn ``drawn[c]`` times.

        Parameters
        ----------
        drawn
            Float ``(C,)``.
        score, tail
            Which score.
        across
            Of pairs of two blocks: drawn with replacement they are ``(C - 1) / C`` as frequent as they are.
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
            found = is_in_a_tail(before[self._first], before[self._last] - 1, total, tail)
            return float(np.sum(known[found]) / n_known)
        return self._area(before, known_before, float(drawn @ self._n_genes) / 2)

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

    def _area(self, before: np.ndarray, known_before: np.ndarray, diagonal: float) -> float:
        """Area of the curve whose limits are percentiles over the square matrix, as ``thresholds`` makes them.

        There each pair stands twice, and each gene once, of cosine 1 with itself; ``diagonal`` is half of these.
        """
        grid = np.array(PERCENTILES)
        place = (2 * (before[-1] + diagonal) - 1) * (np.stack([100 - grid, grid]) / 100)
        first = np.floor(place)
        one, two = (self._cosine_at(before, diagonal, at / 2) for at in (first, first + 1))
        share, apart = place - first, two.astype(float) - one
        # between two cosines, if rounding does not make it one of them: cosines that should be equal are so close
        limit = np.where(share < 0.5, one + apart * share, two - apart * (1 - share))
        lower = np.searchsorted(self._ordered, np.where(limit < two, one, two)[0], side="right")
        upper = np.searchsorted(self._ordered, np.where(limit > one, two, one)[1], side="left")
        predicted = _outside(before, lower, upper)
        found = _outside(known_before, *np.searchsorted(self._known, [lower, upper]))
        return float(-np.trapezoid(found / np.maximum(predicted, 1), found / known_before[-1]))

    def _cosine_at(self, before: np.ndarray, diagonal: float, place: np.ndarray) -> np.ndarray:
        """Of what has so much weight before it, where the diagonal is of cosine 1."""
        ones = before[self._n_to_one]
        beyond = place >= ones + diagonal
        pair = np.searchsorted(before, place - diagonal * beyond, side="right") - 1
        cosine = self._ordered[np.minimum(pair, len(self._ordered) - 1)]
        return np.where((place < ones) | beyond, cosine, cosine.dtype.type(1))


def _outside(before: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Weight below the lower and from the upper places on, once where the two meet."""
    return np.minimum(before[lower] + before[-1] - before[upper], before[-1])


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
