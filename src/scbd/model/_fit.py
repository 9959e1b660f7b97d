"""Run a plan: checkpoints, best weights, interrupts, history."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from scbd.model._callbacks import History, LastState, Progress, TrainingInterrupted
from scbd.model._files import read_header
from scbd.model._memory import freed_memory_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scbd.data import ImageDataModule
    from scbd.model._plan import TrainingPlan

logger = logging.getLogger(__name__)


def fit(
    plan: TrainingPlan,
    data: ImageDataModule,
    *,
    max_steps: int,
    validate_every: int,
    accelerator: str,
    devices: Any,
    checkpoint_dir: str | os.PathLike[str] | None,
    ckpt_path: str | os.PathLike[str] | None,
    early_stopping: bool,
    early_stopping_patience: int,
    enable_progress_bar: bool,
    load_best: bool,
    **trainer_kwargs: Any,
) -> tuple[pl.Trainer, History]:
    """Train, keep the best weights by validation loss, and leave a state that can be resumed.

    Returns
    -------
    The trainer and the history. The weights of ``plan.module`` are the best, or the last.

    Raises
    ------
    FileNotFoundError
        If the checkpoint to resume from does not exist.
    FileExistsError
        If ``checkpoint_dir`` holds the state of an earlier run that is not resumed.
    ValueError
        If the checkpoint cannot be read, or is of a run with other settings.
    KeyboardInterrupt
        If the run was interrupted; with ``checkpoint_dir``, ``last.ckpt`` holds its state.
    """
    if early_stopping and not data.validates:
        msg = "early_stopping watches the validation loss, but there are no validation cells: lower train_size."
        raise ValueError(msg)
    with ExitStack() as stack:
        directory = Path(checkpoint_dir) if checkpoint_dir else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keep = checkpoint_dir is not None
        resume = _resume_path(ckpt_path, directory if keep else None)
        resume_step = read_header(resume, lambda saved: saved["global_step"], "checkpoint") if resume else None
        if keep and resume is None and (directory / "last.ckpt").exists():
            msg = f"{directory} holds the state of an earlier run: go on with it (ckpt_path='last'), or choose another."
            raise FileExistsError(msg)
        if keep:
            directory.mkdir(parents=True, exist_ok=True)
        history = History(directory / "history.csv" if keep else None, resume_step)
        best = ModelCheckpoint(
            directory,
            "best",
            monitor="validation_loss",
            enable_version_counter=False,
            save_weights_only=not keep,
            save_on_train_epoch_end=False,
        )
        callbacks: list[pl.Callback] = [LastState(directory / "last.ckpt" if keep else None, validate_every)]
        if enable_progress_bar:
            callbacks.append(Progress())
        if early_stopping:
            stopping = EarlyStopping(
                "validation_loss", patience=early_stopping_patience, check_on_train_epoch_end=False
            )
            callbacks.append(stopping)
        if data.validates and load_best:
            callbacks.append(best)
        callbacks += trainer_kwargs.pop("callbacks", [])
        stack.enter_context(_quiet_lightning())
        trainer = pl.Trainer(
            **{
                "max_epochs": -1,
                "max_steps": max_steps,
                "val_check_interval": validate_every,
                "num_sanity_val_steps": 0,
                "accelerator": accelerator,
                "devices": devices,
                "logger": history,
                "log_every_n_steps": max(1, min(10, validate_every)),
                "enable_progress_bar": False,  # ours counts steps
                "enable_model_summary": False,
                "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
                "use_distributed_sampler": False,  # ours know their rank
                "default_root_dir": directory,
            }
            | trainer_kwargs,
            callbacks=callbacks,
        )
        history.trainer = trainer
        # a model that was embedded from, or loaded, is in evaluation mode, and Lightning keeps the mode it finds
        plan.train()
        if trainer.strategy.root_device.type == "cpu":
            stack.enter_context(freed_memory_kept())
        try:
            trainer.fit(plan, data, ckpt_path=resume, weights_only=True)
        except TrainingInterrupted:
            where = f"; resume with checkpoint_dir={str(checkpoint_dir)!r}, ckpt_path='last'" if keep else ""
            logger.warning("Training interrupted after %d steps%s.", trainer.global_step, where)
            raise KeyboardInterrupt from None
        except SystemExit as error:  # Lightning's answer to a second Ctrl-C; a notebook must survive it
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        if data.validates and load_best and best.best_model_path:
            state = torch.load(best.best_model_path, map_location=plan.device, weights_only=True)["state_dict"]
            plan.load_state_dict(state)
            logger.info("Kept the weights of the lowest validation loss, %.4f.", best.best_model_score)
    return trainer, history


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


def _resume_path(ckpt_path: str | os.PathLike[str] | None, directory: Path | None) -> Path | None:
    if ckpt_path is None:
        return None
    if ckpt_path == "last" and directory is None:
        msg = "ckpt_path='last' needs the checkpoint_dir of the run to resume."
        raise ValueError(msg)
    path = directory / "last.ckpt" if ckpt_path == "last" and directory else Path(ckpt_path)
    if not path.is_file():
        msg = f"There is no checkpoint {path} to resume from: train with checkpoint_dir=… first, or drop ckpt_path."
        raise FileNotFoundError(msg)
    return path
