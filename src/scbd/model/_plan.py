"""The training plan (Lightning module) of all models, and the linear head that can be trained alongside a model."""

from __future__ import annotations

import inspect
import logging
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._shared.checks import check_count, check_number
from scbd.model._health import collapse_measures
from scbd.model._interfaces import Losses
from scbd.nn._distributed import broadcast_buffers, gather_rows
from scbd.nn._encoders import Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from scbd.model._interfaces import EmbeddingNetwork, Objective

logger = logging.getLogger(__name__)

# number of validation embeddings from which total variance and effective rank are computed
_MAX_HEALTH_CELLS = 8192


class OnlineHead(Callback):
    """Linear classifier of the perturbation on r_c, trained alongside the encoder as the paper's authors do.

    In each step, the head is trained by cross-entropy on the representations from the encoder's own forward pass. The
    head has a separate AdamW optimiser, and its gradient does not reach the encoder. The encoder is therefore trained
    exactly as without the head. The weights of the head are part of the training plan.

    Parameters
    ----------
    network
        Network of z_c.
    n_labels
        Number of perturbations.
    lr, weight_decay
        Learning rate and weight decay of the head's AdamW.
    seed
        Seed of the initial weights.
    weights
        Arrays ``weight`` and ``bias`` of an earlier run, from which training continues. Labels that have been
        registered since then keep their random initial weights.
    """

    def __init__(
        self,
        network: EmbeddingNetwork,
        n_labels: int,
        *,
        lr: float,
        weight_decay: float,
        seed: int,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._network, self._lr, self._weight_decay = network, lr, weight_decay
        with torch.random.fork_rng(devices=[]):  # do not change the global random state
            torch.manual_seed(seed)
            self.linear = nn.Linear(network.width("intermediate"), n_labels)
        with torch.no_grad():
            for name, values in (weights or {}).items():
                self.linear.get_parameter(name)[: len(values)] = torch.from_numpy(values)
        # no gradient while Lightning wraps the plan: distributed training would wait for gradients of parameters that
        # are not part of the loss
        self.linear.requires_grad_(False)
        self._features: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._state: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create the optimiser, restore its state if the run is resumed, and start to record r_c."""
        self.linear.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self.linear.parameters(), lr=self._lr, weight_decay=self._weight_decay)
        if self._state is not None:
            self._optimizer.load_state_dict(self._state)
        self._handle = self._network.show(self._record)

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Train the head on the batch, unless r_c is not finite, which a plan may tolerate."""
        assert self._features is not None and self._optimizer is not None
        features, y = gather_rows(self._features), gather_rows(batch["y"])
        self._features = None
        if not bool(features.isfinite().all()):
            return
        loss = F.cross_entropy(self.linear(features), y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        plan.log("train_online_head", loss.detach(), on_step=True, on_epoch=False)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop recording r_c, even after an error."""
        if hasattr(self, "_handle"):
            self._handle.remove()
        self._features = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimiser; the weights are saved with the plan."""
        return {} if self._optimizer is None else self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state of the optimiser until training starts, when the weights are on their device."""
        self._state = state_dict

    def _record(self, features: Tensor) -> None:
        if self._network.training:
            self._features = features.detach().float()


class TrainingPlan(L.LightningModule):
    """Lightning module that defines the training step, the logging and the optimiser of an objective.

    A model with another training step derives a class from this one, and names that class in its ``traits``.

    Parameters
    ----------
    module
        Objective to train: an :class:`EmbeddingModule`, or an objective that contains one.
    lr, weight_decay
        Learning rate and weight decay of AdamW.
    encoder_lr
        Learning rate of the encoders, if it differs from ``lr``; 0 freezes the encoders.
    lr_decay
        Whether learning rates decay to 0 along half a cosine, from the first step of the run to its last.
    n_steps_alpha_warmup
        Number of steps over which alpha rises linearly from 0 to its full value; 0 for no warm-up.
    seed
        Seed of the random orientations of training images.
    first_step
        Number of steps of earlier runs. Their random orientations are not used again.
    settings
        Settings that must not change when a run is resumed. They are saved in each checkpoint.
    head
        Linear classifier that is trained alongside the module, see ``online_head`` of :meth:`scbd.SCBDModel.train`.

    Examples
    --------
    >>> from dataclasses import replace
    >>> class Halved(scbd.model.TrainingPlan):
    ...     def ramp(self, step):  # invariance at half of its weight, to begin with
    ...         return 0.5 if step < 100 else super().ramp(step)
    >>> class HalvedModel(scbd.SCBDModel):
    ...     traits = replace(scbd.SCBDModel.traits, plan=Halved)
    >>> HalvedModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> HalvedModel(adata, encoder="small").train(max_steps=2)
    """

    # number of consecutive non-finite losses that do not stop training; above 0 only in plans that skip their gradients
    tolerated_losses: ClassVar[int] = 0
    # number of steps, including those of earlier runs, before the full objective applies (pre-training, for example)
    preliminary_steps: int = 0

    def __init__(
        self,
        module: Objective,
        *,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        encoder_lr: float | None = None,
        lr_decay: bool = True,
        n_steps_alpha_warmup: int = 0,
        seed: int = 0,
        first_step: int = 0,
        settings: Mapping[str, Any] | None = None,
        head: OnlineHead | None = None,
    ) -> None:
        super().__init__()
        check_number("lr", lr)
        check_number("weight_decay", weight_decay)
        check_count("n_steps_alpha_warmup", n_steps_alpha_warmup, 0)
        check_forward(module)
        self.module = module
        self.head = None if head is None else head.linear  # moved and saved with this module
        self._head_callbacks: list[Callback] = [] if head is None else [head]
        self.lr = lr
        self.weight_decay = weight_decay
        self.encoder_lr = encoder_lr
        self.lr_decay = lr_decay
        self._encoders = [part for part in module.modules() if isinstance(part, Encoder)]
        if encoder_lr is not None:
            check_number("encoder_lr", encoder_lr)
            self._check_encoders()
        self.n_steps_alpha_warmup = n_steps_alpha_warmup
        self.seed = seed
        self.first_step = first_step
        self.settings = dict(settings or {})
        self._embeddings: list[Tensor] = []
        self._validation_information: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        """Create AdamW with torch's default epsilon, and the decay of its learning rate.

        The epsilon of scvi-tools, 0.01, would be larger than typical gradients of these losses.
        """
        # fused: one kernel for all parameters, which Lightning does not combine with gradient clipping
        fused = self.module.device.type in ("cpu", "cuda") and not self.trainer.gradient_clip_val
        groups = self.parameter_groups()
        optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        if not self.lr_decay:
            return optimizer
        n_steps = self.trainer.max_steps
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / n_steps)) / 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameters to optimise, in groups with their learning rates; freeze or unfreeze the encoders."""
        for part in self._encoders:
            part.freeze(self.encoder_lr == 0)
        if self.encoder_lr is None:
            return [{"params": list(self.module.parameters())}]
        own = [parameter for part in self._encoders for parameter in part.encoder.parameters()]
        known = set(map(id, own))
        others = [parameter for parameter in self.module.parameters() if id(parameter) not in known]
        return [{"params": others}, *([{"params": own, "lr": self.encoder_lr}] if self.encoder_lr else [])]

    def _check_encoders(self) -> None:
        """Raise ``ValueError`` if the model has no encoder, or has no other parameters while the encoder is frozen."""
        if not self._encoders:
            msg = "encoder_lr: this model has no encoder, leave it out."
            raise ValueError(msg)
        own = {id(parameter) for part in self._encoders for parameter in part.encoder.parameters()}
        if self.encoder_lr == 0 and own.issuperset(map(id, self.module.parameters())):
            msg = "encoder_lr=0 leaves nothing to learn, this encoder embeds by itself: leave it out."
            raise ValueError(msg)

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that trains the online head, if there is one."""
        return self._head_callbacks

    def ramp(self, step: int) -> float:
        """Return the factor, from 0 to 1, of alpha or of another weight that warms up, at a step of this run."""
        return min(1.0, step / self.n_steps_alpha_warmup) if self.n_steps_alpha_warmup else 1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, and log its parts."""
        step, rule, of_step = self.global_step, self.module.alpha_rule, self.trainer.accumulate_grad_batches
        # seeding each batch separately gives a resumed run the same image orientations as an uninterrupted run
        number = (self.first_step + step) * of_step + batch_idx % of_step
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        losses = self._losses(batch, ramp=self.ramp(step), generator=generator)
        # not at each step: logging takes milliseconds, which is as long as a training step on a GPU
        if (step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log("train", losses, len(batch["y"]))
            if rule is not None:
                self.log("alpha", rule.alpha, on_step=True, on_epoch=False)
        if rule is not None:
            rule.observe(*(losses.parts[name] for name in ("learned_c", "interaction_c", "environment_c")))
        return losses.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the losses of a validation batch, with the full alpha, or with the current alpha of ``"auto"``."""
        losses = self._losses(batch)
        self._log("validation", losses, len(batch["y"]))
        if self.module.alpha_rule is not None:
            self._validation_information.append(losses.parts["learned_c"])
        if losses.z_c is not None and sum(map(len, self._embeddings)) < _MAX_HEALTH_CELLS:
            self._embeddings.append(losses.z_c)

    def on_validation_epoch_end(self) -> None:
        """Log total variance and effective rank of z_c, if the module returns z_c; update alpha if it is ``"auto"``."""
        if self.module.alpha_rule is not None:
            self.module.alpha_rule.validate(
                torch.stack(self._validation_information), self._information_of_training_cells()
            )
            self._validation_information.clear()
        if self._embeddings:
            for name, value in collapse_measures(torch.cat(self._embeddings)).items():
                self.log(f"z_c_{name}", value, rank_zero_only=True)
            self._embeddings.clear()

    def _losses(self, batch: dict[str, Tensor], **how: Any) -> Losses:
        """Return the losses of a batch, or raise a ``TypeError`` if the module returns anything else."""
        losses = self.module(**batch, **how)
        if not isinstance(losses, Losses):
            msg = (
                f"{type(self.module).__name__}.forward returned {type(losses).__name__}: return "
                "scbd.model.Losses(loss, {'name': part}), the loss to minimise and the numbers to log with it."
            )
            raise TypeError(msg)
        return losses

    def _information_of_training_cells(self) -> Tensor:
        """Return the normalised supervised information of training cells, one number per batch.

        The batches are drawn in the same way as validation batches. Comparing the two shows overfitting.
        """
        trainer, learned = self.trainer, []
        # not a validation step, which would call the validation hooks of callbacks
        with trainer.precision_plugin.val_step_context():
            for batch in trainer.datamodule.matched_dataloader():  # type: ignore[attr-defined]
                learned.append(self.module(**trainer.strategy.batch_to_device(batch)).parts["learned_c"])
        return torch.stack(learned) if learned else torch.empty(0)

    def on_train_start(self) -> None:
        """Warn in the log if the run ends before the preliminary steps do."""
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
        """Copy the buffers of the first process to all others, while the module is still on its device."""
        broadcast_buffers(self.module)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the settings to the checkpoint."""
        checkpoint["scbd_settings"] = self.settings

    def _log(self, stage: Literal["train", "validation"], losses: Losses, batch_size: int) -> None:
        for name, value in {"loss": losses.loss, **losses.parts}.items():
            # with both on_step and on_epoch, Lightning would add suffixes to the names
            training = stage == "train"
            self.log(
                f"{stage}_{name}",
                value.detach(),
                on_step=training,
                on_epoch=not training,
                prog_bar=name == "loss",
                sync_dist=not training,
                batch_size=batch_size,
            )


def check_forward(module: Objective) -> None:
    """Raise ``TypeError`` unless ``forward`` accepts the arguments of the plan in training and in validation."""
    signature, batch = inspect.signature(module.forward), ("inputs", "y", "e")
    try:
        for given in (batch, (*batch, "ramp", "generator")):
            signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        msg = (
            f"{type(module).__name__}.forward does not take what it is given ({error}): declare it as forward(self, "
            "inputs, y, e, *, ramp=1.0, generator=None). ramp multiplies what pulls against the main loss, and rises "
            "to 1 while that warms up; prepare takes the generator."
        )
        raise TypeError(msg) from None
