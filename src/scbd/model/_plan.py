"""What a step is: the Lightning module of all models, and the linear head that may learn beside it."""

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

from scbd._checks import check_count, check_number
from scbd.model._contract import Losses
from scbd.model._health import shape_of
from scbd.nn._distributed import agree_on_buffers, gather
from scbd.nn._encoders import Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from scbd.model._contract import Network, Objective

logger = logging.getLogger(__name__)

# enough embeddings to see how many directions are in use, few enough to cost nothing
_HEALTH_CELLS = 8192


class OnlineHead(Callback):
    """A linear head of the perturbation on r_c, trained beside the encoder as the paper's authors do.

    It learns by cross-entropy from the forward pass that the encoder has just learned from, without gradient to it,
    with an AdamW of its own: training is the same with it and without. Its weights are among the plan's.

    Parameters
    ----------
    network
        Of z_c.
    n_labels
        Number of different y.
    lr, weight_decay
        Of its AdamW.
    seed
        Of its first weights.
    weights
        ``weight`` and ``bias`` to go on from, of the first labels; new ones come behind.
    """

    def __init__(
        self,
        network: Network,
        n_labels: int,
        *,
        lr: float,
        weight_decay: float,
        seed: int,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._network, self._lr, self._weight_decay = network, lr, weight_decay
        with torch.random.fork_rng(devices=[]):  # the random numbers of all others stay theirs
            torch.manual_seed(seed)
            self.linear = nn.Linear(network.width("intermediate"), n_labels)
        with torch.no_grad():
            for name, values in (weights or {}).items():
                self.linear.get_parameter(name)[: len(values)] = torch.from_numpy(values)
        # several processes would wait for gradients of what is no part of their loss
        self.linear.requires_grad_(False)
        self._features: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._state: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to look; go on with the optimiser of a run that is resumed."""
        self.linear.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self.linear.parameters(), lr=self._lr, weight_decay=self._weight_decay)
        if self._state is not None:
            self._optimizer.load_state_dict(self._state)
        self._handle = self._network.show(self._look)

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Learn from the batch; not from features that are no numbers, which a plan may tolerate."""
        assert self._features is not None and self._optimizer is not None
        features, y = gather(self._features), gather(batch["y"])
        self._features = None
        if not bool(features.isfinite().all()):
            return
        loss = F.cross_entropy(self.linear(features), y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        plan.log("train_online_head", loss.detach(), on_step=True, on_epoch=False)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Look no longer, whatever happened."""
        if hasattr(self, "_handle"):
            self._handle.remove()
        self._features = None

    def state_dict(self) -> dict[str, Any]:
        """Of the optimiser; the weights are the plan's."""
        return {} if self._optimizer is None else self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the weights are where they are trained."""
        self._state = state_dict

    def _look(self, features: Tensor) -> None:
        if self._network.training:
            self._features = features.detach().float()


class TrainingPlan(L.LightningModule):
    """Steps, logging and optimiser of an objective.

    A system with steps of its own subclasses this, and names its class in the model's ``traits``.

    Parameters
    ----------
    module
        What is trained: an :class:`EmbeddingModule`, or something around one.
    lr, weight_decay
        Of AdamW.
    encoder_lr
        The rate of encoders, where it is another; 0 freezes them.
    lr_decay
        Whether rates fall to 0 along half a cosine, from the first step of the run to its last.
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
    >>> from dataclasses import replace
    >>> class Halved(scbd.model.TrainingPlan):
    ...     def ramp(self, step):  # invariance at half of its weight, to begin with
    ...         return 0.5 if step < 100 else super().ramp(step)
    >>> class HalvedModel(scbd.SCBDModel):
    ...     traits = replace(scbd.SCBDModel.traits, plan=Halved)
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
        self.head = None if head is None else head.linear  # its weights go where ours go
        self._beside: list[Callback] = [] if head is None else [head]
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
        self._learned: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        """AdamW with torch's own epsilon (scvi-tools' default of 0.01 would drown these gradients)."""
        # one kernel for all parameters; Lightning refuses to clip gradients for it
        fused = self.module.device.type in ("cpu", "cuda") and not self.trainer.gradient_clip_val
        groups = self.parameter_groups()
        optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        if not self.lr_decay:
            return optimizer
        n_steps = self.trainer.max_steps
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / n_steps)) / 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

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
            msg = "encoder_lr: this model has no encoder, leave it out."
            raise ValueError(msg)
        own = {id(parameter) for part in self._encoders for parameter in part.encoder.parameters()}
        if self.encoder_lr == 0 and own.issuperset(map(id, self.module.parameters())):
            msg = "encoder_lr=0 leaves nothing to learn, this encoder embeds by itself: leave it out."
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
        losses = self._losses(batch, ramp=self.ramp(step), generator=generator)
        # of each step, Lightning takes milliseconds for it: as long as a GPU's step, of which it says nothing
        if (step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log("train", losses, len(batch["y"]))
            if rule is not None:
                self.log("alpha", rule.alpha, on_step=True, on_epoch=False)
        if rule is not None:
            rule.observe(*(losses.parts[name] for name in ("learned_c", "interaction_c", "environment_c")))
        return losses.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Losses of a validation batch, at the final alpha, or at what ``"auto"`` has found so far."""
        losses = self._losses(batch)
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
                prog_bar=name == "loss",
                sync_dist=not training,
                batch_size=batch_size,
            )


def check_forward(module: Objective) -> None:
    """Raise ``TypeError`` unless ``forward`` takes what the plan gives it in training and in validation."""
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
