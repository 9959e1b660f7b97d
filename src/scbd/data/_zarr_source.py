"""Images and features in Zarr arrays, read row by row from the bytes of their chunks."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.data._sources import IMAGES, STORE_KEY, InputKind, allocate_output, as_row_numbers, iterate_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zarr

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
        for start, stop in iterate_runs(np.diff(shards) != 0):
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
        for start, stop in iterate_runs((np.diff(offsets) != lengths[:-1]) | (np.diff(places) != 1)):
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
        edges = list(iterate_runs(np.diff(chunks) != 0))
        wanted = chunks[[start for start, _ in edges]]
        starts, ends = offsets[wanted], offsets[wanted] + lengths[wanted]
        gaps = starts[1:] - ends[:-1]
        *steps, last = self._decoders or [_copy_bytes]
        chunk = np.empty((self.chunk_rows, *self.shape[1:]), self.dtype)
        for begin, end in iterate_runs((gaps < 0) | (gaps > _MAX_GAP_BYTES)):
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
