"""Batches that know environments, all of them in each or one after the other; or controls, half of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.data._loading import ImageDataModule
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data._loading import Stage

# fewer would say little of an environment's moments
_CELLS_WANTED = 8


class ShuffledBatches(ImageDataModule):
    """Plainly shuffled, unless P × K is asked for: no loss here compares cells of a perturbation with each other."""

    def _choose_perturbations_per_batch(self) -> None:
        """Choose none."""


class OwnBatches(ShuffledBatches):
    """Base of those that draw cells in a way of their own.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.

    Raises
    ------
    ValueError
        If asked for P × K, which would not be done.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.perturbations_per_batch is not None:
            msg = (
                f"perturbations_per_batch={self.perturbations_per_batch}: this model draws its batches in a way of its "
                "own. Leave it out."
            )
            raise ValueError(msg)


class EnvironmentBatches(OwnBatches):
    """The same number of cells from each of many environments: all, or as many as give eight cells each.

    An environment with fewer cells gives some of them twice: no environment makes batches smaller, or stays away.
    """

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        rows = self._rows(stage)
        codes, sizes = np.unique(self._e[rows], return_counts=True)
        wanted = min(len(codes), max(2, batch_size // _CELLS_WANTED), batch_size // 2)
        n_cells = np.maximum(sizes, -(-batch_size // wanted))
        rows = np.concatenate([np.resize(rows[self._e[rows] == e], n) for e, n in zip(codes, n_cells, strict=True)])
        settings: dict[str, Any] = {"n_steps": n_steps, "seed": self.seed} | world
        return PerturbationSampler(rows, batch_size, labels=self._e[rows], perturbations_per_batch=wanted, **settings)


class AlternatingSampler(ShuffleSampler):
    """One environment a batch: each once in a round, in an order of its own, equally often however large it is.

    Before, plain batches of all environments.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Cells in a batch; an environment with fewer gives some of them twice.
    environments
        Codes of these rows.
    pretrain_steps
        Plain batches before the first round, at least: as many as make whole rounds. Of environments apart, BatchNorm
        learns statistics that no single batch has had, and new cells are misread.
    **kwargs
        See :class:`scbd.data.BatchSampler`.
    """

    def __init__(
        self, rows: np.ndarray, batch_size: int, *, environments: np.ndarray, pretrain_steps: int = 0, **kwargs: int
    ) -> None:
        super().__init__(rows, batch_size, **kwargs)
        self._groups = [self.rows[environments == e] for e in np.unique(environments)]
        self.pretrain_steps = -(-pretrain_steps // self.n_environments) * self.n_environments

    @property
    def n_environments(self) -> int:
        """Batches in a round."""
        return len(self._groups)

    def batch(self, step: int) -> np.ndarray:
        """Row numbers of a step's batch."""
        if step < self.pretrain_steps:
            return super().batch(step)
        turn, index = divmod(step, self.n_environments)
        group = self._groups[np.random.default_rng([self.seed, turn]).permutation(self.n_environments)[index]]
        rng = np.random.default_rng([self.seed, turn, index])
        return rng.choice(group, size=self.batch_size, replace=len(group) < self.batch_size, shuffle=False)


class AlternatingBatches(OwnBatches):
    """Training batches of one environment each, after plain ones; validation is shuffled plainly.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.
    pretrain_steps
        How many plain ones.
    """

    def __init__(self, *args: Any, pretrain_steps: int = 0, **kwargs: Any) -> None:
        self.pretrain_steps = pretrain_steps  # known when the base makes its samplers
        super().__init__(*args, **kwargs)

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        if stage != "train":
            return super()._sampler(stage, batch_size, n_steps, **world)
        rows = self._rows(stage)
        settings: dict[str, Any] = {"n_steps": n_steps, "seed": self.seed, "pretrain_steps": self.pretrain_steps}
        return AlternatingSampler(rows, batch_size, environments=self._e[rows], **settings | world)


class EndlessOrder:
    """Rows in one random order after another.

    Parameters
    ----------
    rows
        Row numbers.
    seed
        Of the orders.
    """

    def __init__(self, rows: np.ndarray, seed: Sequence[int]) -> None:
        self._rows, self._seed = rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def take(self, first: int, n: int) -> np.ndarray:
        """So many from a place on."""
        turns, places = np.divmod(np.arange(first, first + n), len(self._rows))
        # those at hand are kept: the next rows are likely of the same
        self._orders = {turn: self._order(turn) for turn in np.unique(turns).tolist()}
        return np.concatenate([order[places[turns == turn]] for turn, order in self._orders.items()])

    def _order(self, turn: int) -> np.ndarray:
        known = self._orders.get(turn)
        return np.random.default_rng([*self._seed, turn]).permutation(self._rows) if known is None else known


class PairedSampler(BatchSampler):
    """Controls in half of each batch, perturbed cells in the other; either group begins anew when it ends.

    An epoch passes the larger group once.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Cells in a batch; the perturbed are one more, where it is odd.
    controls
        Which of the rows are controls, boolean of the same length.
    n_steps, **kwargs
        See :class:`scbd.data.BatchSampler`.

    Raises
    ------
    ValueError
        If there are none, or nothing else.
    """

    def __init__(
        self, rows: np.ndarray, batch_size: int, *, controls: np.ndarray, n_steps: int | None = None, **kwargs: int
    ) -> None:
        super().__init__(rows, batch_size, n_steps=n_steps, **kwargs)
        groups = [self.rows[controls], self.rows[~controls]]
        if not all(map(len, groups)):
            msg = (
                f"{len(groups[0]):,} of {len(rows):,} cells to draw from are controls: pairs of a control and a "
                "perturbed cell need both. Use another split, or more cells."
            )
            raise ValueError(msg)
        self._orders = [EndlessOrder(group, [self.seed, which]) for which, group in enumerate(groups)]
        self._sizes = [batch_size // 2, batch_size - batch_size // 2]
        passes = [len(group) // size for group, size in zip(groups, self._sizes, strict=True)]
        self.steps_per_epoch = max(1, *passes)
        if n_steps is None:
            self.n_steps = self.steps_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Row numbers of a step's batch, controls first."""
        return np.concatenate(
            [order.take(step * size, size) for order, size in zip(self._orders, self._sizes, strict=True)]
        )


class PairedBatches(OwnBatches):
    """As many controls as perturbed cells in each batch; validation passes the larger group once.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.
    control
        Code of the controls' perturbation.
    """

    def __init__(self, *args: Any, control: int, **kwargs: Any) -> None:
        self.control = control  # known when the base makes its samplers
        super().__init__(*args, **kwargs)

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        rows = self._rows(stage)
        settings: dict[str, Any] = {"n_steps": n_steps if stage == "train" else None, "seed": self.seed}
        return PairedSampler(rows, batch_size, controls=self._y[rows] == self.control, **settings | world)
