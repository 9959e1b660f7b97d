"""Loss that trains a decoder, which maps the embeddings z_c and z_s to pictures, after the encoders or with them.

The decoder is additive: z_c and z_s each add a separate contribution to the picture.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scbd.model._interfaces import Losses, Objective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from scbd.model._auto_alpha import AutoAlpha
    from scbd.model._objective import SCBDModule
    from scbd.nn._decoders import AdditiveDecoder
    from scbd.nn._environment_scaling import EnvironmentScaling

# divisor of the number of cells in a batch: the cycle loss is computed from one quarter of the cells, which is enough
# to learn from, at a low cost
_EXCHANGE_EVERY = 4


class DecoderObjective(Objective):
    """Objective that trains a decoder: the negative log-likelihood of the inputs of cells, given their embeddings.

    Parameters
    ----------
    module
        Module with the encoders whose embeddings are decoded.
    decoder
        Decoder to train.
    weight
        Weight of the negative log-likelihood in joint training, where it is added to the contrastive losses of the
        module. With `None`, the encoders are frozen, and only the decoder is trained.
    cycle
        Weight of :meth:`cycle_loss`. It must be 0 for a model with z_c only.
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
        """Settings of the decoder and of the module, which must be the same when an interrupted run is resumed."""
        return self.module.settings | self.own_settings

    @property
    def own_settings(self) -> dict[str, Any]:
        """Settings of the decoder and its losses, without the settings of the encoders."""
        decoder = {"likelihood": self.decoder.likelihood, "width": self.decoder.width}
        return decoder | {"weight": self.weight, "cycle": self.cycle}

    @property
    def device(self) -> torch.device:
        """Device that holds the parameters, such as a GPU."""
        return self.module.device

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Rule that adapts alpha, the weight of the invariance loss, during joint training.

        `None` if the encoders are frozen or alpha is constant.
        """
        return None if self.weight is None else self.module.alpha_rule

    def train(self, mode: bool = True) -> DecoderObjective:
        """Set training or evaluation mode; frozen encoders stay in evaluation mode.

        In training mode, the running statistics of BatchNorm would change, and with them the embeddings of the frozen
        encoders.
        """
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
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """Compute the losses of a batch of cells.

        The loss is the negative log-likelihood of the inputs, in nats per value, plus the weighted cycle loss. A value
        is one channel of a pixel, or one feature. In joint training, the negative log-likelihood is weighted, and the
        contrastive losses of the module are added.

        Parameters
        ----------
        inputs, y, e, ramp, generator
            See :meth:`SCBDModule.forward`.
        """
        prepared = self.module.prepare(inputs, e, generator)
        target = prepared.whole
        if self.decoder.likelihood == "bernoulli":
            target = self.module.preprocess.intensities(target)
        with torch.set_grad_enabled(self.weight is not None and torch.is_grad_enabled()):
            blocks = self.module.blocks(prepared)
        nats = self.decoder.negative_log_likelihood(target, *blocks.z)
        loss, parts = nats if self.weight is None else self.weight * nats, {"reconstruction": nats}
        if self.cycle:
            z_c, z_s = blocks.z
            parts["cycle"] = self.cycle_loss(z_c, z_s, e, generator=generator)
            loss = loss + self.cycle * parts["cycle"]
        if self.weight is None:
            return Losses(loss, parts if self.cycle else {})
        losses = self.module.losses(blocks, y, e, ramp=ramp)
        return losses._replace(loss=losses.loss + loss, parts={**losses.parts, **parts})

    def cycle_loss(
        self, z_c: Tensor, z_s: Tensor, e: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Compute the cycle loss: pictures decoded from z_c and z_s of different cells should have these embeddings.

        Each picture is decoded from z_c of one cell and z_s of another cell, and is then embedded by the encoders. The
        loss is the squared distance between the new embeddings and the embeddings that the picture was decoded from,
        averaged over z_c and z_s. It lies between 0 and 4.

        If z_s is clustered by pairs of perturbation y and environment e, only z_c is compared: such a z_s contains y of
        its own cell, whereas the picture shows y of the cell that z_c was taken from.

        The weights of the encoders are frozen while they embed the pictures. The decoder thereby learns to draw the
        contribution of z_c to a picture from the information in z_c only, and the contribution of z_s from z_s only.

        Parameters
        ----------
        z_c, z_s
            Embeddings of the cells of a batch, ``(B, D)`` each.
        e
            Codes of the environments of the cells, int64 ``(B,)``. Before a picture is embedded, it is standardised in
            the environment of the cell that z_s was taken from.
        generator
            Random number generator that draws the pairs of cells from which pictures are decoded. Without one, the
            pairs are the same in each call.

        Returns
        -------
        A scalar.

        References
        ----------
        Zhu et al. (2017), Unpaired image-to-image translation using cycle-consistent adversarial networks; Jha et al.
        (2018), Disentangling factors of variation with cycle-consistent variational auto-encoders.
        """
        n = len(z_c)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        some = max(1, n // _EXCHANGE_EVERY)
        z_c, z_s = z_c[order[:some].to(z_c.device)], z_s[order[-some:].to(z_s.device)]
        pictures = self.decoder.mean(z_c, z_s)
        if self.decoder.likelihood == "bernoulli":
            pictures = self.module.preprocess.scaled(pictures)
        within = pictures
        environments: EnvironmentScaling | None = self.module.preprocess.environments
        if environments is not None and e is not None:
            within = environments(pictures, self.module.columns(e[order[-some:].to(e.device)]))
        looking = [(self.module.content, within, z_c)]
        # a z_s that is clustered by pairs of y and e contains y of its own cell, whereas the picture shows y of another
        if self.module.style_target == "e":
            looking.append((self.module.style, pictures, z_s))
        missed = []
        for block, images, z in looking:
            with _frozen_for_context(block):
                missed.append((block(images).float() - z.detach().float()).square().sum(1).mean())
        return torch.stack(missed).mean()


@contextmanager
def _frozen_for_context(block: nn.Module) -> Iterator[None]:
    """Freeze the parameters of an encoder within a ``with`` statement, and put the encoder into evaluation mode.

    Gradients still reach the inputs of the encoder.
    """
    was = block.training, [parameter.requires_grad for parameter in block.parameters()]
    block.eval().requires_grad_(False)
    try:
        yield
    finally:
        block.train(was[0])
        for parameter, learns in zip(block.parameters(), was[1], strict=True):
            parameter.requires_grad_(learns)
