"""What inputs may be: images or features, in which shape and of which dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGE_DTYPES = ("uint8", "uint16", "float16", "float32")
FEATURE_DTYPES = ("float16", "float32", "float64")


def check_images(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Raise if what has this shape and dtype cannot be images."""
    if len(shape) != 4:
        msg = (
            f"{where} has shape {shape}, images must be 4-D: (cells, channels, height, width). "
            "For one channel, add an axis with images[:, None]."
        )
        raise ValueError(msg)
    if 0 in shape:
        msg = f"{where} has shape {shape}: there is nothing to read along an axis of length 0."
        raise ValueError(msg)
    if channels_last(*shape[1:]):
        n, first, second, third = shape
        msg = (
            f"{where} has shape {shape}, which looks like (cells, height, width, channels), images must be (cells, "
            "channels, height, width): turn them with np.moveaxis(images, -1, 1). If these really are "
            f"{first} channels of {second} × {third} pixels, pad them to squares."
        )
        raise ValueError(msg)
    if dtype.name not in IMAGE_DTYPES or not dtype.isnative:
        msg = f"{where} has dtype {_shown(dtype)}: cast it to one of {', '.join(IMAGE_DTYPES)}."
        raise TypeError(msg)


def channels_last(first: int, second: int, third: int) -> bool:
    """Whether these are height, width and channels rather than channels, height and width.

    No crop is so narrow and has so many channels, be it as many as it is high (squares, turned), or 16 and more of at
    most five pixels' width. Small crops (3 × 3), strips, and squares of any number of channels are let through.
    """
    narrow = 2 * third <= min(first, second)
    return narrow and (first == second or (third <= 5 and min(first, second) >= 16))


def check_features(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Raise if what has this shape and dtype cannot be a table of features."""
    if len(shape) != 2:
        msg = f"{where} has shape {shape}, features must be 2-D: (cells, features)."
        raise ValueError(msg)
    if 0 in shape:
        msg = f"{where} has shape {shape}: there is nothing to read along an axis of length 0."
        raise ValueError(msg)
    if dtype.kind not in "fiub":
        msg = f"{where} holds {dtype.name}, features are numbers: leave columns of text out, or put them into obs."
        raise TypeError(msg)
    if dtype.name not in FEATURE_DTYPES or not dtype.isnative:
        msg = f"{where} has dtype {_shown(dtype)}: cast it to one of {', '.join(FEATURE_DTYPES)}."
        raise TypeError(msg)


def _shown(dtype: np.dtype) -> str:
    """Name of a dtype; with its byte order, where that is what is wrong with it."""
    return dtype.name if dtype.isnative else f"{dtype.name}, in a foreign byte order ({dtype.str})"


class InputKind(NamedTuple):
    """Images or features: how they are told from what cannot be read, and what to do about that."""

    check: Callable[[tuple[int, ...], np.dtype, str], None]
    """Raises if what has this shape and dtype is not of this kind."""
    to_memory: str
    """How to have an array that can be read by row."""
    whole_rows: str
    """How to have a Zarr array whose chunks hold whole rows."""


IMAGES = InputKind(
    check_images,
    "load it into a numpy array, or open the file with scbd.data.open_screen",
    "convert the store with scbd.data.write_screen",
)
FEATURES = InputKind(
    check_features,
    "load it (adata.to_memory()), or open the file with scbd.data.open_screen(path, layer=…)",
    "write it again with chunks=(16, n_features), shards=(16384, n_features): a batch reads the chunks of its rows",
)
