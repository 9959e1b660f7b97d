"""Cells that lie together on a disk: which of them to draw, and whether they may be drawn together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# one would read fastest, and make the same cells meet for ever
_STRETCHES = 4
# standard errors; far out, since a table has many labels
_SURPRISING = 4.0
# of an order: few, so that many cells share one
_PARTS = 8


def stretches(rng: np.random.Generator, sizes: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Draw cells of groups, of each as up to four stretches of neighbours; each cell of a group as often as any.

    Parameters
    ----------
    rng
        Source of the draw.
    sizes
        Cells of each group, int64 ``(G,)``. They are a ring: behind the last comes the first.
    counts
        How many different ones to draw, at most all, int64 ``(G,)``; five and more in stretches, fewer anywhere.

    Returns
    -------
    Of each group the positions in it, a stretch after the other, int64 ``(counts[g],)``.
    """
    number = np.arange(_STRETCHES)
    longest = -(-counts[:, None] // _STRETCHES)
    lengths = np.clip(counts[:, None] - number * longest, 0, longest)
    before = np.cumsum(lengths, axis=1) - lengths
    # stretches and the cells left between them, in a random order, begin at a random cell
    free = sizes - counts
    slots = np.empty_like(lengths)
    for i in number:  # as many different slots, by Floyd's algorithm
        drawn = rng.integers(free + i + 1)
        taken = (slots[:, :i] == drawn[:, None]).any(axis=1)
        slots[:, i] = np.where(taken, free + i, drawn)
    firsts = np.sort(slots, axis=1) - number + before + rng.integers(sizes)[:, None]
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = (np.repeat((firsts - before).ravel(), lengths.ravel()) + place) % np.repeat(sizes, counts)
    return np.split(positions, np.cumsum(counts)[:-1])


def mixed_neighbours(y: np.ndarray, labels: Iterable[np.ndarray]) -> bool:
    """Whether cells of a perturbation lie together, and share no label with the next more often than by chance.

    Neighbours are counted that share a label. If rows are shuffled within perturbations, the mean and the variance of
    that number are known exactly (those of the number of runs). Four standard errors and a pair more are taken as no
    chance: of a shuffled table, one label in thirty thousand.

    Parameters
    ----------
    y
        Codes of the perturbation in the order of the rows, int64 ``(N,)``.
    labels
        Codes of all that should differ between partners: environment, guide, plate; non-negative int64 ``(N,)`` each.
        They are asked for one by one, up to the first that is not mixed.

    Returns
    -------
    If so, cells that follow each other are as good as any. If cells of a well lay together, they would be each other's
    partners, and little would be learned across wells.

    References
    ----------
    Barton and David (1957), Multiple runs.
    """
    same = y[1:] == y[:-1]
    _, group, sizes = np.unique(y, return_inverse=True, return_counts=True)
    if np.count_nonzero(~same) + 1 > len(sizes) or not same.any():
        return False
    return all(_is_mixed(label, same, group, sizes.astype(float)) for label in labels)


def parts_of(numbers: np.ndarray | None) -> Iterator[np.ndarray]:
    """Labels of numbers that are near each other, an eighth of the values each, int64 ``(N,)`` a column.

    Parameters
    ----------
    numbers
        Places in an order, from 0, int64 ``(N, K)``; `None` has no columns.
    """
    for places in () if numbers is None else numbers.T:
        yield places * _PARTS // (places.max() + 1)


def _is_mixed(label: np.ndarray, same: np.ndarray, group: np.ndarray, n: np.ndarray) -> bool:
    """Whether a label is, for rows of groups of ``n``, of which ``same`` says where the next is of the same group."""
    n_codes = int(label.max()) + 1
    pairs, counts = np.unique(group * n_codes + label, return_counts=True)
    squares, cubes = (np.bincount(pairs // n_codes, counts.astype(float) ** power) for power in (2, 3))
    expected = (squares / n - 1).sum()
    variance = (squares * (squares + n * (n + 1)) - 2 * n * cubes - n**3) / (n**2 * np.maximum(n - 1, 1))
    shared = np.count_nonzero(same & (label[1:] == label[:-1]))
    return bool(shared <= expected + _SURPRISING * np.sqrt(max(variance.sum(), 0.0)) + 1 + 1e-9)
