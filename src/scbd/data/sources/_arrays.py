"""Where images lie at rest: one small protocol, and arrays in memory or memory-mapped under it."""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import numpy as np

IMAGE_DTYPES = ("uint8", "uint16", "float16", "float32")


class ImageSource(Protocol):
    """Images that can be read by row: ``shape`` is (N, C, H, W), ``read(rows)`` returns the rows as asked.

    A source is read from one thread at a time.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """As stored."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether rows that lie together are read no faster than others."""
        ...

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order, ``(len(rows), C, H, W)``, as stored and free to change.

        They are written to ``out`` where it is given (contiguous, of that shape and dtype), else to a new array.
        """
        ...


class ArraySource:
    """Images in an array, in memory or memory-mapped.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, dtype uint8, uint16, float16 or float32.
    where
        How an error should call the array, for example ``"obsm['single_cell_images']"``.

    Raises
    ------
    TypeError
        If it is not a numpy array (lazy arrays are refused rather than read through a layer that may return other
        rows than asked), a masked one, or of a dtype that is not read.
    ValueError
        If it is not four-dimensional, has no cells, channels or pixels, or its channels come last.

    Examples
    --------
    >>> source = scbd.data.ArraySource(adata.obsm["single_cell_images"])
    >>> source.read(np.array([3, 1, 2])).shape
    (3, 4, 32, 32)
    """

    def __init__(self, images: Any, where: str = "images") -> None:
        if not isinstance(images, np.ndarray):
            msg = (
                f"{where} is a {type(images).__module__}.{type(images).__name__}, which cannot be read by row safely: "
                "load it into a numpy array, or open the file with scbd.data.open_screen."
            )
            raise TypeError(msg)
        if isinstance(images, np.ma.MaskedArray):
            msg = (
                f"{where} is a masked array, and what its mask hides would be seen: say what is to be there, with "
                "images.filled(0)."
            )
            raise TypeError(msg)
        check_images(images.shape, images.dtype, where)
        self._images = images

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return self._images.shape

    @property
    def dtype(self) -> np.dtype:
        """As stored."""
        return self._images.dtype

    @property
    def in_memory(self) -> bool:
        """Unless memory-mapped."""
        owner: Any = self._images
        while isinstance(owner, np.ndarray):
            owner = owner.base
        return not isinstance(owner, mmap.mmap)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order, as stored and free to change.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        out = target_of(self, rows, out)
        # take would first make a contiguous copy of a view, all of it
        if isinstance(rows, slice) or not self._images.flags.c_contiguous:
            out[...] = self._images[rows]
            return out
        # twice as fast as fancy indexing: with "clip" numpy writes straight to `out`, and nothing is left to clip
        return np.take(self._images, rows, axis=0, out=out, mode="clip")


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
    if _channels_last(*shape[1:]):
        n, first, second, third = shape
        msg = (
            f"{where} has shape {shape}, which looks like (cells, height, width, channels), images must be (cells, "
            "channels, height, width): turn them with np.moveaxis(images, -1, 1). If these really are "
            f"{first} channels of {second} × {third} pixels, pad them to squares."
        )
        raise ValueError(msg)
    if dtype.name not in IMAGE_DTYPES or not dtype.isnative:
        msg = f"{where} has dtype {dtype.str!r}: cast it to one of {', '.join(IMAGE_DTYPES)}."
        raise TypeError(msg)


def _channels_last(first: int, second: int, third: int) -> bool:
    """Whether these are height, width and channels rather than channels, height and width.

    No crop is so narrow and has so many channels, be it as many as it is high (squares, turned), or 16 and more of at
    most five pixels' width. Small crops (3 × 3), strips, and squares of any number of channels are let through.
    """
    narrow = 2 * third <= min(first, second)
    return narrow and (first == second or (third <= 5 and min(first, second) >= 16))


def target_of(source: ImageSource, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray:
    """Where these rows are to be read to, having checked that they exist.

    Raises
    ------
    IndexError
        If there is no such row.
    """
    n, *image_shape = source.shape
    if not isinstance(rows, slice) and len(rows) and not (0 <= rows.min() and rows.max() < n):
        msg = f"Rows {rows.min()} to {rows.max()} were asked for, there are {n} images."
        raise IndexError(msg)
    return np.empty((count_rows(rows, n), *image_shape), source.dtype) if out is None else out


def count_rows(rows: np.ndarray | slice, n: int) -> int:
    """How many of ``n`` rows are asked for."""
    return len(range(*rows.indices(n))) if isinstance(rows, slice) else len(rows)


def non_finite_rows(source: ImageSource, block: int = 4096) -> np.ndarray:
    """Rows whose images hold a NaN or an infinity; integers are not read at all."""
    if source.dtype.kind != "f":
        return np.empty(0, dtype=np.int64)
    starts = range(0, source.shape[0], block)
    bad = [~np.isfinite(source.read(slice(s, s + block))).all(axis=(1, 2, 3)) for s in starts]
    return np.flatnonzero(np.concatenate(bad))
