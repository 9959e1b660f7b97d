"""To how many pixels images are resized: one rule for models, stores and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TypeAlias

# pixels a side of a square, or (height, width)
ImageSize: TypeAlias = int | tuple[int, int]


def resized_to(image_size: ImageSize | None, height: int, width: int) -> tuple[int, int]:
    """Height and width of images after they were resized.

    Parameters
    ----------
    image_size
        `None` leaves images as they are. A number makes small squares of large ones. A pair ``(height, width)`` is
        taken at its word: it may stretch images.
    height, width
        Of the images.

    Raises
    ------
    ValueError
        If ``image_size`` is neither, or a number for images that are not square: they would be squashed.
    """
    if image_size is None:
        return height, width
    sides = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        msg = f"image_size must be a positive number of pixels, or (height, width), got {image_size!r}."
        raise ValueError(msg)
    if sides is not image_size and height != width:
        kept = tuple(max(1, round(sides[0] * side / max(height, width))) for side in (height, width))
        msg = (
            f"image_size={image_size} would squash images of {height} × {width} pixels to a square: crop or pad them, "
            f"keep their proportions with image_size={kept}, or ask for it by name, with image_size={sides}."
        )
        raise ValueError(msg)
    return int(sides[0]), int(sides[1])
