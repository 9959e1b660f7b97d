"""An encoder that is ready for inputs, and the block it makes with a projection head (paper, section 2)."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._checks import check_choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from scbd.nn._inputs import InputTransform

Representation = Literal["embedding", "intermediate"]


class Encoder(nn.Module):
    """An encoder, ready for inputs of a shape: ``r = Enc(x)``, the intermediate representation.

    The encoder computes in channels-last layout, and without the padding of very small maps: the same mathematics,
    faster.

    Parameters
    ----------
    encoder
        A name or a module, see :func:`build_encoder`.
    input_shape
        ``(C, H, W)`` of images, or ``(F,)`` of features, as they come.
    transform
        What features pass before the encoder.
    norm
        Of an encoder by name, see :func:`build_encoder`.

    Attributes
    ----------
    n_features
        Dimension ``R`` of the representation.
    n_stages
        Number of stages on the way there, see :meth:`watched`.
    frozen
        Whether the encoder is, see :meth:`freeze`.

    Raises
    ------
    ValueError
        If the encoder cannot take such inputs, or does not return one vector of features a cell.

    Examples
    --------
    >>> encoder = scbd.nn.Encoder("small", (4, 32, 32))
    >>> encoder(torch.zeros(2, 4, 32, 32)).shape
    torch.Size([2, 256])
    """

    def __init__(
        self,
        encoder: str | nn.Module,
        input_shape: tuple[int, ...],
        transform: InputTransform | None = None,
        *,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        self.frozen = False
        self._freed: list[nn.Parameter] = []  # of the encoder, what learns when it is not frozen
        seen = input_shape if transform is None else transform.output_shape
        self.transform = transform
        self.encoder = build_encoder(encoder, seen[0], of_features=len(seen) == 1, norm=norm)
        self.n_features, stages = _dry_run(self.encoder, seen)
        self.n_stages = len(stages)
        self._tap = Tap()
        for module in (*stages, self.encoder):
            module.register_forward_hook(self._tap)
        # the layout in which convolutions run fastest; images follow in Preprocess
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        """Intermediate representations ``(B, R)`` of preprocessed inputs ``(B, C, H, W)`` or ``(B, F)``."""
        return self.encoder(inputs if self.transform is None else self.transform(inputs))

    def freeze(self, frozen: bool) -> None:
        """Keep the encoder as it is, weights and running statistics, while what is behind it learns; or let it learn.

        Parameters
        ----------
        frozen
            Whether it stays.
        """
        if frozen and not self.frozen:
            self._freed = [parameter for parameter in self.encoder.parameters() if parameter.requires_grad]
        for parameter in self._freed:
            parameter.requires_grad_(not frozen)
        self.frozen = frozen
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        """Go into training mode, or out of it; an encoder that is frozen stays out."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def width(self, representation: Representation) -> int:
        """Dimension of what :meth:`represent` returns."""
        return self.n_features

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """What a cell is embedded as: without a projection, the embedding is the intermediate representation."""
        return self(inputs)

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Have ``r`` of every forward pass looked at, until the handle is removed."""
        return self.encoder.register_forward_hook(lambda _module, _inputs, r: look(r))

    def watched(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """``r``, and what the inputs were on the way: a vector a stage, and ``r``.

        Stages are the encoder's last maps at each resolution, averaged over pixels: ``n_stages`` tensors of ``(B, C)``.
        """
        kept: list[Tensor] = []
        self._tap.kept = kept
        try:
            return Encoder.forward(self, inputs), kept
        finally:
            self._tap.kept = None


class Block(Encoder):
    """One embedding: encoder, two-layer projection, unit sphere.

    ``z = Proj(r) / |Proj(r)|`` with ``Proj = Linear(R, R) - GELU - Linear(R, D)``; of the encoder ``"linear"``, which
    embeds as it is, ``z = r / |r|``.

    Parameters
    ----------
    encoder, input_shape, transform, norm
        See :class:`Encoder`.
    n_latent
        Dimension ``D`` of the embedding.

    Attributes
    ----------
    n_features, n_latent
        Dimensions ``R`` of the intermediate representation and ``D`` of the embedding.

    Raises
    ------
    ValueError
        If the encoder embeds as it is, in another number of dimensions.

    Examples
    --------
    >>> block = scbd.nn.Block("small", (4, 32, 32), n_latent=64)
    >>> block.n_features, block.n_latent
    (256, 64)
    """

    def __init__(
        self,
        encoder: str | nn.Module,
        input_shape: tuple[int, ...],
        n_latent: int,
        transform: InputTransform | None = None,
        *,
        norm: Norm = "batch",
    ) -> None:
        super().__init__(encoder, input_shape, transform, norm=norm)
        n_features = self.n_features
        self.projection: nn.Module
        if isinstance(self.encoder, IdentityLinear):
            if n_latent != n_features:
                msg = (
                    f"n_latent={n_latent}: without whitening, encoder='linear' embeds in the {n_features} dimensions "
                    "of its inputs; leave n_latent out, or choose a whitening, which takes the n_latent best."
                )
                raise ValueError(msg)
            self.projection = nn.Identity()
        else:
            self.projection = nn.Sequential(
                nn.Linear(n_features, n_features), nn.GELU(), nn.Linear(n_features, n_latent)
            )
        self.n_latent = n_latent

    def project(self, r: Tensor) -> Tensor:
        """Projections of intermediate representations ``(B, R)``, ``(B, D)`` in float32 or wider: z of any length."""
        h = self.projection(r)
        return h.to(torch.promote_types(h.dtype, torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed preprocessed inputs ``(B, C, H, W)`` or ``(B, F)`` on the unit sphere, ``(B, D)``."""
        return on_sphere(self.project(super().forward(inputs)))

    def watched(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Projections, z of any length, and what the inputs were on the way: a vector a stage, and ``r``."""
        r, passed = super().watched(inputs)
        return self.project(r), passed

    def width(self, representation: Representation) -> int:
        """Dimension of what :meth:`represent` returns."""
        return self.n_latent if representation == "embedding" else self.n_features

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``."""
        r = super().forward(inputs)
        return r if representation == "intermediate" else on_sphere(self.project(r))


def on_sphere(h: Tensor) -> Tensor:
    """Vectors ``(B, D)`` at unit length; NaN where one is too long for its square to be a number."""
    # of these, a direction of length 0 would be left
    overflown = torch.linalg.vector_norm(h.detach(), dim=1, keepdim=True).isinf()
    return F.normalize(h, dim=1).masked_fill(overflown, torch.nan)


def _dry_run(encoder: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, list[nn.Module]]:
    """Number of features, and the modules at the end of each stage."""
    was_training = encoder.training
    encoder.eval()  # a dry run must not move BatchNorm's statistics
    try:
        with torch.no_grad():
            # two cells, so that a squeezed batch dimension shows; a ramp, so that they differ without a random number
            inputs = torch.linspace(0, 1, 2 * math.prod(input_shape)).view(2, *input_shape)
            features, stages = find_stages(encoder, inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        what = "features" if len(input_shape) == 1 else "images"
        of = "" if len(input_shape) == 1 else " (channels, height, width)"
        msg = f"The encoder does not take {what} of shape {input_shape}{of}: {error}"
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
        ``(B, R)``. A module is copied, weights included, to the CPU, where every model begins.
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
    check_choice("norm", norm, Norm)
    if norm != "batch" and (of_features or isinstance(encoder, nn.Module) or weights is not None):
        what = "encoders of features" if of_features else "a module of your own" if weights is None else "weights"
        msg = f"norm={norm!r} is for encoders of images by name, and not for {what}: leave it out."
        raise ValueError(msg)
    if isinstance(encoder, nn.Module):
        return copy.deepcopy(encoder).cpu()  # a saved one may be loaded to a GPU
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
    built = _replaced(known[encoder](n_channels), SmallMapConv2d.of)
    if norm != "batch":  # MONAI's own argument reaches the first of a ResNet alone
        make = _INSTEAD[norm]
        _replaced(built, lambda child: make(child.num_features) if isinstance(child, nn.BatchNorm2d) else None)
    if weights is not None:
        _load_weights(built, encoder, Path(weights))
    return built


def _replaced(network: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The network, with what ``make`` returns in place of each of its modules for which it returns something."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if (new := make(child)) is not None:
                setattr(module, name, new)
    return network


# up to here the products are large and few; beyond, the library's convolution is faster
_MOST_OUTPUT_PIXELS = 4


class SmallMapConv2d(nn.Conv2d):
    """A convolution that multiplies no padding where its output has at most four pixels.

    Elsewhere, and on other devices than the processor, it is :class:`torch.nn.Conv2d`.
    """

    @classmethod
    def of(cls, convolution: nn.Module) -> SmallMapConv2d | None:
        """One with the parameters of a padded convolution; `None` of anything that it would not compute alike."""
        if type(convolution) is not nn.Conv2d or not _is_plain(convolution):
            return None
        # on no device: weights of its own would be drawn from the generator, and thrown away
        new = cls(
            convolution.in_channels,
            convolution.out_channels,
            convolution.kernel_size,  # type: ignore[arg-type]
            convolution.stride,  # type: ignore[arg-type]
            convolution.padding,  # type: ignore[arg-type]
            bias=convolution.bias is not None,
            device="meta",
        )
        new.weight, new.bias = convolution.weight, convolution.bias
        return new

    def forward(self, images: Tensor) -> Tensor:
        """Convolve ``(B, C, H, W)``."""
        height, width = (self._output_size(images.shape[axis], axis - 2) for axis in (2, 3))
        if images.device.type != "cpu" or not 1 <= height * width <= _MOST_OUTPUT_PIXELS:
            return super().forward(images)
        rows = [self._touching(pixel, images.shape[2], 0) for pixel in range(height)]
        columns = [self._touching(pixel, images.shape[3], 1) for pixel in range(width)]
        pixels_first, kernel = images.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1)
        outputs = [
            F.linear(pixels_first[:, row, column].flatten(1), kernel[:, tap, tap_across].flatten(1), self.bias)
            for row, tap in rows
            for column, tap_across in columns
        ]
        return torch.stack(outputs, 1).unflatten(1, (height, width)).permute(0, 3, 1, 2)

    def _output_size(self, size: int, axis: int) -> int:
        return (size + 2 * int(self.padding[axis]) - self.kernel_size[axis]) // self.stride[axis] + 1

    def _touching(self, pixel: int, size: int, axis: int) -> tuple[slice, slice]:
        """Input pixels under the kernel at an output pixel, and the taps that lie over them."""
        first = pixel * self.stride[axis] - int(self.padding[axis])
        start, stop = max(first, 0), min(first + self.kernel_size[axis], size)
        return slice(start, stop), slice(start - first, stop - first)


def _is_plain(convolution: nn.Conv2d) -> bool:
    padding = convolution.padding
    return (
        convolution.groups == 1
        and convolution.dilation == (1, 1)
        and convolution.padding_mode == "zeros"
        and not isinstance(padding, str)
        and any(padding)
        # else some outputs would touch nothing
        and all(p < k for p, k in zip(padding, convolution.kernel_size, strict=True))
    )


def find_stages(encoder: nn.Module, images: Tensor) -> tuple[Tensor, list[nn.Module]]:
    """Features of some images, and the modules that return the encoder's last maps at each resolution.

    Found by running it, whatever the architecture: the stages of a ResNet, the transitions of a DenseNet. Maps of a
    single pixel, and those whose average is what the encoder returns, say no more than the features do and are left
    out.

    Parameters
    ----------
    encoder
        In evaluation mode, so that running it leaves no trace.
    images
        At least two that differ, ``(B, C, H, W)``.
    """
    outputs: list[tuple[nn.Module, Any]] = []

    def record(module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append((module, output))

    handles = [module.register_forward_hook(record) for module in encoder.modules() if module is not encoder]
    try:
        features = encoder(images)
    finally:
        for handle in handles:
            handle.remove()
    maps = [(m, out) for m, out in outputs if isinstance(out, Tensor) and out.ndim == 4 and out[0, 0].numel() > 1]
    last = [list(run)[-1] for _, run in groupby(maps, key=lambda one: one[1].shape[2:])]
    return features, [module for module, out in last if not _is_same(pooled(out), features)]


class Tap:
    """A forward hook that keeps what leaves its modules, averaged over pixels, while someone is looking."""

    def __init__(self) -> None:
        self.kept: list[Tensor] | None = None

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        """Keep it."""
        if self.kept is not None:
            self.kept.append(pooled(output) if output.ndim == 4 else output)


def pooled(maps: Tensor) -> Tensor:
    """Average maps ``(B, C, H, W)`` over pixels, ``(B, C)``."""
    # in the layout of the maps, ten times faster than mean((2, 3))
    return maps.permute(0, 2, 3, 1).flatten(1, 2).mean(1)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return isinstance(other, Tensor) and one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _load_weights(encoder: nn.Module, name: str, path: Path) -> None:
    """Give an encoder weights that are kept under torchvision's names; a classifier among them is left out."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        # counters, which old files lack, and nothing depends on
        counters = {key: value for key, value in encoder.state_dict().items() if key.endswith("num_batches_tracked")}
        state = {_renamed(key, name): state[key] for key in state if not key.startswith(("fc.", "classifier."))}
        encoder.load_state_dict(counters | state)
    except FileNotFoundError:
        raise
    except (AttributeError, EOFError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        msg = f"{path} holds no weights of torchvision's {name} for as many channels as there are: {error}"
        raise ValueError(msg) from error


def _renamed(key: str, name: str) -> str:
    """Of a residual network, names are the same; of a DenseNet here are the features alone, with a level in between."""
    if not name.startswith("densenet"):
        return key
    key = re.sub(r"(denselayer\d+)\.(norm|conv)\.?([12])\.", r"\1.layers.\2\3.", key)  # old files have a dot more
    return key.replace("features.", "0.", 1)
