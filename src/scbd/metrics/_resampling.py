"""Resampling of arrays: bootstrap over related genes, permutation tests of gene sets, and permuted labels.

The bootstrap draws blocks of related genes, such as protein complexes, because genes of a block are not independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scipy import sparse

ScoreName = Literal["area", "recall", "average_precision"]

# number of gene pairs whose weights are summed at once, so that they fit into the processor's cache
_PAIRS_PER_BLOCK = 1 << 15
# Number of random sets with at least the mean cosine of a gene set, after which no more random sets are drawn for this
# gene set. The p value of the gene set is then accurate enough.
_MIN_SETS_REACHED = 20
# At most 2,048 random orders of the genes are drawn at once, and all orders together have at most 2^24 entries.
_MAX_ORDERS, _MAX_GENES_IN_ORDERS = 2_048, 1 << 24
# Mean cosines of gene sets count as equal if they differ by less than this value. Sums over the same genes in a
# different order differ by rounding errors.
_COSINE_TOLERANCE = 1e-9


def weighted_percentiles(
    ordered: np.ndarray, grid: np.ndarray, n_genes: float | None = None, *, before: np.ndarray | None = None
) -> np.ndarray:
    """Return percentiles of the cosines of gene pairs, which may have weights.

    Without weights, the percentiles are identical to those of :func:`numpy.percentile`. The cosines are not copied.

    Parameters
    ----------
    ordered
        Cosines of ``P`` pairs of genes, each pair once, in ascending order, ``(P,)``.
    grid
        Percentiles to be computed, from 0 to 100, an array of any shape.
    n_genes
        Number of genes. If it is given, percentiles are those of the full square matrix of cosines, which holds each
        pair twice, and a 1 for each gene with itself. `None`: percentiles of the pairs alone.
    before
        Weights of the pairs, as the total weight of all pairs that precede each place in ``ordered``, ``(P + 1,)``.
        `None`: each pair has weight 1.
    """
    copies, ones = (1, 0.0) if n_genes is None else (2, n_genes / 2)
    total = len(ordered) if before is None else before[-1]
    # Place, among the sorted cosines, at which the cosines of 1 of each gene with itself are inserted. They come before
    # cosines that exceed 1 by rounding errors.
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
    # Interpolation starts from the nearer of the two neighbouring cosines, as in numpy. Otherwise, percentiles could
    # differ from those of numpy in the last bit.
    return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))


def weight_outside(
    ordered: np.ndarray, lower: np.ndarray, upper: np.ndarray, *, before: np.ndarray | None = None
) -> np.ndarray:
    """Return the total weight of the gene pairs with a cosine of at most ``lower`` or at least ``upper``.

    A pair that is both at most ``lower`` and at least ``upper`` counts once. ``ordered`` (sorted cosines) and
    ``before`` (cumulative weights) are as in :func:`weighted_percentiles`.
    """
    # The lower and the upper limit are converted to the dtype of the cosines. Otherwise, numpy would convert all
    # cosines to the dtype of the limits.
    low, high = lower.astype(ordered.dtype), upper.astype(ordered.dtype)
    low = np.where(low > lower, np.nextafter(low, -np.inf, dtype=low.dtype), low)
    high = np.where(high < upper, np.nextafter(high, np.inf, dtype=high.dtype), high)
    n_low, n_high = ordered.searchsorted(low, side="right"), ordered.searchsorted(high, side="left")
    if before is None:
        return np.minimum(n_low + len(ordered) - n_high, len(ordered))
    return np.minimum(before[n_low] + before[-1] - before[n_high], before[-1])


def is_in_a_tail(first: np.ndarray, last: np.ndarray, n: float, tail: float) -> np.ndarray:
    """Return a mask of the values that lie in the lower or the upper tail of ``n`` sorted values.

    Parameters
    ----------
    first, last
        For each tested value, the index of the first and the index of the last of the ``n`` sorted values that are
        equal to the tested value.
    n
        Number of sorted values, or their total weight.
    tail
        Size of each tail, as a fraction of ``n``.
    """
    # if there is only a single value, it lies in neither tail
    if n <= 1:
        return np.zeros(np.shape(first), dtype=bool)
    return (first / (n - 1) > 1 - tail) | (last / (n - 1) < tail)


def divide_into_blocks(related: sparse.csr_array) -> np.ndarray:
    """Divide genes into blocks of related genes, which are resampled together, and return the block of each gene.

    The blocks are integers ``(G,)``. Partners of a gene are the genes that are related to it. The gene with the most
    partners forms the first block, together with its partners. Among the remaining genes, the gene with the most
    remaining partners forms the next block, together with these remaining partners, and so on. Genes without remaining
    partners form blocks of their own.

    If complexes have no common genes, each complex is a block. Overlapping complexes that contain the gene with the
    most partners are merged into one block. In a network of pairs, a block is a gene with many partners, together with
    these partners.
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
    """Pairs of genes in the order of their cosine, from which scores of bootstrap samples of genes are computed.

    The bootstrap draws blocks, which are groups of related genes. Sorting the pairs once is enough, because a score of
    a bootstrap sample follows from cumulative sums of the weights of pairs. The weight of a block is the number of
    times that the block was drawn. A pair of genes of one block has the weight of the block. A pair of genes of two
    blocks has the product of the weights of both blocks. Two copies of the same block form no pairs.

    Parameters
    ----------
    cosine, related
        Cosine of each pair of genes, and mask of the related pairs, as from :meth:`Relations.pairs`,
        ``(G (G - 1) / 2,)``.
    blocks
        Block of each gene, from :func:`divide_into_blocks`.
    tail
        Fraction of pairs in each tail of the cosines, for the score ``"recall"``.
    percentiles
        Thresholds of the precision-recall curve, for the score ``"area"``.
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
        # For each related pair, the range of all pairs with the same cosine, in ascending order of cosines. The range
        # is given by the place of its first pair, and the place after its last pair.
        self._first = np.searchsorted(self._ordered, self._known_cosine, side="left")
        self._last = np.searchsorted(self._ordered, self._known_cosine, side="right")
        self._n_genes = np.bincount(blocks)
        self._tail, self._percentiles = tail, np.asarray(percentiles, dtype=float)

    def n_effective(self) -> float:
        """Return the effective number of blocks: the number of equally large blocks that give the same uncertainty.

        The effective number is at most the number of blocks that contain related pairs.
        """
        known = np.bincount(self._known_one[self._known_inside], minlength=len(self._n_genes))
        return float(known.sum() ** 2 / np.square(known, dtype=float).sum())

    def score(self, drawn: np.ndarray, score: ScoreName, across: float = 1.0) -> float:
        """Compute one score of a bootstrap sample of blocks; the score is NaN if the sample contains no related pair.

        Parameters
        ----------
        drawn
            Number of times that each of ``C`` blocks was drawn, float ``(C,)``.
        score
            Name of the score: ``"area"``, ``"recall"`` or ``"average_precision"``.
        across
            Factor by which weights of pairs of genes from two different blocks are multiplied. When ``C`` blocks are
            drawn with replacement, the expected weight of such pairs is too small by ``(C - 1) / C``, which a factor of
            ``C / (C - 1)`` corrects.
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
        limits = weighted_percentiles(self._ordered, grid, float(drawn @ self._n_genes), before=before)
        predicted = weight_outside(self._ordered, *limits, before=before)
        found = weight_outside(self._known_cosine, *limits, before=known_before)
        return float(-np.trapezoid(found / np.maximum(predicted, 1), found / n_known))

    def _weight_before(self, drawn: np.ndarray, across: float) -> np.ndarray:
        """Return the total weight of all pairs that precede each place in the order of cosines, ``(P + 1,)``.

        ``drawn`` and ``across`` are as in :meth:`score`. Weights are summed in parts that fit into the processor's
        cache.
        """
        before = self._before
        for start in range(0, len(self._one), _PAIRS_PER_BLOCK):
            part = slice(start, start + _PAIRS_PER_BLOCK)
            weight = np.take(drawn, self._one[part], mode="clip")
            weight *= np.take(across * drawn, self._two[part], mode="clip")
            inside = self._inside[slice(*np.searchsorted(self._inside, [start, start + _PAIRS_PER_BLOCK]))]
            weight[inside - start] = drawn[self._one[inside]]
            weight[0] += before[start]
            np.cumsum(weight, out=before[start + 1 : start + len(weight) + 1])
        return before


