"""Fast reading of images and features from Zarr arrays, by direct access to the bytes of single chunks in files.

Zarr divides an array into chunks, which are compressed one by one. Several chunks can be stored in one file, which is
called a shard.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.data._sources import IMAGES, STORE_KEY, InputKind, allocate_output, as_row_numbers, iterate_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    import zarr

# A Zarr shard, that is, a file with several chunks, ends with an index. _INDEX_ENTRY_BYTES: size of the index entry of
# one chunk, which holds the offset and the length of the chunk in the file. _CHECKSUM_BYTES: size of the checksum after
# the last index entry.
_INDEX_ENTRY_BYTES, _CHECKSUM_BYTES = 16, 4
# offset that the index of a shard holds for a chunk that is not stored
_ABSENT_CHUNK_OFFSET = np.uint64(2**64 - 1)
# Maximum number of bytes between two requested chunks of a file for which both chunks are read with one system call.
# The bytes between the chunks are then read as well, and are discarded.
_MAX_GAP_BYTES = 2**16


class ZarrSource:
    """Source of images or features that are stored in a Zarr array with one row per cell.

    If all of these conditions hold, the bytes of chunks are read directly from the files, which is many times faster
    than reading with the zarr package:

    - The array is in a local folder, in Zarr format 3 and in the byte order of this machine.
    - Each chunk holds whole rows.
    - The array is not compressed, or compressed with lz4, zstd, blosc or gzip.

    Otherwise, the array is read with the zarr package.

    Checksums of compressed rows are verified whenever the rows are read. If rows are not compressed and each row is a
    chunk of its own, verification would take longer than reading. Checksums of such rows are verified only by
    :func:`verify_screen`.

    Parameters
    ----------
    images
        Zarr array of images ``(N, C, H, W)``, or of features ``(N, F)`` if ``kind`` is ``FEATURES``.
    where
        Name of the array, for error messages.
    kind
        Kind of data in the array: ``IMAGES`` (default) or ``FEATURES``.

    Raises
    ------
    TypeError, ValueError
        If the shape or dtype of the array does not suit this kind of data, see :class:`ArraySource`.

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
        """Number of rows per chunk of the Zarr array. Reading one row costs as much as reading its whole chunk."""
        self._chunks_per_shard = 1 if images.shards is None else images.shards[0] // images.chunks[0]
        local = isinstance(images.store, LocalStore) and images.metadata.zarr_format == 3
        self._decoders = _chunk_decoders(images) if local and images.chunks[1:] == images.shape[1:] else None
        if self._decoders is not None:
            self._files = _ByteRangeReader(Path(images.store.root) / images.path)  # type: ignore[attr-defined]
        self._indices: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # A chunk that is not stored normally means that all its numbers equal the fill value of the array. In arrays
        # that scbd has written, no chunk is of this kind, so that a missing chunk is lost data.
        self._complete = STORE_KEY in images.attrs

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
        FileNotFoundError
            If scbd has written the array, and one of its files is missing.
        ValueError
            If a file is truncated, or the checksum of its data is wrong. The message names the file and its rows.
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
        n_per_shard = self.chunk_rows * self._chunks_per_shard
        shards = rows // n_per_shard
        for start, stop in iterate_runs(np.diff(shards) != 0):
            number, part = int(shards[start]), slice(start, stop)
            try:
                self._read_shard(number, rows[part], places[part], out)
            except (FileNotFoundError, EOFError, ValueError, RuntimeError) as error:
                last = min((number + 1) * n_per_shard, self.shape[0]) - 1
                with_rows = f"with rows {number * n_per_shard} to {last} of {self._where}"
                path = self._files.folder / self._key(number)
                if isinstance(error, FileNotFoundError):
                    msg = f"{path} is missing, {with_rows}."
                    raise FileNotFoundError(msg) from error
                msg = f"{path} is damaged or truncated, {with_rows} ({error}): copy or write the store again."
                raise ValueError(msg) from error
        return out

    def _read_shard(self, number: int, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Read rows that are stored in one shard, that is, in one file with one or several chunks.

        Parameters
        ----------
        number
            Number of the shard.
        rows
            Row numbers in the whole array, in ascending order.
        places
            Position in ``out`` to which each requested row is written.
        out
            Array to write the rows to.
        """
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
        # if chunks are not compressed and hold one row each, with or without a checksum at the end, read adjacent
        # chunks with one system call, and do not verify their checksums
        if self.chunk_rows == 1 and self._decoders in ([_copy_bytes], [_strip_checksum, _copy_bytes]):
            offsets, length, size = offsets[chunks], int(lengths[chunks[0]]), out[:1].nbytes
            for start, stop in iterate_runs(np.diff(offsets) != length):
                data = self._files.read(self._key(number), int(offsets[start]), (stop - start) * length)
                pixels = np.frombuffer(data, np.uint8).reshape(stop - start, length)[:, :size].view(out.dtype)
                out[places[start:stop]] = pixels.reshape(stop - start, *out.shape[1:])
        else:
            self._read_chunks(number, rows, chunks, places, out)

    def _read_chunks(
        self, number: int, rows: np.ndarray, chunks: np.ndarray, places: np.ndarray, out: np.ndarray
    ) -> None:
        """Read chunks of one shard, decode them one by one, and copy the requested rows to ``out``.

        Chunks that lie close together in the file are read with one system call.

        Parameters
        ----------
        number
            Number of the shard.
        rows
            Requested row numbers in the whole array, in ascending order.
        chunks
            For each requested row, the number of its chunk in the shard.
        places
            For each requested row, its position in ``out``.
        out
            Array to write the rows to.
        """
        offsets, lengths = self._indices[number]
        edges = list(iterate_runs(np.diff(chunks) != 0))
        wanted = chunks[[start for start, _ in edges]]
        starts, ends = offsets[wanted], offsets[wanted] + lengths[wanted]
        gaps = starts[1:] - ends[:-1]
        *steps, last = self._decoders or [_copy_bytes]
        chunk = np.empty((self.chunk_rows, *self.shape[1:]), self.dtype)
        for begin, end in iterate_runs((gaps < 0) | (gaps > _MAX_GAP_BYTES)):
            base = int(starts[begin])
            data = self._files.read(self._key(number), base, int(ends[end - 1]) - base)
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
        """Read the position and length of each chunk in a shard, that is, in a file with one or several chunks.

        Parameters
        ----------
        number
            Number of the shard.

        Returns
        -------
        Offsets and lengths of the chunks in bytes, two arrays int64 ``(chunks_per_shard,)``. The length is 0 if a chunk
        is not stored because all its numbers equal the fill value of the array.

        Raises
        ------
        EOFError, ValueError
            If the file is empty or truncated, or if its index is damaged.
        FileNotFoundError
            If scbd has written the array, and the file is missing.
        """
        n, key = self._chunks_per_shard, self._key(number)
        try:
            if self._images.shards is None:
                length = (self._files.folder / key).stat().st_size
                if not length:
                    msg = "the file is empty"
                    raise EOFError(msg)
                return np.zeros(1, np.int64), np.array([length])
            size = _INDEX_ENTRY_BYTES * n + _CHECKSUM_BYTES
            data = self._files.read(key, -size, size)
        except FileNotFoundError:
            if self._complete:
                raise
            return np.zeros(n, np.int64), np.zeros(n, np.int64)
        offsets, lengths = np.frombuffer(_strip_checksum(data), "<u8").reshape(n, 2).T
        empty = offsets == _ABSENT_CHUNK_OFFSET
        return np.where(empty, 0, offsets).astype(np.int64), np.where(empty, 0, lengths).astype(np.int64)

    def _key(self, number: int) -> str:
        return self._images.metadata.encode_chunk_key((number, *(0 for _ in self.shape[1:])))


def _chunk_decoders(array: zarr.Array) -> list[Callable] | None:
    """Return the functions that decode the bytes of a chunk of a Zarr array, in the order in which they are applied.

    The first function is applied to the bytes of the chunk, and each further function to the result of the previous
    function. The last function takes as a second argument the array that it writes the rows to. The result is `None`
    if the array has a compression or layout that only the zarr package can decode.
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
    """Return the value of an option of a Zarr codec, such as the byte order, as text.

    The option is a member of an enumeration up to version 3.3 of the zarr package, and a text from version 3.4 on.
    """
    return str(getattr(choice, "value", choice))


def _strip_checksum(data: bytes | memoryview) -> memoryview:
    """Verify the checksum at the end of the bytes of a chunk, and return the bytes before it.

    The last four bytes are the CRC-32C checksum of all bytes before them.

    Raises
    ------
    ValueError
        If the checksum is wrong.
    """
    from numcodecs.checksum32 import CRC32C

    view = memoryview(data)
    body, stored = view[:-_CHECKSUM_BYTES], int.from_bytes(view[-_CHECKSUM_BYTES:], "little")
    # convert the data to an array, since CRC32C.checksum does not accept a memoryview
    if CRC32C.checksum(np.frombuffer(body, np.uint8)) != stored:
        msg = "a checksum is wrong"
        raise ValueError(msg)
    return body


def _copy_bytes(data: bytes | memoryview, out: np.ndarray) -> None:
    """Copy the uncompressed bytes of a chunk into ``out``, an array of the shape and dtype of the chunk."""
    out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)


class _ByteRangeReader:
    """Reader of ranges of bytes from the files of a folder.

    Files stay open after reading, so that the next range of a file is read faster. At most 256 files are open at once.
    """

    # maximum number of files that are kept open
    _MOST = 256

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, key: str, start: int, length: int) -> memoryview:
        """Read a range of bytes from a file.

        Parameters
        ----------
        key
            Name of the file in the folder.
        start
            Position of the first byte. A negative position counts from the end of the file.
        length
            Number of bytes to read.

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
        data, n_read = np.empty(length, np.uint8).data, 0
        while n_read < length:  # a system call reads at most 2 GiB
            n = os.preadv(descriptor, [data[n_read:]], start + n_read) if start >= 0 else 0
            if not n:
                msg = f"{n_read} of {length} bytes at {start}"
                raise EOFError(msg)
            n_read += n
        return data

    def _descriptor(self, key: str) -> int:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        if len(self._open) >= self._MOST:
            os.close(self._open.popitem(last=False)[1])
        self._open[key] = os.open(self.folder / key, os.O_RDONLY)
        return self._open[key]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
