"""Sources of images or features that are read by row from memory, HDF5 or Zarr, and reading in the background."""

from __future__ import annotations

import hashlib
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pandas as pd

from scbd._shared.checks import check_unmasked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


IMAGE_DTYPES = ("uint8", "uint16", "float16", "float32")
FEATURE_DTYPES = ("float16", "float32", "float64")
# attribute with which scbd marks the Zarr stores that it writes and the arrays in them
STORE_KEY = "scbd_store"


def check_images(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Raise if an array of this shape and dtype cannot hold images.

    Parameters
    ----------
    shape, dtype
        Shape and dtype of the array.
    where
        Name of the array in error messages.

    Raises
    ------
    ValueError
        If the array is not four-dimensional, has an axis of length 0, or seems to have its channels last
        (:func:`has_channels_last`).
    TypeError
        If the dtype is not one of ``IMAGE_DTYPES``, or does not have the byte order of this machine.
    """
    if len(shape) != 4:
        msg = (
            f"{where} has shape {shape}, images must be 4-D: (cells, channels, height, width). "
            "For one channel, add an axis with images[:, None]."
        )
        raise ValueError(msg)
    if 0 in shape:
        msg = f"{where} has shape {shape}: there is nothing to read along an axis of length 0."
        raise ValueError(msg)
    if has_channels_last(*shape[1:]):
        msg = (
            f"{where} has shape {shape}, which looks like (cells, height, width, channels), images must be (cells, "
            "channels, height, width): turn them with np.moveaxis(images, -1, 1)."
        )
        raise ValueError(msg)
    if dtype.name not in IMAGE_DTYPES or not dtype.isnative:
        msg = f"{where} has dtype {_dtype_description(dtype)}: cast it to one of {', '.join(IMAGE_DTYPES)}."
        raise TypeError(msg)


def has_channels_last(first: int, second: int, third: int) -> bool:
    """Return whether an image shape looks like (height, width, channels) rather than (channels, height, width).

    The channels look last if two conditions hold:

    - The third axis is at most half as long as the shorter of the first two.
    - The first two axes are equally long (a square image), or the third axis has at most 5 entries and the first two
      have at least 16 each.

    Images with channels first hardly ever have such a shape: it would take as many channels as rows of pixels, or 16
    and more channels in an image at most 5 pixels wide. Small crops (3 × 3 pixels), narrow strips, and square images
    with any number of channels are accepted as channels first.
    """
    narrow = 2 * third <= min(first, second)
    return narrow and (first == second or (third <= 5 and min(first, second) >= 16))


def check_features(shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Raise if an array of this shape and dtype cannot hold a table of features.

    Parameters
    ----------
    shape, dtype
        Shape and dtype of the array.
    where
        Name of the array in error messages.

    Raises
    ------
    ValueError
        If the array is not two-dimensional, or has an axis of length 0.
    TypeError
        If the values are not numbers, the dtype is not one of ``FEATURE_DTYPES``, or it does not have the byte order of
        this machine.
    """
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
        msg = f"{where} has dtype {_dtype_description(dtype)}: cast it to one of {', '.join(FEATURE_DTYPES)}."
        raise TypeError(msg)


def _dtype_description(dtype: np.dtype) -> str:
    """Return the name of a dtype, with its byte order if that is not the byte order of this machine."""
    return dtype.name if dtype.isnative else f"{dtype.name}, in a foreign byte order ({dtype.str})"


class InputKind(NamedTuple):
    """Kind of inputs (images or features): its check, and the advice to give for arrays that cannot be read."""

    check: Callable[[tuple[int, ...], np.dtype, str], None]
    """Function that raises if a shape and dtype are not of this kind; its third argument is the name for messages."""
    to_memory: str
    """Advice in error messages: how to obtain an array that can be read by row."""


IMAGES = InputKind(check_images, "load it into a numpy array, or open the file with scbd.data.open_screen")
FEATURES = InputKind(
    check_features, "load it (adata.to_memory()), or open the file with scbd.data.open_screen(path, layer=…)"
)


class ImageSource(Protocol):
    """Protocol for inputs of cells, images or features, that are read by row with ``read(rows)``.

    By default, only one thread at a time reads a source. A source that several threads can read at once has an
    attribute ``concurrent`` that is true. A source whose storage chunks hold several rows each has an attribute
    ``chunk_rows`` with the number of rows per chunk.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(N, C, H, W)`` of images, or ``(N, F)`` of features."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the stored inputs."""
        ...

    @property
    def in_memory(self) -> bool:
        """True if all inputs are in memory, where adjacent rows are read no faster than scattered rows."""
        ...

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Read the inputs of the given rows, in the given order.

        Parameters
        ----------
        rows
            Row numbers or a slice.
        out
            Contiguous array to write to, of shape ``(len(rows), …)`` and the dtype of the source. Default: a new array.

        Returns
        -------
        Inputs ``(len(rows), …)`` in the stored dtype. The caller may modify the array.
        """
        ...


class ArraySource:
    """Images or features in a numpy array, in memory or memory-mapped.

    Parameters
    ----------
    images
        Images of shape ``(N, C, H, W)`` and dtype uint8, uint16, float16 or float32. With ``kind`` for features, an
        array of shape ``(N, F)`` and dtype float16, float32 or float64.
    where
        Name of the array in error messages, for example ``"obsm['single_cell_images']"``.
    kind
        Kind of inputs: images (default) or features.

    Raises
    ------
    TypeError
        If ``images`` is not a numpy array, is a masked array, or has an unsupported dtype.
    ValueError
        If ``images`` has the wrong number of dimensions, has an axis of length 0, or has its channels last.

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
        """Shape ``(N, C, H, W)`` of images, or ``(N, F)`` of features."""
        return self._images.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self._images.dtype

    @property
    def in_memory(self) -> bool:
        """True unless the array is memory-mapped."""
        owner: Any = self._images
        while isinstance(owner, np.ndarray):
            owner = owner.base
        return not isinstance(owner, mmap.mmap)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Read the inputs of the given rows, in the given order, into an array that the caller may modify.

        Parameters
        ----------
        rows
            Row numbers or a slice.
        out
            Contiguous array to write to, of shape ``(len(rows), …)`` and the stored dtype. Default: a new array.

        Returns
        -------
        Inputs ``(len(rows), …)`` in the stored dtype.

        Raises
        ------
        IndexError
            If a row number is out of range.
        """
        out = allocate_output(self, rows, out)
        # np.take would first copy the whole array if it is a view that is not contiguous
        if isinstance(rows, slice) or not self._images.flags.c_contiguous:
            out[...] = self._images[rows]
            return out
        # np.take is twice as fast as fancy indexing, because with mode="clip" numpy writes directly to `out`. No row
        # number is ever clipped, since target_of has checked their range.
        return np.take(self._images, rows, axis=0, out=out, mode="clip")


def allocate_output(source: ImageSource, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray:
    """Return the array to read the given rows into, after checking that the row numbers are in range.

    Parameters
    ----------
    source
        Source that will be read.
    rows
        Row numbers or a slice.
    out
        Array supplied by the caller; `None` allocates a new one.

    Raises
    ------
    IndexError
        If a row number is out of range.
    """
    n, *image_shape = source.shape
    if not isinstance(rows, slice) and len(rows) and not (0 <= rows.min() and rows.max() < n):
        msg = f"Rows {rows.min()} to {rows.max()} were asked for, there are {n}."
        raise IndexError(msg)
    return np.empty((count_rows(rows, n), *image_shape), source.dtype) if out is None else out


def count_rows(rows: np.ndarray | slice, n: int) -> int:
    """Return the number of rows that row numbers or a slice select from ``n`` rows."""
    return len(range(*rows.indices(n))) if isinstance(rows, slice) else len(rows)


def as_row_numbers(rows: np.ndarray | slice, n: int) -> np.ndarray:
    """Return the row numbers that row numbers or a slice select from ``n`` rows."""
    return np.arange(*rows.indices(n)) if isinstance(rows, slice) else rows


def find_non_finite_rows(source: ImageSource, block: int = 4096) -> np.ndarray:
    """Return the numbers of rows whose inputs contain NaN or infinity.

    Inputs of an integer dtype are always finite, and are not read. Other inputs are read in blocks of ``block`` rows.
    """
    if source.dtype.kind != "f":
        return np.empty(0, dtype=np.int64)
    starts = range(0, source.shape[0], block)
    bad = [~np.isfinite(source.read(slice(s, s + block))).all(axis=tuple(range(1, len(source.shape)))) for s in starts]
    return np.flatnonzero(np.concatenate(bad))


class ColumnSource:
    """Selected columns of features ``(N, F)``, or selected channels of images ``(N, C, H, W)``, from any source.

    Parameters
    ----------
    source
        Source of features or images.
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
        """Read the selected columns or channels of the given rows, in the given order.

        Parameters
        ----------
        rows
            Row numbers or a slice.
        out
            Contiguous array to write to, of shape ``(len(rows), …)`` and the stored dtype. Default: a new array.

        Returns
        -------
        Inputs ``(len(rows), …)`` in the stored dtype.
        """
        out = allocate_output(self, rows, out)
        return np.take(self.source.read(rows), self._columns, axis=1, out=out, mode="clip")


def select_columns(source: ImageSource, columns: Sequence[int]) -> ImageSource:
    """Return a source of the given columns, or the source itself if these are all its columns, in order."""
    return source if list(columns) == list(range(source.shape[1])) else ColumnSource(source, columns)


# number of cells whose inputs enter a digest: enough to detect images that were corrected, exchanged or rescaled, and
# few enough to be read quickly
_N_DIGEST_CELLS = 64
# number of rows whose hashes are in memory at once
_HASH_BLOCK_ROWS = 65_536


def digest_cells(source: ImageSource | None, table: pd.DataFrame) -> str:
    """Compute the SHA-256 of a whole table of cells and of the inputs of up to 64 cells.

    The 64 cells are drawn at random, with the number of cells as the seed. They are therefore the same in each call.

    Parameters
    ----------
    source
        Source of the images or features of the cells; `None` if there are no inputs to include.
    table
        Table with one row per cell, including its index. Reordering rows or renaming a column changes the digest.
        Categorical columns count by their values: codes and unused categories do not change the digest.

    Returns
    -------
    64 hexadecimal digits.
    """
    digest = hashlib.sha256(repr([len(table), *map(str, table.columns)]).encode())
    for start in range(0, len(table), _HASH_BLOCK_ROWS):
        part = table.iloc[start : start + _HASH_BLOCK_ROWS]
        columns = {number: _drop_unused_categories(part.iloc[:, number]) for number in range(part.shape[1])}
        hashes = pd.util.hash_pandas_object(pd.DataFrame(columns, index=part.index))
        digest.update(hashes.to_numpy().tobytes())
    if source is not None:
        n = source.shape[0]
        rows = np.sort(np.random.default_rng(n).choice(n, min(n, _N_DIGEST_CELLS), replace=False))
        digest.update(repr([*source.shape, source.dtype.str]).encode())
        digest.update(source.read(rows).tobytes())
    return digest.hexdigest()


def _drop_unused_categories(column: pd.Series) -> pd.Series:
    """Return a column without the categories that do not occur in it.

    Otherwise all categories, which may be millions of names, would be hashed again with each part of the table.
    """
    return column.cat.remove_unused_categories() if isinstance(column.dtype, pd.CategoricalDtype) else column


def iterate_runs(apart: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of positions that belong together.

    Parameters
    ----------
    apart
        Boolean ``(n - 1,)`` for ``n`` positions: true where a position and the next belong to different runs.
    """
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(apart) + 1]
    yield from zip(edges[:-1], edges[1:], strict=True)
