"""Samplers that draw the cells of each training batch.

A contrastive loss compares the cells of a batch with each other, so that the choice of these cells is part of the
method. Samplers yield one array of row numbers (one row per cell) per batch. A batch depends only on the data, the
settings, the seed, the training step and the number of the process in distributed training. If training is resumed at
some step, the sampler therefore yields exactly the batches of an uninterrupted run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Number of stretches of consecutive rows in which the cells of a perturbation are drawn for a batch. A single stretch
# would be read fastest from disk, but cells in adjacent rows would then always be in a batch together.
_N_STRETCHES = 4
# Threshold of the test for a random order of rows. Adjacent cells share a label too often if the number of such pairs
# exceeds the number expected by chance by more than this number of standard deviations. The threshold is high, since
# many labels are tested.
_MAX_Z_SCORE = 4.0


class BatchSampler(ABC):
    """Base class of samplers, which yield one array of row numbers (one row per cell) for each batch.

    Parameters
    ----------
    rows
        Row numbers of the cells to draw from.
    batch_size
        Number of cells per batch. In distributed training, the cells of all processes are counted together.
    n_steps
        Total number of batches, including the batches before ``start``. Default: the number of complete batches in one
        pass over the cells.
    seed
        Seed of all random choices.
    start
        Number of the first batch to yield, counted from 0, if training is resumed.
    rank, world_size
        Number of this process in distributed training, counted from 0, and total number of processes. Each process
        yields every ``world_size``-th cell of a batch, beginning with cell number ``rank``. Each process then has cells
        of all perturbations in the batch. Statistics that a process computes from its own cells, such as the mean in
        BatchNorm, therefore carry no information on the perturbation.

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
        """Return the row numbers of the batch of a training step, int64 ``(batch_size,)``.

        In distributed training, the array includes the cells of all processes.
        """


class ShuffleSampler(BatchSampler):
    """Sampler that shuffles all cells in each epoch and divides them into batches.

    The last batch of an epoch is dropped if it is incomplete. Perturbations are not considered, so that a cell may be
    the only one of its perturbation in a batch. :class:`PerturbationSampler` avoids this.

    Examples
    --------
    >>> sampler = scbd.data.ShuffleSampler(np.arange(240), batch_size=60, n_steps=5)
    >>> [len(batch) for batch in sampler]
    [60, 60, 60, 60, 60]
    """

    _epoch = -1

    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers of the batch of a training step, including the cells of all processes."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self._epoch = epoch
        return self._order[index * self.batch_size : (index + 1) * self.batch_size]


class PerturbationSampler(BatchSampler):
    """Sampler of batches of P perturbations with K cells each.

    Every cell of a batch has at least one other cell of its perturbation in the batch, that is, a positive pair for the
    contrastive loss. This is the sampling scheme of the paper (appendix A):

    - P perturbations are drawn without replacement, with probabilities in proportion to their numbers of cells.
    - ``K = batch_size / P`` (rounded up) different cells are drawn from each of these perturbations.
    - A perturbation with fewer than K cells contributes all its cells, and further perturbations fill the batch. No
      cell is twice in a batch, since it would form a positive pair with itself.
    - The last perturbation that is drawn contributes the cells that the batch still lacks, but at least two cells. If
      the batch lacks only one cell, another perturbation contributes one cell fewer. If all other perturbations in the
      batch contribute only two cells, a perturbation with more cells contributes three.
    - Perturbations with a single cell are excluded, since a single cell forms no positive pair.

    A perturbation contributes at most about K cells to a batch, however many cells it has. Cells of large perturbations
    are therefore drawn less often than other cells. For example, with 1,000 perturbations and P = 64, let 15 % of all
    cells be controls. Controls are then in every batch, but they are only 1.6 % (1 / 64) of its cells.
    :class:`ShuffleSampler` draws all cells equally often.

    Parameters
    ----------
    rows
        Row numbers of the cells to draw from.
    batch_size
        Number of cells per batch.
    labels
        Perturbation code of each cell in ``rows``, integers of the same length.
    perturbations_per_batch
        Number P of perturbations per batch. If it exceeds the number of perturbations with at least two cells, all of
        these are used.
    neighbours
        If true, the K cells of a perturbation are drawn as four stretches of consecutive rows at random positions. If
        false, they are K independent rows. Stretches suit data on disk whose rows are sorted by perturbation and
        shuffled within each perturbation: K cells then take four reads instead of K. Over a whole training run, a cell
        is in a batch together with nearly as many different cells as with independent rows.
    **kwargs
        Further arguments of :class:`BatchSampler`.

    Raises
    ------
    ValueError
        If no perturbation has two cells, if the perturbations have too few cells to fill a batch with K cells each, or
        if ``batch_size`` is odd and no perturbation has more than two cells.

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
        """Return the row numbers of the batch of a training step, grouped by perturbation.

        In distributed training, the array includes the cells of all processes.
        """
        rng = np.random.default_rng([self.seed, step])
        # draw perturbations without replacement, with probabilities in proportion to their numbers n of cells: sorting
        # them by exponential random times with rates n is equivalent
        groups, counts = self._fill(np.argsort(rng.exponential(size=len(self._sizes)) / self._sizes))
        sizes = self._sizes[groups]
        if self._neighbours:
            cells = _draw_stretches(rng, sizes, counts)
        else:
            cells = [rng.choice(n, size=k, replace=False, shuffle=False) for n, k in zip(sizes, counts, strict=True)]
        drawn = np.concatenate([self._groups[g][some] for g, some in zip(groups, cells, strict=True)])
        if not self._neighbours:
            return drawn
        # in distributed training, a process takes every world_size-th cell of the batch: order the cells of a
        # perturbation such that one process gets consecutive rows, which are read faster
        places = np.lexsort([np.arange(len(drawn)) % self.world_size, np.repeat(np.arange(len(groups)), counts)])
        batch = np.empty_like(drawn)
        batch[places] = drawn
        return batch

    def _fill(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Choose the perturbations of a batch, and the number of cells that each contributes.

        Parameters
        ----------
        order
            Numbers of all perturbations in the random order in which they were drawn.

        Returns
        -------
        Numbers of the first perturbations in this order that together fill the batch, and the number of cells to draw
        from each, which is at least two.
        """
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
        # Here all perturbations of the batch contribute two cells, except the last, which would contribute only one.
        # Drop the last perturbation, and take three cells from a perturbation with more than two cells. If no such
        # perturbation is in the batch, it replaces one with two cells.
        larger, groups = order[self._sizes[order] > 2][0], groups[:-1]
        if larger not in groups:
            groups[-1] = larger
        return groups, np.where(groups == larger, 3, 2)


