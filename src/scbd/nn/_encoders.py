"""Image encoders by name or any module, and the block they make with a projection head (paper, section 2)."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd.nn._small_maps import exact_small_maps
from scbd.nn._stages import Tap, find_stages

if TYPE_CHECKING:
    from collections.abc import Callable

Representation = Literal["embedding", "intermediate"]


def small_encoder(n_channels: int) -> nn.Module:
    """Four strided 3 x 3 convolutions: for images up to about 64 pixels and for quick runs. 256 features."""
    layers: list[nn.Module] = []
    width_in = n_channels
    for width in (32, 64, 128, 256):
        layers += [
            nn.Conv2d(width_in, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.GELU(),
        ]
        width_in = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def resnet18(n_channels: int) -> nn.Module:
    """ResNet-18 with torchvision's stem (7 x 7, stride 2, max-pool) and 512 features."""
    from monai.networks.nets.resnet import resnet18 as build

    return build(**_RESNET, n_input_channels=n_channels)


def resnet50(n_channels: int) -> nn.Module:
    """ResNet-50 with torchvision's stem (7 x 7, stride 2, max-pool) and 2,048 features."""
    from monai.networks.nets.resnet import resnet50 as build

    return build(**_RESNET, n_input_channels=n_channels)


def densenet121(n_channels: int) -> nn.Module:
    """DenseNet-121 without its classifier, 1,024 features."""
    from monai.networks.nets.densenet import DenseNet121

    features = DenseNet121(spatial_dims=2, in_channels=n_channels, out_channels=1).features
    return nn.Sequential(features, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())


# with these, MONAI's ResNets have torchvision's state keys and outputs
_RESNET = {"spatial_dims": 2, "conv1_t_stride": 2, "bias_downsample": False, "feed_forward": False}

ENCODERS: dict[str, Callable[[int], nn.Module]] = {
    "small": small_encoder,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "densenet121": densenet121,
}


def build_encoder(encoder: str | nn.Module, n_channels: int) -> nn.Module:
    """Make an encoder from its name, or an independent copy of a module.

    Parameters
    ----------
    encoder
        ``"small"``, ``"resnet18"``, ``"resnet50"``, ``"densenet121"``, or any module that takes float images
        ``(B, C, H, W)`` and returns features ``(B, R)``. A module is copied, weights included.
    n_channels
        Number of image channels ``C``.

    Raises
    ------
    ValueError
        If the name is not known.
    TypeError
        If ``encoder`` is neither a name nor a module.

    Examples
    --------
    >>> encoder = scbd.nn.build_encoder("small", n_channels=4)
    >>> encoder(torch.zeros(2, 4, 32, 32)).shape
    torch.Size([2, 256])
    """
    if isinstance(encoder, nn.Module):
        return copy.deepcopy(encoder)
    if not isinstance(encoder, str):
        msg = f"encoder must be a name or a torch.nn.Module, got {type(encoder).__name__}."
        raise TypeError(msg)
    if encoder not in ENCODERS:
        msg = f"There is no encoder {encoder!r}: use one of {', '.join(ENCODERS)}, or pass a torch.nn.Module."
        raise ValueError(msg)
    return ENCODERS[encoder](n_channels)


