"""Additive decoder: reconstructs images or features as the sum of one contribution per embedding, z_c and z_s.

See the paper, appendix A, and Lachapelle et al. (2024).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._shared.checks import check_choice

Likelihood = Literal["bernoulli", "gaussian"]

# factor by which the decoder enlarges the sides of its first feature map: four layers that double the size each
_UPSAMPLING_FACTOR = 16


class BlockDecoder(nn.Sequential):
    """Decoder of one embedding (z_c or z_s), ``(B, D)``, into feature maps ``(B, width / 2, H, W)``.

    The layers follow the table of the decoder in the paper. Four transposed convolutions each double the size of the
    feature maps.

    Parameters
    ----------
    n_latent
        Dimension ``D`` of the embedding.
    image_size
        Size ``(H, W)`` of the decoded images in pixels. The sides of the first feature map are a sixteenth of ``H`` and
        ``W``, rounded up. If the last feature maps are larger than ``(H, W)``, they are cropped around their centre.
    width
        Number of channels of all layers except the last, which has ``width / 2``. The paper uses 256.
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


def _init_variance_preserving(layer: nn.Module) -> None:
    """Initialise the weights of a layer such that the outputs of the layer have the same variance as its inputs.

    With PyTorch's default weights, the images decoded from two different embeddings would differ only by about a
    millionth before training, and for a long time after training has started.
    """
    if isinstance(layer, nn.Linear):  # the input of the linear layer is an embedding of length 1
        nn.init.normal_(layer.weight, std=math.sqrt(2))
    elif isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    elif isinstance(layer, nn.ConvTranspose2d):
        # stride 2: an output pixel is reached by 9 / 4 of the kernel's 9 weights, on average
        nn.init.normal_(layer.weight, std=math.sqrt(2 * 4 / (9 * layer.in_channels)))
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


class AdditiveDecoder(nn.Module):
    r"""Decoder whose output is a sum of one term per embedding: :math:`\mathrm{Dec}_c(z_c) + \mathrm{Dec}_s(z_s)`.

    The sum is the logit (Bernoulli likelihood) or the mean (Gaussian likelihood) of each pixel or feature. The term of
    z_c does not depend on z_s, and vice versa. This makes it possible to exchange one embedding and to keep the term of
    the other.

    Parameters
    ----------
    n_latents
        Dimensions of the embeddings z_c and z_s, or a single dimension for a model with one embedding.
    image_shape
        Shape of one decoded cell: ``(C, H, W)`` for images, or ``(F,)`` for features.
    width
        Number of channels (images) or units (features) of the decoder's layers, an even number. The paper uses 256.
    likelihood
        ``"bernoulli"`` for pixels or features between 0 and 1, or ``"gaussian"`` for any values. The Gaussian has a
        single standard deviation for all pixels and features, which is learned.

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
            hidden = width // 2
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(n, width), nn.GELU(), nn.Linear(width, hidden), nn.GELU()) for n in n_latents
            )
            self.pixels: nn.Module = nn.Linear(hidden, image_shape[0])
        else:
            channels, height, wide = image_shape
            self.parts = nn.ModuleList(BlockDecoder(n, (height, wide), width) for n in n_latents)
            self.pixels = nn.Conv2d(width // 2, channels, 1)
        self.log_scale = nn.Parameter(torch.zeros(()), requires_grad=likelihood == "gaussian")
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, *embeddings: Tensor) -> Tensor:
        """Decode the embeddings of a batch of cells into logits (Bernoulli) or means (Gaussian).

        Each embedding, z_c and z_s, is ``(B, D)``. The result is ``(B, C, H, W)`` for images or ``(B, F)`` for
        features.
        """
        maps = [part(z) for part, z in zip(self.parts, embeddings, strict=True)]
        return self.pixels(torch.stack(maps).sum(0))

    def mean(self, *embeddings: Tensor) -> Tensor:
        """Decode embeddings into the expected images ``(B, C, H, W)``, or expected features ``(B, F)``; float32."""
        images = self(*embeddings).float()
        return images.sigmoid() if self.likelihood == "bernoulli" else images

    def negative_log_likelihood(self, images: Tensor, *embeddings: Tensor) -> Tensor:
        """Compute the negative log-likelihood of images ``(B, C, H, W)``, or features ``(B, F)``, given the embeddings.

        The result, a scalar, is in nats per pixel and channel (or per feature), averaged over cells.
        """
        predicted = self(*embeddings).float()
        if self.likelihood == "bernoulli":
            return F.binary_cross_entropy_with_logits(predicted, images)
        error = (images - predicted) * (-self.log_scale).exp()
        return 0.5 * error.square().mean() + self.log_scale + 0.5 * math.log(2 * math.pi)
