"""How the chunks of a Zarr array are coded, from its metadata: undone here, one chunk at a time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import zarr
    from zarr.abc.codec import Codec

    Undo = Callable[..., bytes | memoryview]
    Decode = Callable[[bytes | memoryview, np.ndarray], None]

CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class ShardIndex:
    """How the index of a shard is stored: at its end or its beginning, with a checksum or without."""

    at_end: bool
    checked: bool

    def plain(self, data: bytes) -> memoryview:
        """The index without its checksum.

        Raises
        ------
        ValueError
            If the checksum is wrong.
        """
        return without_checksum(data) if self.checked else memoryview(data)


def name_of(choice: Any) -> str:
    """Of one of Zarr's choices: members of enumerations until its version 3.3, plain text in 3.4."""
    return str(getattr(choice, "value", choice))


def codecs_of(array: zarr.Array, where: str) -> tuple[Decode, ShardIndex | None, int | None]:
    """How chunks are decoded, and shards indexed.

    Returns
    -------
    What turns the bytes of a chunk into pixels, written to an array; the index of shards, if there are any; where
    pixels are stored as they are, the number of bytes behind them.

    Raises
    ------
    ValueError
        If the array is coded in a way that is not read here.
    """
    from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

    codecs: list[Codec] = list(array.metadata.codecs)  # type: ignore[union-attr]
    index = None
    if isinstance(codecs[0], ShardingCodec):
        sharding = codecs[0]
        checked = any(isinstance(codec, Crc32cCodec) for codec in sharding.index_codecs)
        index = ShardIndex(name_of(sharding.index_location) == "end", checked)
        codecs = list(sharding.codecs)
    undo: list[Undo] = []
    for codec in reversed(codecs):
        if isinstance(codec, BytesCodec):
            if array.dtype.itemsize > 1 and codec.endian is not None and name_of(codec.endian) != sys.byteorder:
                raise ValueError(_not_read(where, f"numbers that are {name_of(codec.endian)}-endian"))
        else:
            undo.append(_undone(codec, where))
    last = undo.pop() if undo and undo[-1] is not without_checksum else _copied

    def decode(data: bytes | memoryview, out: np.ndarray) -> None:
        for step in undo:
            data = step(data)
        last(data, out)

    return decode, index, CHECKSUM_BYTES * len(undo) if last is _copied else None


def without_checksum(data: bytes | memoryview) -> memoryview:
    """All but the last four bytes, which are the checksum of the rest.

    Raises
    ------
    ValueError
        If they are not.
    """
    view = memoryview(data)
    body, stored = view[:-CHECKSUM_BYTES], int.from_bytes(view[-CHECKSUM_BYTES:], "little")
    if checksum(body) != stored:
        msg = "a checksum is wrong"
        raise ValueError(msg)
    return body


def checksum(data: bytes | memoryview | np.ndarray, before: int = 0) -> int:
    """CRC-32C of bytes, or of what came before and these."""
    import google_crc32c

    # of a view of bytes it takes arrays alone
    return google_crc32c.extend(before, np.frombuffer(data, np.uint8))


def _copied(data: bytes | memoryview, out: np.ndarray) -> None:
    out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)


def _undone(codec: Codec, where: str) -> Undo:
    import numcodecs
    from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

    if isinstance(codec, Crc32cCodec):
        return without_checksum
    if isinstance(codec, BloscCodec):
        return numcodecs.Blosc().decode
    if isinstance(codec, ZstdCodec):
        return numcodecs.Zstd().decode
    if isinstance(codec, GzipCodec):
        return numcodecs.GZip().decode
    raise ValueError(_not_read(where, type(codec).__name__))


def _not_read(where: str, what: str) -> str:
    return f"{where} is stored with {what}, which is not read here: convert the store with scbd.data.write_screen."
