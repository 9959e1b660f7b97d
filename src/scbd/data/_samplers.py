"""Samplers that draw the cells of each batch.

A contrastive loss compares the cells inside a batch, so that the choice of cells for a batch is part of the method.
Samplers yield one array of row numbers per batch. A batch depends only on the data, the settings, the seed, the step
and the rank. A resumed run therefore continues exactly, given the step to start from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# number of stretches of consecutive cells per perturbation: a single stretch would be read fastest, but the same cells
# would always share a batch
_N_STRETCHES = 4
# number of standard deviations above chance at which adjacent cells share a label too often; high, since a table has
# many labels
_MAX_Z_SCORE = 4.0
# number of parts into which the range of an ordered variable is divided; few, so that each part has many cells
_N_RANK_BINS = 8


class BatchSampler(ABC):
    """Batches of row numbers for a fixed number of steps.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Number of cells per batch, over all ranks together.
    n_steps
        Total number of steps, including the steps before ``start``. Default: one epoch.
    seed
        Seed of all random choices.
    start
        First step to yield, for a run that is resumed.
    rank, world_size
        Rank of this process, and number of processes. Each process yields every ``world_size``-th cell of a batch,
        beginning with cell ``rank``. All processes then have cells of all perturbations, and statistics that a process
        computes from its own cells (as in BatchNorm) reveal no perturbation.

    Raises
    ------
    ValueError
        If ``batch_size`` is below 2, larger than the number of rows, or not a multiple of ``world_size``.
    """

    def __init__(
        self,
        rows: np.ndarray,
        batch_size: int,
        *,
        n_steps: int | None = None,
        seed: int = 0,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.rows = np.asarray(rows, dtype=np.int64)
        if batch_size < 2:
            msg = f"batch_size={batch_size}: a contrastive loss compares cells with each other, use at least 2."
            raise ValueError(msg)
        if batch_size > len(self.rows):
            msg = f"batch_size={batch_size} is larger than the {len(self.rows)} cells to draw from: lower batch_size."
            raise ValueError(msg)
        if batch_size % world_size:
            msg = f"batch_size={batch_size} cannot be shared equally by {world_size} devices."
            raise ValueError(msg)
        self.batch_size = batch_size
        self.steps_per_epoch = len(self.rows) // batch_size
        self.n_steps = self.steps_per_epoch if n_steps is None else n_steps
        self.seed = seed
        self.start = start
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return self.n_steps

    def __iter__(self) -> Iterator[np.ndarray]:
        for step in range(self.start, self.n_steps):
            yield self.batch(step)[self.rank :: self.world_size]

    @abstractmethod
    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers of the batch of a step, over all ranks together, int64 ``(batch_size,)``."""


class ShuffleSampler(BatchSampler):
    """Batches of randomly shuffled cells.

    Each epoch is a new permutation of the rows. The last batch of an epoch is dropped if it is incomplete. A cell may
    be the only one of its perturbation in a batch; in batches of :class:`PerturbationSampler`, each cell has a partner.

    Examples
    --------
    >>> sampler = scbd.data.ShuffleSampler(np.arange(240), batch_size=60, n_steps=5)
    >>> [len(batch) for batch in sampler]
    [60, 60, 60, 60, 60]
    """

    _epoch = -1

    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers of the batch of a step, over all ranks together."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self._epoch = epoch
        return self._order[index * self.batch_size : (index + 1) * self.batch_size]


