"""Sources from which the images or features of cells are read by row, with checks of their shape and dtype.

The file holds the protocol of a source, the source for arrays in memory, and a source that selects channels or columns.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pandas as pd

from scbd._shared.checks import check_unmasked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


IMAGE_DTYPES = ("uint8", "uint16", "float16", "float32")
FEATURE_DTYPES = ("float16", "float32", "float64")
# name of the attribute by which scbd recognises Zarr stores, and arrays in them, that it has written itself
STORE_KEY = "scbd_store"
# number of hexadecimal digits to which a digest (hash) of cells is shortened; 16 digits suffice to distinguish tables
_N_DIGEST_DIGITS = 16


def check_images(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Raise an error if an array of this shape and dtype cannot hold images of cells, ``(N, C, H, W)``.

    Parameters
    ----------
    shape, dtype
        Shape and dtype of the array.
    where
        Name of the array, for error messages.

    Raises
    ------
    ValueError
        If the array is not four-dimensional, has an axis of length 0, or seems to have its channels on the last axis
        (:func:`has_channels_last`).
    TypeError
        If the dtype is not one of ``IMAGE_DTYPES``, or its byte order is not that of this machine.
    """
    if len(shape) != 4:
        msg = (
            f"{where} has shape {shape}, images must be 4-D: (cells, channels, height, width). "
            "For one channel, add an axis with images[:, None]."
        )
        raise ValueError(msg)
    _check_not_empty(shape, where)
    if has_channels_last(*shape[1:]):
        msg = (
            f"{where} has shape {shape}, which looks like (cells, height, width, channels), images must be (cells, "
            "channels, height, width): turn them with np.moveaxis(images, -1, 1)."
        )
        raise ValueError(msg)
    _check_dtype(dtype, IMAGE_DTYPES, where)


def has_channels_last(first: int, second: int, third: int) -> bool:
    """Return whether an image shape looks like (height, width, channels) rather than (channels, height, width).

    The result is true if both of these conditions hold:

    - The third axis is at most half as long as the shorter of the first two axes.
    - The first two axes are equally long (as in a square image), or the third axis has at most 5 entries and each of
      the first two axes has at least 16 entries.

    An image with channels on the first axis hardly ever meets these conditions: it would need as many channels as rows
    of pixels, or at least 16 channels and a width of at most 5 pixels. Small crops (3 × 3 pixels), narrow strips, and
    square images with any number of channels on the first axis are therefore accepted.

    Parameters
    ----------
    first, second, third
        Lengths of the three axes of an image.
    """
    narrow = 2 * third <= min(first, second)
    return narrow and (first == second or (third <= 5 and min(first, second) >= 16))