def draw_units(n_units: int, n_samples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield bootstrap samples of units, such as cells or blocks of genes, that are drawn with replacement.

    Each sample is the number of times that each unit was drawn, float ``(n_units,)``.
    """
    rng = np.random.default_rng(seed)
    for _ in range(n_samples):
        yield np.bincount(rng.integers(n_units, size=n_units), minlength=n_units).astype(float)


def bootstrap_interval(values: np.ndarray, level: float, n_effective: float) -> tuple[float, float]:
    """Return a confidence interval from quantiles of bootstrap samples, widened if few blocks are resampled.

    ``values`` are the bootstrap samples of a score, and ``n_effective`` is the effective number of resampled blocks.
    Intervals from plain percentiles are too narrow for few blocks, for two reasons (Hesterberg (2015)). The variance of
    the samples is too small by the factor ``(n - 1) / n`` for ``n`` blocks. And a mean with unknown variance has a
    distribution with heavier tails than a normal distribution. The quantiles are therefore those of Student's t with
    ``n_effective - 1`` degrees of freedom.
    """
    wide = small_sample_factor(n_effective) * stats.t.ppf((1 + level) / 2, n_effective - 1)
    tail = float(stats.norm.sf(wide))
    low, high = np.nanquantile(values, [tail, 1 - tail])
    return float(low), float(high)


def bootstrap_p_value(values: np.ndarray, n_effective: float) -> float:
    """Return the two-sided p value of the hypothesis that a difference between two scores is 0.

    ``values`` are the bootstrap samples of the difference, and ``n_effective`` is the effective number of resampled
    blocks. If the level of :func:`bootstrap_interval` is chosen such that the interval ends at 0, the p value is 1
    minus this level. One sample beyond 0 is added to ``values``, so that p values are never 0, and stay large with very
    few blocks.
    """
    beyond = min((values <= 0).sum(), (values >= 0).sum())
    wide = stats.norm.isf((1 + beyond) / (1 + len(values)))
    return float(min(1.0, 2 * stats.t.sf(wide / small_sample_factor(n_effective), n_effective - 1)))


def small_sample_factor(n_effective: float) -> float:
    """Return the factor that corrects a bootstrap standard error for a small number of resampled blocks.

    The factor is ``sqrt(n / (n - 1))`` for an effective number of ``n`` blocks.
    """
    return float(np.sqrt(n_effective / (n_effective - 1)))


def mean_cosine(unit: np.ndarray) -> float:
    """Return the mean cosine over all pairs of rows of length 1, without computing the cosine of each pair.

    The rows ``unit`` are ``(size, D)``, for example the profiles of the genes of one set.
    """
    return float(_mean_cosine(unit.sum(axis=0)[None], np.square(unit).sum(), len(unit))[0])


def sequential_p_values(
    unit: np.ndarray, sizes: np.ndarray, observed: np.ndarray, n_first: int, n_most: int, rng: np.random.Generator
) -> np.ndarray:
    """Compute a p value for the similarity of the genes of each set, with more random sets for smaller p values.

    The p value of a set compares the mean cosine of its genes with the mean cosines of random gene sets of the same
    size. The number of random sets is doubled in each round. A set is finished after the first round in which at least
    20 random sets have at least its mean cosine. Its p value is then ``p = (1 + reached) / (1 + drawn)``, where
    ``drawn`` is the number of random sets, and ``reached`` is the number of random sets with at least the mean cosine
    of the set.

    The p values are valid although sets finish in different rounds. For a threshold ``t``, let ``r`` be the first round
    with ``21 / (1 + drawn) <= t``, or the last round if there is no such round. A set that finishes before round ``r``
    has ``p > t``. A set with ``p <= t`` therefore took part in round ``r``, and had
    ``(1 + reached) / (1 + drawn) <= t`` in this round. Among sets that are not similar, the proportion with ``p <= t``
    is thus at most ``t``, as if all sets were tested in round ``r`` alone (Besag and Clifford (1991)).

    Parameters
    ----------
    unit
        Profiles of genes, float64 ``(G, D)``, rows of length 1 or 0.
    sizes, observed
        Number of genes and mean cosine of each set, ``(S,)``.
    n_first, n_most
        Number of random sets of each size in the first round, and maximum number in all rounds together.
    rng
        Random generator of the sets.

    Returns
    -------
    p value of each set, ``(S,)``.
    """
    n_reached = np.zeros(len(sizes), dtype=np.int64)
    p = np.ones(len(sizes))
    n_drawn, n_wanted = 0, n_first
    left = np.arange(len(sizes))
    while True:
        n_reached[left] += _count_sets_as_similar(unit, sizes[left], observed[left], n_wanted - n_drawn, rng)
        n_drawn = n_wanted
        p[left] = (1 + n_reached[left]) / (1 + n_drawn)
        left = left[n_reached[left] < _MIN_SETS_REACHED]
        if not len(left) or n_drawn >= n_most:
            return p
        n_wanted = min(2 * n_drawn, n_most)


def _count_sets_as_similar(
    unit: np.ndarray, sizes: np.ndarray, observed: np.ndarray, n: int, rng: np.random.Generator
) -> np.ndarray:
    """Count, for each gene set, the random sets of the same size that have at least its mean cosine, ``(S,)``.

    ``n`` random orders of the genes are drawn. The first ``k`` genes of an order are a random set of ``k`` genes, so
    that each order gives random sets of all sizes.
    """
    counts = np.zeros(len(sizes), dtype=np.int64)
    of_size = {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
    length = np.einsum("gd,gd->g", unit, unit)
    width = min(n, _MAX_ORDERS, max(1, _MAX_GENES_IN_ORDERS // len(unit)))
    # Each column of the array ``deck`` is one order of the genes. Orders are drawn in blocks. A new block of orders is
    # shuffled from the orders of the previous block, because shuffling gives random orders from any start.
    deck = np.repeat(np.arange(len(unit), dtype=np.int32)[:, None], width, axis=1)
    for start in range(0, n, width):
        orders = np.arange(min(width, n - start))
        total, own = np.zeros((len(orders), unit.shape[1])), np.zeros(len(orders))
        for i in range(int(sizes.max())):
            # Draw the i-th gene of each order from the genes not yet drawn (Fisher and Yates shuffle).
            place = rng.integers(i, len(deck), size=len(orders))
            genes = deck[place, orders]
            deck[place, orders] = deck[i, orders]
            deck[i, orders] = genes
            total += unit[genes]
            own += length[genes]
            if (given := of_size.get(i + 1)) is not None:
                null = np.sort(_mean_cosine(total, own, i + 1))
                counts[given] += len(orders) - np.searchsorted(null, observed[given] - _COSINE_TOLERANCE)
    return counts


def _mean_cosine(total: np.ndarray, own: np.ndarray, size: int) -> np.ndarray:
    """Compute the mean cosine between the rows of each of several groups, from sums over the rows.

    Each group has ``size`` rows of length 1 (or 0). ``total`` holds the sum of the rows of each group, ``(n, D)``, and
    ``own`` the sum of the squared lengths of its rows.
    """
    return (np.einsum("nd,nd->n", total, total) - own) / (size * (size - 1))


def permute_within_groups(labels: np.ndarray, groups: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``n`` random permutations of labels that exchange labels only within groups, ``(n, N)``.

    ``labels`` and ``groups`` hold the label and the integer code of the group of each row, both ``(N,)``.
    """
    order = np.argsort(rng.random((n, len(groups))) + groups, axis=1)
    permuted = np.empty((n, len(groups)), dtype=labels.dtype)
    np.put_along_axis(permuted, order, labels[np.argsort(groups, kind="stable")][None], axis=1)
    return permuted
