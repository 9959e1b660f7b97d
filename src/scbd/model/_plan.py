"""Training plan of all models: the Lightning module that defines a training step, the optimiser and the logging.

The file also holds the linear classifier of perturbations that can be trained alongside a model.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._shared.checks import check_count, check_number
from scbd.model._health import collapse_measures
from scbd.model._interfaces import EmbeddingModule, Losses
from scbd.nn._distributed import broadcast_buffers, gather_rows
from scbd.nn._encoders import Encoder

if TYPE_CHECKING:
    import numpy as np

    from scbd.model._interfaces import EmbeddingNetwork, Objective

logger = logging.getLogger(__name__)

# approximate maximum number of validation cells from whose z_c the total variance and the effective rank are computed
_MAX_HEALTH_CELLS = 8192


def skip_step_if(condition: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make a fused optimiser skip its next step if a condition, a boolean tensor of one value, is true.

    The optimiser reads the condition on its device. If Python read it, the CPU would have to wait for the GPU.
    """
    optimizer.found_inf = condition.float()  # type: ignore[attr-defined]


class OnlineHead(Callback):
    """Linear classifier of the perturbation on r_c, trained alongside the encoder as the paper's authors do.

    r_c is the output of the encoder of z_c before the projection. In each training step, the classifier is trained by
    cross-entropy on the r_c that the encoder has computed for its own loss. The classifier has a separate AdamW
    optimiser, and its gradient does not reach the encoder. The encoder is therefore trained exactly as without the
    classifier. The weights of the classifier are part of the training plan.

    Parameters
    ----------
    network
        Network that computes r_c and z_c.
    n_labels
        Number of perturbations, which are the classes.
    lr, weight_decay
        Learning rate and weight decay of the classifier's AdamW optimiser.
    seed
        Seed of the classifier's random initial weights.
    weights
        Arrays ``weight`` and ``bias`` of the classifier at the end of an earlier run, from which training continues.
        Perturbations that were registered after that run start from random weights.
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
        # The random initial weights must not change the state of torch's global random number generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.linear = nn.Linear(network.width("intermediate"), n_labels)
        with torch.no_grad():
            for name, values in (weights or {}).items():
                self.linear.get_parameter(name)[: len(values)] = torch.from_numpy(values)
        # The classifier's parameters require no gradient until training starts. Distributed training registers all
        # parameters that require a gradient, and would wait in every step for gradients of the classifier, which is not
        # part of the loss.
        self.linear.requires_grad_(False)
        self._features: Tensor | None = None
        self._loss = torch.tensor(math.nan)  # of the last batch with finite r_c
        self._optimizer: torch.optim.Optimizer | None = None
        self._state: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create the classifier's optimiser, and start to record the r_c of each forward pass.

        If the run is resumed, the state of the optimiser is restored from the checkpoint.
        """
        self.linear.requires_grad_(True)
        how: dict[str, Any] = {"lr": self._lr, "weight_decay": self._weight_decay}
        self._optimizer = torch.optim.AdamW(self.linear.parameters(), **how, fused=True)
        if self._state is not None:
            self._optimizer.load_state_dict(self._state)
        self._loss = self._loss.to(self.linear.weight.device)
        self._handle = self._network.show(self._record)

    def on_train_batch_end(
        self, trainer: L.Trainer, plan: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Train the classifier on the recorded r_c of the batch.

        A batch whose r_c contains NaN or infinity is skipped, since some training plans tolerate such a batch.
        """
        assert self._features is not None and self._optimizer is not None
        features, y = gather_rows(self._features), gather_rows(batch["y"])
        self._features = None
        is_finite = features.isfinite().all()
        loss = F.cross_entropy(self.linear(features), y)
        self._optimizer.zero_grad()
        loss.backward()
        skip_step_if(is_finite.logical_not(), self._optimizer)
        self._optimizer.step()
        self._loss = torch.where(is_finite, loss.detach(), self._loss)
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            plan.log("train_online_head", self._loss, on_step=True, on_epoch=False)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop recording r_c. Lightning calls this method at the end of a run, even after an error."""
        if hasattr(self, "_handle"):
            self._handle.remove()
        self._features = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the classifier's optimiser for a checkpoint, which holds the weights already."""
        return {} if self._optimizer is None else self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of the classifier's optimiser from a checkpoint until training starts.

        The optimiser is created only then, when the weights have been moved to their device.
        """
        self._state = state_dict

    def _record(self, features: Tensor) -> None:
        if self._network.training:
            self._features = features.detach().float()


class TrainingPlan(L.LightningModule):
    """Lightning module that defines the training step, the logging and the optimiser for the module of a model.

    A model that needs a different training step has a subclass of this class, which is set as ``plan`` in the
    ``traits`` of the model.

    Parameters
    ----------
    module
        Module to train: an :class:`EmbeddingModule`, or a wrapper around it that computes another loss.
    lr, weight_decay
        Learning rate and weight decay of the AdamW optimiser.
    encoder_lr
        Learning rate of the encoders, if it differs from the learning rate ``lr`` of all other parameters. With 0, the
        encoders are frozen.
    lr_decay
        Whether learning rates decay to 0 along half a cosine, from the first to the last step of the run.
    n_steps_alpha_warmup
        Number of steps over which alpha, the weight of the invariance loss, rises linearly from 0 to its full value. 0
        means no warm-up.
    seed
        Seed of the random flips and rotations of training images.
    first_step
        Number of steps of earlier runs of the model. The random flips and rotations of earlier runs are not repeated.
    settings
        Settings that must be equal when an interrupted run is resumed. They are saved in each checkpoint.
    head
        Linear classifier of perturbations that is trained alongside the module, see ``online_head`` of
        :meth:`scbd.SCBDModel.train`.

    Examples
    --------
    >>> from dataclasses import replace
    >>> class Halved(scbd.model.TrainingPlan):
    ...     def ramp(self, step):  # half of the weight of the invariance loss in the first 100 steps
    ...         return 0.5 if step < 100 else super().ramp(step)
    >>> class HalvedModel(scbd.SCBDModel):
    ...     traits = replace(scbd.SCBDModel.traits, plan=Halved)
    >>> HalvedModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> HalvedModel(adata, encoder="small").train(max_steps=2)
    """

    # number of consecutive training losses that may be NaN or infinite before training is stopped; above 0 only in
    # training plans that skip the gradients of such losses
    tolerated_losses: ClassVar[int] = 0
    # number of preliminary steps (for example pre-training), counted from the first run, in which the loss still lacks
    # some of its terms
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
        check_module(module)
        self.module = module
        # The linear layer of the classifier is a submodule, so that it is moved to the device and saved with this plan.
        self.head = None if head is None else head.linear
        self._head_callbacks: list[Callback] = [] if head is None else [head]
        self.lr = lr
        self.weight_decay = weight_decay
        self.encoder_lr = encoder_lr
        self.lr_decay = lr_decay
        self._encoders = [part for part in module.modules() if isinstance(part, Encoder)]
        self._encoder_parameters = [parameter for part in self._encoders for parameter in part.encoder.parameters()]
        if encoder_lr is not None:
            check_number("encoder_lr", encoder_lr)
            if not self._encoders:
                msg = "encoder_lr: this model has no encoder, leave it out."
                raise ValueError(msg)
            if encoder_lr == 0 and {*map(id, self._encoder_parameters)}.issuperset(map(id, module.parameters())):
                msg = "encoder_lr=0 leaves nothing to learn, this encoder embeds by itself: leave it out."
                raise ValueError(msg)
        self.n_steps_alpha_warmup = n_steps_alpha_warmup
        self.seed = seed
        self.first_step = first_step
        self.settings = dict(settings or {})
        self._embeddings: list[Tensor] = []
        self._validation_information: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        """Create the AdamW optimiser and the schedule of its learning rate, for Lightning.

        Epsilon of AdamW has the default value of torch. The value of scvi-tools, 0.01, would be larger than typical
        gradients of the contrastive losses.
        """
        # Fused AdamW updates all parameters in one kernel. Lightning does not support it together with gradient
        # clipping.
        fused = self.module.device.type in ("cpu", "cuda") and not self.trainer.gradient_clip_val
        groups = self.parameter_groups()
        optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        if not self.lr_decay:
            return optimizer
        n_steps = self.trainer.max_steps
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / n_steps)) / 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameters to optimise, in groups with equal learning rates.

        The method also freezes the encoders if ``encoder_lr`` is 0, and unfreezes them otherwise.
        """
        for part in self._encoders:
            part.freeze(self.encoder_lr == 0)
        if self.encoder_lr is None:
            return [{"params": list(self.module.parameters())}]
        own = set(map(id, self._encoder_parameters))
        others = [parameter for parameter in self.module.parameters() if id(parameter) not in own]
        groups: list[dict[str, Any]] = [{"params": others}]
        if self.encoder_lr > 0:
            groups.append({"params": self._encoder_parameters, "lr": self.encoder_lr})
        return groups

    def configure_callbacks(self) -> list[Callback]:
        """Return a list with the callback that trains the linear classifier of perturbations; empty without it."""
        return self._head_callbacks

    def ramp(self, step: int) -> float:
        """Return the factor, from 0 to 1, by which alpha is multiplied at a step of this run during its warm-up.

        Other objectives multiply the weight of a different term of their loss by this factor.
        """
        return min(1.0, step / self.n_steps_alpha_warmup) if self.n_steps_alpha_warmup else 1.0

    @property
    def is_logged_step(self) -> bool:
        """Return whether values of the current training step are logged."""
        return (self.global_step + 1) % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a training batch, and log the loss and its terms."""
        step, rule, of_step = self.global_step, self.module.alpha_rule, self.trainer.accumulate_grad_batches
        # The random flips and rotations of each batch have a seed of their own, computed from the number of the batch.
        # A resumed run therefore flips and rotates images in the same way as an uninterrupted run.
        number = (self.first_step + step) * of_step + batch_idx % of_step
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        losses = self._losses(batch, ramp=self.ramp(step), generator=generator)
        # Losses are not logged at each step, because logging takes milliseconds, which is as long as a training step on
        # a GPU.
        if self.is_logged_step:
            self._log("train", losses, len(batch["y"]))
            if rule is not None:
                self.log("alpha", rule.alpha, on_step=True, on_epoch=False)
        if rule is not None:
            rule.observe(*(losses.parts[name] for name in ("learned_c", "interaction_c", "environment_c")))
        return losses.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the losses of a validation batch.

        The weight alpha of the invariance loss has its full value even during warm-up. With ``alpha="auto"``, it has
        the current value.
        """
        losses = self._losses(batch)
        self._log("validation", losses, len(batch["y"]))
        if self.module.alpha_rule is not None:
            self._validation_information.append(losses.parts["learned_c"])
        if losses.z_c is not None and sum(map(len, self._embeddings)) < _MAX_HEALTH_CELLS:
            self._embeddings.append(losses.z_c)

    def on_validation_epoch_end(self) -> None:
        """Log the total variance and the effective rank of z_c at the end of a validation, to show a collapse.

        The two are logged only if the module returns z_c with its losses. With ``alpha="auto"``, alpha is also adapted
        to the supervised information of the validation cells.
        """
        trainer, rule = self.trainer, self.module.alpha_rule
        if rule is not None:
            # The information of training cells is computed in batches that are drawn in the same way as validation
            # batches. If the information of the validation cells is lower, the model has overfitted the training cells.
            # The module is called directly. A validation step of Lightning would call the validation hooks of
            # callbacks, although these cells are training cells.
            with trainer.precision_plugin.val_step_context():
                known = [
                    self.module(**trainer.strategy.batch_to_device(batch)).parts["learned_c"]
                    for batch in trainer.datamodule.matched_dataloader()  # type: ignore[attr-defined]
                ]
            rule.validate(torch.stack(self._validation_information), torch.stack(known) if known else torch.empty(0))
            self._validation_information.clear()
        if self._embeddings:
            for name, value in collapse_measures(torch.cat(self._embeddings)).items():
                self.log(f"z_c_{name}", value, rank_zero_only=True)
            self._embeddings.clear()

    def _losses(self, batch: dict[str, Tensor], **how: Any) -> Losses:
        """Return the losses of a batch; raise ``TypeError`` if the module does not return suitable :class:`Losses`."""
        losses = self.module(**batch, **how)
        if not isinstance(losses, Losses):
            msg = (
                f"{type(self.module).__name__}.forward returned {type(losses).__name__}: return "
                "scbd.model.Losses(loss, {'name': part}), the loss to minimise and the numbers to log with it."
            )
            raise TypeError(msg)
        is_named = isinstance(losses.parts, Mapping) and "loss" not in losses.parts
        for name, value in {"loss": losses.loss, **(losses.parts if is_named else {})}.items():
            learned = name != "loss" or not torch.is_grad_enabled() or getattr(value, "requires_grad", False)
            if not (is_named and isinstance(value, Tensor) and value.numel() == 1 and learned):
                name = name if is_named else "parts"
                msg = (
                    f"{type(self.module).__name__}.forward returned Losses with an unsuitable {name}: return "
                    "scbd.model.Losses(loss, {'name': part}), each a tensor with a single number, loss with a "
                    "gradient, and no part with the name 'loss'."
                )
                raise TypeError(msg)
        return losses

    def on_train_start(self) -> None:
        """Log a warning if the run ends during the preliminary steps, so that some terms of the loss never apply."""
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
        """Copy the buffers of the module (such as running means) from the first process to all other processes.

        This is done at the end of training, while the module is still on its device.
        """
        broadcast_buffers(self.module)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the settings of the run to the checkpoint, so that a resumed run can be compared with them."""
        checkpoint["scbd_settings"] = self.settings

    def _log(self, stage: Literal["train", "validation"], losses: Losses, batch_size: int) -> None:
        for name, value in {"loss": losses.loss, **losses.parts}.items():
            # Losses are logged either per step (training) or per epoch (validation). If both were requested, Lightning
            # would add suffixes to the names of the losses.
            training = stage == "train"
            self.log(
                f"{stage}_{name}",
                value.detach(),
                on_step=training,
                on_epoch=not training,
                sync_dist=not training,
                batch_size=batch_size,
            )


def check_module(module: Objective) -> None:
    """Raise an error if a module lacks the network of z_c, or if its ``forward`` lacks an argument.

    The training plan calls ``forward`` with ``inputs``, ``y`` and ``e`` in validation. In training, ``ramp`` and
    ``generator`` are added.
    """
    if isinstance(module, EmbeddingModule) and not hasattr(module, "content"):
        msg = (
            f"{type(module).__name__} has no 'content': set it in the constructor, after super().__init__(preprocess), "
            "to the network of z_c: self.content = scbd.nn.Encoder(…)."
        )
        raise AttributeError(msg)
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
