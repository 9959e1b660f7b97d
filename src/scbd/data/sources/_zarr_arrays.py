"""Images in a Zarr array, read by the offsets of its chunks: one look at each shard's index, then plain reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scbd.data.sources._arrays import target_of
from scbd.data.sources._byte_ranges import LocalFiles, byte_ranges
from scbd.data.sources._kinds import IMAGES, InputKind
from scbd.data.sources._zarr_codecs import codecs_of

if TYPE_CHECKING:
    import zarr

_EMPTY = np.uint64(2**64 - 1)
_ENTRY = 16  # bytes of an index: offset and length of a chunk
_CHECKSUM = 4
# chunks this close to each other are fetched in one request
_GAP = 2**16


@dataclass(frozen=True)
class _Shard:
    """One file of a store: where its chunks lie; an empty chunk has length 0."""

    offsets: np.ndarray
    lengths: np.ndarray
    dense: bool  # chunk after chunk, none empty


class ZarrSource:
    """Images, or features, in a Zarr array (format 3) whose chunks hold whole images, or whole rows.

    Zarr's own reading of random rows takes milliseconds a chunk; this takes the offsets of chunks from each shard's
    index, once, and reads bytes. Checksums of compressed images are tested as they are read; testing those of others
    would take longer than reading does, and is left to :func:`verify_screen`.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``; sharded or not; uncompressed, or compressed with blosc (lz4, zstd, …), zstd or gzip.
    where
        How an error should call it.
    kind
        See :class:`ArraySource`.
    verify
        Test all checksums.

    Raises
    ------
    TypeError, ValueError
        If it does not hold images, see :class:`ArraySource`; if its chunks hold parts of images, or are compressed in a
        way that is not read.

    Examples
    --------
    >>> import zarr
    >>> images = zarr.create_array("images.zarr", data=adata.obsm["single_cell_images"], chunks=(1, 4, 32, 32))
    >>> scbd.data.ZarrSource(images).read(np.array([3, 1, 2])).shape
    (3, 4, 32, 32)
    """

    in_memory = False

    def __init__(
        self, images: zarr.Array, where: str = "images", kind: InputKind = IMAGES, *, verify: bool = False
    ) -> None:
        kind.check(images.shape, images.dtype, where)
        self.shape: tuple[int, ...] = images.shape
        self.dtype: np.dtype = images.dtype
        if images.chunks[1:] != images.shape[1:] or images.metadata.zarr_format != 3:
            msg = (
                f"{where} is cut into chunks of {images.chunks} (format {images.metadata.zarr_format}): chunks must "
                f"hold whole rows of it and be of format 3; {kind.whole_rows}."
            )
            raise ValueError(msg)
        self._images = images
        self._where = where
        self._files = byte_ranges(images)
        self._decode, self._sharding, trailer = codecs_of(images, where)
        # behind each image that is stored as it is, its checksum; `None` where it is not, or to be tested
        self._trailer = None if trailer and verify else trailer
        self._chunk_rows = images.chunks[0]
        self._chunks_per_shard = 1 if images.shards is None else images.shards[0] // images.chunks[0]
        self._shards: dict[int, _Shard] = {}
        # a store of ours leaves no chunk out: what is missing is lost, and not meant to be empty
        self._complete = "scbd_store" in images.attrs

    @property
    def chunk_rows(self) -> int:
        """Images a chunk; reading one of them costs as much as reading all."""
        return self._chunk_rows

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
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(self.shape[0]))
        places = np.argsort(rows, kind="stable")
        ordered = rows[places]
        chunks = ordered // self._chunk_rows
        shards = chunks // self._chunks_per_shard
        edges = np.flatnonzero(np.diff(shards, prepend=-1, append=-1))
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            part = slice(start, stop)
            self._read_shard(int(shards[start]), ordered[part], chunks[part], places[part], out)
        return out

    def _read_shard(
        self, number: int, rows: np.ndarray, chunks: np.ndarray, places: np.ndarray, out: np.ndarray
    ) -> None:
        key = self._key(number)
        try:
            shard = self._index(number)
            local = chunks - number * self._chunks_per_shard
            if self._direct(shard) and isinstance(self._files, LocalFiles):
                self._read_raw(key, shard, local, places, out)
            else:
                self._read_chunks(key, shard, rows, local, places, out)
        except FileNotFoundError as error:
            msg = f"{self._files.name(key)} is missing, with {self._rows_of(number)}: copy or write the store again."
            raise FileNotFoundError(msg) from error
        except (EOFError, ValueError, RuntimeError) as error:
            msg = (
                f"{self._files.name(key)} is damaged or truncated, with {self._rows_of(number)} ({error}): copy or "
                "write the store again."
            )
            raise ValueError(msg) from error

    def _direct(self, shard: _Shard) -> bool:
        """Whether bytes of the file are images as they are, one after the other."""
        return self._trailer is not None and self._chunk_rows == 1 and shard.dense

    def _read_raw(self, key: str, shard: _Shard, local: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Neighbours that stay neighbours are read at once, to where they belong."""
        assert isinstance(self._files, LocalFiles)
        size = out[0].nbytes
        flat = out.data.cast("B")
        checksum = memoryview(bytearray(self._trailer or 0))
        breaks = np.flatnonzero((np.diff(local) != 1) | (np.diff(places) != 1)) + 1
        edges = [0, *breaks.tolist(), len(local)]
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            first = int(places[start])
            targets = [flat[first * size : (first + stop - start) * size]]
            if checksum:
                images = (flat[i * size : (i + 1) * size] for i in range(first, first + stop - start))
                targets = [part for image in images for part in (image, checksum)]
            self._files.read_into(key, int(shard.offsets[local[start]]), targets)

    def _read_chunks(
        self, key: str, shard: _Shard, rows: np.ndarray, local: np.ndarray, places: np.ndarray, out: np.ndarray
    ) -> None:
        """Chunks that lie close are fetched at once, and decoded one by one."""
        empty = shard.lengths[local] == 0
        if empty.any():
            out[places[empty]] = self._images.fill_value
            rows, local, places = rows[~empty], local[~empty], places[~empty]
        wanted, first = np.unique(local, return_index=True)
        last = [*first[1:].tolist(), len(local)]
        chunk = np.empty((self._chunk_rows, *self.shape[1:]), self.dtype)
        offsets, ends = shard.offsets[wanted], shard.offsets[wanted] + shard.lengths[wanted]
        for start, stop in _close(offsets, ends):
            base = int(offsets[start])
            data = memoryview(self._files.read(key, base, int(ends[stop - 1]) - base))
            for i in range(start, stop):
                coded = data[int(offsets[i]) - base : int(ends[i]) - base]
                cells = slice(int(first[i]), last[i])
                if chunk.shape[0] == last[i] - first[i] == 1:
                    place = int(places[first[i]])
                    self._decode(coded, out[place : place + 1])
                else:
                    self._decode(coded, chunk)
                    out[places[cells]] = chunk[rows[cells] % self._chunk_rows]

    def _index(self, number: int) -> _Shard:
        if number not in self._shards:
            self._shards[number] = self._read_index(number)
        return self._shards[number]

    def _read_index(self, number: int) -> _Shard:
        n, key = self._chunks_per_shard, self._key(number)
        try:
            if self._sharding is None:
                return _Shard(np.zeros(1, np.int64), np.array([self._files.size(key)]), dense=True)
            size = _ENTRY * n + _CHECKSUM * self._sharding.checked
            data = self._files.read(key, -size if self._sharding.at_end else 0, size)
        except FileNotFoundError:
            if self._complete:
                raise
            return _Shard(np.zeros(n, np.int64), np.zeros(n, np.int64), dense=False)
        entries = np.frombuffer(self._sharding.plain(data), "<u8").reshape(n, 2)
        offsets, lengths = entries.T
        empty = offsets == _EMPTY
        here = min(n, -(-self.shape[0] // self._chunk_rows) - number * n)
        if self._complete and empty[:here].any():
            msg = "its index has no entry for a chunk"
            raise ValueError(msg)
        offsets = np.where(empty, 0, offsets).astype(np.int64)
        lengths = np.where(empty, 0, lengths).astype(np.int64)
        dense = not empty[:here].any() and bool((offsets[1:here] == (offsets + lengths)[: here - 1]).all())
        return _Shard(offsets, lengths, dense=dense)

    def _key(self, number: int) -> str:
        return self._images.metadata.encode_chunk_key((number, *(0 for _ in self.shape[1:])))

    def _rows_of(self, number: int) -> str:
        size = self._chunk_rows * self._chunks_per_shard
        return f"rows {number * size} to {min((number + 1) * size, self.shape[0]) - 1} of {self._where}"


def _close(offsets: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of chunks that are close to each other and in order, as start and stop."""
    gaps = offsets[1:] - ends[:-1]
    breaks = np.flatnonzero((gaps < 0) | (gaps > _GAP)) + 1
    edges = [0, *breaks.tolist(), len(offsets)]
    return list(zip(edges[:-1], edges[1:], strict=True)) if len(offsets) else []
