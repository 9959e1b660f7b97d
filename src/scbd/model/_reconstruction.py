"""What a decoder is trained on: inputs from both embeddings, alone or beside the contrastive losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from scbd.model._contract import Losses, Objective
from scbd.nn import Groups

if TYPE_CHECKING:
    from torch import Tensor

    from scbd.model._alpha import AutoAlpha
    from scbd.model._module import SCBDModule
    from scbd.nn import AdditiveDecoder


class Reconstruction(Objective):
    """The decoder's objective: the likelihood of inputs given both embeddings, which stay as they are unless joint.

    Parameters
    ----------
    module
        The two blocks.
    decoder
        Of their embeddings.
    weight
        Weight of the reconstruction beside the contrastive losses; `None` leaves the blocks frozen.
    exchange
        Decode each cell with z_s of another cell of its environment.
    """

    def __init__(
        self, module: SCBDModule, decoder: AdditiveDecoder, weight: float | None, *, exchange: bool = False
    ) -> None:
        super().__init__()
        self.module = module
        self.decoder = decoder
        self.weight = weight
        self.exchange = exchange

    @property
    def settings(self) -> dict[str, Any]:
        """Of the decoder, and of the blocks; a resumed run must share them."""
        return self.module.settings | self.own_settings

    @property
    def own_settings(self) -> dict[str, Any]:
        """Of the decoder alone."""
        decoder = {"likelihood": self.decoder.likelihood, "width": self.decoder.width}
        return decoder | {"weight": self.weight, "exchange": self.exchange}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.module.device

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Of the blocks, if they are trained."""
        return None if self.weight is None else self.module.alpha_rule

    def train(self, mode: bool = True) -> Reconstruction:
        """Frozen blocks stay in evaluation mode: BatchNorm's statistics are part of the embedding."""
        super().train(mode)
        if self.weight is None:
            self.module.eval()
        return self

    def forward(
        self,
        inputs: Tensor,
        y: Tensor,
        e: Tensor,
        *,
        numbers: Tensor | None = None,
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """Negative log-likelihood, nats a value; when joint beside the losses of the blocks."""
        images = self.module.preprocess(inputs, generator)
        target = self.module.preprocess.intensities(images) if self.decoder.likelihood == "bernoulli" else images
        with torch.set_grad_enabled(self.weight is not None and torch.is_grad_enabled()):
            embedded = self.module.blocks(images)
        z_c, *z_s = embedded.z
        if self.exchange:
            others = Groups(e).others(generator)
            z_s = [z[others] for z in z_s]
        nats = self.decoder.negative_log_likelihood(target, z_c, *z_s)
        if self.weight is None:
            return Losses(nats)
        losses = self.module.losses(embedded, y, e, numbers, ramp=ramp)
        parts = {**losses.parts, "reconstruction": nats}
        return losses._replace(loss=losses.loss + self.weight * nats, parts=parts)
