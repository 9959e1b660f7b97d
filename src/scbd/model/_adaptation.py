"""Normalisation statistics for cells from elsewhere: learned layer by layer, and put in for a moment."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from scbd.nn import Alignment, ChannelSums, FeatureScaling, Moments, align

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from scbd.model._contract import EmbeddingModule

_PREPROCESS = "preprocess"


class _Normaliser(NamedTuple):
    """``(x - mean) / sd``, as it was when the module was trained."""

    name: str
    mean: Tensor
    sd: Tensor
    added: float
    """To the variance, where it is that which is kept; 0 where it is the standard deviation."""

    @classmethod
    def of(cls, name: str, module: nn.Module) -> _Normaliser:
        if isinstance(module, _BatchNorm):
            mean, variance = module.running_mean, module.running_var
            assert mean is not None
            assert variance is not None
            return cls(name, mean.clone(), (variance + module.eps).sqrt(), module.eps)
        return cls(name, module.mean.clone(), module.sd.clone(), 0.0)  # type: ignore[operator]

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """What it makes of inputs ``(B, C, ...)``."""
        shape = (1, -1, *(1,) * (inputs.ndim - 2))
        return (inputs.float() - self.mean.view(shape)) / self.sd.view(shape)

    def buffers(self, alignment: Alignment) -> dict[str, Tensor]:
        """Its buffers once aligned, by their names in the module."""
        shift, ratio = (part.to(self.mean).view(self.mean.shape) for part in alignment)
        mean, sd = self.mean + self.sd * shift, self.sd * ratio
        if self.added:
            variance = (sd.square() - self.added).clamp(min=0)
            return {f"{self.name}.running_mean": mean, f"{self.name}.running_var": variance}
        return {f"{self.name}.mean": mean, f"{self.name}.sd": sd}


def reference_moments(
    module: EmbeddingModule, batches: Iterable[tuple[Tensor, Tensor]], n_groups: int
) -> dict[str, Moments]:
    """What some cells that were trained on look like to each normalisation that they pass.

    Parameters
    ----------
    module
        Trained; put in evaluation mode.
    batches
        Inputs as stored, and the group of each cell, such as its environment.
    n_groups
        Number of groups: variances are those within.
    """
    sums: dict[str, ChannelSums] = {}
    groups = torch.empty(0)

    def count(normaliser: _Normaliser, normalised: Tensor) -> None:
        sums.setdefault(normaliser.name, ChannelSums(n_groups)).add(normalised, groups)

    with _watched(module, lambda normaliser, _, inputs: count(normaliser, normaliser.of_inputs(inputs))):
        for inputs, groups in batches:  # noqa: B007 - groups are read by the hook
            prepared = module.preprocess(inputs.to(module.device))
            if module.preprocess.standardize:
                count(_Normaliser.of(_PREPROCESS, module.preprocess), prepared)
            _through_networks(module, prepared)
    return {name: part.moments() for name, part in sums.items()}


def adapted_buffers(
    module: EmbeddingModule, batches: Iterable[tuple[Tensor, Tensor]], n_groups: int, reference: Mapping[str, Moments]
) -> dict[str, Tensor]:
    """Statistics with which cells leave each normalisation as those of a reference do, by the names of buffers.

    Cells are read once: at each batch, a layer is aligned by all cells so far, and the layers behind it see what it
    makes of the batch then. Batches are best drawn at random.

    Parameters
    ----------
    module
        Trained, and left as it was but for evaluation mode.
    batches, n_groups
        As for :func:`reference_moments`.
    reference
        What :func:`reference_moments` found.
    """
    sums = {name: ChannelSums(n_groups) for name in reference}
    found: dict[str, Tensor] = {}
    groups = torch.empty(0)

    # convolutions pad inputs with their mean, which must be right; their scale does not pass a BatchNorm, and that of
    # pixels has in it how large cells are
    centred_only = {_PREPROCESS} if len(reference) > 1 else set()

    def aligned(normaliser: _Normaliser, normalised: Tensor) -> dict[str, Tensor]:
        name = normaliser.name
        sums[name].add(normalised, groups)
        return normaliser.buffers(align(reference[name], sums[name].moments(), scale=name not in centred_only))

    def renew(normaliser: _Normaliser, layer: nn.Module, inputs: Tensor) -> None:
        if normaliser.name not in reference:
            return
        buffers = aligned(normaliser, normaliser.of_inputs(inputs))
        for name, values in buffers.items():
            layer.get_buffer(name.rpartition(".")[2]).copy_(values)
        found.update(buffers)

    own, prepared = _Normaliser.of(_PREPROCESS, module.preprocess), _PreparedNew(module.preprocess)
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with _watched(module, renew):
            for stored, groups in batches:  # noqa: B007 - groups are read by the hook
                inputs = stored.to(module.device)
                if _PREPROCESS in reference:
                    _put(module, {name: kept[name] for name in (f"{_PREPROCESS}.mean", f"{_PREPROCESS}.sd")})
                    buffers = aligned(own, prepared(inputs))
                    _put(module, buffers)
                    found.update(buffers)
                _through_networks(module, module.preprocess(inputs))
    finally:
        _put(module, kept)
    return found


class _PreparedNew:
    """Inputs of new cells behind a preprocess that is not theirs yet.

    Features are cut off about where new cells are, as they will be once it is aligned: cut off about where training
    cells are, all of a plate that is far away would be the same.
    """

    def __init__(self, preprocess: nn.Module) -> None:
        self._preprocess = preprocess
        self._window: tuple[Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if not isinstance(self._preprocess, FeatureScaling) or self._preprocess.clip is None:
            prepared: Tensor = self._preprocess(inputs)
            return prepared
        scaled = self._preprocess.scaled(inputs)
        if self._window is None:  # of the first batch
            self._window = self._preprocess.limits(scaled)
        return scaled.clamp(*self._window)


@contextmanager
def put_in(module: nn.Module, buffers: Mapping[str, Tensor]) -> Generator[None]:
    """The module with other values of some buffers, until the end of the block."""
    kept = {name: module.get_buffer(name).clone() for name in buffers}
    try:
        _put(module, buffers)
        yield
    finally:
        _put(module, kept)


def _put(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, values in buffers.items():
            module.get_buffer(name).copy_(values)


@contextmanager
def _watched(module: EmbeddingModule, look: Callable[[_Normaliser, nn.Module, Tensor], None]) -> Generator[None]:
    """Have what comes to each BatchNorm looked at; without gradient, and uncompiled, where hooks are not called."""
    module.eval()
    handles = []
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            normaliser = _Normaliser.of(name, layer)
            handles.append(
                layer.register_forward_pre_hook(
                    lambda layer, inputs, normaliser=normaliser: look(normaliser, layer, inputs[0])
                )
            )
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _through_networks(module: EmbeddingModule, prepared: Tensor) -> None:
    for network in (module.content, module.style):
        if network is not None:
            network.represent(prepared, "embedding")
