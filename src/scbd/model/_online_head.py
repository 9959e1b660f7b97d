"""A linear head that learns beside the encoder: from what each training batch is embedded as, and without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from scbd.nn import gather

if TYPE_CHECKING:
    from collections.abc import Mapping

    import lightning.pytorch as L
    import numpy as np

    from scbd.model._contract import Network


class OnlineHead(Callback):
    """Trains a linear head on r_c as the paper's authors do: in every training batch, behind the encoder's own step.

    The features are those of the forward pass that the encoder has just learned from: of its weights before that step,
    with BatchNorm in training mode, without gradient. The head has an AdamW of its own, so that training is the same
    with it and without. A plan that has one keeps its weights among its own: best weights and checkpoints hold them.

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
