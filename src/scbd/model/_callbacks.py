"""Lightning callbacks of a training run, and the checkpoints that they write.

The callbacks record the history, detect divergence, and save weights and checkpoints. The file also holds the functions
that find the checkpoint of an interrupted run and check that a new run may continue from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as L
import pandas as pd
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from scbd._shared.files import explained_write, open_atomically
from scbd.model._saved_models import read_part_of_saved_file

if TYPE_CHECKING:
    from torch import Tensor

    from scbd.model._plan import TrainingPlan

# prefixes of the names of metrics that are logged during validation; metrics with other names are logged in training
# steps
VALIDATION_PREFIXES = ("validation_", "z_c_")


class TrainingDiverged(RuntimeError):
    """Error that training raises when the loss or a weight becomes NaN or infinite.

    After the error, the model has the weights of the last validation with a finite loss. In a run without validation,
    it has the last weights that were copied at a regular interval while the training loss was finite. If the run had no
    such weights yet, the model has the weights from before the run. ``model.history`` holds the losses up to the error.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small")
    >>> try:
    ...     model.train(max_steps=2000, lr=0.01)
    ... except scbd.model.TrainingDiverged:  # continue from the last good weights, with a lower learning rate
    ...     model.train(max_steps=2000, lr=0.001)
    """


class History(Checkpoint):
    """Callback that records the value of every logged metric at each training step and validation.

    The history is saved in each checkpoint. A run that is resumed from a checkpoint therefore continues its history at
    the step of this checkpoint. The class derives from ``Checkpoint`` because Lightning runs checkpoint callbacks last,
    so that the metrics that other callbacks log in the same step are recorded, too.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the training metrics after every ``log_every_n_steps``-th optimiser step."""
        step_ends = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if step_ends and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._keep(trainer, validation=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the validation metrics after each validation."""
        self._keep(trainer, validation=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded metrics of all steps, which Lightning saves in each checkpoint."""
        return {"rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the recorded metrics from a checkpoint."""
        self._rows = state_dict["rows"]

    def frames(self, offset: int = 0, prefix: str = "") -> dict[str, pd.DataFrame]:
        """Return the recorded values as one data frame per metric, in the format of ``history_`` in scvi-tools.

        Each data frame has the training step as index, and a single column with the values of the metric.

        Parameters
        ----------
        offset
            Number of steps of earlier runs, which is added to each step of this run.
        prefix
            Text that is put in front of the name of each metric.
        """
        rows, frames = sorted(self._rows.items()), {}
        for name in dict.fromkeys(name for _, row in rows for name in row):
            values = {step + offset: row[name] for step, row in rows if name in row}
            frames[prefix + name] = pd.DataFrame({prefix + name: values}).rename_axis("step")
        return frames

    def _keep(self, trainer: L.Trainer, *, validation: bool) -> None:
        row = self._rows.setdefault(trainer.global_step, {})
        for name, value in trainer.callback_metrics.items():
            if name.startswith(VALIDATION_PREFIXES) == validation:
                row[name] = float(value)


class ProgressBar(callbacks.TQDMProgressBar):
    """Progress bar that shows the losses at every ``log_every_n_steps``-th optimiser step.

    Lightning itself reads values that are logged with ``prog_bar=True`` in every step, for which the CPU has to wait
    until the GPU has finished the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step, self._losses = -1, dict[str, float]()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return the training loss and the validation loss, which are read only if the training loss is logged."""
        step = trainer.global_step
        if step != self._step and step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._step, metrics = step, trainer.callback_metrics
            names = (name for name in ("train_loss", "validation_loss") if name in metrics)
            self._losses = {name: float(metrics[name]) for name in names}
        return self._losses


class Divergence(Checkpoint):
    """Callback that stops training when the loss is NaN or infinite, and keeps a copy of the last good weights.

    In a run with validation, weights are good if their validation loss is finite. In a run without validation, weights
    are good if their training loss is finite. Weights are copied only at validations, or every ``every`` steps. The
    weights of the step just before a non-finite loss are not used, because they may already have diverged.

    Parameters
    ----------
    every
        Number of training steps between two copies of the weights in a run without validation.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        # number of consecutive training losses that were NaN or infinite, kept as a tensor on the device: reading the
        # number in every step would make the CPU wait for a GPU
        self._n_non_finite = torch.zeros((), dtype=torch.int64)
        self.weights: dict[str, Tensor] = {}
        self.step = 0
        """Training step at which the copy of the last good weights, ``weights``, was made."""

    def on_train_start(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Copy the initial weights of the run, which are the last good weights until a later copy replaces them."""
        self._n_non_finite = self._n_non_finite.to(plan.device)
        self._keep(trainer, plan)

    def on_before_backward(self, trainer: L.Trainer, plan: TrainingPlan, loss: Tensor) -> None:  # type: ignore[override]
        """Count consecutive losses that are NaN or infinite.

        In a run without validation, also copy the weights every ``every`` steps, if their training loss is finite.
        """
        # the difference of a number and itself is 0, but NaN if the number is NaN or infinite
        loss = loss.detach()
        self._n_non_finite.add_(1).mul_((loss - loss) != 0)
        if trainer.global_step % self._every == 0 and not any(trainer.num_val_batches) and not int(self._n_non_finite):
            self._keep(trainer, plan)

    def on_train_batch_end(self, trainer: L.Trainer, plan: TrainingPlan, *args: Any) -> None:  # type: ignore[override]
        """Stop training if too many consecutive training losses were NaN or infinite.

        The limit is ``tolerated_losses`` of the training plan. In distributed training, all processes stop if one of
        them exceeds the limit.
        """
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            bad = int(trainer.strategy.reduce(self._n_non_finite, reduce_op="max"))
            self._check(bad <= plan.tolerated_losses, "training loss", trainer)

    def on_validation_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Copy the weights if their validation loss is finite; otherwise raise :class:`TrainingDiverged`."""
        loss = trainer.callback_metrics.get("validation_loss", torch.zeros(()))
        self._check(bool(loss.isfinite()), "validation loss", trainer)
        self._keep(trainer, plan)

    def on_train_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Raise :class:`TrainingDiverged` if the final weights are not finite.

        The weights after the last step need a check of their own, because no loss has been computed with them.
        """
        finite = [value.isfinite().all() for value in plan.state_dict().values()]
        self._check(bool(torch.stack(finite).all()), "weights", trainer)

    def _keep(self, trainer: L.Trainer, plan: TrainingPlan) -> None:
        self.weights = {name: value.detach().clone() for name, value in plan.state_dict().items()}
        self.step = trainer.global_step

    def _check(self, good: bool, what: str, trainer: L.Trainer) -> None:
        if not good:
            group = trainer.optimizers[0].param_groups[0]
            lr = group.get("initial_lr", group["lr"])  # initial learning rate, before the schedule lowers it
            msg = (
                f"NaN or infinity in the {what} by step {trainer.global_step:,} (lr {lr:g}, precision "
                f"{trainer.precision}): lower lr, set gradient_clip_val=1.0, or look for extreme values of the inputs. "
                f"The model has the weights of step {self.step:,}."
            )
            raise TrainingDiverged(msg)


class EarlyStopping(callbacks.EarlyStopping):
    """Early stopping on the validation loss.

    Lightning's own callback would continue a run that is resumed after it had already stopped early. This callback ends
    such a run at once.
    """

    def __init__(self, patience: int) -> None:
        super().__init__("validation_loss", patience=patience, check_on_train_epoch_end=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop at once if the run is resumed from a checkpoint at which early stopping had already ended it."""
        trainer.should_stop = self.wait_count >= self.patience


class BestWeights(ModelCheckpoint):
    """Callback that saves the weights with the lowest validation loss as ``best.ckpt``.

    Validations during the preliminary steps of the training plan (for example pre-training) do not count.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            "best",
            monitor="validation_loss",
            save_weights_only=True,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_validation_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Save the weights if their validation loss is the lowest so far.

        Weights are not saved during the preliminary steps of the training plan. A penalty that starts after these steps
        raises the loss, so that the lowest loss would always be that of weights trained without the penalty.
        """
        if plan.first_step + trainer.global_step > plan.preliminary_steps:
            super().on_validation_end(trainer, plan)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the path and the validation loss of the best weights when a run is resumed.

        The path is set to ``best.ckpt`` in the current checkpoint folder, because the folder may have been moved since
        the file was written.
        """
        path, score = os.path.join(str(self.dirpath), "best.ckpt"), state_dict["best_model_score"]
        if score is not None and os.path.isfile(path):
            self.best_model_path = self.kth_best_model_path = path
            self.best_model_score = self.kth_value = score
            self.best_k_models = {path: score}

    def restore(self, plan: L.LightningModule) -> None:
        """Load the weights of the lowest validation loss into the training plan, if such weights were saved."""
        if self.best_model_path:
            saved = torch.load(self.best_model_path, map_location=plan.device, weights_only=True)
            plan.load_state_dict(saved["state_dict"])


class LastState(ModelCheckpoint):
    """Callback that saves the checkpoint ``last.ckpt``, from which an interrupted run can be resumed.

    The file is written at each validation. In a run without validation, it is written every ``every`` steps. Lightning
    can also save a checkpoint when an exception ends the run (``save_on_exception``). This option is not used, because
    the file would then hold the state of an incomplete step, or weights that have diverged.
    """

    def __init__(self, folder: Path | None, every: int, *, validates: bool) -> None:
        super().__init__(
            folder,
            "last",
            every_n_train_steps=None if validates else every,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save a checkpoint at the end of an optimiser step, but not between the batches of one step.

        If a step accumulates the gradients of several batches, a checkpoint between these batches would lose the
        gradients, because checkpoints do not contain them.
        """
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, plan, outputs, batch, batch_idx)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer that never leaves a partially written checkpoint, even if the process is killed.

    A checkpoint is first written to a temporary file in the folder of the checkpoints, and this file is then renamed.
    Lightning's own writer creates its temporary file in the temporary folder of the system. If that folder is on
    another file system, the new file is copied over the only good checkpoint, and a process that is killed during the
    copy leaves a partial file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint to a local path. For a remote address (``"s3://…"``), Lightning's own writer is used."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with (
            explained_write(Path(path), "With resume=True, training goes on from that file."),
            open_atomically(Path(path)) as file,
        ):
            torch.save(checkpoint, file)


class ResumableCheckpoint(NamedTuple):
    """Checkpoint file from which an interrupted training run is resumed."""

    path: Path
    step: int
    """Number of training steps that the interrupted run had made when the checkpoint was written."""
    settings: dict[str, Any]
    """Settings of the interrupted run that must be equal in the resumed run, by name."""


def find_checkpoint(folder: Path | None, *, resume: bool) -> ResumableCheckpoint | None:
    """Find the checkpoint ``last.ckpt`` in a folder, and read its step and settings.

    Returns
    -------
    The checkpoint to resume from; `None` if there is no folder, or no checkpoint in the folder.

    Raises
    ------
    FileExistsError
        If the folder holds a checkpoint and ``resume`` is false.
    ValueError
        If the checkpoint cannot be read.
    """
    path = folder / "last.ckpt" if folder else None
    if path is None or not path.is_file():
        return None
    if not resume:
        msg = f"{folder} holds the state of an earlier run: go on with it (resume=True), or choose another."
        raise FileExistsError(msg)
    return ResumableCheckpoint(
        path, *read_part_of_saved_file(path, lambda saved: (saved["global_step"], saved["scbd_settings"]), "checkpoint")
    )


def check_checkpoint_matches(state: ResumableCheckpoint, settings: dict[str, Any], max_steps: int) -> None:
    """Raise ``ValueError`` if a run cannot be resumed from a checkpoint.

    This is the case if the interrupted run had other cells, labels or settings than the new run, or if the step of the
    checkpoint is beyond the last step of the new run.

    Parameters
    ----------
    state
        Checkpoint of the interrupted run.
    settings
        Settings of the new run.
    max_steps
        Number of steps of the new run.
    """
    changed = [
        f"other {name}" if name in ("images", "labels", "split", "order of labels") else f"{name}: {before!r} → {now!r}"
        for name in settings | state.settings
        if (before := state.settings.get(name)) != (now := settings.get(name))
    ]
    if changed:
        msg = f"{state.path} is of a run with other settings ({'; '.join(changed)}): repeat them, or begin another."
        raise ValueError(msg)
    if state.step > max_steps:
        msg = f"{state.path} is at step {state.step}, beyond max_steps={max_steps}: ask for more, or begin another run."
        raise ValueError(msg)
