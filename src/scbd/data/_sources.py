"""Where the inputs of cells are: one small protocol, read by row from memory, HDF5 and Zarr; and read ahead."""

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
from scbd._files import check_file, one_torch_thread, torch_threads_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    import zarr

Item = TypeVar("Item")
Result = TypeVar("Result")

IMAGE_DTYPES = ("uint8", "uint16", "float16", "float32")
FEATURE_DTYPES = ("float16", "float32", "float64")
# what a store of ours says of itself, and of its arrays
STORE_KEY = "scbd_store"


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
        msg = (
            f"{where} has shape {shape}, which looks like (cells, height, width, channels), images must be (cells, "
            "channels, height, width): turn them with np.moveaxis(images, -1, 1)."
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


IMAGES = InputKind(check_images, "load it into a numpy array, or open the file with scbd.data.open_screen")
FEATURES = InputKind(
    check_features, "load it (adata.to_memory()), or open the file with scbd.data.open_screen(path, layer=…)"
)


class ImageSource(Protocol):
    """Inputs of cells that can be read by row: images or features; ``read(rows)`` returns the rows as asked.

    A source is read from one thread at a time, unless it has a true attribute ``concurrent``. One whose rows are
    stored many together has their number in an attribute ``chunk_rows``.
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
        Shape ``(N, C, H, W)``, dtype uint8, uint16, float16 or float32.
    where
        How an error should call the array, for example ``"obsm['single_cell_images']"``.
    kind
        Whether these are images or features.

    Raises
    ------
    TypeError
        If it is not a numpy array, a masked one, or of a dtype that is not read.
    ValueError
        If it is not four-dimensional, has no cells, channels or pixels, or its channels come last.

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


def numbers_of(rows: np.ndarray | slice, n: int) -> np.ndarray:
    """Rows of ``n`` by their numbers."""
    return np.arange(*rows.indices(n)) if isinstance(rows, slice) else rows


def non_finite_rows(source: ImageSource, block: int = 4096) -> np.ndarray:
    """Rows whose inputs hold a NaN or an infinity; integers are not read at all."""
    if source.dtype.kind != "f":
        return np.empty(0, dtype=np.int64)
    starts = range(0, source.shape[0], block)
    bad = [~np.isfinite(source.read(slice(s, s + block))).all(axis=tuple(range(1, len(source.shape)))) for s in starts]
    return np.flatnonzero(np.concatenate(bad))


class ColumnSource:
    """Some columns of features ``(N, F)``, or channels of images ``(N, C, H, W)``, wherever they lie.

    Parameters
    ----------
    source
        Features or images.
    columns
        Places of those to read, K integers.
    """

    def __init__(self, source: ImageSource, columns: Sequence[int] | np.ndarray) -> None:
        self.source, self._columns = source, np.asarray(columns)
        self.shape = (source.shape[0], len(self._columns), *source.shape[2:])
        self.dtype = source.dtype
        self.in_memory = source.in_memory
        self.concurrent = getattr(source, "concurrent", False)
        self.chunk_rows = getattr(source, "chunk_rows", 1)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Features or images of these rows, in this order, free to change."""
        out = target_of(self, rows, out)
        return np.take(self.source.read(rows), self._columns, axis=1, out=out, mode="clip")


def columns_of(source: ImageSource, columns: Sequence[int]) -> ImageSource:
    """Those columns; the source itself where they are all that it has, in its order."""
    return source if list(columns) == list(range(source.shape[1])) else ColumnSource(source, columns)


def open_h5(path: Path) -> h5py.File:
    """An HDF5 file, to be read.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is none; if it is not HDF5, or truncated.
    ImportError
        If it was compressed by a filter of hdf5plugin, which is not installed.
    """
    check_file(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        msg = f"{path} cannot be read as .h5ad ({error}): it is truncated or of another kind."
        raise ValueError(msg) from error
    filters: set[int] = set()
    file.visititems(lambda _, item: filters.update(_filters_of(item)))
    if not all(map(h5py.h5z.filter_avail, filters)):
        try:
            import hdf5plugin  # noqa: F401  # brings its filters along
        except ImportError as error:
            file.close()
            msg = f"{path} was compressed by a filter that HDF5 does not have by itself: pip install hdf5plugin."
            raise ImportError(msg) from error
    return file


def _filters_of(item: h5py.Dataset | h5py.Group) -> list[int]:
    """Numbers of the filters that a dataset passes."""
    if not isinstance(item, h5py.Dataset):
        return []
    created = item.id.get_create_plist()
    return [created.get_filter(place)[0] for place in range(created.get_nfilters())]


def mapped(dataset: h5py.Dataset) -> np.ndarray | None:
    """A read-only array over the bytes of a dataset; `None` where they do not lie in one stretch as they are.

    As long as it lives the file is open, and HDF5 refuses to write to it.
    """
    offset = dataset.id.get_offset() if dataset.chunks is None and not dataset.external else None
    if offset is None:
        return None
    array = np.memmap(dataset.file.filename, dataset.dtype, mode="r", offset=offset, shape=dataset.shape)
    array.file = dataset.file  # type: ignore[attr-defined]
    # a plain array: AnnData writes none of another type
    return array.view(np.ndarray)


class HDF5Source:
    """Images in an HDF5 dataset of any chunks and compression, read through its library.

    Every chunk that holds some of the rows is decompressed once. Where a chunk spans many rows, a few random ones cost
    as much as all of them.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, of an open file.
    where
        How an error should call it, and its file.

    Raises
    ------
    TypeError, ValueError
        If it does not hold images, see :class:`ArraySource`.
    """

    in_memory = False

    def __init__(self, images: h5py.Dataset, where: str = "images") -> None:
        check_images(images.shape, images.dtype, where)
        self.shape: tuple[int, ...] = images.shape
        self.dtype: np.dtype = images.dtype
        self.chunk_rows = images.chunks[0] if images.chunks else 1
        self._images, self._where = images, where

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order, as stored and free to change.

        Raises
        ------
        IndexError
            If there is no such row.
        ValueError
            If the file is damaged there.
        """
        out = target_of(self, rows, out)
        rows = numbers_of(rows, self.shape[0])
        if not len(rows):
            return out
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        # rows of one chunk, and neighbours, are read at once
        apart = (np.diff(wanted) > 1) & (np.diff(wanted // self.chunk_rows) != 0)
        for start, stop in _runs(apart):
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


# bytes of an index of a shard: offset and length of a chunk, and behind all of them their checksum
_ENTRY, _CHECKSUM = 16, 4
_EMPTY = np.uint64(2**64 - 1)
# chunks this close to each other are fetched at once
_GAP = 2**16


class ZarrSource:
    """Images, or features, in a Zarr array.

    Where it lies in a folder, its chunks hold whole rows and their coding is common (none, lz4, zstd, blosc, gzip),
    chunks are found by each shard's index and read as bytes, many times as fast as through Zarr; else through Zarr.
    Checksums of compressed rows are tested as they are read; those of others by :func:`verify_screen` alone, since
    testing takes longer than reading.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``.
    where
        How an error should call it.
    kind
        Whether these are images or features.

    Raises
    ------
    TypeError, ValueError
        If it does not hold images, see :class:`ArraySource`.

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
        """How many rows a chunk has; one of them costs as much to read as all."""
        self._chunks_per_shard = 1 if images.shards is None else images.shards[0] // images.chunks[0]
        local = isinstance(images.store, LocalStore) and images.metadata.zarr_format == 3
        self._undo = _undone(images) if local and images.chunks[1:] == images.shape[1:] else None
        if self._undo is not None:
            self._files = _Files(Path(images.store.root) / images.path)  # type: ignore[attr-defined]
        self._indices: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # a store of ours leaves no chunk out: what is missing is lost, and not meant to be empty
        self._complete = STORE_KEY in images.attrs

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Inputs of these rows, in this order, as stored and free to change.

        Raises
        ------
        IndexError
            If there is no such row.
        FileNotFoundError
            If a shard is missing from a store that scbd has written.
        ValueError
            If a file is truncated, or a checksum wrong (which, and which rows).
        """
        out = target_of(self, rows, out)
        if self._undo is None:
            out[...] = self._images[rows] if isinstance(rows, slice) else self._images.oindex[rows]
            return out
        rows = numbers_of(rows, self.shape[0])
        if not len(rows):
            return out
        places = np.argsort(rows, kind="stable")
        rows = rows[places]
        shards = rows // (self.chunk_rows * self._chunks_per_shard)
        for start, stop in _runs(np.diff(shards) != 0):
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
        # behind what is stored as it is, nothing or a checksum
        if self.chunk_rows == 1 and self._undo in ([_copied], [_checked, _copied]):
            self._read_plain(self._key(number), offsets[chunks], lengths[chunks], places, out)
        else:
            self._read_chunks(self._key(number), offsets, lengths, rows, chunks, places, out)

    def _read_plain(
        self, key: str, offsets: np.ndarray, lengths: np.ndarray, places: np.ndarray, out: np.ndarray
    ) -> None:
        """Neighbours that stay neighbours are read at once, to where they belong."""
        size = out[:1].nbytes
        flat = out.data.cast("B")
        passed_over = memoryview(bytearray(int(lengths[0]) - size))
        for start, stop in _runs((np.diff(offsets) != lengths[:-1]) | (np.diff(places) != 1)):
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
        """Chunks that lie close are fetched at once, and decoded one by one."""
        edges = list(_runs(np.diff(chunks) != 0))
        wanted = chunks[[start for start, _ in edges]]
        starts, ends = offsets[wanted], offsets[wanted] + lengths[wanted]
        gaps = starts[1:] - ends[:-1]
        *steps, last = self._undo or [_copied]
        chunk = np.empty((self.chunk_rows, *self.shape[1:]), self.dtype)
        for begin, end in _runs((gaps < 0) | (gaps > _GAP)):
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
        """Of the chunks of a shard their offsets and lengths; an empty one has length 0."""
        n, key = self._chunks_per_shard, self._key(number)
        try:
            if self._images.shards is None:
                return np.zeros(1, np.int64), np.array([self._files.size(key)])
            data = self._files.read(key, -_ENTRY * n - _CHECKSUM, _ENTRY * n + _CHECKSUM)
        except FileNotFoundError:
            if self._complete:
                raise
            return np.zeros(n, np.int64), np.zeros(n, np.int64)
        offsets, lengths = np.frombuffer(_checked(data), "<u8").reshape(n, 2).T
        empty = offsets == _EMPTY
        return np.where(empty, 0, offsets).astype(np.int64), np.where(empty, 0, lengths).astype(np.int64)

    def _key(self, number: int) -> str:
        return self._images.metadata.encode_chunk_key((number, *(0 for _ in self.shape[1:])))

    def _rows_of(self, number: int) -> str:
        size = self.chunk_rows * self._chunks_per_shard
        return f"rows {number * size} to {min((number + 1) * size, self.shape[0]) - 1} of {self._where}"


def _undone(array: zarr.Array) -> list[Callable] | None:
    """What makes rows of the bytes of a chunk, the last step to an array; `None` if it takes Zarr to do that."""
    import numcodecs
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

    known: dict[type, Callable] = {
        Crc32cCodec: _checked,
        BloscCodec: numcodecs.Blosc().decode,
        ZstdCodec: numcodecs.Zstd().decode,
        GzipCodec: numcodecs.GZip().decode,
    }
    codecs: Any = array.metadata.codecs  # type: ignore[union-attr]
    if isinstance(codecs[0], ShardingCodec):
        (sharding,) = codecs
        index = [type(codec) for codec in sharding.index_codecs]
        if _name_of(sharding.index_location) != "end" or index != [BytesCodec, Crc32cCodec]:
            return None
        codecs = sharding.codecs
    first, *others = codecs
    native = isinstance(first, BytesCodec) and (first.endian is None or _name_of(first.endian) == sys.byteorder)
    if not native or any(type(codec) not in known for codec in others):
        return None
    steps = [known[type(codec)] for codec in reversed(others)]
    return [*steps, _copied] if not steps or steps[-1] is _checked else steps


def _name_of(choice: Any) -> str:
    """Of one of Zarr's choices: members of enumerations until its version 3.3, plain text in 3.4."""
    return str(getattr(choice, "value", choice))


def _checked(data: bytes | memoryview) -> memoryview:
    """All but the last four bytes, which are the checksum of the rest (CRC-32C).

    Raises
    ------
    ValueError
        If they are not.
    """
    from numcodecs.checksum32 import CRC32C

    view = memoryview(data)
    body, stored = view[:-_CHECKSUM], int.from_bytes(view[-_CHECKSUM:], "little")
    # of a view of bytes it takes arrays alone
    if CRC32C.checksum(np.frombuffer(body, np.uint8)) != stored:
        msg = "a checksum is wrong"
        raise ValueError(msg)
    return body


def _copied(data: bytes | memoryview, out: np.ndarray) -> None:
    out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)


def _runs(apart: np.ndarray) -> Iterator[tuple[int, int]]:
    """Stretches of places between which nothing is apart, as start and stop; ``(n - 1,)`` for n places."""
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(apart) + 1]
    yield from zip(edges[:-1], edges[1:], strict=True)


