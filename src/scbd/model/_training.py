"""How a module is trained: one Lightning plan, one function that fits it."""

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
from scbd.nn import effective_rank, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from scbd.data import ImageDataModule
    from scbd.model._module import SCBDModule

logger = logging.getLogger(__name__)

# enough embeddings to see how many directions are in use, few enough to cost nothing
_HEALTH_CELLS = 8192


class TrainingPlan(pl.LightningModule):
    """Steps, logging and optimiser of a module whose forward returns ``loss`` and its parts.

    Parameters
    ----------
    module
        The network.
    lr, weight_decay
        Of AdamW.
    n_steps_alpha_warmup
        Steps over which alpha rises linearly from 0; 0 for none.
    seed
        Seed of the random orientations.
    settings
        What must not change when a run is resumed; kept in every checkpoint.
    """

    def __init__(
        self,
        module: SCBDModule,
        *,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        n_steps_alpha_warmup: int = 0,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.lr = lr
        self.weight_decay = weight_decay
        self.n_steps_alpha_warmup = n_steps_alpha_warmup
        self.seed = seed
        self.settings = dict(settings or {})
        self._embeddings: list[Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with torch's own epsilon (scvi-tools' default of 0.01 would drown these gradients)."""
        return torch.optim.AdamW(self.module.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of a batch."""
        step = self.global_step
        warm = min(1.0, step / self.n_steps_alpha_warmup) if self.n_steps_alpha_warmup else 1.0
        # a generator of its own for each step: a resumed run turns its images as an uninterrupted one
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        losses = self.module(**batch, alpha=warm * self.module.alpha, generator=generator)
        self._log("train", losses, len(batch["y"]))
        return losses["loss"]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Losses of a validation batch, at the final alpha."""
        losses = self.module(**batch)
        self._log("validation", losses, len(batch["y"]))
        if sum(map(len, self._embeddings)) < _HEALTH_CELLS:
            self._embeddings.append(losses["z_c"])

    def on_validation_epoch_end(self) -> None:
        """Log how alive z_c is."""
        z_c = torch.cat(self._embeddings)
        self._embeddings.clear()
        self.log("z_c_spread", spread(z_c), rank_zero_only=True)
        self.log("z_c_effective_rank", effective_rank(z_c), rank_zero_only=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the settings beside the state."""
        checkpoint["scbd_settings"] = self.settings

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with another run's settings."""
        saved = checkpoint.get("scbd_settings", {})
        changed = [f"{k}: {saved.get(k)!r} → {v!r}" for k, v in self.settings.items() if saved.get(k) != v]
        if changed:
            msg = f"The checkpoint belongs to a run with other settings ({'; '.join(changed)}): repeat that run's."
            raise ValueError(msg)

    def _log(self, part: str, losses: dict[str, Tensor], batch_size: int) -> None:
        for name, value in losses.items():
            if value.ndim == 0:
                shown = f"{part}_loss" if name == "loss" else f"{part}_{name}"
                # on_step and on_epoch apart, so that names carry no suffix
                training = part == "train"
                self.log(shown, value.detach(), on_step=training, on_epoch=not training, batch_size=batch_size)


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
    KeyboardInterrupt
        If the run was interrupted; with ``checkpoint_dir``, ``last.ckpt`` holds its state.
    """
    validates = len(data.split.validation) > 1
    if early_stopping and not validates:
        msg = "early_stopping watches the validation loss, but there are no validation cells: lower train_size."
        raise ValueError(msg)
    with ExitStack() as stack:
        directory = Path(checkpoint_dir) if checkpoint_dir else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keep = checkpoint_dir is not None
        resume = _resume_path(ckpt_path, directory if keep else None)
        resume_step = torch.load(resume, map_location="cpu", weights_only=False)["global_step"] if resume else None
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
            patience = {"patience": early_stopping_patience, "check_on_train_epoch_end": False}
            callbacks.append(EarlyStopping("validation_loss", **patience))
        if validates and load_best:
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
        # a model that was embedded from, or loaded, is in evaluation mode, and Lightning keeps the mode it finds
        plan.train()
        try:
            trainer.fit(plan, data, ckpt_path=resume, weights_only=False)
        except TrainingInterrupted:
            where = f"; resume with checkpoint_dir={str(checkpoint_dir)!r}, ckpt_path='last'" if keep else ""
            logger.warning("Training interrupted after %d steps%s.", trainer.global_step, where)
            raise KeyboardInterrupt from None
        except SystemExit as error:  # Lightning's answer to a second Ctrl-C; a notebook must survive it
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        if validates and load_best and best.best_model_path:
            state = torch.load(best.best_model_path, map_location=plan.device, weights_only=False)["state_dict"]
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
