"""Batches for the baselines: balanced over environments, of one environment each, or half controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.data._loading import ImageDataModule
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data._loading import Stage

# minimum number of cells per environment in a batch, so that its mean and covariance can be estimated
_MIN_CELLS_PER_ENVIRONMENT = 8


class ShuffledBatches(ImageDataModule):
    """Data module that shuffles cells, unless the user requests P × K batches (P perturbations, K cells of each).

    The losses of the baselines do not compare cells of the same perturbation with each other.
    """

    def _choose_perturbations_per_batch(self) -> None:
        """Keep ``perturbations_per_batch=None``, for plain shuffling."""


class CustomBatches(ShuffledBatches):
    """Base of data modules that have their own way of drawing cells.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.

    Raises
    ------
    ValueError
        If the user requests P × K batches (``perturbations_per_batch``), which these data modules do not draw.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.perturbations_per_batch is not None:
            msg = (
                f"perturbations_per_batch={self.perturbations_per_batch}: this model draws its batches in a way of its "
                "own. Leave it out."
            )
            raise ValueError(msg)


class EnvironmentBalancedBatches(CustomBatches):
    """Data module whose batches have the same number of cells from each of several environments.

    A batch contains all environments if it has room for eight cells of each. Otherwise it contains fewer environments,
    with about eight cells of each, but at least two environments. If an environment has too few cells, some of its
    cells are repeated. Small environments therefore neither limit the batch size nor are excluded.
    """

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        rows = self._rows(stage)
        codes, sizes = np.unique(self._e[rows], return_counts=True)
        wanted = min(len(codes), max(2, batch_size // _MIN_CELLS_PER_ENVIRONMENT), batch_size // 2)
        n_cells = np.maximum(sizes, -(-batch_size // wanted))
        rows = np.concatenate([np.resize(rows[self._e[rows] == e], n) for e, n in zip(codes, n_cells, strict=True)])
        settings: dict[str, Any] = {"n_steps": n_steps, "seed": self.seed} | world
        return PerturbationSampler(rows, batch_size, labels=self._e[rows], perturbations_per_batch=wanted, **settings)


class SingleEnvironmentSampler(ShuffleSampler):
    """Batches of one environment each, preceded by batches of all environments.

    Batches form rounds. In a round, each environment has one batch, and the order of environments is random. Each
    environment thus has the same number of batches, whatever its number of cells.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Cells in a batch. If an environment has fewer cells, some of them are repeated.
    environments
        Environment codes of these rows.
    pretrain_steps
        Minimum number of shuffled batches of all environments before the first round. It is rounded up to whole rounds.
        If all batches contained a single environment, the running statistics of BatchNorm would differ from those of
        every batch, and new cells would be embedded incorrectly.
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
        """Number of environments, which is the number of batches in a round."""
        return len(self._groups)

    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers of the batch of a step."""
        if step < self.pretrain_steps:
            return super().batch(step)
        turn, index = divmod(step, self.n_environments)
        group = self._groups[np.random.default_rng([self.seed, turn]).permutation(self.n_environments)[index]]
        rng = np.random.default_rng([self.seed, turn, index])
        return rng.choice(group, size=self.batch_size, replace=len(group) < self.batch_size, shuffle=False)


class SingleEnvironmentBatches(CustomBatches):
    """Data module whose training batches contain one environment each, after some shuffled batches.

    The first training batches are shuffled over all environments, and so are all validation batches.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.
    pretrain_steps
        Minimum number of shuffled training batches before the first round, see :class:`SingleEnvironmentSampler`.
    """

    def __init__(self, *args: Any, pretrain_steps: int = 0, **kwargs: Any) -> None:
        self.pretrain_steps = pretrain_steps  # set first: the base makes samplers in its constructor
        super().__init__(*args, **kwargs)

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        if stage != "train":
            return super()._sampler(stage, batch_size, n_steps, **world)
        rows = self._rows(stage)
        settings: dict[str, Any] = {"n_steps": n_steps, "seed": self.seed, "pretrain_steps": self.pretrain_steps}
        return SingleEnvironmentSampler(rows, batch_size, environments=self._e[rows], **settings | world)


class EndlessPermutation:
    """Endless sequence of rows, one random permutation of all rows after another.

    Parameters
    ----------
    rows
        Row numbers.
    seed
        Seed of the permutations.
    """

    def __init__(self, rows: np.ndarray, seed: Sequence[int]) -> None:
        self._rows, self._seed = rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def take(self, first: int, n: int) -> np.ndarray:
        """Return ``n`` rows of the sequence, starting at position ``first``."""
        turns, places = np.divmod(np.arange(first, first + n), len(self._rows))
        # keep these permutations: the next rows are likely to be from the same ones
        self._orders = {turn: self._order(turn) for turn in np.unique(turns).tolist()}
        return np.concatenate([order[places[turns == turn]] for turn, order in self._orders.items()])

    def _order(self, turn: int) -> np.ndarray:
        known = self._orders.get(turn)
        return np.random.default_rng([*self._seed, turn]).permutation(self._rows) if known is None else known


class ControlPairedSampler(BatchSampler):
    """Batches with controls in the first half and perturbed cells in the second half.

    Each group is shuffled, and shuffled again when all of its cells have been drawn. An epoch is one pass over the
    larger group.

    Parameters
    ----------
    rows
        Row numbers to draw from.
    batch_size
        Cells in a batch. If it is odd, there is one more perturbed cell than there are controls.
    controls
        Mask of the controls among these rows, boolean of the same length.
    n_steps, **kwargs
        See :class:`scbd.data.BatchSampler`.

    Raises
    ------
    ValueError
        If no row is a control, or all rows are controls.
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
        self._orders = [EndlessPermutation(group, [self.seed, which]) for which, group in enumerate(groups)]
        self._sizes = [batch_size // 2, batch_size - batch_size // 2]
        passes = [len(group) // size for group, size in zip(groups, self._sizes, strict=True)]
        self.steps_per_epoch = max(1, *passes)
        if n_steps is None:
            self.n_steps = self.steps_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers of the batch of a step, controls first."""
        return np.concatenate(
            [order.take(step * size, size) for order, size in zip(self._orders, self._sizes, strict=True)]
        )


class ControlPairedBatches(CustomBatches):
    """Data module whose batches contain as many controls as perturbed cells.

    Validation is one pass over the larger of the two groups.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.
    control
        Code of the perturbation that marks the controls.
    """

    def __init__(self, *args: Any, control: int, **kwargs: Any) -> None:
        self.control = control  # set first: the base makes samplers in its constructor
        super().__init__(*args, **kwargs)

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        rows = self._rows(stage)
        settings: dict[str, Any] = {"n_steps": n_steps if stage == "train" else None, "seed": self.seed}
        return ControlPairedSampler(rows, batch_size, controls=self._y[rows] == self.control, **settings | world)
