"""Run a plan: checkpoints, best weights, interrupts, history."""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as L
import numpy as np
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from scbd._progress import say
from scbd.data import ShuffleSampler
from scbd.model._callbacks import BestWeights, EarlyStopping, History, LastState, Progress, TrainingInterrupted
from scbd.model._checkpoints import BEST, HISTORY, LAST, WholeFiles, kept_by_run, remove_leftovers
from scbd.model._divergence import Divergence, TrainingDiverged
from scbd.model._forecast import Forecast
from scbd.model._memory import freed_memory_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from scbd.data import ImageDataModule
    from scbd.model._checkpoints import State
    from scbd.model._plan import TrainingPlan
    from scbd.model._settings import TrainSettings

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """A run that can start: what Lightning could have against it was said, and nothing is written yet."""

    plan: TrainingPlan
    data: ImageDataModule
    trainer: L.Trainer
    history: History
    directory: Path | None
    state: State | None
    divergence: Divergence
    best: BestWeights | None
    steps: int = 0
    """Updates behind the weights, once it has run."""

    def start(self) -> None:
        """Train: the plan ends with the last weights, or the best; where it diverged, with the last good ones.

        Raises
        ------
        TrainingDiverged
            If a loss was no number.
        KeyboardInterrupt
            If the run was interrupted; with a directory, ``last.ckpt`` holds its state.
        """
        with ExitStack() as stack:
            stack.enter_context(_quiet_lightning())
            if self.directory:
                stack.enter_context(_folder(self.directory))
            # a model that was embedded from, or loaded, is in evaluation mode, and Lightning keeps the mode it finds
            self.plan.train()
            if self.trainer.strategy.root_device.type == "cpu":
                stack.enter_context(freed_memory_kept())
            try:
                self._fit()
            except TrainingDiverged:
                self.divergence.restore(self.plan)
                self.steps = self.divergence.step
                raise
            except BaseException:
                self._end()
                raise
            self._end()

    def _end(self) -> None:
        """With the best weights if so asked, though the run was interrupted: its state is written."""
        self.steps = self.trainer.global_step
        if self.best is not None:
            self.best.restore(self.plan)

    def _fit(self) -> None:
        resume = self.state.path if self.state else None
        try:
            self.trainer.fit(self.plan, self.data, ckpt_path=resume, weights_only=True)
        except TrainingInterrupted:
            keep = self.directory is not None
            where = f"; resume with checkpoint_dir={str(self.directory)!r}, ckpt_path='last'" if keep else ""
            logger.warning("Training interrupted after %d steps%s.", self.trainer.global_step, where)
            raise KeyboardInterrupt from None
        except SystemExit as error:  # Lightning's answer to a second Ctrl-C; a notebook must survive it
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


class Hardware(NamedTuple):
    """What a run computes on, as Lightning names it."""

    accelerator: str
    devices: Any
    precision: str


