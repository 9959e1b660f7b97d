"""Resize crops once, rather than in every epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from scbd._sizes import resized_to
from scbd.data.sources import ArraySource

if TYPE_CHECKING:
    from scbd._sizes import ImageSize

_BLOCK = 512


def resize_images(images: np.ndarray, image_size: ImageSize, *, out: np.ndarray | None = None) -> np.ndarray:
    """Resize images to so many pixels a side (bilinear, antialiased), in their own dtype.

    Models take ``image_size`` and resize as they go, which suits a GPU. On a processor, and for crops much larger than
    what is trained on, it pays to do it once: an epoch then reads and computes less. Integers are rounded.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, in memory or memory-mapped; uint8, uint16, float16 or float32.
    image_size
        Pixels a side; images that are not square want a pair ``(height, width)``, which may stretch them.
    out
        Array to write to, for example a memory-map; a new one by default.

    Returns
    -------
    Shape ``(N, C, image_size, image_size)``, or ``(N, C, height, width)``; dtype of ``images``.

    Raises
    ------
    TypeError, ValueError
        If ``images`` are not images, ``image_size`` is not positive or would squash images that are not square, or
        ``out`` is of another shape or dtype.

    Examples
    --------
    >>> scbd.data.resize_images(adata.obsm["single_cell_images"], 16).shape
    (240, 4, 16, 16)
    """
    source = ArraySource(images)
    n, channels, *stored = source.shape
    size = resized_to(image_size, *stored)
    shape = (n, channels, *size)
    if out is None:
        out = np.empty(shape, source.dtype)
    elif out.shape != shape or out.dtype != source.dtype:
        msg = f"out has shape {out.shape} and dtype {out.dtype}, the resized images {shape} and {source.dtype}."
        raise ValueError(msg)
    for start in range(0, n, _BLOCK):
        block = resized(source.read(slice(start, start + _BLOCK)), size)
        # a weighted mean never leaves the range of its dtype
        out[start : start + _BLOCK] = (block.round_() if source.dtype.kind == "u" else block).numpy()
    return out


def resized(images: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """Bilinear and antialiased, float32."""
    return F.interpolate(torch.from_numpy(images).float(), size, mode="bilinear", antialias=True, align_corners=False)