class PerturbationSampler(BatchSampler):
    """Batches of P perturbations with K cells each, so that every cell has partners of its perturbation.

    This is the sampling scheme of the paper (appendix A):

    - P perturbations are drawn without replacement, each in proportion to its number of cells.
    - ``K = batch_size / P`` (rounded up) different cells are drawn from each perturbation.
    - A perturbation with fewer than K cells contributes all its cells, and further perturbations fill the batch. No
      cell is twice in a batch, since it would be its own positive.
    - The last perturbation contributes the cells that are still missing, but at least two cells. If only one cell is
      missing, another perturbation contributes one cell fewer. If the others have two cells each, a larger perturbation
      contributes three cells.
    - Perturbations with a single cell are excluded, since they have no pair to contrast.

    A perturbation contributes at most about K cells to a batch, however many cells it has. Cells of large perturbations
    are therefore seen less often than other cells. For example, let controls be 15 % of the cells, with 1,000
    perturbations and P = 64. The controls are then in every batch, but only 1.6 % of its cells are controls. This is
    the scheme of the paper; :class:`ShuffleSampler` shows all cells equally often.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Number of cells per batch.
    labels
        Perturbation codes of these rows, integers of the same length.
    perturbations_per_batch
        P. A number larger than the number of perturbations takes all perturbations.
    neighbours
        Draw the K cells as four stretches of consecutive rows at random positions, instead of K independent rows. If
        rows are stored sorted by perturbation and shuffled within each perturbation, reading a perturbation from disk
        takes four reads instead of K. Over a run, a cell shares batches with nearly as many different cells.
    **kwargs
        See :class:`BatchSampler`.

    Raises
    ------
    ValueError
        If no perturbation has two cells, if the perturbations cannot fill a batch with K cells each, or if
        ``batch_size`` is odd and all perturbations have two cells.

    Examples
    --------
    >>> genes = adata.obs["gene"].cat.codes.to_numpy()
    >>> rows = np.arange(adata.n_obs)
    >>> sampler = scbd.data.PerturbationSampler(rows, 30, labels=genes, perturbations_per_batch=3, n_steps=2)
    >>> [len(set(genes[batch])) for batch in sampler]  # three perturbations of ten cells
    [3, 3]
    """

    def __init__(
        self,
        rows: np.ndarray,
        batch_size: int,
        *,
        labels: np.ndarray,
        perturbations_per_batch: int,
        neighbours: bool = False,
        **kwargs: int | None,
    ) -> None:
        super().__init__(rows, batch_size, **kwargs)  # type: ignore[arg-type]
        self._neighbours = neighbours
        order = np.argsort(labels, kind="stable")
        _, counts = np.unique(labels, return_counts=True)
        groups = np.split(self.rows[order], np.cumsum(counts)[:-1])
        self._groups = [np.sort(group) if neighbours else group for group in groups if len(group) > 1]
        self._sizes = np.array([len(group) for group in self._groups])
        n_perturbations = min(perturbations_per_batch, len(self._groups))
        if n_perturbations < 1:
            msg = "No perturbation has two cells, so there is no pair to contrast: add cells, or check y_key."
            raise ValueError(msg)
        self.cells_per_perturbation = -(-batch_size // n_perturbations)
        available = np.minimum(self._sizes, self.cells_per_perturbation).sum()
        if self.cells_per_perturbation < 2 or available < batch_size:
            msg = (
                f"{n_perturbations} perturbations cannot fill a batch of {batch_size} with "
                f"{self.cells_per_perturbation} different cells each (together they have {available}; the smallest has "
                f"{self._sizes.min()}): use a smaller batch_size, or perturbations_per_batch=None for plain shuffling."
            )
            raise ValueError(msg)
        if batch_size % 2 and self._sizes.max() == 2:
            msg = f"batch_size={batch_size}: all perturbations are pairs of cells, which fill an even number only."
            raise ValueError(msg)

    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers of the batch of a step, grouped by perturbation, over all ranks together."""
        rng = np.random.default_rng([self.seed, step])
        # exponential waiting times with rates n, sorted, draw perturbations in proportion to n without replacement
        groups, counts = self._fill(np.argsort(rng.exponential(size=len(self._sizes)) / self._sizes))
        sizes = self._sizes[groups]
        if not self._neighbours:
            cells = [rng.choice(n, size=k, replace=False, shuffle=False) for n, k in zip(sizes, counts, strict=True)]
            return self._rows_of(groups, cells)
        drawn = self._rows_of(groups, _draw_stretches(rng, sizes, counts))
        # a rank takes every world_size-th place: order the cells of a perturbation such that consecutive rows go to one
        # rank
        places = np.lexsort([np.arange(len(drawn)) % self.world_size, np.repeat(np.arange(len(groups)), counts)])
        batch = np.empty_like(drawn)
        batch[places] = drawn
        return batch

    def _rows_of(self, groups: np.ndarray, cells: list[np.ndarray]) -> np.ndarray:
        """Return the row numbers of the drawn cells, given by their positions in each perturbation."""
        return np.concatenate([self._groups[g][some] for g, some in zip(groups, cells, strict=True)])

    def _fill(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first perturbations of ``order`` that fill a batch, and how many cells (at least two) of each."""
        counts = np.minimum(self._sizes[order], self.cells_per_perturbation)
        n = int(np.searchsorted(np.cumsum(counts), self.batch_size)) + 1
        groups, counts = order[:n].copy(), counts[:n]
        counts[-1] -= counts.sum() - self.batch_size
        if counts[-1] > 1:
            return groups, counts
        if counts.max() > 2:
            counts[np.flatnonzero(counts > 2)[-1]] -= 1
            counts[-1] = 2
            return groups, counts
        # All perturbations have two cells, except the last with one. Drop the last one, and take three cells of a
        # larger perturbation: one that is in the batch, or else one that replaces another.
        larger, groups = order[self._sizes[order] > 2][0], groups[:-1]
        if larger not in groups:
            groups[-1] = larger
        return groups, np.where(groups == larger, 3, 2)


def _draw_stretches(rng: np.random.Generator, sizes: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Draw cells from each group, as up to four stretches of consecutive cells per group.

    All cells of a group are drawn with equal probability.

    Parameters
    ----------
    rng
        Random generator.
    sizes
        Number of cells per group, int64 ``(G,)``. Each group is a ring: its first cell follows its last.
    counts
        Number of different cells to draw per group, at most the size of the group, int64 ``(G,)``. Up to four cells are
        drawn one by one, five or more in stretches.

    Returns
    -------
    For each group the positions of the drawn cells in the group, stretch after stretch, int64 ``(counts[g],)``.
    """
    number = np.arange(_N_STRETCHES)
    longest = -(-counts[:, None] // _N_STRETCHES)
    lengths = np.clip(counts[:, None] - number * longest, 0, longest)
    before = np.cumsum(lengths, axis=1) - lengths
    # the stretches and the cells that are not drawn are arranged in random order, beginning at a random cell of the
    # ring
    free = sizes - counts
    slots = np.empty_like(lengths)
    for i in number:  # draw different slots with Floyd's algorithm
        drawn = rng.integers(free + i + 1)
        taken = (slots[:, :i] == drawn[:, None]).any(axis=1)
        slots[:, i] = np.where(taken, free + i, drawn)
    firsts = np.sort(slots, axis=1) - number + before + rng.integers(sizes)[:, None]
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = (np.repeat((firsts - before).ravel(), lengths.ravel()) + place) % np.repeat(sizes, counts)
    return np.split(positions, np.cumsum(counts)[:-1])


def are_rows_mixed(y: np.ndarray, labels: Iterable[np.ndarray]) -> bool:
    """Return whether the cells of a perturbation are adjacent rows that are shuffled with respect to all labels.

    The test counts the adjacent cells of a perturbation that have the same label. If the rows are shuffled within
    perturbations, the mean and the variance of this count are known exactly, from the theory of the number of runs. A
    label fails the test if the count exceeds its mean by more than four standard deviations plus one pair. In a
    shuffled table, about one label in 30,000 fails by chance.

    Parameters
    ----------
    y
        Codes of the perturbation in the order of the rows, int64 ``(N,)``.
    labels
        Codes of the labels that should differ between partners in a batch, such as environment, guide and plate;
        non-negative int64 ``(N,)`` each. The iterable is consumed only up to the first label that fails the test.

    Returns
    -------
    True if consecutive cells of a perturbation are as suitable for a batch as random ones. If cells of a well were
    stored together instead, they would be each other's partners, and little would be learned across wells. The result
    is also False if all perturbations have a single cell.

    References
    ----------
    Barton and David (1957), Multiple runs.
    """
    same = y[1:] == y[:-1]
    _, group, sizes = np.unique(y, return_inverse=True, return_counts=True)
    if np.count_nonzero(~same) + 1 > len(sizes) or not same.any():
        return False
    return all(_is_mixed(label, same, group, sizes.astype(float)) for label in labels)


def bin_ranks(numbers: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield a label for each column of ranks: the eighth of the range in which each rank lies, int64 ``(N,)``.

    Parameters
    ----------
    numbers
        Rank of each cell in K ordered variables, from 0, int64 ``(N, K)``; `None` if there are no such variables.
    """
    for places in () if numbers is None else numbers.T:
        yield places * _N_RANK_BINS // (places.max() + 1)


def _is_mixed(label: np.ndarray, same: np.ndarray, group: np.ndarray, n: np.ndarray) -> bool:
    """Return whether adjacent cells of a group share a label no more often than by chance (:func:`are_rows_mixed`).

    Parameters
    ----------
    label
        Codes of the label, non-negative int64 ``(N,)``.
    same
        Boolean ``(N - 1,)``: true where a cell and the next are in the same group.
    group
        Group of each cell, from 0, int64 ``(N,)``.
    n
        Number of cells per group, float.
    """
    n_codes = int(label.max()) + 1
    pairs, counts = np.unique(group * n_codes + label, return_counts=True)
    squares, cubes = (np.bincount(pairs // n_codes, counts.astype(float) ** power) for power in (2, 3))
    expected = (squares / n - 1).sum()
    variance = (squares * (squares + n * (n + 1)) - 2 * n * cubes - n**3) / (n**2 * np.maximum(n - 1, 1))
    shared = np.count_nonzero(same & (label[1:] == label[:-1]))
    return bool(shared <= expected + _MAX_Z_SCORE * np.sqrt(max(variance.sum(), 0.0)) + 1 + 1e-9)
