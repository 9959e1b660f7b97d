"""What happens around training steps: history, progress, the state to resume from."""

from __future__ import annotations

import csv
import io
import logging
import math
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from scbd._files import written_whole
from scbd._progress import progress_bar
from scbd.model._checkpoints import keep_previous
from scbd.model._divergence import copied_weights

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch import Tensor

    from scbd.model._plan import TrainingPlan


logger = logging.getLogger(__name__)

# numbers that validation logs; all others come with training steps
_OF_VALIDATION = ("validation_", "z_c_")


class History(Logger):
    """Keeps every logged number by step, and writes them to a CSV where a directory is given.

    A number that is none (NaN) is kept as well: it says where a run went wrong.

    Parameters
    ----------
    path
        CSV file to write.
    earlier
        CSV file of the run that is resumed, if there is one, whose rows up to ``resume_step`` are kept.
    resume_step
        Step a resumed run starts from.
    """

    name = "history"
    version = ""
    trainer: L.Trainer

    def __init__(self, path: Path | None = None, earlier: Path | None = None, resume_step: int = 0) -> None:
        super().__init__()
        self._path = path
        self._rows: dict[int, dict[str, float]] = {}
        if earlier is not None:
            with earlier.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    step = int(row.pop("step"))
                    if step <= resume_step:
                        self._rows[step] = {name: float(value) for name, value in row.items() if value}

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep: the model knows its settings."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add numbers by the updates made so far: Lightning's own count of batches is one off after some resumes."""
        self._rows.setdefault(self.trainer.global_step, {}).update(
            {k: float(v) for k, v in metrics.items() if k != "epoch"}
        )

    def log_step(self) -> None:
        """Keep what the step at hand logged so far: Lightning hands it over only when all callbacks are done."""
        metrics = self.trainer.callback_metrics.items()
        self.log_metrics({name: float(value) for name, value in metrics if not name.startswith(_OF_VALIDATION)})

    @rank_zero_only
    def write(self) -> None:
        """Write the CSV, if there is one and something to write; an empty field is a number that was not logged."""
        if self._path is None or not self._rows:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["step", *self._names()], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"step": step} | row for step, row in sorted(self._rows.items()))
        with written_whole(self._path) as file:
            file.write(text.getvalue().encode())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what there is."""
        self.write()

    def frames(self, offset: int = 0, prefix: str = "") -> dict[str, pd.DataFrame]:
        """The shape of ``history_`` in scvi-tools: one frame a metric, indexed by step."""
        frames = {}
        for name in self._names():
            values = {step + offset: row[name] for step, row in sorted(self._rows.items()) if name in row}
            frame = pd.DataFrame({prefix + name: values})
            frame.index.name = "step"
            frames[prefix + name] = frame
        return frames

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for _, row in sorted(self._rows.items()) for name in row))


class Progress(Callback):
    """One bar over all steps, with rate, time left and the current losses."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        if trainer.is_global_zero:
            self._bar = progress_bar(
                "Training", trainer.max_steps, unit="step", initial=trainer.global_step, shown=True
            )

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if trainer.is_global_zero:
            self._bar.update(trainer.global_step - self._bar.n)
            shown = ("train_loss", "validation_loss")
            metrics = {k: f"{float(v):.3f}" for k, v in trainer.callback_metrics.items() if k in shown}
            self._bar.set_postfix(metrics, refresh=False)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the bar, whatever happened."""
        if hasattr(self, "_bar"):
            self._bar.close()


class TrainingInterrupted(BaseException):
    """The first Ctrl-C, raised between two steps."""


class BestWeights(Checkpoint):
    """Keep the weights of the lowest validation loss: in a file, from which a resumed run takes them, or in memory.

    Not before the plan's own objective has begun: a penalty that sets in late would raise the loss, and the weights
    kept would be those of a model without it.

    Parameters
    ----------
    path
        Checkpoint to write; `None` keeps them in memory.
    earlier
        Checkpoint of the run that is resumed, which has the best weights up to there; `None` if there is none.
    """

    def __init__(self, path: Path | None, earlier: Path | None = None) -> None:
        self._path = path
        self._file = earlier  # that has the best so far
        self._weights: dict[str, Tensor] = {}
        self.loss = math.inf
        """The lowest so far."""

    def on_validation_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Keep the weights if they are the best so far."""
        if plan.first_step + trainer.global_step <= plan.preliminary_steps:
            return
        loss = float(trainer.callback_metrics["validation_loss"])
        if loss < self.loss:
            self.loss = loss
            if self._path is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._weights = copied_weights(plan)
            else:
                trainer.save_checkpoint(self._path)
                self._file = self._path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep what another folder has of them beside the states of this run, which will know their loss."""
        if self._path is None or self._file in (None, self._path) or not math.isfinite(self.loss):
            return
        if trainer.is_global_zero:
            with written_whole(self._path) as file:
                file.write(self._file.read_bytes())
        self._file = self._path

    def state_dict(self) -> dict[str, Any]:
        """The lowest loss: a resumed run has to beat it."""
        return {"loss": self.loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, if the weights of that loss are to be had."""
        if self._file is not None:
            self.loss = state_dict["loss"]
        elif math.isfinite(state_dict["loss"]):
            logger.warning(
                "The run to resume left no weights of its lowest validation loss beside the checkpoint: load_best "
                "takes those of the lowest loss from here on."
            )

    def restore(self, plan: L.LightningModule) -> None:
        """Give the plan the best weights, if there was a validation."""
        if math.isfinite(self.loss) and self._file is not None and not self._weights:
            saved = torch.load(self._file, map_location=plan.device, weights_only=True)
            self._weights = saved["state_dict"]
        if self._weights:
            plan.load_state_dict(self._weights)
            logger.info("Kept the weights of the lowest validation loss, %.4f.", self.loss)
        self._weights = {}


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's, under whose name states keep it: a run that had stopped does not go on when it is resumed.

    Unless it is to wait for longer than it was.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on waiting, for as long as is asked now."""
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop at once, if it is over."""
        if self.wait_count >= self.patience:
            logger.info("The run had stopped early: to go on, raise early_stopping_patience above %d.", self.patience)
            trainer.should_stop = True