def check_features(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Raise an error if an array of this shape and dtype cannot hold a table of features of cells, ``(N, F)``.

    Parameters
    ----------
    shape, dtype
        Shape and dtype of the array.
    where
        Name of the array, for error messages.

    Raises
    ------
    ValueError
        If the array is not two-dimensional, or has an axis of length 0.
    TypeError
        If the values are not numbers, the dtype is not one of ``FEATURE_DTYPES``, or its byte order is not that of this
        machine.
    """
    if len(shape) != 2:
        msg = f"{where} has shape {shape}, features must be 2-D: (cells, features)."
        raise ValueError(msg)
    _check_not_empty(shape, where)
    if dtype.kind not in "fiub":
        msg = f"{where} holds {dtype.name}, features are numbers: leave columns of text out, or put them into obs."
        raise TypeError(msg)
    _check_dtype(dtype, FEATURE_DTYPES, where)


def _check_dtype(dtype: np.dtype, allowed: Sequence[str], where: str) -> None:
    """Raise ``TypeError`` if a dtype is not among the allowed ones, or its byte order is not that of this machine."""
    if dtype.name not in allowed or not dtype.isnative:
        name = dtype.name if dtype.isnative else f"{dtype.name}, in a foreign byte order ({dtype.str})"
        msg = f"{where} has dtype {name}: cast it to one of {', '.join(allowed)}."
        raise TypeError(msg)


def _check_not_empty(shape: tuple[int, ...], where: str) -> None:
    """Raise ``ValueError`` if an axis of an array has length 0."""
    if 0 in shape:
        msg = f"{where} has shape {shape}: there is nothing to read along an axis of length 0."
        raise ValueError(msg)


class InputKind(NamedTuple):
    """Kind of data that an encoder takes as input, images or features, with the check of arrays of this kind."""

    check: Callable[[tuple[int, ...], np.dtype, str], None]
    """Function that raises an error if an array of the given shape and dtype cannot hold data of this kind.

    Its third argument is the name of the array, for the error message.
    """
    to_memory: str
    """Advice on obtaining a numpy array, which ends the error message for an object that is not a numpy array."""


IMAGES = InputKind(check_images, "load it into a numpy array, or open the file with scbd.data.open_screen")
FEATURES = InputKind(
    check_features, "load it (adata.to_memory()), or open the file with scbd.data.open_screen(path, layer=…)"
)


class ImageSource(Protocol):
    """Protocol of a source of images or features, with one row per cell, which are read by row with ``read(rows)``.

    A source may have two further attributes. If ``concurrent`` is true, several threads may read from the source at
    once; without this attribute, only one thread at a time may. The attribute ``chunk_rows`` is the number of rows per
    chunk of the storage; without this attribute, each row can be read alone.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all images, ``(cells, channels, height, width)``, or of all features, ``(cells, features)``."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype in which the images or features are stored."""
        ...

    @property
    def in_memory(self) -> bool:
        """True if all images or features are in memory, so that scattered rows are read as fast as adjacent rows."""
        ...

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Read the images or features of the given rows, in the given order.

        Parameters
        ----------
        rows
            Row numbers (one row per cell), or a slice of rows.
        out
            Contiguous array to write to, of shape ``(number of rows, …)`` and the dtype of the source. Default: a new
            array.

        Returns
        -------
        Images ``(number of rows, C, H, W)`` or features ``(number of rows, F)``, in the stored dtype. The caller may
        modify this array.
        """
        ...


class ArraySource:
    """Source of images or features that are in a numpy array, in memory or memory-mapped.

    Parameters
    ----------
    images
        Images ``(N, C, H, W)`` of dtype uint8, uint16, float16 or float32. If ``kind`` is ``FEATURES``: features
        ``(N, F)`` of dtype float16, float32 or float64.
    where
        Name of the array, for error messages, for example ``"obsm['single_cell_images']"``.
    kind
        Kind of data in the array: ``IMAGES`` (default) or ``FEATURES``.

    Raises
    ------
    TypeError
        If ``images`` is not a numpy array, is a masked array, or has an unsupported dtype.
    ValueError
        If ``images`` has the wrong number of dimensions, has an axis of length 0, or has its channels on the last axis.

    Examples
    --------
    >>> source = scbd.data.ArraySource(adata.obsm["single_cell_images"])
    >>> source.read(np.array([3, 1, 2])).shape
    (3, 4, 32, 32)
    """

    concurrent = True

    def __init__(self, images: Any, where: str = "images", kind: InputKind = IMAGES) -> None:
        if not isinstance(images, np.ndarray):
            msg = f"{where} is a {type(images).__module__}.{type(images).__name__}: {kind.to_memory}."
            raise TypeError(msg)
        check_unmasked(where, images)
        kind.check(images.shape, images.dtype, where)
        self._images = images

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all images, ``(cells, channels, height, width)``, or of all features, ``(cells, features)``."""
        return self._images.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array of images or features."""
        return self._images.dtype

    @property
    def in_memory(self) -> bool:
        """True if the array of images or features is in memory, false if it is memory-mapped from a file."""
        owner: Any = self._images
        while isinstance(owner, np.ndarray):
            owner = owner.base
        return not isinstance(owner, mmap.mmap)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Read the images or features of the given rows, in the given order.

        Parameters
        ----------
        rows
            Row numbers (one row per cell), or a slice of rows.
        out
            Contiguous array to write to, of shape ``(number of rows, …)`` and the stored dtype. Default: a new array.

        Returns
        -------
        Images ``(number of rows, C, H, W)`` or features ``(number of rows, F)``, in the stored dtype. The caller may
        modify this array.

        Raises
        ------
        IndexError
            If a row number is out of range.
        """
        out = allocate_output(self, rows, out)
        # index an array that is not contiguous, since np.take would first copy the whole array
        if isinstance(rows, slice) or not self._images.flags.c_contiguous:
            out[...] = self._images[rows]
            return out
        # np.take with mode="clip" is twice as fast as indexing with row numbers, because numpy writes directly to
        # `out`. No row number is ever clipped, since allocate_output has checked that all are in range.
        return np.take(self._images, rows, axis=0, out=out, mode="clip")


def allocate_output(source: ImageSource, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray:
    """Check that the given row numbers are in range, and return an array into which these rows can be read.

    Parameters
    ----------
    source
        Source of images or features that will be read.
    rows
        Row numbers (one row per cell), or a slice of rows.
    out
        Array that the caller of the source has supplied for the result, which is returned itself. `None` allocates a
        new array.

    Returns
    -------
    Array ``(number of rows, …)`` of the dtype of the source. A new array has no values yet.

    Raises
    ------
    IndexError
        If a row number is out of range.
    """
    n, *image_shape = source.shape
    if not isinstance(rows, slice) and len(rows) and not (rows.min() >= 0 and rows.max() < n):
        msg = f"Rows {rows.min()} to {rows.max()} were requested, but there are {n} rows."
        raise IndexError(msg)
    return np.empty((count_rows(rows, n), *image_shape), source.dtype) if out is None else out


def count_rows(rows: np.ndarray | slice, n: int) -> int:
    """Return the number of rows that ``rows``, an array of row numbers or a slice, selects from ``n`` rows."""
    return len(range(*rows.indices(n))) if isinstance(rows, slice) else len(rows)


def as_row_numbers(rows: np.ndarray | slice, n: int) -> np.ndarray:
    """Convert a slice of ``n`` rows to an array of row numbers; an array of row numbers is returned unmodified."""
    return np.arange(*rows.indices(n)) if isinstance(rows, slice) else rows


def rows_per_block(shape: tuple[int, ...], dtype: np.dtype, n_bytes: int) -> int:
    """Return the number of rows of an array of this shape and dtype that take ``n_bytes``, rounded down, at least 1."""
    return max(1, n_bytes // (math.prod(shape[1:]) * dtype.itemsize))


def iterate_blocks(n: int, size: int) -> Iterator[slice]:
    """Divide ``n`` rows into slices of ``size`` consecutive rows; the last slice may reach beyond the last row."""
    return (slice(start, start + size) for start in range(0, n, size))


def draw_rows(n: int, most: int) -> np.ndarray:
    """Draw at most ``most`` of ``n`` row numbers at random, sorted; equal arguments always draw the same rows."""
    return np.sort(np.random.default_rng(n).choice(n, min(n, most), replace=False))


def find_non_finite_rows(source: ImageSource, block: int = 4096) -> np.ndarray:
    """Return the numbers of the rows (one row per cell) whose image or features contain NaN or infinity.

    Integers are always finite, so that a source of integers is not read.

    Parameters
    ----------
    source
        Source of the images or features.
    block
        Number of rows that are read at once.
    """
    if source.dtype.kind != "f":
        return np.empty(0, dtype=np.int64)
    axes = tuple(range(1, len(source.shape)))
    finite = [np.isfinite(source.read(rows)).all(axis=axes) for rows in iterate_blocks(source.shape[0], block)]
    return np.flatnonzero(~np.concatenate(finite))


class ColumnSource:
    """Source that reads only selected columns of features, or selected channels of images, from another source.

    Parameters
    ----------
    source
        Source of all columns, ``(N, F)``, or of all channels, ``(N, C, H, W)``.
    columns
        Positions of the K columns or channels to read, integers.
    """

    def __init__(self, source: ImageSource, columns: Sequence[int] | np.ndarray) -> None:
        self.source, self._columns = source, np.asarray(columns)
        self.shape = (source.shape[0], len(self._columns), *source.shape[2:])
        self.dtype = source.dtype
        self.in_memory = source.in_memory
        self.concurrent = getattr(source, "concurrent", False)
        self.chunk_rows = getattr(source, "chunk_rows", 1)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Read the K selected columns or channels of the given rows, in the given order.

        Parameters
        ----------
        rows
            Row numbers (one row per cell), or a slice of rows.
        out
            Contiguous array to write to, of shape ``(number of rows, K, …)`` and the stored dtype. Default: a new
            array.

        Returns
        -------
        Images ``(number of rows, K, H, W)`` or features ``(number of rows, K)``, in the stored dtype.
        """
        out = allocate_output(self, rows, out)
        return np.take(self.source.read(rows), self._columns, axis=1, out=out, mode="clip")


def select_columns(source: ImageSource, columns: Sequence[int]) -> ImageSource:
    """Return a source that reads only the given columns of features, or channels of images, of ``source``.

    If all columns or channels are given in their original order, ``source`` itself is returned.
    """
    return source if list(columns) == list(range(source.shape[1])) else ColumnSource(source, columns)


# Number of cells whose images or features enter the hash of a data set. The number is large enough to detect that the
# images were corrected, exchanged or rescaled, and small enough to be read quickly.
_N_DIGEST_CELLS = 64
# number of rows of the table of cells that are hashed at once, which limits memory
_HASH_BLOCK_ROWS = 65_536


def digest_cells(source: ImageSource | None, table: pd.DataFrame) -> str:
    """Compute a SHA-256 hash that identifies a data set: its table of cells, and the images or features of 64 cells.

    The 64 cells (all cells if there are fewer) are drawn at random, with the number of cells as the seed. Each call
    therefore draws the same cells.

    Parameters
    ----------
    source
        Source of the images or features of the cells; `None` to hash only the table.
    table
        Table with one row per cell. Its index is hashed as well. The hash changes if rows are reordered or a column is
        renamed. The integer codes and the unused categories of a categorical column do not affect the hash.

    Returns
    -------
    Hash as a text of 64 hexadecimal digits.
    """
    digest = hashlib.sha256(repr([len(table), *map(str, table.columns)]).encode())
    for rows in iterate_blocks(len(table), _HASH_BLOCK_ROWS):
        part = table.iloc[rows]
        columns = {}
        for number in range(part.shape[1]):
            column = part.iloc[:, number]
            # pandas would hash all categories of a column, which may be millions of names, again with each part
            if isinstance(column.dtype, pd.CategoricalDtype):
                column = column.cat.remove_unused_categories()
            columns[number] = column
        hashes = pd.util.hash_pandas_object(pd.DataFrame(columns, index=part.index))
        digest.update(hashes.to_numpy().tobytes())
    if source is not None:
        digest.update(repr([*source.shape, source.dtype.str]).encode())
        digest.update(source.read(draw_rows(source.shape[0], _N_DIGEST_CELLS)).tobytes())
    return digest.hexdigest()


def digest_inputs(source: ImageSource) -> str:
    """Return a digest (hash) of the images or features of the cells of a table."""
    return digest_cells(source, pd.DataFrame(index=range(source.shape[0])))[:_N_DIGEST_DIGITS]


def digest_labels(labels: pd.DataFrame) -> str:
    """Return a digest (hash) of the labels of the cells of a table."""
    return digest_cells(None, labels)[:_N_DIGEST_DIGITS]


def iterate_runs(apart: np.ndarray) -> Iterator[tuple[int, int]]:
    """Divide the positions 0 to n - 1 into runs of consecutive positions, and yield the start and stop of each run.

    Parameters
    ----------
    apart
        Boolean ``(n - 1,)``: true at position ``i`` if a new run starts at position ``i + 1``.
    """
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(apart) + 1]
    yield from pairwise(edges)