def prepare(
    plan: TrainingPlan,
    data: ImageDataModule,
    settings: TrainSettings,
    state: State | None,
    hardware: Hardware,
    cheaper: Sequence[str] = (),
) -> Run:
    """Make ready to train; loggers, callbacks and plugins of the user's come beside ours.

    Parameters
    ----------
    plan
        What a step is.
    data
        Batches, of which ``max_steps`` are trained on.
    settings
        How the run goes: where it keeps states, when it validates and stops, what it shows.
    state
        To resume from.
    hardware
        Where it runs.
    cheaper
        Arguments that would take less time, to be named if the run is long.

    Raises
    ------
    ValueError
        If a setting does not fit; before anything is written.
    """
    directory, given = settings.directory, dict(settings.trainer_kwargs or {})
    if settings.early_stopping and not data.validates:
        msg = "early_stopping watches the validation loss, but there are no validation cells: lower train_size."
        raise ValueError(msg)
    if settings.load_best and not data.validates:
        msg = "load_best takes the weights of the lowest validation loss, but there are no validation cells: lower "
        raise ValueError(msg + "train_size, or leave load_best out.")
    for name in ("early_stopping", "load_best"):
        if getattr(settings, name) and given.get("limit_val_batches") == 0:
            msg = f"{name} looks at validation cells, and limit_val_batches=0 leaves them out: drop one of the two."
            raise ValueError(msg)
    validate_every = min(settings.validate_every or _steps_between_validations(data), data.max_steps)
    history = History(
        directory / HISTORY if directory else None,
        kept_by_run(state, directory, HISTORY),
        state.step if state else 0,
    )
    divergence = Divergence(history, validate_every)
    best = None
    if settings.load_best:
        best = BestWeights(directory / BEST if directory else None, kept_by_run(state, directory, BEST))
    # checkpoints come last, whatever is said here: what others find at a step belongs to its state
    ours: list[Callback | None] = [
        divergence,
        *([Progress(), Forecast(say, cheaper)] if settings.enable_progress_bar else []),
        EarlyStopping("validation_loss", patience=settings.early_stopping_patience, check_on_train_epoch_end=False)
        if settings.early_stopping
        else None,
        *_several(given.pop("callbacks", None)),
        best,
        LastState(directory / LAST if directory else None, validate_every, history),
    ]
    plugins = _several(given.pop("plugins", None))
    loggers = [history, *_several(given.pop("logger", None))]
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(WholeFiles())
    with _quiet_lightning():
        trainer = L.Trainer(
            **{
                "max_epochs": -1,
                "max_steps": data.max_steps,
                # counted in batches
                "val_check_interval": validate_every * given.get("accumulate_grad_batches", 1),
                "num_sanity_val_steps": 0,
                **hardware._asdict(),
                "log_every_n_steps": max(1, min(10, validate_every)),
                "enable_progress_bar": False,  # ours counts steps
                "enable_model_summary": False,
                "use_distributed_sampler": False,  # ours know their rank
                "default_root_dir": directory,
            }
            | given,
            callbacks=[callback for callback in ours if callback is not None],
            logger=loggers,
            plugins=plugins,
            enable_checkpointing=True,
        )
    history.trainer = trainer
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        msg = (
            f"The strategy {given.get('strategy', 'auto')!r} trains in processes of its own, from which no "
            "history comes back. Use devices=1 in a notebook, or strategy='ddp' in a script that torchrun starts."
        )
        raise ValueError(msg)
    # what cannot be shared is said before processes are started
    ShuffleSampler(data.split.train, data.batch_size, world_size=trainer.world_size)
    return Run(plan, data, trainer, history, directory, state, divergence, best)


def _steps_between_validations(data: ImageDataModule) -> int:
    """Twenty validations a run, fewer where they would take more than a tenth of it."""
    # a cell that is not learned from costs about a third
    affordable = 0.1 * 3 * data.max_steps * data.batch_size / max(1, len(data.split.validation))
    return data.max_steps // int(np.clip(affordable, 1, min(20, data.max_steps)))


def _several(given: Any) -> list[Any]:
    """One, several or none, as a list; of loggers, a truth value asks for no other than ours."""
    if given is None or isinstance(given, bool):
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


@contextmanager
def _folder(directory: Path) -> Iterator[None]:
    """A folder to keep states in; one that stays empty is not left behind."""
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    try:
        yield
    finally:
        if made:
            with suppress(OSError):  # it holds something
                directory.rmdir()


# what Lightning says of choices that are deliberate here
_EXPECTED = (
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*available but not used.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*Total length of `.*` across ranks is zero.*",
    ".*treespec, LeafSpec.*",
    ".*in eval mode at the start of training.*",  # blocks that a decoder is trained on
)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Neither Lightning's notes on the hardware and on other products, nor its warnings of what is deliberate."""
    notes = logging.getLogger("lightning.pytorch")
    level = notes.level
    with warnings.catch_warnings():
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message=message)
        notes.setLevel(logging.WARNING)
        try:
            yield
        finally:
            notes.setLevel(level)
