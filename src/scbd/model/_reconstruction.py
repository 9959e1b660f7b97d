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
        Decode each cell with z_s of another cell of its environment, and from z_c without what the environment adds
        to cells of a label, see :func:`without_environment`.
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
            of_e = Groups(e)
            others = of_e.others(generator)
            z_c, z_s = without_environment(z_c, Groups(y), of_e), [z[others] for z in z_s]
        nats = self.decoder.negative_log_likelihood(target, z_c, *z_s)
        if self.weight is None:
            return Losses(nats)
        losses = self.module.losses(embedded, y, e, numbers, ramp=ramp)
        parts = {**losses.parts, "reconstruction": nats}
        return losses._replace(loss=losses.loss + self.weight * nats, parts=parts)


def without_environment(z: Tensor, y: Groups, e: Groups) -> Tensor:
    r"""Embeddings less what an environment adds to cells of their label, as the other cells of a batch tell.

    From a cell of label :math:`y` and environment :math:`e`, of which there are :math:`n`, is taken

    .. math:: \frac{1}{n} \sum_{j \ne i} (z_j - \bar{z}_y),

    the mean over its pair of label and environment as differences from the label, in which the cell itself counts
    nothing: what is its own stays, and a cell that is alone of its pair stays as it is. :math:`\bar{z}_y` is of all
    other cells of the label. A picture that is decoded from this gives no reason to tell the environment in z_c, which
    a decoder that adds its parts otherwise has wherever environments change labels differently.

    Parameters
    ----------
    z
        ``(B, D)``.
    y, e
        Labels and environments of the cells.

    Returns
    -------
    float32 ``(B, D)``.
    """
    z, pair = z.float(), y.crossed(e)
    ones = torch.ones_like(z[:, :1])
    of_pair, of_label = pair.sums(ones), y.sums(ones)
    mean = (y.sums(z) - z) / (of_label - 1).clamp(min=1)
    return z - (pair.sums(z) - z - (of_pair - 1) * mean) / of_pair
