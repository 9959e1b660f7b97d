"""Where inputs are stored: one small protocol, and arrays in memory or memory-mapped under it."""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import numpy as np

from scbd.data.sources._kinds import IMAGES, InputKind


class ImageSource(Protocol):
    """Inputs of cells that can be read by row: images or features; ``read(rows)`` returns the rows as asked.

    A source is read from one thread at a time.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, H, W) of images, (N, F) of features."""
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
        """Inputs of these rows, in this order, ``(len(rows), …)``, as stored and free to change.

        They are written to ``out`` where it is given (contiguous, of that shape and dtype), else to a new array.
        """
        ...


class ArraySource:
    """Images, or features, in an array, in memory or memory-mapped.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, dtype uint8, uint16, float16 or float32; or what ``kind`` says.
    where
        How an error should call the array, for example ``"obsm['single_cell_images']"``.
    kind
        ``scbd.data.IMAGES``, or ``scbd.data.FEATURES``: shape ``(N, F)``, dtype float16, float32 or float64.

    Raises
    ------
    TypeError
        If it is not a numpy array (lazy arrays are refused rather than read through a layer that may return other
        rows than asked), a masked one, or of a dtype that is not read.
    ValueError
        If it is not four-dimensional, has no cells, channels or pixels, or its channels come last; of features, if it
        is not two-dimensional.

    Examples
    --------
    >>> source = scbd.data.ArraySource(adata.obsm["single_cell_images"])
    >>> source.read(np.array([3, 1, 2])).shape
    (3, 4, 32, 32)
    """

    def __init__(self, images: Any, where: str = "images", kind: InputKind = IMAGES) -> None:
        if not isinstance(images, np.ndarray):
            msg = (
                f"{where} is a {type(images).__module__}.{type(images).__name__}, which cannot be read by row safely: "
                f"{kind.to_memory}."
            )
            raise TypeError(msg)
        if isinstance(images, np.ma.MaskedArray):
            msg = (
                f"{where} is a masked array, and what its mask hides would be seen: say what is to be there, with "
                "filled(0)."
            )
            raise TypeError(msg)
        kind.check(images.shape, images.dtype, where)
        self._images = images

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, H, W), or (N, F)."""
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
        """Inputs of these rows, in this order, as stored and free to change.

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


def target_of(source: ImageSource, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray:
    """Where these rows are to be read to, having checked that they exist.

    Raises
    ------
    IndexError
        If there is no such row.
    """
    n, *image_shape = source.shape
    if not isinstance(rows, slice) and len(rows) and not (0 <= rows.min() and rows.max() < n):
        msg = f"Rows {rows.min()} to {rows.max()} were asked for, there are {n}."
        raise IndexError(msg)
    return np.empty((count_rows(rows, n), *image_shape), source.dtype) if out is None else out


def count_rows(rows: np.ndarray | slice, n: int) -> int:
    """How many of ``n`` rows are asked for."""
    return len(range(*rows.indices(n))) if isinstance(rows, slice) else len(rows)


def non_finite_rows(source: ImageSource, block: int = 4096) -> np.ndarray:
    """Rows whose inputs hold a NaN or an infinity; integers are not read at all."""
    if source.dtype.kind != "f":
        return np.empty(0, dtype=np.int64)
    starts = range(0, source.shape[0], block)
    bad = [~np.isfinite(source.read(slice(s, s + block))).all(axis=tuple(range(1, len(source.shape)))) for s in starts]
    return np.flatnonzero(np.concatenate(bad))
