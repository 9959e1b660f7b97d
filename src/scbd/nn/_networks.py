"""Encoders by name, or any module."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn

from scbd.nn._weights import load_weights

if TYPE_CHECKING:
    import os
    from collections.abc import Callable


Norm = Literal["batch", "instance", "group"]
# divides the widths of all encoders by name
_N_GROUPS = 8
_INSTEAD: dict[str, Callable[[int], nn.Module]] = {
    "instance": partial(nn.InstanceNorm2d, affine=True),
    "group": partial(nn.GroupNorm, _N_GROUPS),
}


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


# those that torchvision has, too
_WITH_WEIGHTS = ("resnet18", "resnet50", "densenet121")


class IdentityLinear(nn.Linear):
    """A linear map without offset that begins as the identity: what it returns is an embedding already."""

    def __init__(self, n_features: int) -> None:
        super().__init__(n_features, n_features, bias=False)
        nn.init.eye_(self.weight)


def mlp(n_features: int) -> nn.Module:
    """Two hidden layers, 256 and 128 wide, of features."""
    return nn.Sequential(nn.Linear(n_features, 256), nn.GELU(), nn.Linear(256, 128), nn.GELU())


FEATURE_ENCODERS: dict[str, Callable[[int], nn.Module]] = {"linear": IdentityLinear, "mlp": mlp}


def build_encoder(
    encoder: str | nn.Module,
    n_channels: int,
    *,
    of_features: bool = False,
    norm: Norm = "batch",
    weights: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Make an encoder from its name, or an independent copy of a module.

    Parameters
    ----------
    encoder
        Of images, ``"small"``, ``"resnet18"``, ``"resnet50"``, ``"densenet121"``; of features, ``"linear"`` or
        ``"mlp"``; or any module that takes float images ``(B, C, H, W)``, or features ``(B, F)``, and returns features
        ``(B, R)``. A module is copied, weights included.
    n_channels
        Number of image channels ``C``, or of features ``F``.
    of_features
        Whether the inputs are features.
    norm
        What normalises activations of an encoder of images that is named: ``"batch"``, by statistics of all cells,
        which training keeps; ``"instance"``, each channel of each image by its own mean and variance, so that what an
        image has of stain and contrast is gone, and a new plate needs nothing (but maps must be larger than a pixel);
        ``"group"``, eight groups of channels of an image together.
    weights
        File of a state dict under torchvision's names, for ``"resnet18"``, ``"resnet50"`` or ``"densenet121"``, such as
        one learned on photographs; random weights by default. What comes out can be given to any model as its encoder.

    Raises
    ------
    FileNotFoundError
        If the weights are not there.
    ValueError
        If the name or ``norm`` is not known, the weights do not fit, or a norm is asked for of what has none to choose.
    TypeError
        If ``encoder`` is neither a name nor a module.

    Examples
    --------
    >>> encoder = scbd.nn.build_encoder("small", n_channels=4)
    >>> encoder(torch.zeros(2, 4, 32, 32)).shape
    torch.Size([2, 256])
    """
    if weights is not None and encoder not in _WITH_WEIGHTS:
        msg = f"weights are for the encoders {', '.join(_WITH_WEIGHTS)}, not for {encoder!r}: leave them out."
        raise ValueError(msg)
    if norm not in get_args(Norm):
        msg = f"norm={norm!r} is not known: use one of {', '.join(get_args(Norm))}."
        raise ValueError(msg)
    if norm != "batch" and (of_features or isinstance(encoder, nn.Module) or weights is not None):
        what = "encoders of features" if of_features else "a module of your own" if weights is None else "weights"
        msg = f"norm={norm!r} is for encoders of images by name, and not for {what}: leave it out."
        raise ValueError(msg)
    if isinstance(encoder, nn.Module):
        return copy.deepcopy(encoder)
    if not isinstance(encoder, str):
        msg = f"encoder must be a name or a torch.nn.Module, got {type(encoder).__name__}."
        raise TypeError(msg)
    known, others = (FEATURE_ENCODERS, ENCODERS) if of_features else (ENCODERS, FEATURE_ENCODERS)
    if encoder not in known:
        what = f"There is no encoder {encoder!r}"
        if encoder in others:
            inputs, foreign = ("features", "images") if of_features else ("images", "features")
            what = f"encoder={encoder!r} is for {foreign}, and the inputs are {inputs}"
        msg = f"{what}: use one of {', '.join(known)}, or pass a torch.nn.Module."
        raise ValueError(msg)
    built = known[encoder](n_channels)
    if norm != "batch":
        _replace_norms(built, _INSTEAD[norm])
    if weights is not None:
        load_weights(built, encoder, weights)
    return built


def _replace_norms(network: nn.Module, make: Callable[[int], nn.Module]) -> None:
    """Another normalisation in place of each BatchNorm (MONAI's own argument reaches the first of a ResNet alone)."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, make(child.num_features))
