"""Shards of a Zarr store, put together here: Zarr's own way takes half a millisecond an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from scbd.data.sources._zarr_codecs import CHECKSUM_BYTES, checksum, name_of

if TYPE_CHECKING:
    import zarr
    from zarr.abc.codec import BytesBytesCodec

# how hard to try: what is stored once is read a dozen times, at nearly the same speed
_LEVELS: dict[Literal["lz4", "zstd"], int] = {"lz4": 5, "zstd": 3}
COMPRESSIONS = tuple(_LEVELS)


class ShardEncoder:
    """Files of an array that has one image a chunk.

    Parameters
    ----------
    array
        Sharded, with :meth:`codecs`.
    """

    def __init__(self, array: zarr.Array) -> None:
        from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

        (sharding,) = array.metadata.codecs  # type: ignore[union-attr]
        assert isinstance(sharding, ShardingCodec) and isinstance(sharding.codecs[0], BytesCodec)
        assert isinstance(sharding.codecs[-1], Crc32cCodec) and array.shards is not None
        self._chunks = array.shards[0]
        self._compress = None
        if isinstance(sharding.codecs[1], BloscCodec):
            import numcodecs

            blosc = sharding.codecs[1]
            self._compress = numcodecs.Blosc(name_of(blosc.cname), blosc.clevel, numcodecs.Blosc.SHUFFLE).encode

    @staticmethod
    def codecs(compression: Literal["lz4", "zstd"] | None) -> list[BytesBytesCodec]:
        """Codecs of the chunks, behind their bytes."""
        from zarr.codecs import BloscCodec, Crc32cCodec

        if compression is None:
            return [Crc32cCodec()]
        return [BloscCodec(cname=compression, clevel=_LEVELS[compression], shuffle="shuffle"), Crc32cCodec()]

    def encode(self, images: np.ndarray) -> bytes:
        """The file of a shard: chunks one after the other, each with its checksum, and their index."""
        parts: list[bytes | memoryview] = []
        index = np.full((self._chunks, 2), 2**64 - 1, "<u8")
        position = 0
        for number, image in enumerate(images):
            data = image.data.cast("B") if self._compress is None else self._compress(image)
            parts += [data, checksum(data).to_bytes(CHECKSUM_BYTES, "little")]
            index[number] = position, len(data) + CHECKSUM_BYTES
            position += len(data) + CHECKSUM_BYTES
        entries = index.tobytes()
        return b"".join([*parts, entries, checksum(entries).to_bytes(CHECKSUM_BYTES, "little")])
