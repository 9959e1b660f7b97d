"""What a decoder is trained on: inputs from both embeddings, alone or beside the contrastive losses."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scbd.model._contract import Losses, Objective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from scbd.model._alpha import AutoAlpha
    from scbd.model._module import SCBDModule
    from scbd.nn import AdditiveDecoder

# one cell of a batch in so many has its blocks exchanged: enough to learn from, and little work
_EXCHANGED = 4


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
    cycle
        Weight of :meth:`cycle_loss`; 0 leaves it out, as a model of a single block must.
    """

    def __init__(
        self, module: SCBDModule, decoder: AdditiveDecoder, weight: float | None, *, cycle: float = 0.0
    ) -> None:
        super().__init__()
        self.module = module
        self.decoder = decoder
        self.weight = weight
        self.cycle = cycle

    @property
    def settings(self) -> dict[str, Any]:
        """Of the decoder, and of the blocks; a resumed run must share them."""
        return self.module.settings | self.own_settings

    @property
    def own_settings(self) -> dict[str, Any]:
        """Of the decoder alone."""
        decoder = {"likelihood": self.decoder.likelihood, "width": self.decoder.width}
        return decoder | {"weight": self.weight, "cycle": self.cycle}

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
        nats = self.decoder.negative_log_likelihood(target, *embedded.z)
        loss, parts = nats if self.weight is None else self.weight * nats, {"reconstruction": nats}
        if self.cycle:
            parts["cycle"] = self.cycle_loss(*embedded.z, generator=generator)
            loss = loss + self.cycle * parts["cycle"]
        if self.weight is None:
            return Losses(loss, parts if self.cycle else {})
        losses = self.module.losses(embedded, y, e, numbers, ramp=ramp)
        return losses._replace(loss=losses.loss + loss, parts={**losses.parts, **parts})

    def cycle_loss(self, z_c: Tensor, z_s: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Squared distance between the blocks of a picture and those it was decoded from, if these are of two cells.

        The encoders only look here, as they are: what is learned is to draw, in each part of a picture, what its block
        says, and nothing that the other block says. Reconstructions alone do not tell who drew what.

        Parameters
        ----------
        z_c, z_s
            Blocks of a batch, ``(B, D)`` each, of length 1.
        generator
            Of the pairs; always the same ones without.

        Returns
        -------
        A scalar from 0 to 4, the mean of both blocks; of z_c alone if z_s is clustered by pairs of y and e.

        References
        ----------
        Zhu et al. (2017), Unpaired image-to-image translation using cycle-consistent adversarial networks; Jha et al.
        (2018), Disentangling factors of variation with cycle-consistent variational auto-encoders. There too, what is
        decoded from two is embedded again; here by encoders that learn to tell y and e by losses of their own.
        """
        n = len(z_c)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        some = max(1, n // _EXCHANGED)
        z_c, z_s = z_c[order[:some].to(z_c.device)], z_s[order[-some:].to(z_s.device)]
        pictures = self.decoder.mean(z_c, z_s)
        if self.decoder.likelihood == "bernoulli":
            pictures = self.module.preprocess.scaled(pictures)
        looking = [(self.module.content, z_c)]
        if self.module.style_target == "e":  # of a pair, no picture with another's content would be
            looking.append((self.module.style, z_s))
        missed = []
        for block, z in looking:
            with _looking(block):
                missed.append((block(pictures).float() - z.detach().float()).square().sum(1).mean())
        return torch.stack(missed).mean()


@contextmanager
def _looking(block: nn.Module) -> Iterator[None]:
    """A block in evaluation mode, through which gradients pass without teaching it."""
    was = block.training, [parameter.requires_grad for parameter in block.parameters()]
    block.eval().requires_grad_(False)
    try:
        yield
    finally:
        block.train(was[0])
        for parameter, learns in zip(block.parameters(), was[1], strict=True):
            parameter.requires_grad_(learns)
