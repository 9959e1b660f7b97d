"""Lightning callbacks of training: history, divergence, best weights and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import pandas as pd
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from scbd._shared.files import open_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from scbd.model._plan import TrainingPlan

# prefixes of the metrics that validation logs; training steps log all other metrics
VALIDATION_PREFIXES = ("validation_", "z_c_")


class TrainingDiverged(RuntimeError):
    """Error that training raises when the loss or a weight becomes NaN or infinite.

    The model keeps the weights of the last validation with a finite loss. Without validation, it keeps weights that
    were saved at a regular interval while the training loss was finite. If there are no such weights, it keeps the
    weights from before the run. ``model.history`` holds the losses.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small")
    >>> try:
    ...     model.train(max_steps=2000, lr=0.01)
    ... except scbd.model.TrainingDiverged:  # from the weights that were good
    ...     model.train(max_steps=2000, lr=0.001)
    """


class History(Checkpoint):
    """Callback that records every logged metric by step.

    The history is saved in each checkpoint. The history of a resumed run therefore continues at the checkpoint's step.
    The class derives from ``Checkpoint`` because Lightning runs checkpoint callbacks last, and so after all callbacks
    that log.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the metrics of a training step, every ``log_every_n_steps`` steps."""
        step_ends = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if step_ends and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._keep(trainer, validation=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the metrics of a validation."""
        self._keep(trainer, validation=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded metrics by step."""
        return {"rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the recorded metrics."""
        self._rows = state_dict["rows"]

    def frames(self, offset: int = 0, prefix: str = "") -> dict[str, pd.DataFrame]:
        """Return one data frame per metric, indexed by step, as ``history_`` holds them in scvi-tools.

        Parameters
        ----------
        offset
            Number added to each step: the steps of earlier runs.
        prefix
            Text put before the name of each metric.
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


class Divergence(Checkpoint):
    """Callback that stops training when the loss is not finite, and keeps a copy of the last good weights.

    Weights are good if their validation loss is finite. Without validation, weights are good if their training loss is
    finite. The weights just before a non-finite loss are not used, because they may already have diverged.

    Parameters
    ----------
    every
        Number of steps between copies of the weights in a run without validation.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        # number of consecutive non-finite losses; stays on the device, because reading it waits for the device
        self._n_non_finite = torch.zeros((), dtype=torch.int64)
        self.weights: dict[str, Tensor] = {}
        self.step = 0
        """Step at which ``weights`` were copied."""

    def on_train_start(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Copy the weights that the run starts from."""
        self._n_non_finite = self._n_non_finite.to(plan.device)
        self._keep(trainer, plan)

    def on_before_backward(self, trainer: L.Trainer, plan: TrainingPlan, loss: Tensor) -> None:  # type: ignore[override]
        """Count consecutive non-finite losses; without validation, copy weights whose loss is finite."""
        self._n_non_finite = torch.where(loss.isfinite(), torch.zeros_like(self._n_non_finite), self._n_non_finite + 1)
        if trainer.global_step % self._every == 0 and not any(trainer.num_val_batches) and not int(self._n_non_finite):
            self._keep(trainer, plan)

    def on_train_batch_end(self, trainer: L.Trainer, plan: TrainingPlan, *args: Any) -> None:  # type: ignore[override]
        """Stop all processes if one has more consecutive non-finite losses than ``plan.tolerated_losses``."""
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            bad = int(trainer.strategy.reduce(self._n_non_finite, reduce_op="max"))
            self._check(bad <= plan.tolerated_losses, "training loss", trainer)

    def on_validation_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Copy the weights if the validation loss is finite; otherwise stop."""
        loss = trainer.callback_metrics.get("validation_loss", torch.zeros(()))
        self._check(bool(loss.isfinite()), "validation loss", trainer)
        self._keep(trainer, plan)

    def on_train_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Check that the weights after the last step are finite, since no loss has been computed with them."""
        finite = [value.isfinite().all() for value in plan.state_dict().values()]
        self._check(bool(torch.stack(finite).all()), "weights", trainer)

    def _keep(self, trainer: L.Trainer, plan: TrainingPlan) -> None:
        self.weights = {name: value.detach().clone() for name, value in plan.state_dict().items()}
        self.step = trainer.global_step

    def _check(self, good: bool, what: str, trainer: L.Trainer) -> None:
        if not good:
            group = trainer.optimizers[0].param_groups[0]
            lr = group.get("initial_lr", group["lr"])  # the learning rate before its decay
            msg = (
                f"NaN or infinity in the {what} by step {trainer.global_step:,} (lr {lr:g}, precision "
                f"{trainer.precision}): lower lr, set gradient_clip_val=1.0, or look for extreme values of the inputs. "
                f"The model has the weights of step {self.step:,}."
            )
            raise TrainingDiverged(msg)


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's early stopping on the validation loss, which also ends a resumed run that had stopped before."""

    def __init__(self, patience: int) -> None:
        super().__init__("validation_loss", patience=patience, check_on_train_epoch_end=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop at once if the resumed run has already used up its patience."""
        trainer.should_stop = self.wait_count >= self.patience


class BestWeights(ModelCheckpoint):
    """Callback that saves the weights of the lowest validation loss as ``best.ckpt``.

    Validations during the plan's preliminary steps do not count.
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
        """Save the weights if they are the best so far, unless the preliminary steps of the plan are still running.

        A penalty that starts after the preliminary steps raises the loss. The best weights would otherwise always be
        weights that were trained without the penalty.
        """
        if plan.first_step + trainer.global_step > plan.preliminary_steps:
            super().on_validation_end(trainer, plan)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the path and loss of the best weights, in the current folder in case the folder was moved."""
        path, score = os.path.join(str(self.dirpath), "best.ckpt"), state_dict["best_model_score"]
        if score is not None and os.path.isfile(path):
            self.best_model_path = self.kth_best_model_path = path
            self.best_model_score = self.kth_value = score
            self.best_k_models = {path: score}

    def restore(self, plan: L.LightningModule) -> None:
        """Load the best weights into the plan, if any were saved."""
        if self.best_model_path:
            saved = torch.load(self.best_model_path, map_location=plan.device, weights_only=True)
            plan.load_state_dict(saved["state_dict"])


class LastState(ModelCheckpoint):
    """Callback that saves ``last.ckpt``, from which a run can be resumed.

    The file is written at each validation. In a run without validation, the file is written every ``every`` steps.
    Lightning's ``save_on_exception`` is not used, because it would replace the file with a state from within a step, or
    with weights that have diverged.
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
        """Save only after the last batch of a step, because a checkpoint does not hold accumulated gradients."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, plan, outputs, batch, batch_idx)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer that never leaves a partial checkpoint.

    A checkpoint is written to a temporary file in the same folder, which is then renamed. Lightning's own writer uses
    the system's folder for temporary files. If that folder is on another file system, Lightning copies the new file
    over the only good checkpoint, and a process that is killed during the copy leaves a partial file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint to a local path; remote addresses are left to Lightning."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with open_atomically(Path(path)) as file:
            torch.save(checkpoint, file)