def _draw_stretches(rng: np.random.Generator, sizes: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Draw cells from each of G perturbations, as at most four stretches of consecutive cells per perturbation.

    All cells of a perturbation are drawn with equal probability. To this end, its cells are treated as a ring, in which
    the first cell follows the last.

    Parameters
    ----------
    rng
        Random generator.
    sizes
        Number of cells of each perturbation, int64 ``(G,)``.
    counts
        Number of different cells to draw from each perturbation, at most its number of cells, int64 ``(G,)``. Up to
        four cells are drawn as single cells, five or more as stretches.

    Returns
    -------
    One int64 array ``(counts[g],)`` per perturbation: the positions of the drawn cells among its cells, one stretch
    after the other.
    """
    number = np.arange(_N_STRETCHES)
    longest = -(-counts[:, None] // _N_STRETCHES)
    lengths = np.clip(counts[:, None] - number * longest, 0, longest)
    before = np.cumsum(lengths, axis=1) - lengths
    # Place the stretches at random positions that do not overlap: choose random slots in a row that consists of the
    # stretches and the cells that are not drawn, and let this row begin at a random cell of the ring.
    free = sizes - counts
    slots = np.empty_like(lengths)
    for i in number:  # Floyd's algorithm draws slots at random without drawing one twice
        drawn = rng.integers(free + i + 1)
        taken = (slots[:, :i] == drawn[:, None]).any(axis=1)
        slots[:, i] = np.where(taken, free + i, drawn)
    firsts = np.sort(slots, axis=1) - number + before + rng.integers(sizes)[:, None]
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = (np.repeat((firsts - before).ravel(), lengths.ravel()) + place) % np.repeat(sizes, counts)
    return np.split(positions, np.cumsum(counts)[:-1])


def are_rows_mixed(y: np.ndarray, labels: Iterable[np.ndarray]) -> bool:
    """Test whether rows are sorted by perturbation, and in random order within each perturbation.

    If they are, a stretch of consecutive rows of a perturbation is as good for a batch as random cells of the
    perturbation, and is read faster. If cells of a well were stored in adjacent rows instead, positive pairs of the
    contrastive loss would mostly come from one well, and the model would learn little across wells.

    The order is tested for each given label, such as the well. The statistic is the number of pairs of adjacent cells
    of a perturbation that have the same label. Its mean and variance under a random order are known exactly, from the
    theory of the number of runs. A label fails the test if the statistic exceeds its mean by more than four standard
    deviations plus 1. If rows are in random order, about one label in 30,000 fails.

    Parameters
    ----------
    y
        Perturbation code of each row, int64 ``(N,)``.
    labels
        Labels in which the cells of a perturbation in a batch should differ, such as environment, guide and plate. Each
        label is an array of non-negative codes, int64 ``(N,)``. The iterable is consumed only up to the first label
        that fails the test.

    Returns
    -------
    True if the rows of each perturbation are adjacent and no label fails the test. False also if each perturbation has
    only one cell.

    References
    ----------
    Barton and David (1957), Multiple runs.
    """
    same = y[1:] == y[:-1]
    _, group, sizes = np.unique(y, return_inverse=True, return_counts=True)
    if np.count_nonzero(~same) + 1 > len(sizes) or not same.any():
        return False
    n = sizes.astype(float)
    for label in labels:
        n_codes = int(label.max()) + 1
        pairs, counts = np.unique(group * n_codes + label, return_counts=True)
        squares, cubes = (np.bincount(pairs // n_codes, counts.astype(float) ** power) for power in (2, 3))
        expected = (squares / n - 1).sum()
        variance = (squares * (squares + n * (n + 1)) - 2 * n * cubes - n**3) / (n**2 * np.maximum(n - 1, 1))
        n_equal = np.count_nonzero(same & (label[1:] == label[:-1]))
        if n_equal > expected + _MAX_Z_SCORE * np.sqrt(max(variance.sum(), 0.0)) + 1 + 1e-9:
            return False
    return True
