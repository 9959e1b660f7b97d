"""What a decoder is trained on: images from both embeddings, alone or beside the contrastive losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from scbd.model._alpha import AutoAlpha
    from scbd.model._module import SCBDModule
    from scbd.nn import AdditiveDecoder


class Reconstruction(nn.Module):
    """The decoder's objective: the likelihood of images given both embeddings, which stay as they are unless joint.

    Parameters
    ----------
    module
        The two blocks.
    decoder
        Of their embeddings.
    weight
        Weight of the reconstruction beside the contrastive losses; `None` leaves the blocks frozen.
    """

    def __init__(self, module: SCBDModule, decoder: AdditiveDecoder, weight: float | None) -> None:
        super().__init__()
        self.module = module
        self.decoder = decoder
        self.weight = weight
        self.settings = {"likelihood": decoder.likelihood, "width": decoder.pixels.in_channels * 2, "weight": weight}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.module.device

    @property
    def auto_alpha(self) -> AutoAlpha | None:
        """Of the blocks, if they are trained."""
        return None if self.weight is None else self.module.auto_alpha

    def train(self, mode: bool = True) -> Reconstruction:
        """Frozen blocks stay in evaluation mode: BatchNorm's statistics are part of the embedding."""
        super().train(mode)
        if self.weight is None:
            self.module.eval()
        return self

    def forward(
        self, images: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """``loss``, and when joint its parts."""
        images = self.module.preprocess(images, generator)
        target = self.module.preprocess.intensities(images) if self.decoder.likelihood == "bernoulli" else images
        with torch.set_grad_enabled(self.weight is not None and torch.is_grad_enabled()):
            embedded = self.module.blocks(images)
        nats = self.decoder.negative_log_likelihood(target, *embedded.z)
        if self.weight is None:
            return {"loss": nats}
        losses = self.module.losses(embedded, y, e, ramp=ramp)
        return losses | {"loss": losses["loss"] + self.weight * nats, "reconstruction": nats}
