"""A loss that is no number any more: the run stops there, and the model has the last weights that were good."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    import lightning.pytorch as L
    from torch import Tensor

    from scbd.model._callbacks import History
    from scbd.model._plan import TrainingPlan

# a GPU is asked for its losses so often, since it has to finish all it was given before it answers
_STEPS_ON_A_GPU = 10


class TrainingDiverged(RuntimeError):
    """The loss became NaN or infinite.

    The model has the weights of the last validation (or state to resume from) whose loss was a number, and those from
    before the run if there was none; ``model.history`` has all losses, those that are no numbers too.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata, encoder="small")
    >>> try:
    ...     model.train(max_steps=2000, lr=0.01)
    ... except scbd.model.TrainingDiverged:  # from the weights that were good
    ...     model.train(max_steps=2000, lr=0.001)
    """


class Divergence(Callback):
    """Stop at the first loss that is no number.

    Weights are kept with every validation that finds a finite loss. The weights just before a loss that is none were
    made by a step that may have gone wrong already, and BatchNorm's statistics have seen its images: they are not
    trusted.

    Parameters
    ----------
    history
        Gets the loss that is none, logged or not.
    every
        Steps after which weights are kept where there is no validation, once the next loss has shown them good.
    """

    def __init__(self, history: History, every: int) -> None:
        self._history = history
        self._every = every
        self._candidate: tuple[int, dict[str, Tensor]] | None = None
        self._weights: dict[str, Tensor] = {}
        self.step = 0
        """Step of the weights that are kept."""

    def on_train_start(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Keep the weights that a run starts from."""
        self._keep(trainer.global_step, copied_weights(plan))
        # first of the steps in a row without a finite loss; 0 for none
        self._first = torch.zeros((), dtype=torch.int64, device=plan.device)

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: L.Trainer, plan: TrainingPlan, outputs: Any, *args: Any
    ) -> None:
        """Look at the loss of the step; on a GPU, at those of several."""
        step = max(1, trainer.global_step)  # 0 while gradients of a first step are accumulated
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        since = torch.where(self._first > 0, self._first, step)
        # where bad gradients are left out, a finite loss ends what came before
        recovered = torch.zeros_like(since) if plan.tolerated_losses else self._first
        self._first = torch.where(loss.isfinite(), recovered, since)
        due = step % self._every == 0
        if due or not _waits(plan.device) or step % _STEPS_ON_A_GPU == 0:
            self._check_training(trainer, plan)
            if self._candidate is not None:
                self._keep(*self._candidate)
            if due and not any(trainer.num_val_batches):
                self._candidate = step, copied_weights(plan)

    def on_validation_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Keep the weights, if they were found good."""
        self._check_training(trainer, plan)
        loss = float(trainer.callback_metrics.get("validation_loss", 0.0))
        if not math.isfinite(loss):
            raise TrainingDiverged(self._sentence(trainer, f"The validation loss is {loss}"))
        self._keep(trainer.global_step, copied_weights(plan))

    def on_train_end(self, trainer: L.Trainer, plan: TrainingPlan) -> None:  # type: ignore[override]
        """Nobody has seen what the last step made of the weights."""
        self._check_training(trainer, plan)
        finite = [value.isfinite().all() for value in plan.state_dict().values()]
        if not bool(torch.stack(finite).all()):
            raise TrainingDiverged(self._sentence(trainer, "Weights became NaN or infinite"))
        self._weights, self._candidate = {}, None

    def restore(self, plan: TrainingPlan) -> None:
        """Give the plan the weights that were kept."""
        plan.load_state_dict(self._weights)
        self._weights, self._candidate = {}, None

    def _keep(self, step: int, weights: dict[str, Tensor]) -> None:
        self.step, self._weights, self._candidate = step, weights, None

    def _check_training(self, trainer: L.Trainer, plan: TrainingPlan) -> None:
        # all processes stop, if one has to
        first = int(trainer.strategy.reduce(self._first, reduce_op="max"))
        if not first or trainer.global_step - first < plan.tolerated_losses:
            return
        self._history.log_step()
        loss = float(trainer.callback_metrics.get("train_loss", math.nan))
        raise TrainingDiverged(self._sentence(trainer, f"The training loss became {loss}", first))

    def _sentence(self, trainer: L.Trainer, what: str, first: int | None = None) -> str:
        """What was seen in the loss of a step, before its update, or else behind the last update."""
        step = first or trainer.global_step
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        msg = f"{what} at step {step:,} of {trainer.max_steps:,} (lr {lr:g}, precision {trainer.precision}). "
        look = "look for missing or extreme values of pixels or features"
        if first == 1:
            msg += f"No update had been made yet: {look}, or take out a setting that is out of range. "
        else:
            msg += f"Try lr={lr / 10:g}"
            msg += "" if trainer.precision == "32-true" else ", precision='32-true'"
            msg += f", or gradient_clip_val=1.0; or {look}. "
        kept = f"those of step {self.step:,}, the last found good" if self.step else "those from before the run"
        return f"{msg}The weights are {kept}; history has the losses."


def _waits(device: torch.device) -> bool:
    """Whether asking for a number makes the computer wait for all that was asked before."""
    return device.type != "cpu"


def copied_weights(plan: L.LightningModule) -> dict[str, Tensor]:
    """All parameters and buffers as they are now."""
    return {name: value.detach().clone() for name, value in plan.state_dict().items()}
