"""Crops made smaller on their way into a store: fewer pixels, fewer bits."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._sizes import resized_to
from scbd.data.sources import IMAGE_DTYPES
from scbd.data.stores._intensities import sampled_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd._sizes import ImageSize
    from scbd.data.stores._crops import Crops


@dataclass(frozen=True, eq=False)
class Conversion:
    """What is done to every image.

    Attributes
    ----------
    image_size
        Height and width; `None` leaves them.
    dtype
        Of the result.
    intensity_range
        For each channel what becomes the lowest and the highest value of an integer dtype, ``(C, 2)``; `None` where
        intensities stay as they are.
    """

    image_size: tuple[int, int] | None
    dtype: np.dtype
    intensity_range: np.ndarray | None

    def __post_init__(self) -> None:
        """Load torch if images are resized: before there are threads, each of which is told to use one core of it."""
        if self.image_size is not None:
            importlib.import_module("scbd.data._resizing")

    def shape(self, channels: int, height: int, width: int) -> tuple[int, int, int]:
        """Of a converted image."""
        return (channels, *(self.image_size or (height, width)))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Convert images ``(N, C, H, W)``."""
        if self.image_size not in (None, images.shape[2:]):
            from scbd.data._resizing import resized

            images = resized(images, self.image_size).numpy()
        if self.intensity_range is not None:
            low, high = self.intensity_range.T[:, :, None, None]
            highest = np.iinfo(self.dtype).max
            images = np.subtract(images, low, dtype=np.float32)
            images *= highest / (high - low)
            images.clip(0, highest, out=images)
        if self.dtype.kind == "u" and images.dtype.kind == "f":
            np.round(images, out=images)
        return np.ascontiguousarray(images, dtype=self.dtype)


def conversion(
    plates: Sequence[Crops], image_size: ImageSize | None, dtype: Any, intensity_range: Any, seed: int
) -> Conversion:
    """What was asked for, checked; the range of intensities from a sample of crops where it is needed and not given.

    Raises
    ------
    TypeError, ValueError
        If the dtype is not one of images, or does not hold what is stored, the range is none, or not needed, the size
        would squash a plate's images, or a crop of the sample has NaN or infinite pixels.
    """
    stored = plates[0].images.dtype
    wanted = stored if dtype is None else np.dtype(dtype)
    if wanted.name not in IMAGE_DTYPES:
        msg = f"dtype={wanted.name!r} is not one of images: use {', '.join(IMAGE_DTYPES)}."
        raise TypeError(msg)
    if wanted == np.float16 and stored == np.uint16:
        msg = "dtype='float16' rounds whole numbers above 2,048, and has none above 65,504: leave uint16 as it is."
        raise ValueError(msg)
    size = _size(plates, image_size)
    if wanted.kind == "f" or wanted == stored:
        if intensity_range is not None:
            msg = f"From {stored} to {wanted} intensities stay as they are: leave intensity_range out."
            raise ValueError(msg)
        return Conversion(size, wanted, None)
    n_channels = plates[0].images.shape[1]
    found = sampled_range(plates, seed) if intensity_range is None else np.asarray(intensity_range, dtype=np.float32)
    if found.shape not in ((2,), (n_channels, 2)) or not (found[..., 0] < found[..., 1]).all():
        msg = (
            f"intensity_range must be (low, high), for all or for each of {n_channels} channels, got {found.tolist()}."
        )
        raise ValueError(msg)
    return Conversion(size, wanted, np.broadcast_to(found, (n_channels, 2)))


def _size(plates: Sequence[Crops], image_size: ImageSize | None) -> tuple[int, int] | None:
    """Of all plates; `None` where it stays."""
    for plate in plates:
        try:
            size = resized_to(image_size, *plate.images.shape[2:])
        except ValueError as error:
            msg = f"{plate.name}: {error}"
            raise ValueError(msg) from error
    return None if image_size is None else size
