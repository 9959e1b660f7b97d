"""Sources of images or features that are read by row from memory, HDF5 or Zarr, and reading in the background."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import h5py
import numpy as np
import pandas as pd

from scbd._checks import check_unmasked
from scbd._files import check_file, keep_torch_threads, limit_torch_to_one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    import zarr

Item = TypeVar("Item")
Result = TypeVar("Result")

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


def open_h5(path: Path) -> h5py.File:
    """Open an HDF5 file for reading.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is not HDF5, is truncated, or is a placeholder of Git LFS.
    ImportError
        If the file was compressed with a filter of hdf5plugin, and hdf5plugin is not installed.
    """
    check_file(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        msg = f"{path} cannot be read as .h5ad ({error}): it is truncated or of another kind."
        raise ValueError(msg) from error
    filters: set[int] = set()
    file.visititems(lambda _, item: filters.update(_filter_ids(item)))
    if not all(map(h5py.h5z.filter_avail, filters)):
        try:
            import hdf5plugin  # noqa: F401  # importing it registers its filters
        except ImportError as error:
            file.close()
            msg = f"{path} was compressed by a filter that HDF5 does not have by itself: pip install hdf5plugin."
            raise ImportError(msg) from error
    return file


def _filter_ids(item: h5py.Dataset | h5py.Group) -> list[int]:
    """Return the identifiers of the HDF5 filters (such as compression) of a dataset; of a group, an empty list."""
    if not isinstance(item, h5py.Dataset):
        return []
    created = item.id.get_create_plist()
    return [created.get_filter(place)[0] for place in range(created.get_nfilters())]


def memory_map_dataset(dataset: h5py.Dataset) -> np.ndarray | None:
    """Return a read-only memory-mapped array of a dataset, or `None` if the dataset cannot be mapped.

    A dataset can be mapped if its values lie uncompressed and contiguous in the file. As long as the array exists, the
    file stays open, and HDF5 refuses to write to it.
    """
    offset = dataset.id.get_offset() if dataset.chunks is None and not dataset.external else None
    if offset is None:
        return None
    array = np.memmap(dataset.file.filename, dataset.dtype, mode="r", offset=offset, shape=dataset.shape)
    array.file = dataset.file  # type: ignore[attr-defined]
    # a plain array, since AnnData cannot write a np.memmap
    return array.view(np.ndarray)


class HDF5Source:
    """Images in an HDF5 dataset with any chunks and compression, read with h5py.

    A read decompresses each chunk that contains requested rows once. If a chunk holds many rows, reading a few random
    rows costs as much as reading all of them.

    Parameters
    ----------
    images
        Dataset of shape ``(N, C, H, W)`` in an open file.
    where
        Name of the dataset and its file in error messages.

    Raises
    ------
    TypeError, ValueError
        If the dataset does not hold images, see :class:`ArraySource`.
    """

    in_memory = False

    def __init__(self, images: h5py.Dataset, where: str = "images") -> None:
        check_images(images.shape, images.dtype, where)
        self.shape: tuple[int, ...] = images.shape
        self.dtype: np.dtype = images.dtype
        self.chunk_rows = images.chunks[0] if images.chunks else 1
        self._images, self._where = images, where

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Read the images of the given rows, in the given order, into an array that the caller may modify.

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
        ValueError
            If the file is damaged where these rows are stored.
        """
        out = allocate_output(self, rows, out)
        rows = as_row_numbers(rows, self.shape[0])
        if not len(rows):
            return out
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        # rows of the same chunk, and adjacent rows, are read with one call
        apart = (np.diff(wanted) > 1) & (np.diff(wanted // self.chunk_rows) != 0)
        for start, stop in _iterate_runs(apart):
            first, last = int(wanted[start]), int(wanted[stop - 1])
            try:
                if (np.diff(wanted[start:stop]) == 1).all() and (np.diff(order[start:stop]) == 1).all():
                    place = int(order[start])
                    self._images.read_direct(out, np.s_[first : last + 1], np.s_[place : place + stop - start])
                else:
                    out[order[start:stop]] = self._images[first : last + 1][wanted[start:stop] - first]
            except (OSError, RuntimeError) as error:
                msg = f"{self._where} is damaged or truncated: rows {first} to {last} cannot be read ({error})."
                raise ValueError(msg) from error
        return out


# A shard ends with an index of its chunks. Sizes in bytes: an entry (offset and length of one chunk), and the checksum
# that follows all entries.
_INDEX_ENTRY_BYTES, _CHECKSUM_BYTES = 16, 4
# offset in the index of a chunk that is not stored
_ABSENT_CHUNK_OFFSET = np.uint64(2**64 - 1)
# maximum gap, in bytes, between chunks that are read with one call
_MAX_GAP_BYTES = 2**16


class ZarrSource:
    """Images or features in a Zarr array.

    Chunks are read as bytes directly from the files, many times faster than with Zarr, if all of these conditions hold:

    - The array is in a local folder, in Zarr format 3 and in the byte order of this machine.
    - Each chunk holds whole rows.
    - The compression is a common one (none, lz4, zstd, blosc or gzip).

    Otherwise, the array is read with Zarr.

    Reading verifies the checksums of compressed rows. For uncompressed rows that are one chunk each, verification would
    take longer than reading, so that only :func:`verify_screen` verifies their checksums.

    Parameters
    ----------
    images
        Array of shape ``(N, C, H, W)``. With ``kind`` for features, an array of shape ``(N, F)``.
    where
        Name of the array in error messages.
    kind
        Kind of inputs: images (default) or features.

    Raises
    ------
    TypeError, ValueError
        If the array does not hold inputs of this kind, see :class:`ArraySource`.

    Examples
    --------
    >>> import zarr
    >>> images = zarr.create_array("images.zarr", data=adata.obsm["single_cell_images"], chunks=(1, 4, 32, 32))
    >>> scbd.data.ZarrSource(images).read(np.array([3, 1, 2])).shape
    (3, 4, 32, 32)
    """

    in_memory = False

    def __init__(self, images: zarr.Array, where: str = "images", kind: InputKind = IMAGES) -> None:
        from zarr.storage import LocalStore

        kind.check(images.shape, images.dtype, where)
        self.shape: tuple[int, ...] = images.shape
        self.dtype: np.dtype = images.dtype
        self._images, self._where = images, where
        self.chunk_rows: int = images.chunks[0]
        """Number of rows per chunk; reading one row costs as much as reading all rows of its chunk."""
        self._chunks_per_shard = 1 if images.shards is None else images.shards[0] // images.chunks[0]
        local = isinstance(images.store, LocalStore) and images.metadata.zarr_format == 3
        self._decoders = _chunk_decoders(images) if local and images.chunks[1:] == images.shape[1:] else None
        if self._decoders is not None:
            self._files = _ByteRangeReader(Path(images.store.root) / images.path)  # type: ignore[attr-defined]
        self._indices: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # Zarr does not store chunks that hold only the fill value. Stores written by scbd have no such chunks, so that
        # a missing chunk of these stores is lost data.
        self._complete = STORE_KEY in images.attrs

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
        FileNotFoundError
            If a shard is missing from a store that scbd has written.
        ValueError
            If a file is truncated, or a checksum is wrong. The message names the file and the rows in it.
        """
        out = allocate_output(self, rows, out)
        if self._decoders is None:
            out[...] = self._images[rows] if isinstance(rows, slice) else self._images.oindex[rows]
            return out
        rows = as_row_numbers(rows, self.shape[0])
        if not len(rows):
            return out
        places = np.argsort(rows, kind="stable")
        rows = rows[places]
        shards = rows // (self.chunk_rows * self._chunks_per_shard)
        for start, stop in _iterate_runs(np.diff(shards) != 0):
            number, part = int(shards[start]), slice(start, stop)
            try:
                self._read_shard(number, rows[part], places[part], out)
            except FileNotFoundError as error:
                msg = f"{self._files.path(self._key(number))} is missing, with {self._rows_of(number)}."
                raise FileNotFoundError(msg) from error
            except (EOFError, ValueError, RuntimeError) as error:
                where = f"{self._files.path(self._key(number))} is damaged or truncated, with {self._rows_of(number)}"
                msg = f"{where} ({error}): copy or write the store again."
                raise ValueError(msg) from error
        return out

    def _read_shard(self, number: int, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Read rows of one shard, given in ascending order, into the positions ``places`` of ``out``."""
        if number not in self._indices:
            self._indices[number] = self._read_index(number)
        offsets, lengths = self._indices[number]
        chunks = rows // self.chunk_rows - number * self._chunks_per_shard
        empty = lengths[chunks] == 0
        if empty.any():
            out[places[empty]] = self._images.fill_value
            rows, places, chunks = rows[~empty], places[~empty], chunks[~empty]
        if not len(rows):
            return
        # uncompressed chunks of one row each, with or without a checksum at the end
        if self.chunk_rows == 1 and self._decoders in ([_copy_bytes], [_strip_checksum, _copy_bytes]):
            self._read_plain(self._key(number), offsets[chunks], lengths[chunks], places, out)
        else:
            self._read_chunks(self._key(number), offsets, lengths, rows, chunks, places, out)

    def _read_plain(
        self, key: str, offsets: np.ndarray, lengths: np.ndarray, places: np.ndarray, out: np.ndarray
    ) -> None:
        """Read uncompressed chunks of one row each straight into ``out``, without verifying their checksums.

        Chunks that are adjacent in the file and in ``out`` are read with one call.
        """
        size = out[:1].nbytes
        flat = out.data.cast("B")
        passed_over = memoryview(bytearray(int(lengths[0]) - size))
        for start, stop in _iterate_runs((np.diff(offsets) != lengths[:-1]) | (np.diff(places) != 1)):
            first = int(places[start])
            targets = [flat[first * size : (first + stop - start) * size]]
            if passed_over:
                images = (flat[i * size : (i + 1) * size] for i in range(first, first + stop - start))
                targets = [part for image in images for part in (image, passed_over)]
            self._files.read_into(key, int(offsets[start]), targets)

    def _read_chunks(
        self,
        key: str,
        offsets: np.ndarray,
        lengths: np.ndarray,
        rows: np.ndarray,
        chunks: np.ndarray,
        places: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Read chunks and decode them one by one; chunks that lie close together in the file are read with one call."""
        edges = list(_iterate_runs(np.diff(chunks) != 0))
        wanted = chunks[[start for start, _ in edges]]
        starts, ends = offsets[wanted], offsets[wanted] + lengths[wanted]
        gaps = starts[1:] - ends[:-1]
        *steps, last = self._decoders or [_copy_bytes]
        chunk = np.empty((self.chunk_rows, *self.shape[1:]), self.dtype)
        for begin, end in _iterate_runs((gaps < 0) | (gaps > _MAX_GAP_BYTES)):
            base = int(starts[begin])
            data = memoryview(self._files.read(key, base, int(ends[end - 1]) - base))
            for i in range(begin, end):
                start, stop = edges[i]
                coded = data[int(starts[i]) - base : int(ends[i]) - base]
                for step in steps:
                    coded = step(coded)
                if self.chunk_rows == stop - start == 1:
                    last(coded, out[places[start]])
                else:
                    last(coded, chunk)
                    out[places[start:stop]] = chunk[rows[start:stop] % self.chunk_rows]

    def _read_index(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the offset and the length, in bytes, of each chunk of a shard, int64 ``(chunks_per_shard,)`` each.

        A chunk that is not stored, because it holds only the fill value, has length 0.
        """
        n, key = self._chunks_per_shard, self._key(number)
        try:
            if self._images.shards is None:
                return np.zeros(1, np.int64), np.array([self._files.size(key)])
            data = self._files.read(
                key, -_INDEX_ENTRY_BYTES * n - _CHECKSUM_BYTES, _INDEX_ENTRY_BYTES * n + _CHECKSUM_BYTES
            )
        except FileNotFoundError:
            if self._complete:
                raise
            return np.zeros(n, np.int64), np.zeros(n, np.int64)
        offsets, lengths = np.frombuffer(_strip_checksum(data), "<u8").reshape(n, 2).T
        empty = offsets == _ABSENT_CHUNK_OFFSET
        return np.where(empty, 0, offsets).astype(np.int64), np.where(empty, 0, lengths).astype(np.int64)

    def _key(self, number: int) -> str:
        return self._images.metadata.encode_chunk_key((number, *(0 for _ in self.shape[1:])))

    def _rows_of(self, number: int) -> str:
        size = self.chunk_rows * self._chunks_per_shard
        return f"rows {number * size} to {min((number + 1) * size, self.shape[0]) - 1} of {self._where}"


def _chunk_decoders(array: zarr.Array) -> list[Callable] | None:
    """Return the functions that decode the bytes of a chunk, in order, or `None` if only Zarr can decode the array.

    Each function takes the result of the one before. The last function also takes the array to write the rows to.
    """
    import numcodecs
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

    known: dict[type, Callable] = {
        Crc32cCodec: _strip_checksum,
        BloscCodec: numcodecs.Blosc().decode,
        ZstdCodec: numcodecs.Zstd().decode,
        GzipCodec: numcodecs.GZip().decode,
    }
    codecs: Any = array.metadata.codecs  # type: ignore[union-attr]
    if isinstance(codecs[0], ShardingCodec):
        (sharding,) = codecs
        index = [type(codec) for codec in sharding.index_codecs]
        if _option_text(sharding.index_location) != "end" or index != [BytesCodec, Crc32cCodec]:
            return None
        codecs = sharding.codecs
    first, *others = codecs
    native = isinstance(first, BytesCodec) and (first.endian is None or _option_text(first.endian) == sys.byteorder)
    if not native or any(type(codec) not in known for codec in others):
        return None
    steps = [known[type(codec)] for codec in reversed(others)]
    return [*steps, _copy_bytes] if not steps or steps[-1] is _strip_checksum else steps


def _option_text(choice: Any) -> str:
    """Return the text of one of Zarr's options, which is an enumeration member up to Zarr 3.3 and text from 3.4 on."""
    return str(getattr(choice, "value", choice))


def _strip_checksum(data: bytes | memoryview) -> memoryview:
    """Return the data without its last four bytes, after verifying that these are the checksum (CRC-32C) of the rest.

    Raises
    ------
    ValueError
        If the checksum is wrong.
    """
    from numcodecs.checksum32 import CRC32C

    view = memoryview(data)
    body, stored = view[:-_CHECKSUM_BYTES], int.from_bytes(view[-_CHECKSUM_BYTES:], "little")
    # CRC32C.checksum accepts an array, but not a memoryview
    if CRC32C.checksum(np.frombuffer(body, np.uint8)) != stored:
        msg = "a checksum is wrong"
        raise ValueError(msg)
    return body


def _copy_bytes(data: bytes | memoryview, out: np.ndarray) -> None:
    """Copy the uncompressed bytes of a chunk into an array."""
    out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)


def _iterate_runs(apart: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of positions that belong together.

    Parameters
    ----------
    apart
        Boolean ``(n - 1,)`` for ``n`` positions: true where a position and the next belong to different runs.
    """
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(apart) + 1]
    yield from zip(edges[:-1], edges[1:], strict=True)


class _ByteRangeReader:
    """Files of a folder, read by ranges of bytes; up to 256 of them are kept open."""

    # maximum number of open files
    _MOST = 256
    # maximum number of buffers per system call; Linux accepts 1,024
    _TARGETS = 512

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def path(self, key: str) -> Path:
        """Return the path of a file."""
        return self._folder / key

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        return self.path(key).stat().st_size

    def read(self, key: str, start: int, length: int) -> bytes:
        """Read ``length`` bytes from position ``start``; a negative ``start`` counts from the end of the file.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        EOFError
            If the file ends before the last requested byte.
        """
        descriptor = self._descriptor(key)
        if start < 0:
            start += os.fstat(descriptor).st_size
        data = os.pread(descriptor, length, start) if start >= 0 else b""
        if len(data) < length:
            msg = f"{len(data)} of {length} bytes at {start}"
            raise EOFError(msg)
        return data

    def read_into(self, key: str, start: int, targets: Sequence[memoryview]) -> None:
        """Fill the targets one after the other with bytes from position ``start`` on, without an intermediate copy.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        EOFError
            If the file ends before the last requested byte.
        """
        descriptor = self._descriptor(key)
        for first in range(0, len(targets), self._TARGETS):
            some = list(targets[first : first + self._TARGETS])
            while some:
                n = os.preadv(descriptor, some, start)
                if not n:
                    msg = f"{sum(map(len, some))} bytes are missing at {start}"
                    raise EOFError(msg)
                start += n
                while some and n >= len(some[0]):
                    n -= len(some.pop(0))
                if n:  # filled in part, since a system call reads at most 2 GiB
                    some[0] = some[0][n:]

    def _descriptor(self, key: str) -> int:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        if len(self._open) >= self._MOST:
            os.close(self._open.popitem(last=False)[1])
        self._open[key] = os.open(self.path(key), os.O_RDONLY)
        return self._open[key]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


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


# marks the end of the items in the queue of prefetch
_END_OF_ITEMS = object()
# maximum number of worker threads; more of them would only wait for the thread that is reading
_MAX_WORKERS = 16


def prefetch(items: Iterable[Item], ahead: int = 2) -> Generator[Item]:
    """Iterate over items that a background thread produces in order, up to ``ahead`` items in advance.

    An exception that the iterable raises is raised here in place of its item. If the iteration is closed early, the
    thread finishes its current item and ends. A thread suffices: the libraries that gather rows release Python's global
    interpreter lock, so that a separate process would cost more than it gains.
    """
    made: queue.Queue = queue.Queue(ahead)
    left = threading.Event()

    def hand_over(item: object) -> bool:
        """Put an item into the queue as soon as there is room; return false if the iteration has been closed."""
        while not left.is_set():
            try:
                made.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def make() -> None:
        try:
            for item in items:
                if not hand_over((item, None)):
                    return
            hand_over((_END_OF_ITEMS, None))
        except BaseException as error:  # noqa: BLE001 any exception is raised again where the items are iterated
            hand_over((_END_OF_ITEMS, error))

    thread = threading.Thread(target=make, name="scbd-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is _END_OF_ITEMS:
                return
            yield item
    finally:
        left.set()
        thread.join()


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result]:
    """Apply a function to all items in several threads, and yield the results in the order of the items.

    There is one thread per core, but at least 2 and at most 16 threads. Each thread limits torch to one core.

    An exception is raised in place of its result. After an exception, or if the iteration is closed early, calls that
    have begun are finished, and no others are begun.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # at least two threads, so that one works while another waits for the disk
    n_workers = min(max(cores, 2), _MAX_WORKERS)
    with keep_torch_threads(), ThreadPoolExecutor(n_workers, "scbd-worker", limit_torch_to_one_thread) as pool:
        yield from pool.map(work, items)
