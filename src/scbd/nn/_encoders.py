"""An encoder that is ready for inputs, and the block it makes with a projection head (paper, section 2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd.nn._networks import IdentityLinear, build_encoder
from scbd.nn._small_maps import exact_small_maps
from scbd.nn._stages import Tap, find_stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from scbd.nn._networks import Norm
    from scbd.nn._transform import InputTransform

Representation = Literal["embedding", "intermediate"]


class Features(nn.Module):
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
    >>> features = scbd.nn.Features("small", (4, 32, 32))
    >>> features(torch.zeros(2, 4, 32, 32)).shape
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
        self.encoder = exact_small_maps(build_encoder(encoder, seen[0], of_features=len(seen) == 1, norm=norm))
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

    def train(self, mode: bool = True) -> Features:
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
        """What :meth:`forward` returns, and what the inputs were on the way: a vector a stage, and ``r``.

        Stages are the encoder's last maps at each resolution, averaged over pixels: ``n_stages`` tensors of ``(B, C)``.
        """
        kept: list[Tensor] = []
        self._tap.kept = kept
        try:
            return self(inputs), kept
        finally:
            self._tap.kept = None


class Block(Features):
    """One embedding: encoder, two-layer projection, unit sphere.

    ``z = Proj(r) / |Proj(r)|`` with ``Proj = Linear(R, R) - GELU - Linear(R, D)``; of the encoder ``"linear"``, which
    embeds as it is, ``z = r / |r|``.

    Parameters
    ----------
    encoder, input_shape, transform, norm
        See :class:`Features`.
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
        """Embed intermediate representations ``(B, R)`` on the unit sphere, ``(B, D)`` in float32 or wider."""
        z = self.projection(r)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        # of what is too long for its square to be a number, a direction of length 0 would be left
        overflown = torch.linalg.vector_norm(z.detach(), dim=1, keepdim=True).isinf()
        return F.normalize(z, dim=1).masked_fill(overflown, torch.nan)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed preprocessed inputs ``(B, C, H, W)`` or ``(B, F)`` on the unit sphere, ``(B, D)``."""
        return self.project(super().forward(inputs))

    def width(self, representation: Representation) -> int:
        """Dimension of what :meth:`represent` returns."""
        return self.n_latent if representation == "embedding" else self.n_features

    def represent(self, inputs: Tensor, representation: Representation) -> Tensor:
        """``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``."""
        r = super().forward(inputs)
        return r if representation == "intermediate" else self.project(r)


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
