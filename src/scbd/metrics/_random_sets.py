"""How alike the genes of random sets are."""

from __future__ import annotations

import numpy as np

# random sets that are as alike as a given one after which its p value is known well enough
_ENOUGH = 20
# random orders that are dealt at a time, and numbers that these hold
_ORDERS, _BLOCK = 2_048, 1 << 24
# the same genes added in another order
_ROUNDING = 1e-9


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
    as in round ``r`` alone.

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
