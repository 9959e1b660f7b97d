"""What an encoder makes of images on the way to its features: one vector an image for each resolution."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn


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