class _Files:
    """Files of a folder, read by ranges of bytes; the last few hundred are kept open."""

    _MOST = 256
    # of one system call; Linux takes 1,024
    _TARGETS = 512

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def path(self, key: str) -> Path:
        """Of a file."""
        return self._folder / key

    def size(self, key: str) -> int:
        """Number of bytes."""
        return self.path(key).stat().st_size

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes from ``start``; a negative one counts from the end.

        Raises
        ------
        FileNotFoundError, EOFError
            If there is no such file, or it is shorter.
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
        """Fill one target after the other with bytes from ``start``, without a copy; errors are those of `read`."""
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
                if n:  # a system call reads at most 2 GiB
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


# enough that pictures which were corrected, exchanged or rescaled differ somewhere, few enough to be read in no time
_SAMPLED = 64
# rows whose hashes are in memory at once
_HASHED = 65_536


def digest_cells(source: ImageSource | None, table: pd.DataFrame) -> str:
    """SHA-256 of a table, all of it, and of the pixels of 64 cells that are always the same for so many cells.

    Parameters
    ----------
    source
        Images ``(N, C, H, W)`` of the rows of the table; `None` for none.
    table
        What is known of each cell; rows in another order, or columns of another name, are another table. Values count,
        not the codes of a categorical, nor its unused categories.

    Returns
    -------
    64 hexadecimal digits.
    """
    digest = hashlib.sha256(repr([len(table), *map(str, table.columns)]).encode())
    for start in range(0, len(table), _HASHED):
        part = table.iloc[start : start + _HASHED]
        columns = {number: _alone(part.iloc[:, number]) for number in range(part.shape[1])}
        hashes = pd.util.hash_pandas_object(pd.DataFrame(columns, index=part.index))
        digest.update(hashes.to_numpy().tobytes())
    if source is not None:
        n = source.shape[0]
        rows = np.sort(np.random.default_rng(n).choice(n, min(n, _SAMPLED), replace=False))
        digest.update(repr([*source.shape, source.dtype.str]).encode())
        digest.update(source.read(rows).tobytes())
    return digest.hexdigest()