class LastState(Checkpoint):
    """Keep the state a run can be resumed from: every so many steps, at the end, and on Ctrl-C.

    The first Ctrl-C lets the step at hand finish, since one cut in half would leave half of the parameters updated; a
    second one stops at once. What a validation finds (``alpha="auto"`` does) belongs to the step before it, so that a
    step with a validation ends with that: a state in between would go on without it.

    Parameters
    ----------
    path
        Checkpoint to write; `None` writes none. The one before is kept beside it.
    every
        Steps between checkpoints.
    history
        Written before each checkpoint, which it belongs to.
    """

    def __init__(self, path: Path | None, every: int, history: History) -> None:
        self._path = path
        self._every = every
        self._history = history
        self._asked = False
        self._saved = -1
        self._previous: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over Ctrl-C, where Python lets us."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._ask)

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time; stop here if asked to. Not within a step, whose gradients are in no state."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        due = trainer.global_step % self._every == 0
        if not (due and any(trainer.num_val_batches)):
            self._end_step(trainer, due)

    def on_validation_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Save; stop here if asked to."""
        self._end_step(trainer, due=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the end, from which a longer run can go on."""
        self._save(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give Ctrl-C back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _end_step(self, trainer: L.Trainer, due: bool) -> None:
        if self._asked or due:
            if self._asked or trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
                self._history.log_step()
            self._save(trainer)
        if self._asked:
            raise TrainingInterrupted

    def _save(self, trainer: L.Trainer) -> None:
        if self._path is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._history.write()
        if trainer.is_global_zero and self._path.exists() and trainer.global_step != self._saved:
            keep_previous(self._path)
        trainer.save_checkpoint(self._path)
        self._saved = trainer.global_step

    def _ask(self, signum: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
