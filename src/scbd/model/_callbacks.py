"""What happens around training steps: history, progress, the state to resume from."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from scbd.data.progress import progress_bar

if TYPE_CHECKING:
    import lightning.pytorch as pl


class History(Logger):
    """Keeps every logged number by step, and writes them to a CSV where a directory is given.

    Parameters
    ----------
    path
        CSV file. If it exists and the run is resumed, its rows up to ``resume_step`` are kept.
    resume_step
        Step a resumed run starts from; `None` for a fresh run.
    """

    name = "history"
    version = ""
    trainer: pl.Trainer

    def __init__(self, path: Path | None = None, resume_step: int | None = None) -> None:
        super().__init__()
        self._path = path
        self._rows: dict[int, dict[str, float]] = {}
        if path is not None and resume_step is not None and path.exists():
            earlier = pd.read_csv(path)
            earlier = earlier[earlier["step"] <= resume_step].set_index("step")
            self._rows = {step: row.dropna().to_dict() for step, row in earlier.iterrows()}

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep: the model knows its settings."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add numbers by the updates made so far: Lightning's own count of batches is one off after some resumes."""
        self._rows.setdefault(self.trainer.global_step, {}).update(
            {k: float(v) for k, v in metrics.items() if k != "epoch"}
        )

    @rank_zero_only
    def save(self) -> None:
        """Write the CSV beside its place and rename it."""
        if self._path is None:
            return
        partial = self._path.with_suffix(".partial")
        self.frame().to_csv(partial)
        os.replace(partial, self._path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what there is."""
        self.save()

    def frame(self) -> pd.DataFrame:
        """All numbers, one row a step, one column a metric."""
        frame = pd.DataFrame.from_dict(self._rows, orient="index").sort_index()
        frame.index.name = "step"
        return frame

    def frames(self, offset: int = 0, prefix: str = "") -> dict[str, pd.DataFrame]:
        """The shape of ``history_`` in scvi-tools: one frame a metric, indexed by step."""
        frame = self.frame().add_prefix(prefix)
        frame.index += offset
        return {name: frame[[name]].dropna() for name in frame}


class Progress(Callback):
    """One bar over all steps, with rate, time left and the current losses."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar."""
        if trainer.is_global_zero:
            self._bar = progress_bar(
                "Training", trainer.max_steps, unit="step", initial=trainer.global_step, shown=True
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if trainer.is_global_zero:
            self._bar.update(trainer.global_step - self._bar.n)
            shown = ("train_loss", "validation_loss")
            metrics = {k: f"{float(v):.3f}" for k, v in trainer.callback_metrics.items() if k in shown}
            self._bar.set_postfix(metrics, refresh=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the bar, whatever happened."""
        if hasattr(self, "_bar"):
            self._bar.close()


class TrainingInterrupted(BaseException):
    """The first Ctrl-C, raised between two steps."""


class LastState(Callback):
    """Keep the state a run can be resumed from: every so many steps, at the end, and on Ctrl-C.

    The first Ctrl-C lets the step at hand finish, since one cut in half would leave half of the parameters updated; a
    second one stops at once. What a validation finds (``alpha="auto"`` does) belongs to the step before it, so that a
    step with a validation ends with that: a state in between would go on without it.

    Parameters
    ----------
    path
        Checkpoint to write; `None` writes none.
    every
        Steps between checkpoints.
    """

    def __init__(self, path: Path | None, every: int) -> None:
        self._path = path
        self._every = every
        self._asked = False
        self._previous: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over Ctrl-C, where Python lets us."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._ask)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Save when it is time; stop here if asked to."""
        due = trainer.global_step % self._every == 0
        if not (due and any(trainer.num_val_batches)):
            self._end_step(trainer, due)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Save; stop here if asked to."""
        self._end_step(trainer, due=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end, from which a longer run can go on."""
        self._save(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give Ctrl-C back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _end_step(self, trainer: pl.Trainer, due: bool) -> None:
        if self._asked or due:
            self._save(trainer)
        if self._asked:
            raise TrainingInterrupted

    def _save(self, trainer: pl.Trainer) -> None:
        if self._path is not None:
            trainer.save_checkpoint(self._path)  # Lightning writes beside and renames

    def _ask(self, signum: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