def _alone(column: pd.Series) -> pd.Series:
    """Without the categories of other rows: names of millions would all be hashed with every part."""
    return column.cat.remove_unused_categories() if isinstance(column.dtype, pd.CategoricalDtype) else column


_END = object()
# more would only wait for the one that reads
_MOST_WORKERS = 16


def prefetch(items: Iterable[Item], ahead: int = 2) -> Generator[Item]:
    """Iterate over items in order, made by a background thread that is up to ``ahead`` items in front.

    An exception of the iterable is raised where its item would have come. When the iteration is closed early, the
    thread ends with the item at hand. A worker process would cost more than it gives: gathering is done by libraries
    that hold Python's lock for none of that time.
    """
    made: queue.Queue = queue.Queue(ahead)
    left = threading.Event()

    def hand_over(item: object) -> bool:
        """Wait for room; false when nobody is there any more."""
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
            hand_over((_END, None))
        except BaseException as error:  # noqa: BLE001 whatever it is, it belongs to the one who iterates
            hand_over((_END, error))

    thread = threading.Thread(target=make, name="scbd-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        left.set()
        thread.join()


def worked_on(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result]:
    """Results of all items in their order, made by threads of which each uses one core, at least two and at most 16.

    An exception is raised where its result would have come. Then, and when the iteration is closed early, what has been
    begun is finished, and nothing else begun.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # two, since one works while another waits for the disk
    n_workers = min(max(cores, 2), _MOST_WORKERS)
    with torch_threads_kept(), ThreadPoolExecutor(n_workers, "scbd-worker", one_torch_thread) as pool:
        yield from pool.map(work, items)
