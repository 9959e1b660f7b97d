"""Images of different sizes, or that are not square, brought to one: padded or cut about their middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from scbd._sizes import resized_to

if TYPE_CHECKING:
    from collections.abc import Iterable

# a square that holds the largest image, one that lies in the smallest, or so many pixels
Fit: TypeAlias = Literal["pad", "crop"] | int | tuple[int, int]


def fitted_size(fit: Fit, sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Height and width that images of these sizes are brought to.

    Raises
    ------
    ValueError
        If ``fit`` is neither a word that is known nor a size.
    """
    if fit in ("pad", "crop"):
        side = max(map(max, sizes)) if fit == "pad" else min(map(min, sizes))
        return side, side
    try:
        return resized_to(fit, 1, 1)  # type: ignore[arg-type]
    except ValueError as error:
        msg = f"fit={fit!r} is not known: use 'pad', 'crop', a number of pixels, or (height, width)."
        raise ValueError(msg) from error


def centred(images: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Images ``(…, h, w)`` on a canvas of zeros ``(…, *size)``.

    Pixel ``h // 2``, in which the middle lies, becomes pixel ``size[0] // 2``; likewise in width.
    """
    out = np.zeros((*images.shape[:-2], *size), images.dtype)
    # of each axis where the canvas begins in the image, which may be before it
    starts = [h // 2 - side // 2 for h, side in zip(images.shape[-2:], size, strict=True)]
    inside = [slice(max(s, 0), max(s + side, 0)) for s, side in zip(starts, size, strict=True)]
    part = images[..., inside[0], inside[1]]
    places = [slice(max(-s, 0), max(-s, 0) + n) for s, n in zip(starts, part.shape[-2:], strict=True)]
    out[..., places[0], places[1]] = part
    return out
