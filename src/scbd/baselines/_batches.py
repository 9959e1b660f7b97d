"""Batches that know environments: all of them in each, or one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd.data import BatchSampler, ImageDataModule, PerturbationSampler, ShuffleSampler

if TYPE_CHECKING:
    from typing import Any

    from scbd.data import Stage

# fewer would say little of an environment's moments
_CELLS_WANTED = 8


class EnvironmentBatches(ImageDataModule):
    """The same number of cells from each of many environments: all, or as many as give eight cells each."""

    def _most_cells(self) -> int:
        """As many of each environment as the smallest has."""
        sizes = np.unique(self._e[self.split.train], return_counts=True)[1]
        return int(sizes.min()) * len(sizes)

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        rows = self._rows(stage)
        environments = self._e[rows]
        wanted = min(len(np.unique(environments)), max(2, batch_size // _CELLS_WANTED))
        settings: dict[str, Any] = {"n_steps": n_steps, "seed": self.seed} | world
        try:
            return PerturbationSampler(
                rows, batch_size, labels=environments, perturbations_per_batch=wanted, **settings
            )
        except ValueError as error:
            sizes = np.unique(environments, return_counts=True)[1]
            msg = (
                f"{len(sizes)} environments of {sizes.min()} to {sizes.max()} cells cannot fill a batch of "
                f"{batch_size} with equally many from {wanted} of them: use a smaller batch_size."
            )
            raise ValueError(msg) from error


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


class AlternatingBatches(ImageDataModule):
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
