"""The additive decoder: what each block adds to a cell (paper, appendix A; Lachapelle et al., 2024)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._checks import check_choice

Likelihood = Literal["bernoulli", "gaussian"]

# four doublings lead from the first map to the image
_GROWTH = 16


class BlockDecoder(nn.Sequential):
    """From one embedding ``(B, D)`` to feature maps ``(B, width / 2, H, W)``: four doublings, as the paper's table.

    Parameters
    ----------
    n_latent
        Dimension ``D``.
    image_size
        ``(H, W)``. The first map has a sixteenth of it, rounded up; what stands over in the end is cut off.
    width
        Channels of all layers but the last; the paper has 256.
    """

    def __init__(self, n_latent: int, image_size: tuple[int, int], width: int) -> None:
        first = tuple(math.ceil(side / _GROWTH) for side in image_size)
        layers: list[nn.Module] = [nn.Linear(n_latent, width * math.prod(first)), nn.Unflatten(1, (width, *first))]
        for out in (width, width, width, width // 2):
            layers += [
                nn.GELU(),
                nn.ConvTranspose2d(width, width, 3, stride=2, padding=1, output_padding=1),
                nn.GELU(),
                nn.Conv2d(width, out, 3, padding=1),
            ]
        super().__init__(*layers, nn.GELU())
        self.image_size = image_size
        self.apply(_keep_variance)

    def forward(self, z: Tensor) -> Tensor:
        """Feature maps of embeddings."""
        maps = super().forward(z)
        height, width = self.image_size
        top, left = (maps.shape[-2] - height) // 2, (maps.shape[-1] - width) // 2
        return maps[..., top : top + height, left : left + width]


class FeatureBlockDecoder(nn.Sequential):
    """From one embedding ``(B, D)`` to hidden features ``(B, width / 2)``: two layers.

    Parameters
    ----------
    n_latent
        Dimension ``D``.
    width
        Of the hidden layer; the last has half of it.
    """

    def __init__(self, n_latent: int, width: int) -> None:
        layers = [nn.Linear(n_latent, width), nn.GELU(), nn.Linear(width, width // 2), nn.GELU()]
        super().__init__(*layers)


def _keep_variance(layer: nn.Module) -> None:
    """Weights with which signals neither die nor grow on their way through the layers.

    With torch's default ones, the pictures of two embeddings differ by a millionth before training, and for long after.
    """
    if isinstance(layer, nn.Linear):  # its input has length 1
        nn.init.normal_(layer.weight, std=math.sqrt(2))
    elif isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    elif isinstance(layer, nn.ConvTranspose2d):  # with stride 2, a pixel gets a quarter of the taps
        nn.init.normal_(layer.weight, std=math.sqrt(2 * 4 / (9 * layer.in_channels)))
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


class AdditiveDecoder(nn.Module):
    r"""Images, or features, from both embeddings, each its own part: :math:`\mathrm{Dec}_c(z_c) + \mathrm{Dec}_s(z_s)`.

    The sum is that of the logits (Bernoulli) or of the means (Gaussian). No part of a picture can depend on both
    blocks at once, which is what lets one block be exchanged.

    Parameters
    ----------
    n_latents
        Dimensions of the embeddings: two numbers, or one for a model of a single block.
    image_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features.
    width
        Channels of the layers, or their units; the paper has 256.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, ``"gaussian"``, with one learned scale, for any.

    Raises
    ------
    ValueError
        If the likelihood is not known, or the width is not an even number.

    Examples
    --------
    >>> decoder = scbd.nn.AdditiveDecoder((64, 64), image_shape=(4, 32, 32), width=16)
    >>> decoder(torch.zeros(2, 64), torch.zeros(2, 64)).shape
    torch.Size([2, 4, 32, 32])
    """

    def __init__(
        self,
        n_latents: tuple[int, ...],
        image_shape: tuple[int, ...],
        *,
        width: int = 256,
        likelihood: Likelihood = "gaussian",
    ) -> None:
        super().__init__()
        check_choice("likelihood", likelihood, Likelihood)
        if width < 2 or width % 2:
            msg = f"width={width}: the decoder's number of channels is even and at least 2."
            raise ValueError(msg)
        self.n_latents, self.likelihood, self.width = n_latents, likelihood, width
        if len(image_shape) == 1:
            self.parts = nn.ModuleList(FeatureBlockDecoder(n, width) for n in n_latents)
            self.pixels: nn.Module = nn.Linear(width // 2, image_shape[0])
        else:
            channels, height, wide = image_shape
            self.parts = nn.ModuleList(BlockDecoder(n, (height, wide), width) for n in n_latents)
            self.pixels = nn.Conv2d(width // 2, channels, 1)
        self.log_scale = nn.Parameter(torch.zeros(()), requires_grad=likelihood == "gaussian")
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, *embeddings: Tensor) -> Tensor:
        """Logits or means ``(B, C, H, W)``, or ``(B, F)``, of embeddings ``(B, D)``, one for each block."""
        maps = [part(z) for part, z in zip(self.parts, embeddings, strict=True)]
        return self.pixels(torch.stack(maps).sum(0))

    def mean(self, *embeddings: Tensor) -> Tensor:
        """Expected images ``(B, C, H, W)``, or features ``(B, F)``, float32."""
        images = self(*embeddings).float()
        return images.sigmoid() if self.likelihood == "bernoulli" else images

    def negative_log_likelihood(self, images: Tensor, *embeddings: Tensor) -> Tensor:
        """Of images ``(B, C, H, W)``, or features ``(B, F)``: nats a value, the mean over cells and values."""
        predicted = self(*embeddings).float()
        if self.likelihood == "bernoulli":
            return F.binary_cross_entropy_with_logits(predicted, images)
        error = (images - predicted) * (-self.log_scale).exp()
        return 0.5 * error.square().mean() + self.log_scale + 0.5 * math.log(2 * math.pi)
