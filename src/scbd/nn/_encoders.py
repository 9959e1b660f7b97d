"""Encoders for images or features, and blocks: an encoder with a projection head (paper, section 2)."""

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

from scbd._shared.checks import check_choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from scbd.nn._input_transform import InputTransform

Representation = Literal["embedding", "intermediate"]


class Encoder(nn.Module):
    """Encoder without a projection: ``r = Enc(x)``, the intermediate representation.

    The encoder computes in channels-last layout, and without the padding of very small feature maps. Both make it
    faster and do not change the mathematics.

    Parameters
    ----------
    encoder
        A name or a module, see :func:`build_encoder`.
    input_shape
        Shape of one preprocessed input: ``(C, H, W)`` for images, or ``(F,)`` for features, before ``transform``.
    transform
        Transform applied to features before the encoder. By default there is no transform.
    norm
        Normalisation of an encoder given by name, see :func:`build_encoder`.

    Attributes
    ----------
    n_features
        Dimension ``R`` of the representation ``r``.
    n_stages
        Number of the encoder's stages, see :meth:`watched`.
    frozen
        Whether the encoder is excluded from training, see :meth:`freeze`.

    Raises
    ------
    ValueError
        If the encoder does not accept such inputs, or does not return one vector of features per cell.

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
        self._trainable_parameters: list[nn.Parameter] = []  # parameters that train when not frozen
        seen = input_shape if transform is None else transform.output_shape
        self.transform = transform
        self.encoder = build_encoder(encoder, seen[0], of_features=len(seen) == 1, norm=norm)
        self.n_features, stages = _probe_encoder(self.encoder, seen)
        self.n_stages = len(stages)
        self._tap = PoolingHook()
        for module in (*stages, self.encoder):
            module.register_forward_hook(self._tap)
        # convolutions are fastest in this memory layout; Preprocess converts images to the same layout
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        """Encode preprocessed inputs ``(B, C, H, W)`` or ``(B, F)`` into intermediate representations ``(B, R)``."""
        return self.encoder(inputs if self.transform is None else self.transform(inputs))

    def freeze(self, frozen: bool) -> None:
        """Exclude the encoder from training, or include it again.

        A frozen encoder keeps its weights and its running statistics (BatchNorm). The projection and other layers
        behind the encoder continue to learn.

        Parameters
        ----------
        frozen
            Whether the encoder is frozen (True) or trained (False).
        """
        if frozen and not self.frozen:
            self._trainable_parameters = [
                parameter for parameter in self.encoder.parameters() if parameter.requires_grad
            ]
        for parameter in self._trainable_parameters:
            parameter.requires_grad_(not frozen)
        self.frozen = frozen
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        """Switch to training mode, or to evaluation mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def width(self, representation: Representation) -> int:
        """Return the number of dimensions of what :meth:`represent` returns: ``R`` for either representation."""
        return self.n_features

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """Return the intermediate representations ``(B, R)``; without a projection, they are also the embeddings."""
        return self(inputs)

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Call a function with ``r`` in every forward pass, until the returned handle is removed."""
        return self.encoder.register_forward_hook(lambda _module, _inputs, r: look(r))

    def forward_with_intermediates(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return ``r`` and the intermediate representations of all stages.

        A stage ends with the encoder's last feature map at a resolution. The feature maps are averaged over pixels.

        Returns
        -------
        ``r``, ``(B, R)``, and a list with one tensor ``(B, C)`` per stage (``n_stages`` tensors), followed by ``r``.
        """
        kept: list[Tensor] = []
        self._tap.kept = kept
        try:
            return Encoder.forward(self, inputs), kept
        finally:
            self._tap.kept = None