class Features(nn.Module):
    """An encoder, ready for images of a shape: ``r = Enc(x)``, the intermediate representation.

    The encoder computes in channels-last layout, and without the padding of very small maps: the same mathematics,
    faster.

    Parameters
    ----------
    encoder
        A name or a module, see :func:`build_encoder`.
    image_shape
        ``(C, H, W)`` as the encoder will see it.

    Attributes
    ----------
    n_features
        Dimension ``R`` of the representation.
    n_stages
        Number of stages on the way there, see :meth:`watched`.

    Raises
    ------
    ValueError
        If the encoder cannot take such images, or does not return one feature vector an image.

    Examples
    --------
    >>> features = scbd.nn.Features("small", image_shape=(4, 32, 32))
    >>> features(torch.zeros(2, 4, 32, 32)).shape
    torch.Size([2, 256])
    """

    def __init__(self, encoder: str | nn.Module, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.encoder = exact_small_maps(build_encoder(encoder, image_shape[0]))
        self.n_features, stages = _dry_run(self.encoder, image_shape)
        self.n_stages = len(stages)
        self._tap = Tap()
        for module in (*stages, self.encoder):
            module.register_forward_hook(self._tap)
        # the layout in which convolutions run fastest; images follow in Preprocess
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Intermediate representations ``(B, R)`` of preprocessed images ``(B, C, H, W)``."""
        return self.encoder(images)

    def width(self, representation: Representation) -> int:
        """Dimension of what :meth:`represent` returns."""
        return self.n_features

    def represent(self, images: Tensor, representation: Representation) -> Tensor:
        """What a cell is embedded as: without a projection, the embedding is the intermediate representation."""
        return self(images)

    def watched(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What :meth:`forward` returns, and what the images were on the way: a vector a stage, and ``r``.

        Stages are the encoder's last maps at each resolution, averaged over pixels: ``n_stages`` tensors of ``(B, C)``.
        """
        kept: list[Tensor] = []
        self._tap.kept = kept
        try:
            return self(images), kept
        finally:
            self._tap.kept = None


class Block(Features):
    """One embedding: encoder, two-layer projection, unit sphere.

    ``z = Proj(r) / |Proj(r)|`` with ``Proj = Linear(R, R) - GELU - Linear(R, D)``.

    Parameters
    ----------
    encoder, image_shape
        See :class:`Features`.
    n_latent
        Dimension ``D`` of the embedding.

    Attributes
    ----------
    n_features, n_latent
        Dimensions ``R`` of the intermediate representation and ``D`` of the embedding.

    Examples
    --------
    >>> block = scbd.nn.Block("small", image_shape=(4, 32, 32), n_latent=64)
    >>> block.n_features, block.n_latent
    (256, 64)
    """

    def __init__(self, encoder: str | nn.Module, image_shape: tuple[int, int, int], n_latent: int) -> None:
        super().__init__(encoder, image_shape)
        n_features = self.n_features
        self.projection = nn.Sequential(nn.Linear(n_features, n_features), nn.GELU(), nn.Linear(n_features, n_latent))
        self.n_latent = n_latent

    def project(self, r: Tensor) -> Tensor:
        """Embed intermediate representations ``(B, R)`` on the unit sphere, ``(B, D)`` in float32 or wider."""
        z = self.projection(r)
        return F.normalize(z.to(torch.promote_types(z.dtype, torch.float32)), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Embed preprocessed images ``(B, C, H, W)`` on the unit sphere, ``(B, D)``."""
        return self.project(self.encoder(images))

    def width(self, representation: Representation) -> int:
        """Dimension of what :meth:`represent` returns."""
        return self.n_latent if representation == "embedding" else self.n_features

    def represent(self, images: Tensor, representation: Representation) -> Tensor:
        """``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``."""
        r = self.encoder(images)
        return r if representation == "intermediate" else self.project(r)


def _dry_run(encoder: nn.Module, image_shape: tuple[int, int, int]) -> tuple[int, list[nn.Module]]:
    """Number of features, and the modules at the end of each stage."""
    was_training = encoder.training
    encoder.eval()  # a dry run must not move BatchNorm's statistics
    try:
        with torch.no_grad():
            # two images, so that a squeezed batch dimension shows; a ramp, so that they differ without a random number
            images = torch.linspace(0, 1, 2 * math.prod(image_shape)).view(2, *image_shape)
            features, stages = find_stages(encoder, images)
    except (RuntimeError, ValueError, TypeError) as error:
        msg = f"The encoder does not take images of shape {image_shape} (channels, height, width): {error}"
        raise ValueError(msg) from error
    finally:
        encoder.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        msg = (
            f"The encoder must return features (batch, n_features), it returned {shape} for a batch of 2: flatten them."
        )
        raise ValueError(msg)
    return features.shape[1], stages
