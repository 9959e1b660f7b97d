"""Which cells meet in a batch. Every batch is a pure function of seed, step and rank: runs resume exactly.

A contrastive loss learns from the pairs inside a batch, so who meets whom is part of the method. Samplers yield row
numbers, a whole batch at a time; they hold no state besides the step to start from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# of cells that lie together: one would read fastest, and make the same cells meet for ever
_STRETCHES = 4
# standard errors by which neighbours share more labels than by chance; far out, since a table has many labels
_SURPRISING = 4.0
# of an order: few, so that many cells share one
_PARTS = 8


class BatchSampler(ABC):
    """Batches of row numbers for a fixed number of steps.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Cells in a batch, over all ranks together.
    n_steps
        Batches to yield; `None` is one epoch.
    seed
        Seed of all random choices.
    start
        Step to start from, when a run is resumed.
    rank, world_size
        Each rank yields its own equal share of every batch: every ``world_size``-th cell, so that all have cells of
        all perturbations, and statistics that are taken of a share (BatchNorm's) tell no perturbation.

    Raises
    ------
    ValueError
        If there are fewer rows than a batch, or ranks cannot share a batch equally.
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
        """Row numbers of the joint batch of a step, int64 ``(batch_size,)``."""


class ShuffleSampler(BatchSampler):
    """Plain shuffling: each epoch is a fresh permutation, its incomplete last batch is left out.

    A cell may be the only one of its perturbation in a batch; :class:`PerturbationSampler` gives each a partner.

    Examples
    --------
    >>> sampler = scbd.data.ShuffleSampler(np.arange(240), batch_size=60, n_steps=5)
    >>> [len(batch) for batch in sampler]
    [60, 60, 60, 60, 60]
    """

    _epoch = -1

    def batch(self, step: int) -> np.ndarray:
        """Row numbers of a step's batch."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self._epoch = epoch
        return self._order[index * self.batch_size : (index + 1) * self.batch_size]


class PerturbationSampler(BatchSampler):
    """P perturbations by K cells (paper, appendix A): every cell of a batch finds partners of its perturbation.

    Perturbations are drawn without replacement, each in proportion to its number of cells; ``K = batch_size / P``
    (rounded up) different cells are drawn from each. A perturbation with fewer than K cells gives all it has, and
    further perturbations fill the batch: no cell is ever in a batch twice, where it would be its own positive. The last
    gives what is missing, and never one cell alone: another perturbation has one less then.
    Perturbations with a single cell are left out, since nothing can be contrasted with them.

    So a perturbation is in a batch once or not at all, however many cells it has. With 1,000 perturbations and P = 64,
    controls that are 15 % of the cells are in every batch, and 1.6 % of it: each of them is seen far less often than
    another cell. That is the paper's scheme; plain shuffling shows all cells equally often.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Cells in a batch.
    labels
        Perturbation codes of these rows, integers of the same length.
    perturbations_per_batch
        P. More than there are perturbations means all of them.
    neighbours
        Take the K cells as four stretches of cells that follow each other, each anywhere, in place of any K: four reads
        in place of K from a disk where rows are sorted by perturbation and shuffled inside. Over a run, a cell meets
        nearly as many others.
    **kwargs
        See :class:`BatchSampler`.

    Raises
    ------
    ValueError
        If the perturbations cannot fill a batch with K cells each, or an odd one with pairs.

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
        """Row numbers of a step's batch, grouped by perturbation."""
        rng = np.random.default_rng([self.seed, step])
        # the smallest of exponential waiting times with rates n is a draw in proportion to n, without replacement
        groups, counts = self._fill(np.argsort(rng.exponential(size=len(self._sizes)) / self._sizes))
        sizes = self._sizes[groups]
        if not self._neighbours:
            cells = [rng.choice(n, size=k, replace=False, shuffle=False) for n, k in zip(sizes, counts, strict=True)]
            return self._rows_of(groups, cells)
        drawn = self._rows_of(groups, _stretches(rng, sizes, counts))
        # of each perturbation, what lies together goes to the same rank
        places = np.lexsort([np.arange(len(drawn)) % self.world_size, np.repeat(np.arange(len(groups)), counts)])
        batch = np.empty_like(drawn)
        batch[places] = drawn
        return batch

    def _rows_of(self, groups: np.ndarray, cells: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([self._groups[g][some] for g, some in zip(groups, cells, strict=True)])

    def _fill(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first perturbations of this order that fill a batch, and how many cells of each: two at least."""
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
        # pairs, and one cell too many: three cells of a perturbation in place of two and one
        larger, groups = order[self._sizes[order] > 2][0], groups[:-1]
        if larger not in groups:
            groups[-1] = larger
        return groups, np.where(groups == larger, 3, 2)


def _stretches(rng: np.random.Generator, sizes: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
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