class Block(Encoder):
    """Encoder with a two-layer projection onto the unit sphere, which computes one embedding (z_c or z_s).

    The embedding is ``z = Proj(r) / |Proj(r)|`` with ``Proj = Linear(R, R) - GELU - Linear(R, D)``. The encoder
    ``"linear"`` has no projection: its embedding is ``z = r / |r|``.

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
        If the encoder is ``"linear"``, and ``n_latent`` differs from the dimension of its inputs.

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
        """Project intermediate representations ``(B, R)`` to ``(B, D)``, before normalisation to unit length.

        The result is float32, or float64 if ``r`` is.
        """
        h = self.projection(r)
        return h.to(torch.promote_types(h.dtype, torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed preprocessed inputs ``(B, C, H, W)`` or ``(B, F)`` on the unit sphere, ``(B, D)``."""
        return on_sphere(self.project(super().forward(inputs)))

    def forward_with_intermediates(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the projections ``(B, D)``, before normalisation to unit length, and the intermediate representations.

        The intermediate representations are those of :meth:`Encoder.watched`: one tensor ``(B, C)`` per stage, and
        ``r``.
        """
        r, passed = super().forward_with_intermediates(inputs)
        return self.project(r), passed

    def width(self, representation: Representation) -> int:
        """Return the number of dimensions of what :meth:`represent` returns: ``D`` for the embedding, else ``R``."""
        return self.n_latent if representation == "embedding" else self.n_features

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """Return the embeddings ``z (B, D)``, or the intermediate representations ``r (B, R)``."""
        r = super().forward(inputs)
        return r if representation == "intermediate" else on_sphere(self.project(r))


def on_sphere(h: Tensor) -> Tensor:
    """Scale vectors ``(B, D)`` to unit length; NaN for a vector whose squared length overflows."""
    # without the mask, such a vector would be divided by infinity and become zero
    overflown = torch.linalg.vector_norm(h.detach(), dim=1, keepdim=True).isinf()
    return F.normalize(h, dim=1).masked_fill(overflown, torch.nan)


def _probe_encoder(encoder: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, list[nn.Module]]:
    """Return the number of features, and the modules at the end of each stage, from a forward pass of two inputs.

    Raises
    ------
    ValueError
        If the encoder does not accept inputs of this shape, or does not return one vector of features per input.
    """
    was_training = encoder.training
    encoder.eval()  # the dry run must not change BatchNorm's running statistics
    try:
        with torch.no_grad():
            # two cells, so that an encoder that squeezes the batch dimension is detected; a ramp makes the cells differ
            # without drawing random numbers
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
# number of groups of channels; it divides the numbers of channels of all encoders that have a name
_N_GROUPS = 8
# layers that replace BatchNorm, by value of ``norm``
_NORM_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "instance": partial(nn.InstanceNorm2d, affine=True),
    "group": partial(nn.GroupNorm, _N_GROUPS),
}


def small_encoder(n_channels: int) -> nn.Module:
    """Build four strided 3 x 3 convolutions with 256 features, for images up to about 64 pixels and for quick runs."""
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
    """Build a ResNet-18 with torchvision's stem (7 x 7, stride 2, max-pool) and 512 features."""
    from monai.networks.nets.resnet import resnet18 as build

    return build(**_RESNET, n_input_channels=n_channels)


def resnet50(n_channels: int) -> nn.Module:
    """Build a ResNet-50 with torchvision's stem (7 x 7, stride 2, max-pool) and 2,048 features."""
    from monai.networks.nets.resnet import resnet50 as build

    return build(**_RESNET, n_input_channels=n_channels)


def densenet121(n_channels: int) -> nn.Module:
    """Build a DenseNet-121 without its classifier, with 1,024 features."""
    from monai.networks.nets.densenet import DenseNet121

    features = DenseNet121(spatial_dims=2, in_channels=n_channels, out_channels=1).features
    return nn.Sequential(features, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())


# with these arguments, MONAI's ResNets have the same state keys and outputs as torchvision's
_RESNET = {"spatial_dims": 2, "conv1_t_stride": 2, "bias_downsample": False, "feed_forward": False}

ENCODERS: dict[str, Callable[[int], nn.Module]] = {
    "small": small_encoder,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "densenet121": densenet121,
}


# encoders for which torchvision provides weights
_PRETRAINED_ENCODERS = ("resnet18", "resnet50", "densenet121")


class IdentityLinear(nn.Linear):
    """Linear map without offset, initialised to the identity; its output is the embedding, without a projection."""

    def __init__(self, n_features: int) -> None:
        super().__init__(n_features, n_features, bias=False)
        nn.init.eye_(self.weight)


def mlp(n_features: int) -> nn.Module:
    """Build an encoder of features with two hidden layers, 256 and 128 units wide."""
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
    """Build an encoder from its name, or copy a module.

    Parameters
    ----------
    encoder
        For images: ``"small"``, ``"resnet18"``, ``"resnet50"`` or ``"densenet121"``. For features: ``"linear"`` or
        ``"mlp"``. Alternatively any module that takes float images ``(B, C, H, W)``, or features ``(B, F)``, and
        returns features ``(B, R)``. A module is copied with its weights to the CPU, where every model is created.
    n_channels
        Number of image channels ``C``, or number of features ``F``.
    of_features
        Whether the inputs are features. Default: images.
    norm
        Normalisation of activations in an encoder of images that is given by name:

        - ``"batch"`` (default): with mean and variance over all cells. Running statistics are kept during training.
        - ``"instance"``: each channel of each image with its own mean and variance. This removes differences between
          images in stain intensity and contrast, and requires no statistics of a new plate. Feature maps must be larger
          than one pixel.
        - ``"group"``: eight groups of channels of an image, each group with its own mean and variance.
    weights
        File with a state dict under torchvision's names, for ``"resnet18"``, ``"resnet50"`` or ``"densenet121"``, for
        example pre-trained on photographs. By default weights are random. The returned encoder can be given to any
        model as its encoder.

    Returns
    -------
    The encoder, a module on the CPU.

    Raises
    ------
    FileNotFoundError
        If the file of weights does not exist.
    ValueError
        If the name or ``norm`` is unknown, if the weights do not fit the encoder, or if another ``norm`` than
        ``"batch"`` is requested for an encoder of features, a module or an encoder with ``weights``.
    TypeError
        If ``encoder`` is neither a name nor a module.

    Examples
    --------
    >>> encoder = scbd.nn.build_encoder("small", n_channels=4)
    >>> encoder(torch.zeros(2, 4, 32, 32)).shape
    torch.Size([2, 256])
    """
    if weights is not None and encoder not in _PRETRAINED_ENCODERS:
        msg = f"weights are for the encoders {', '.join(_PRETRAINED_ENCODERS)}, not for {encoder!r}: leave them out."
        raise ValueError(msg)
    check_choice("norm", norm, Norm)
    if norm != "batch" and (of_features or isinstance(encoder, nn.Module) or weights is not None):
        what = "encoders of features" if of_features else "a module of your own" if weights is None else "weights"
        msg = f"norm={norm!r} is for encoders of images by name, and not for {what}: leave it out."
        raise ValueError(msg)
    if isinstance(encoder, nn.Module):
        return copy.deepcopy(encoder).cpu()  # a saved encoder may have been loaded to a GPU
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
    built = _replace_modules(known[encoder](n_channels), SmallMapConv2d.of)
    if norm != "batch":  # MONAI's own argument changes only the first layer of a ResNet
        make = _NORM_LAYERS[norm]
        _replace_modules(built, lambda child: make(child.num_features) if isinstance(child, nn.BatchNorm2d) else None)
    if weights is not None:
        _load_weights(built, encoder, Path(weights))
    return built


def _replace_modules(network: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace, in place, each submodule for which ``make`` returns a new module; return the network."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if (new := make(child)) is not None:
                setattr(module, name, new)
    return network


# largest number of output pixels for which one matrix product per pixel is faster than PyTorch's convolution
_MAX_SMALL_MAP_PIXELS = 4


class SmallMapConv2d(nn.Conv2d):
    """Convolution that skips the products with zero padding where its output has at most four pixels.

    For larger outputs, and on other devices than the CPU, it computes the same as :class:`torch.nn.Conv2d`.
    """

    @classmethod
    def of(cls, convolution: nn.Module) -> SmallMapConv2d | None:
        """Return a replacement that uses the parameters of a padded convolution.

        The result is `None` for other modules, and for convolutions that this class does not support (see
        ``_is_supported``).
        """
        if type(convolution) is not nn.Conv2d or not _is_supported(convolution):
            return None
        # the meta device avoids drawing random initial weights, which would be discarded
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
        """Convolve images ``(B, C, H, W)``."""
        height, width = (self._output_size(images.shape[axis], axis - 2) for axis in (2, 3))
        if images.device.type != "cpu" or not 1 <= height * width <= _MAX_SMALL_MAP_PIXELS:
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
        """Return the input pixels under the kernel at an output pixel, and the part of the kernel that covers them."""
        first = pixel * self.stride[axis] - int(self.padding[axis])
        start, stop = max(first, 0), min(first + self.kernel_size[axis], size)
        return slice(start, stop), slice(start - first, stop - first)


def _is_supported(convolution: nn.Conv2d) -> bool:
    padding = convolution.padding
    return (
        convolution.groups == 1
        and convolution.dilation == (1, 1)
        and convolution.padding_mode == "zeros"
        and not isinstance(padding, str)
        and any(padding)
        # otherwise some output pixels would cover only padding
        and all(p < k for p, k in zip(padding, convolution.kernel_size, strict=True))
    )


def find_stages(encoder: nn.Module, images: Tensor) -> tuple[Tensor, list[nn.Module]]:
    """Return features of images, and the modules that return the encoder's last feature maps at each resolution.

    The modules are found by running the encoder, for any architecture: the stages of a ResNet, the transitions of a
    DenseNet. Two kinds of maps are excluded, because they add no information to the features: maps of a single pixel,
    and maps whose average over pixels is what the encoder returns.

    Parameters
    ----------
    encoder
        Encoder in evaluation mode, so that running it does not change its statistics.
    images
        At least two images that differ, ``(B, C, H, W)``.

    Returns
    -------
    Features ``(B, R)``, and the modules in the order in which they run.
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
    return features, [module for module, out in last if not _is_same(average_over_pixels(out), features)]


class PoolingHook:
    """Forward hook that stores the outputs of its modules, averaged over pixels, while ``kept`` is a list."""

    def __init__(self) -> None:
        self.kept: list[Tensor] | None = None

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        """Append the output to ``kept``, averaged over pixels if it is a feature map, unless ``kept`` is `None`."""
        if self.kept is not None:
            self.kept.append(average_over_pixels(output) if output.ndim == 4 else output)


def average_over_pixels(maps: Tensor) -> Tensor:
    """Average maps ``(B, C, H, W)`` over pixels, ``(B, C)``."""
    # maps are stored channels-last: this is ten times faster than mean((2, 3))
    return maps.permute(0, 2, 3, 1).flatten(1, 2).mean(1)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return isinstance(other, Tensor) and one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _load_weights(encoder: nn.Module, name: str, path: Path) -> None:
    """Load weights stored under torchvision's names into an encoder, without the weights of a classifier.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file is no state dict, or the weights do not fit the encoder.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        # counters of training batches, which old files lack and which have no effect on the outputs
        counters = {key: value for key, value in encoder.state_dict().items() if key.endswith("num_batches_tracked")}
        state = {
            _translate_torchvision_key(key, name): state[key]
            for key in state
            if not key.startswith(("fc.", "classifier."))
        }
        encoder.load_state_dict(counters | state)
    except FileNotFoundError:
        raise
    except (AttributeError, EOFError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        msg = f"{path} holds no weights of torchvision's {name} for as many channels as there are: {error}"
        raise ValueError(msg) from error


def _translate_torchvision_key(key: str, name: str) -> str:
    """Translate a state key of torchvision to a key of the encoders here.

    The keys of a ResNet are the same. The DenseNet here consists of the features only, and its layers have one more
    level.
    """
    if not name.startswith("densenet"):
        return key
    key = re.sub(r"(denselayer\d+)\.(norm|conv)\.?([12])\.", r"\1.layers.\2\3.", key)  # old files have an extra dot
    return key.replace("features.", "0.", 1)
