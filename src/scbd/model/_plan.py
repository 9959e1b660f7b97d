"""One training step, one validation step, the optimiser: the Lightning module of all image models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import torch

from scbd.nn import agree_on_buffers, effective_rank, spread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from scbd.model._alpha import AutoAlpha


# enough embeddings to see how many directions are in use, few enough to cost nothing
_HEALTH_CELLS = 8192


class TrainingPlan(pl.LightningModule):
    """Steps, logging and optimiser of a module whose forward returns ``loss`` and its parts.

    Parameters
    ----------
    module
        The network: takes a batch, ``ramp`` and ``generator``, returns ``loss`` and its parts.
    lr, weight_decay
        Of AdamW.
    n_steps_alpha_warmup
        Steps over which alpha rises linearly from 0 (as ``ramp`` does from 0 to 1); 0 for none.
    seed
        Seed of the random orientations.
    first_step
        Steps of the runs before, whose orientations are not repeated.
    settings
        What must not change when a run is resumed; kept in every checkpoint.
    """

    # losses in a row that may be no numbers; more only where their gradients are left out
    tolerated_losses: ClassVar[int] = 0

    def __init__(
        self,
        module: Any,
        *,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        n_steps_alpha_warmup: int = 0,
        seed: int = 0,
        first_step: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.lr = lr
        self.weight_decay = weight_decay
        self.n_steps_alpha_warmup = n_steps_alpha_warmup
        self.seed = seed
        self.first_step = first_step
        self.settings = dict(settings or {})
        self._embeddings: list[Tensor] = []
        self._learned: list[Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with torch's own epsilon (scvi-tools' default of 0.01 would drown these gradients)."""
        # one kernel for all parameters; Lightning refuses to clip gradients for it
        fused = self.module.device.type in ("cpu", "cuda") and not self.trainer.gradient_clip_val
        return torch.optim.AdamW(self.module.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=fused)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of a batch."""
        step = self.global_step
        warm = min(1.0, step / self.n_steps_alpha_warmup) if self.n_steps_alpha_warmup else 1.0
        # a generator of its own for each step: a resumed run turns its images as an uninterrupted one
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.first_step + step)
        losses = self.module(**batch, ramp=warm, generator=generator)
        self._log("train", losses, len(batch["y"]))
        if self._auto_alpha is not None:
            self.log("alpha", self._auto_alpha.alpha, on_step=True, on_epoch=False)
            self._auto_alpha.observe(losses["learned_c"])
        return losses["loss"]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Losses of a validation batch, at the final alpha, or at what ``"auto"`` has found so far."""
        losses = self.module(**batch)
        self._log("validation", losses, len(batch["y"]))
        if self._auto_alpha is not None:
            self._learned.append(losses["learned_c"])
        if "z_c" in losses and sum(map(len, self._embeddings)) < _HEALTH_CELLS:
            self._embeddings.append(losses["z_c"])

    def on_validation_epoch_end(self) -> None:
        """Log how alive z_c is, for modules that return it; alpha follows what was learned, where it does."""
        if self._auto_alpha is not None:
            self._auto_alpha.validate(torch.stack(self._learned))
            self._learned.clear()
        if not self._embeddings:
            return
        z_c = torch.cat(self._embeddings)
        self._embeddings.clear()
        self.log("z_c_spread", spread(z_c), rank_zero_only=True)
        self.log("z_c_effective_rank", effective_rank(z_c), rank_zero_only=True)

    def on_train_end(self) -> None:
        """Leave all processes with one network, while it is still on its device."""
        agree_on_buffers(self.module)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the settings beside the state."""
        checkpoint["scbd_settings"] = self.settings

    @property
    def _auto_alpha(self) -> AutoAlpha | None:
        """Of modules whose alpha follows what is learned."""
        return getattr(self.module, "auto_alpha", None)

    def _log(self, part: str, losses: dict[str, Tensor], batch_size: int) -> None:
        for name, value in losses.items():
            if value.ndim == 0:
                shown = f"{part}_loss" if name == "loss" else f"{part}_{name}"
                # on_step and on_epoch apart, so that names carry no suffix
                training = part == "train"
                self.log(
                    shown,
                    value.detach(),
                    on_step=training,
                    on_epoch=not training,
                    sync_dist=not training,
                    batch_size=batch_size,
                )
