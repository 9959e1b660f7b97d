"""One training step, one validation step, the optimiser: the Lightning module of all models."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning.pytorch as L
import torch

from scbd.model._health import shape_of
from scbd.nn import Features, agree_on_buffers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch.callbacks import Callback
    from torch import Tensor

    from scbd.model._contract import Losses, Objective
    from scbd.model._online_head import OnlineHead


logger = logging.getLogger(__name__)

# enough embeddings to see how many directions are in use, few enough to cost nothing
_HEALTH_CELLS = 8192


class TrainingPlan(L.LightningModule):
    """Steps, logging and optimiser of an objective.

    A system with steps of its own subclasses this, and names its class in the model's ``_plan``.

    Parameters
    ----------
    module
        What is trained: an :class:`EmbeddingModule`, or something around one.
    lr, weight_decay
        Of AdamW.
    encoder_lr
        The rate of encoders, where it is another; 0 freezes them.
    n_steps_alpha_warmup
        Steps over which alpha rises linearly from 0 (as ``ramp`` does from 0 to 1); 0 for none.
    seed
        Seed of the random orientations.
    first_step
        Steps of the runs before, whose orientations are not repeated.
    settings
        What must not change when a run is resumed; kept in every checkpoint.
    head
        What learns beside the module, see :meth:`scbd.SCBDModel.train`.

    Examples
    --------
    >>> class Halved(scbd.model.TrainingPlan):
    ...     def ramp(self, step):  # invariance at half of its weight, to begin with
    ...         return 0.5 if step < 100 else super().ramp(step)
    >>> class HalvedModel(scbd.SCBDModel):
    ...     _plan = Halved
    >>> HalvedModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> HalvedModel(adata, encoder="small").train(max_steps=2)
    """

    # losses in a row that may be no numbers; more only where their gradients are left out
    tolerated_losses: ClassVar[int] = 0
    # steps, those of earlier runs among them, before the objective is what the system is named for
    preliminary_steps: int = 0

    def __init__(
        self,
        module: Objective,
        *,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        encoder_lr: float | None = None,
        n_steps_alpha_warmup: int = 0,
        seed: int = 0,
        first_step: int = 0,
        settings: Mapping[str, Any] | None = None,
        head: OnlineHead | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.head = None if head is None else head.linear  # its weights go where ours go
        self._beside: list[Callback] = [] if head is None else [head]
        self.lr = lr
        self.weight_decay = weight_decay
        self.encoder_lr = encoder_lr
        self._encoders = [part for part in module.modules() if isinstance(part, Features)]
        if encoder_lr is not None:
            self._check_encoders()
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
        return torch.optim.AdamW(self.parameter_groups(), lr=self.lr, weight_decay=self.weight_decay, fused=fused)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters to optimise, with a rate where it is their own; encoders are frozen, or freed."""
        for part in self._encoders:
            part.freeze(self.encoder_lr == 0)
        if self.encoder_lr is None:
            return [{"params": list(self.module.parameters())}]
        own = [parameter for part in self._encoders for parameter in part.encoder.parameters()]
        known = set(map(id, own))
        others = [parameter for parameter in self.module.parameters() if id(parameter) not in known]
        return [{"params": others}, *([{"params": own, "lr": self.encoder_lr}] if self.encoder_lr else [])]

    def _check_encoders(self) -> None:
        """Raise a ValueError unless there are encoders, and something behind them."""
        if not self._encoders:
            msg = "encoder_lr is for models with an encoder by name, or of your own: leave it out."
            raise ValueError(msg)
        own = {id(parameter) for part in self._encoders for parameter in part.encoder.parameters()}
        if self.encoder_lr == 0 and own.issuperset(map(id, self.module.parameters())):
            msg = "encoder_lr=0 leaves nothing to learn: this encoder embeds by itself. Leave it out."
            raise ValueError(msg)

    def configure_callbacks(self) -> list[Callback]:
        """What learns beside the module."""
        return self._beside

    def ramp(self, step: int) -> float:
        """Factor of alpha, or of another weight that warms up, at a step of this run."""
        return min(1.0, step / self.n_steps_alpha_warmup) if self.n_steps_alpha_warmup else 1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of a batch."""
        step, rule, of_step = self.global_step, self.module.alpha_rule, self.trainer.accumulate_grad_batches
        # a generator of its own for each batch: a resumed run turns its images as an uninterrupted one
        number = (self.first_step + step) * of_step + batch_idx % of_step
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        losses = self.module(**batch, ramp=self.ramp(step), generator=generator)
        self._log("train", losses, len(batch["y"]))
        if rule is not None:
            self.log("alpha", rule.alpha, on_step=True, on_epoch=False)
            rule.observe(*(losses.parts[name] for name in ("learned_c", "interaction_c", "environment_c")))
        return losses.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Losses of a validation batch, at the final alpha, or at what ``"auto"`` has found so far."""
        losses = self.module(**batch)
        self._log("validation", losses, len(batch["y"]))
        if self.module.alpha_rule is not None:
            self._learned.append(losses.parts["learned_c"])
        if losses.z_c is not None and sum(map(len, self._embeddings)) < _HEALTH_CELLS:
            self._embeddings.append(losses.z_c)

    def on_validation_epoch_end(self) -> None:
        """Log how alive z_c is, for modules that return it; alpha follows what was learned, where it does."""
        if self.module.alpha_rule is not None:
            self.module.alpha_rule.validate(torch.stack(self._learned), self._learned_of_known())
            self._learned.clear()
        if self._embeddings:
            for name, value in shape_of(torch.cat(self._embeddings)).items():
                self.log(f"z_c_{name}", value, rank_zero_only=True)
            self._embeddings.clear()

    def _learned_of_known(self) -> Tensor:
        """What is learned of training cells that are looked at as validation cells are: a number a batch."""
        trainer, learned = self.trainer, []
        # no validation step, of which others would be told
        with trainer.precision_plugin.val_step_context():
            for batch in trainer.datamodule.matched_dataloader():  # type: ignore[attr-defined]
                learned.append(self.module(**trainer.strategy.batch_to_device(batch)).parts["learned_c"])
        return torch.stack(learned) if learned else torch.empty(0)

    def on_train_start(self) -> None:
        """Say so where a run ends before its own objective begins."""
        last = self.first_step + self.trainer.max_steps
        if last <= self.preliminary_steps and self.trainer.is_global_zero:
            logger.warning(
                "%s begins after step %d, and training ends at step %d: the result is that of plain training. Train "
                "for longer, or lower the number of steps before.",
                type(self).__name__.removesuffix("Plan"),
                self.preliminary_steps,
                last,
            )

    def on_train_end(self) -> None:
        """Leave all processes with one network, while it is still on its device."""
        agree_on_buffers(self.module)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the settings beside the state."""
        checkpoint["scbd_settings"] = self.settings

    def _log(self, stage: Literal["train", "validation"], losses: Losses, batch_size: int) -> None:
        for name, value in {"loss": losses.loss, **losses.parts}.items():
            # on_step and on_epoch apart, so that names carry no suffix
            training = stage == "train"
            self.log(
                f"{stage}_{name}",
                value.detach(),
                on_step=training,
                on_epoch=not training,
                sync_dist=not training,
                batch_size=batch_size,
            )
