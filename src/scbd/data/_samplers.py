"""Which cells meet in a batch. Every batch is a pure function of seed, step and rank: runs resume exactly.

A contrastive loss learns from the pairs inside a batch, so who meets whom is part of the method. Samplers yield row
numbers, a whole batch at a time; they hold no state besides the step to start from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from scbd.data._neighbours import stretches

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        drawn = self._rows_of(groups, stretches(rng, sizes, counts))
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
