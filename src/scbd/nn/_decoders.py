"""Additive decoder: an image is a sum of one part per embedding (paper, appendix A; Lachapelle et al., 2024)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._shared.checks import check_choice

Likelihood = Literal["bernoulli", "gaussian"]

# ratio of the image side to the side of the first feature map: four doublings
_UPSAMPLING_FACTOR = 16


class BlockDecoder(nn.Sequential):
    """Decoder of one embedding ``(B, D)`` into feature maps ``(B, width / 2, H, W)``, as in the paper's table.

    Four transposed convolutions each double the size of the feature maps.

    Parameters
    ----------
    n_latent
        Dimension ``D`` of the embedding.
    image_size
        ``(H, W)``, in pixels. The sides of the first map are a sixteenth of these, rounded up. The last maps are
        cropped to ``(H, W)`` around their centre.
    width
        Number of channels of all layers except the last, which has half as many. The paper uses 256.
    """

    def __init__(self, n_latent: int, image_size: tuple[int, int], width: int) -> None:
        first = tuple(math.ceil(side / _UPSAMPLING_FACTOR) for side in image_size)
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
        self.apply(_init_variance_preserving)

    def forward(self, z: Tensor) -> Tensor:
        """Decode embeddings ``(B, D)`` into feature maps ``(B, width / 2, H, W)``."""
        maps = super().forward(z)
        height, width = self.image_size
        top, left = (maps.shape[-2] - height) // 2, (maps.shape[-1] - width) // 2
        return maps[..., top : top + height, left : left + width]


class FeatureBlockDecoder(nn.Sequential):
    """Two-layer decoder of one embedding ``(B, D)`` into hidden features ``(B, width / 2)``.

    Parameters
    ----------
    n_latent
        Dimension ``D`` of the embedding.
    width
        Number of units of the first layer. The second layer has half as many.
    """

    def __init__(self, n_latent: int, width: int) -> None:
        layers = [nn.Linear(n_latent, width), nn.GELU(), nn.Linear(width, width // 2), nn.GELU()]
        super().__init__(*layers)


def _init_variance_preserving(layer: nn.Module) -> None:
    """Initialise the weights of a layer such that the variance of signals is the same before and after the layer.

    With PyTorch's default weights, the images decoded from two embeddings differ only by about a millionth before
    training, and for a long time after it starts.
    """
    if isinstance(layer, nn.Linear):  # its input is an embedding of length 1
        nn.init.normal_(layer.weight, std=math.sqrt(2))
    elif isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    elif isinstance(layer, nn.ConvTranspose2d):  # stride 2: a pixel receives a quarter of the 9 weights
        nn.init.normal_(layer.weight, std=math.sqrt(2 * 4 / (9 * layer.in_channels)))
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


class AdditiveDecoder(nn.Module):
    r"""Decoder that adds one contribution of each embedding: :math:`\mathrm{Dec}_c(z_c) + \mathrm{Dec}_s(z_s)`.

    The sum is taken of logits (Bernoulli) or of means (Gaussian). Neither contribution depends on both embeddings.
    This makes it possible to exchange one embedding and keep the contribution of the other.

    Parameters
    ----------
    n_latents
        Dimensions of the embeddings: two numbers, or one number for a model with a single block.
    image_shape
        ``(C, H, W)`` for images, or ``(F,)`` for features.
    width
        Number of channels (images) or units (features) of the layers. The paper uses 256.
    likelihood
        ``"bernoulli"`` for values between 0 and 1, or ``"gaussian"`` for any values. The Gaussian has one learned scale
        for all values.

    Raises
    ------
    ValueError
        If the likelihood is unknown, or the width is not an even number of at least 2.

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
        """Decode one embedding ``(B, D)`` per block into logits or means, ``(B, C, H, W)`` or ``(B, F)``."""
        maps = [part(z) for part, z in zip(self.parts, embeddings, strict=True)]
        return self.pixels(torch.stack(maps).sum(0))

    def mean(self, *embeddings: Tensor) -> Tensor:
        """Return the expected images ``(B, C, H, W)``, or features ``(B, F)``, in float32."""
        images = self(*embeddings).float()
        return images.sigmoid() if self.likelihood == "bernoulli" else images

    def negative_log_likelihood(self, images: Tensor, *embeddings: Tensor) -> Tensor:
        """Compute the negative log-likelihood of images ``(B, C, H, W)``, or features ``(B, F)``, given the embeddings.

        The result is in nats per pixel and channel (or per feature), averaged over cells.
        """
        predicted = self(*embeddings).float()
        if self.likelihood == "bernoulli":
            return F.binary_cross_entropy_with_logits(predicted, images)
        error = (images - predicted) * (-self.log_scale).exp()
        return 0.5 * error.square().mean() + self.log_scale + 0.5 * math.log(2 * math.pi)
