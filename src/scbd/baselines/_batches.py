"""Data modules and samplers that compose the training batches of the baseline models.

A batch consists of cells shuffled at random, of equal numbers of cells from several environments, of cells from a
single environment, or of controls in one half and perturbed cells in the other half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.data._loading import ImageDataModule
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data._loading import Stage

# Minimum number of cells of each environment in a batch, where the batch size allows it. Eight cells suffice to
# estimate the mean and the covariance of the features of an environment.
_MIN_CELLS_PER_ENVIRONMENT = 8


class ShuffledBatches(ImageDataModule):
    """Data module whose batches are drawn from all shuffled cells, regardless of their perturbations.

    The losses of the baselines do not compare cells of the same perturbation with each other, so that batches need not
    contain several cells of a perturbation. If the user gives ``perturbations_per_batch``, a batch nevertheless
    contains K cells of each of P perturbations (P × K batches).
    """

    def _choose_perturbations_per_batch(self) -> None:
        """Leave ``perturbations_per_batch`` at its default `None`, for batches of shuffled cells."""


class CustomBatches(ShuffledBatches):
    """Base class of data modules that compose batches by a fixed rule, such as one environment per batch.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.

    Raises
    ------
    ValueError
        If the user gives ``perturbations_per_batch``, because batches of K cells from each of P perturbations would
        contradict the rule.
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

    A batch contains all environments if the batch size allows at least eight cells of each. Otherwise, a batch contains
    fewer environments (but at least two), with about eight cells of each. If an environment has too few cells, some of
    its cells are repeated. Small environments therefore neither limit the batch size nor are excluded.
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
    """Sampler of batches that contain one environment each, after initial batches shuffled over all environments.

    After the initial batches, batches form rounds. A round has one batch of each environment, in random order. Each
    environment thus has the same number of batches, whatever its number of cells.

    Parameters
    ----------
    rows
        Row numbers of the cells to draw from.
    batch_size
        Number of cells in a batch. If an environment has fewer cells, some of them are repeated.
    environments
        Code of the environment of each cell in ``rows``.
    pretrain_steps
        Minimum number of initial batches, which are shuffled over all environments. It is rounded up to a multiple of
        the number of environments. Without initial batches (0), every batch contains a single environment. The running
        statistics of BatchNorm then differ from the statistics of every batch, and new cells are embedded incorrectly.
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
        """Number of environments of the cells to draw from, which is also the number of batches in a round."""
        return len(self._groups)

    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers of the cells in the batch of a training step."""
        if step < self.pretrain_steps:
            return super().batch(step)
        turn, index = divmod(step, self.n_environments)
        group = self._groups[np.random.default_rng([self.seed, turn]).permutation(self.n_environments)[index]]
        rng = np.random.default_rng([self.seed, turn, index])
        return rng.choice(group, size=self.batch_size, replace=len(group) < self.batch_size, shuffle=False)


class SingleEnvironmentBatches(CustomBatches):
    """Data module whose training batches contain one environment each, after initial batches of all environments.

    The initial training batches and all validation batches are shuffled over all environments.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.
    pretrain_steps
        Minimum number of initial training batches, which are shuffled over all environments; see
        :class:`SingleEnvironmentSampler`.
    """

    def __init__(self, *args: Any, pretrain_steps: int = 0, **kwargs: Any) -> None:
        # This attribute is set before the constructor of the base class is called, because that constructor makes the
        # samplers, which need the attribute.
        self.pretrain_steps = pretrain_steps
        super().__init__(*args, **kwargs)

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        if stage != "train":
            return super()._sampler(stage, batch_size, n_steps, **world)
        rows = self._rows(stage)
        settings: dict[str, Any] = {"n_steps": n_steps, "seed": self.seed, "pretrain_steps": self.pretrain_steps}
        return SingleEnvironmentSampler(rows, batch_size, environments=self._e[rows], **settings | world)


class EndlessPermutation:
    """Endless sequence of row numbers: one random permutation of all given rows after another.

    Parameters
    ----------
    rows
        Row numbers to permute.
    seed
        Seed of the permutations, as a sequence of integers.
    """

    def __init__(self, rows: np.ndarray, seed: Sequence[int]) -> None:
        self._rows, self._seed = rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def take(self, first: int, n: int) -> np.ndarray:
        """Return ``n`` row numbers of the sequence, starting at its position ``first`` (counted from 0)."""
        turns, places = np.divmod(np.arange(first, first + n), len(self._rows))
        # The permutations that were used in this call are stored, because the next call is likely to continue in the
        # last one.
        self._orders = {turn: self._order(turn) for turn in np.unique(turns).tolist()}
        return np.concatenate([order[places[turns == turn]] for turn, order in self._orders.items()])

    def _order(self, turn: int) -> np.ndarray:
        known = self._orders.get(turn)
        return np.random.default_rng([*self._seed, turn]).permutation(self._rows) if known is None else known


class ControlPairedSampler(BatchSampler):
    """Sampler of batches with controls in the first half and perturbed cells in the second half.

    Controls and perturbed cells are shuffled separately. When all cells of one of these two groups have been drawn, the
    group is shuffled again. An epoch is one pass over the larger group.

    Parameters
    ----------
    rows
        Row numbers of the cells to draw from, controls and perturbed cells.
    batch_size
        Number of cells in a batch. If it is odd, a batch has one more perturbed cell than controls.
    controls
        Boolean mask ``(len(rows),)`` of the rows that are controls.
    n_steps, **kwargs
        See :class:`scbd.data.BatchSampler`.

    Raises
    ------
    ValueError
        If none of the rows or all of the rows are controls.
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
        """Return the row numbers of the cells in the batch of a training step: controls first, then perturbed cells."""
        return np.concatenate(
            [order.take(step * size, size) for order, size in zip(self._orders, self._sizes, strict=True)]
        )


class ControlPairedBatches(CustomBatches):
    """Data module whose batches contain as many controls as perturbed cells.

    Validation is one pass over the controls or over the perturbed cells, whichever group is larger.

    Parameters
    ----------
    *args, **kwargs
        See :class:`scbd.data.ImageDataModule`.
    control
        Code of the perturbation label of the controls.
    """

    def __init__(self, *args: Any, control: int, **kwargs: Any) -> None:
        # This attribute is set before the constructor of the base class is called, because that constructor makes the
        # samplers, which need the attribute.
        self.control = control
        super().__init__(*args, **kwargs)

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        rows = self._rows(stage)
        settings: dict[str, Any] = {"n_steps": n_steps if stage == "train" else None, "seed": self.seed}
        return ControlPairedSampler(rows, batch_size, controls=self._y[rows] == self.control, **settings | world)
