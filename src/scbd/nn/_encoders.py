"""Encoders of images or features, without and with a projection head (paper, section 2).

An encoder maps an input to its intermediate representation ``r``. A block is an encoder followed by a projection head,
which maps ``r`` to an embedding of unit length (z_c or z_s).
"""

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
    """Encoder of images or features into the intermediate representation ``r = Enc(x)``, without a projection head.

    Convolutions use the channels-last memory layout. On very small feature maps, they skip the multiplications with
    zero padding. Both make the encoder faster and do not change the function that it computes.

    Parameters
    ----------
    encoder
        Name of an encoder, or a module, see :func:`build_encoder`.
    input_shape
        Shape of one preprocessed input: ``(C, H, W)`` for images, or ``(F,)`` for features, before ``transform``.
    transform
        Linear map (:class:`InputTransform`) that is applied to features before the encoder. By default features are not
        transformed.
    norm
        Normalisation layers of an encoder that is given by name, see :func:`build_encoder`.

    Attributes
    ----------
    n_features
        Dimension ``R`` of the intermediate representation ``r``.
    n_stages
        Number of stages of the encoder. A stage computes feature maps of one resolution, see
        :meth:`forward_with_intermediates`.
    frozen
        Whether the encoder is excluded from training, see :meth:`freeze`.

    Raises
    ------
    ValueError
        If the encoder does not accept inputs of shape ``input_shape``, or does not return one feature vector per cell.

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
        # the encoder's parameters that are trained unless the encoder is frozen
        self._trainable_parameters: list[nn.Parameter] = []
        seen = input_shape if transform is None else transform.output_shape
        self.transform = transform
        self.encoder = build_encoder(encoder, seen[0], of_features=len(seen) == 1, norm=norm)
        self.n_features, stages = _probe_encoder(self.encoder, seen)
        self.n_stages = len(stages)
        self._tap = PoolingHook()
        for module in (*stages, self.encoder):
            module.register_forward_hook(self._tap)
        # channels-last is the memory layout in which convolutions are fastest, and the layout of the images that
        # Preprocess returns
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        """Encode images ``(B, C, H, W)`` or features ``(B, F)`` as intermediate representations ``(B, R)``.

        The inputs are preprocessed images, or scaled features.
        """
        return self.encoder(inputs if self.transform is None else self.transform(inputs))

    def freeze(self, frozen: bool) -> None:
        """Exclude the encoder from training (freeze it), or include it again.

        A frozen encoder keeps its weights and BatchNorm's running statistics. The projection head and other layers that
        follow the encoder continue to be trained.

        Parameters
        ----------
        frozen
            Whether the encoder is frozen (True) or trained (False).
        """
        if frozen and not self.frozen:
            self._trainable_parameters = [p for p in self.encoder.parameters() if p.requires_grad]
        for parameter in self._trainable_parameters:
            parameter.requires_grad_(not frozen)
        self.frozen = frozen
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        """Switch the module to training mode or to evaluation mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def width(self, representation: Representation) -> int:
        """Return the dimension ``R`` of intermediate representations; the argument ``representation`` has no effect."""
        return self.n_features

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """Return the intermediate representations ``(B, R)`` of preprocessed inputs.

        The argument ``representation`` has no effect: without a projection head, ``r`` is also the embedding.
        """
        return self(inputs)

    def show(self, look: Callable[[Tensor], None]) -> RemovableHandle:
        """Call the function ``look`` with the intermediate representations ``(B, R)`` of every forward pass.

        The calls end when the returned handle is removed.
        """
        return self.encoder.register_forward_hook(lambda _module, _inputs, r: look(r))

    def forward_with_intermediates(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return ``r``, and the feature maps at the end of every stage of the encoder, averaged over pixels.

        A stage consists of the layers that compute feature maps of one resolution, such as a stage of a ResNet. The
        last feature map of a stage is averaged over pixels, which gives one vector per cell.

        Returns
        -------
        ``r``, ``(B, R)``, and a list of the intermediate representations: one tensor ``(B, C)`` per stage (``n_stages``
        tensors), with C the stage's number of channels, followed by ``r``.
        """
        kept: list[Tensor] = []
        self._tap.kept = kept
        try:
            return Encoder.forward(self, inputs), kept
        finally:
            self._tap.kept = None


class Block(Encoder):
    """Encoder followed by a two-layer projection onto the unit sphere, which computes one embedding (z_c or z_s).

    With the intermediate representation ``r`` of the encoder, the embedding is ``z = Proj(r) / |Proj(r)|`` with ``Proj
    = Linear(R, R) - GELU - Linear(R, D)``. The encoder ``"linear"`` has no projection: its embedding is ``z = r /
    |r|``.

    Parameters
    ----------
    encoder, input_shape, transform, norm
        See :class:`Encoder`.
    n_latent
        Dimension ``D`` of the embedding.

    Attributes
    ----------
    n_features, n_latent
        Dimension ``R`` of the intermediate representation, and dimension ``D`` of the embedding.

    Raises
    ------
    ValueError
        If the encoder is ``"linear"``, and ``n_latent`` differs from the number of its input features.

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
            layers = [nn.Linear(n_features, n_features), nn.GELU(), nn.Linear(n_features, n_latent)]
            self.projection = nn.Sequential(*layers)
        self.n_latent = n_latent

    def project(self, r: Tensor) -> Tensor:
        """Project intermediate representations ``r (B, R)`` to vectors ``(B, D)``, not yet scaled to unit length.

        The result is float32, or float64 if ``r`` is float64.
        """
        h = self.projection(r)
        return h.to(torch.promote_types(h.dtype, torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed preprocessed images ``(B, C, H, W)``, or features ``(B, F)``, on the unit sphere, ``(B, D)``."""
        return on_sphere(self.project(super().forward(inputs)))

    def forward_with_intermediates(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the projections ``(B, D)``, not yet scaled to unit length, and the intermediate representations.

        The intermediate representations are those of :meth:`Encoder.forward_with_intermediates`: a list of one tensor
        ``(B, C)`` per stage of the encoder, followed by ``r (B, R)``.
        """
        r, passed = super().forward_with_intermediates(inputs)
        return self.project(r), passed

    def width(self, representation: Representation) -> int:
        """Return the dimension of a representation: ``D`` for ``"embedding"``, or ``R`` for ``"intermediate"``."""
        return self.n_latent if representation == "embedding" else self.n_features

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """Return the embeddings ``z (B, D)``, or the intermediate representations ``r (B, R)``, of preprocessed inputs.

        The argument ``representation`` is ``"embedding"`` or ``"intermediate"``.
        """
        r = super().forward(inputs)
        return r if representation == "intermediate" else on_sphere(self.project(r))


def on_sphere(h: Tensor) -> Tensor:
    """Scale each vector of a batch ``(B, D)`` to unit length; a vector whose squared length overflows becomes NaN."""
    # without the mask ``overflown``, a vector whose length overflows would be divided by infinity and become the zero
    # vector
    overflown = torch.linalg.vector_norm(h.detach(), dim=1, keepdim=True).isinf()
    return F.normalize(h, dim=1).masked_fill(overflown, torch.nan)


def _probe_encoder(encoder: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, list[nn.Module]]:
    """Run an encoder on two inputs; return its number of features, and the module at the end of each stage.

    A stage consists of the layers that compute feature maps of one resolution.

    Raises
    ------
    ValueError
        If the encoder does not accept inputs of ``input_shape``, or does not return one feature vector per input.
    """
    was_training = encoder.training
    encoder.eval()  # evaluation mode, so that this trial run does not change BatchNorm's running statistics
    try:
        with torch.no_grad():
            # a batch of two inputs, so that an encoder that removes the batch dimension is detected; the inputs are
            # filled with a linear ramp, so that they differ without random numbers
            inputs = torch.linspace(0, 1, 2 * math.prod(input_shape)).view(2, *input_shape)
            features, stages = find_stages(encoder, inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        what, axes = ("features", "") if len(input_shape) == 1 else ("images", " (channels, height, width)")
        msg = f"The encoder does not take {what} of shape {input_shape}{axes}: {error}"
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
# number of groups of channels that GroupNorm normalises; it divides the number of channels of every layer of the
# encoders that are built by name
_N_GROUPS = 8
# constructors of the layers that replace BatchNorm, by value of the argument ``norm``
_NORM_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "instance": partial(nn.InstanceNorm2d, affine=True),
    "group": partial(nn.GroupNorm, _N_GROUPS),
}


def small_encoder(n_channels: int) -> nn.Module:
    """Build an encoder of four 3 x 3 convolutions with stride 2, which returns 256 features.

    It is intended for images up to about 64 x 64 pixels and for quick runs.
    """
    layers: list[nn.Module] = []
    width_in = n_channels
    for width in (32, 64, 128, 256):
        convolution = nn.Conv2d(width_in, width, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.GELU()]
        width_in = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _resnet(name: str, n_channels: int) -> nn.Module:
    """Build a ResNet; its first layers (7 x 7, stride 2, max-pool) are torchvision's.

    ``"resnet18"`` returns 512 features, ``"resnet50"`` returns 2,048.
    """
    from monai.networks.nets import resnet

    # with these arguments, MONAI's ResNets have the same outputs, and the same names of weights in the state dict, as
    # torchvision's ResNets
    how = {"conv1_t_stride": 2, "bias_downsample": False, "feed_forward": False}
    return getattr(resnet, name)(spatial_dims=2, n_input_channels=n_channels, **how)


def densenet121(n_channels: int) -> nn.Module:
    """Build a DenseNet-121 without its classifier, which returns 1,024 features."""
    from monai.networks.nets.densenet import DenseNet121

    features = DenseNet121(spatial_dims=2, in_channels=n_channels, out_channels=1).features
    return nn.Sequential(features, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())


ENCODERS: dict[str, Callable[[int], nn.Module]] = {
    "small": small_encoder,
    "resnet18": partial(_resnet, "resnet18"),
    "resnet50": partial(_resnet, "resnet50"),
    "densenet121": densenet121,
}


# names of the encoders for which torchvision provides pre-trained weights
_PRETRAINED_ENCODERS = ("resnet18", "resnet50", "densenet121")


class IdentityLinear(nn.Linear):
    """Linear encoder of features, initialised to the identity; it has no offset and no projection head follows it."""

    def __init__(self, n_features: int) -> None:
        super().__init__(n_features, n_features, bias=False)
        nn.init.eye_(self.weight)


def mlp(n_features: int) -> nn.Module:
    """Build an encoder of features with two layers of 256 and 128 units, which returns 128 features."""
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
    """Build an encoder of images or features by name, or copy an encoder that is given as a module.

    Parameters
    ----------
    encoder
        Name of the encoder. For images: ``"small"``, ``"resnet18"``, ``"resnet50"`` or ``"densenet121"``. For features:
        ``"linear"`` or ``"mlp"``. Alternatively any module that takes float images ``(B, C, H, W)``, or features ``(B,
        F)``, and returns features ``(B, R)``. A module is copied with its weights to the CPU, where every model is
        created.
    n_channels
        Number of channels ``C`` of the images, or number of input features ``F``.
    of_features
        Whether the inputs are features. By default the inputs are images.
    norm
        Normalisation layers of an encoder of images that is given by name. Activations are normalised as follows:

        - ``"batch"`` (default): each channel with its mean and variance over all cells (BatchNorm). Running statistics
          are kept during training.
        - ``"instance"``: each channel of each image with its own mean and variance. This removes differences between
          images in stain intensity and contrast, and requires no statistics of a new plate. Feature maps must be larger
          than one pixel.
        - ``"group"``: the channels of each image in eight groups, each group with its own mean and variance.
    weights
        File with a state dict whose weights have torchvision's names, for ``"resnet18"``, ``"resnet50"`` or
        ``"densenet121"``, for example pre-trained on photographs. By default weights are random. The returned encoder
        can be given to any model as its encoder.

    Returns
    -------
    The encoder, a module on the CPU.

    Raises
    ------
    FileNotFoundError
        If the file ``weights`` does not exist.
    ValueError
        If the name or ``norm`` is unknown, if the weights do not fit the encoder, or if ``norm`` is not ``"batch"`` for
        an encoder of features, a module or an encoder with ``weights``.
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
        return copy.deepcopy(encoder).cpu()  # moved to the CPU, since a module loaded from a file may be on a GPU
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
    if norm != "batch":
        # normalisation layers are replaced here, since MONAI's own argument affects only the first layer of a ResNet
        make = _NORM_LAYERS[norm]
        _replace_modules(built, lambda child: make(child.num_features) if isinstance(child, nn.BatchNorm2d) else None)
    if weights is not None:
        _load_weights(built, encoder, Path(weights))
    return built


def _replace_modules(network: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace, in place, each submodule of a network for which ``make`` returns a new module; return the network."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if (new := make(child)) is not None:
                setattr(module, name, new)
    return network


# largest number of output pixels of a convolution for which one matrix product per output pixel is faster than
# PyTorch's convolution
_MAX_SMALL_MAP_PIXELS = 4


class SmallMapConv2d(nn.Conv2d):
    """Convolution that, on a CPU, skips the multiplications with zero padding if its output has at most four pixels.

    For larger outputs, and on devices other than the CPU, :class:`torch.nn.Conv2d` is used. The result is the same.
    """

    @classmethod
    def of(cls, convolution: nn.Module) -> SmallMapConv2d | None:
        """Return a :class:`SmallMapConv2d` that replaces a padded convolution and uses the same parameters.

        The result is `None` if ``convolution`` is not a convolution, or if this class does not support it: only
        ungrouped, undilated convolutions with zero padding smaller than the kernel are supported.
        """
        if type(convolution) is not nn.Conv2d:
            return None
        is_supported = (
            convolution.groups == 1
            and convolution.dilation == (1, 1)
            and convolution.padding_mode == "zeros"
            and not isinstance(convolution.padding, str)
            and any(convolution.padding)
            # if padding is as wide as the kernel, some output pixels depend on padding only
            and all(p < k for p, k in zip(convolution.padding, convolution.kernel_size, strict=True))
        )
        if not is_supported:
            return None
        # on the meta device, no initial weights are drawn; they would be discarded, since the weights of the original
        # convolution are used
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
        """Convolve a batch of images or feature maps, ``(B, C, H, W)``."""
        height, width = (
            (size + 2 * int(self.padding[axis]) - self.kernel_size[axis]) // self.stride[axis] + 1
            for axis, size in enumerate(images.shape[2:])
        )
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

    def _touching(self, pixel: int, size: int, axis: int) -> tuple[slice, slice]:
        """Return two slices along one axis of the images, for the output pixel at position ``pixel``.

        The first selects the input pixels (of ``size`` pixels along this axis) that the kernel covers. The second
        selects the part of the kernel that covers them. The other part of the kernel covers zero padding.
        """
        first = pixel * self.stride[axis] - int(self.padding[axis])
        start, stop = max(first, 0), min(first + self.kernel_size[axis], size)
        return slice(start, stop), slice(start - first, stop - first)


def find_stages(encoder: nn.Module, images: Tensor) -> tuple[Tensor, list[nn.Module]]:
    """Run an encoder; return its features, and the modules that return its last feature map at each resolution.

    Each returned module is the end of a stage, for example of a stage of a ResNet or a transition of a DenseNet. The
    modules are found by running the encoder, so that any architecture is supported. Two kinds of feature maps are
    excluded, because they contain no information that the features do not contain: maps of a single pixel, and maps
    whose average over pixels is the output of the encoder.

    Parameters
    ----------
    encoder
        Encoder in evaluation mode, so that running it does not change its statistics.
    images
        At least two different images, ``(B, C, H, W)``.

    Returns
    -------
    The encoder's features of the images, ``(B, R)``, and the modules at the ends of the stages, in the order in which
    they run.
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
    """Forward hook that appends outputs of modules, averaged over pixels, to the list ``kept``, unless it is `None`."""

    def __init__(self) -> None:
        self.kept: list[Tensor] | None = None

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        """Append a module's output to the list ``kept``, unless ``kept`` is `None`.

        Feature maps ``(B, C, H, W)`` are averaged over pixels.
        """
        if self.kept is not None:
            self.kept.append(average_over_pixels(output) if output.ndim == 4 else output)


def average_over_pixels(maps: Tensor) -> Tensor:
    """Average feature maps ``(B, C, H, W)`` over their pixels, ``(B, C)``."""
    # feature maps are stored channels-last; averaging in this order of axes is ten times faster than ``mean((2, 3))``
    return maps.permute(0, 2, 3, 1).flatten(1, 2).mean(1)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return isinstance(other, Tensor) and one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _load_weights(encoder: nn.Module, name: str, path: Path) -> None:
    """Load a file of weights with torchvision's names into an encoder; weights of a classifier are ignored.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file does not hold a state dict, or the weights do not fit the encoder.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        # BatchNorm's counters of training batches, which older files lack; they have no effect on the outputs
        counters = {key: value for key, value in encoder.state_dict().items() if key.endswith("num_batches_tracked")}
        kept = [key for key in state if not key.startswith(("fc.", "classifier."))]
        state = {_translate_torchvision_key(key, name): state[key] for key in kept}
        encoder.load_state_dict(counters | state)
    except FileNotFoundError:
        raise
    except (AttributeError, EOFError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        msg = f"{path} holds no weights of torchvision's {name} for as many channels as there are: {error}"
        raise ValueError(msg) from error


def _translate_torchvision_key(key: str, name: str) -> str:
    """Translate the name of a weight in torchvision's state dict to its name in the encoders of this file.

    For a ResNet, the names are the same. The DenseNet of this file holds only the feature extractor of torchvision's
    DenseNet, and its dense layers have an additional level of modules called ``layers``.
    """
    if not name.startswith("densenet"):
        return key
    # in older files, these names have an additional dot, for example ``norm.1`` instead of ``norm1``
    key = re.sub(r"(denselayer\d+)\.(norm|conv)\.?([12])\.", r"\1.layers.\2\3.", key)
    return key.replace("features.", "0.", 1)
