"""Ranges of bytes of the files of a Zarr store: plain reads on a disk, requests to an object store."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr import Array
    from zarr.abc.store import Store

_OPEN_FILES = 256
# of one system call; Linux takes 1,024
_TARGETS = 512


class ByteRanges(Protocol):
    """Files of an array, by key."""

    def name(self, key: str) -> str:
        """How an error should call a file."""
        ...

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes from ``start``; a negative one counts from the end.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        EOFError
            If it is shorter.
        """
        ...

    def size(self, key: str) -> int:
        """Number of bytes.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        """
        ...


def byte_ranges(array: Array) -> ByteRanges:
    """The files of an array, wherever they lie."""
    from zarr.storage import LocalStore

    if isinstance(array.store, LocalStore):
        return LocalFiles(Path(array.store.root) / array.path)
    return RemoteFiles(array.store, array.path)


class LocalFiles:
    """Files of a folder; the last few hundred are kept open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def name(self, key: str) -> str:
        """Path of the file."""
        return str(self._folder / key)

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes from ``start``; a negative one counts from the end."""
        descriptor = self._descriptor(key)
        if start < 0:
            start += os.fstat(descriptor).st_size
        data = os.pread(descriptor, length, start) if start >= 0 else b""
        if len(data) < length:
            msg = f"{len(data)} of {length} bytes at {start}"
            raise EOFError(msg)
        return data

    def read_into(self, key: str, start: int, targets: Sequence[memoryview]) -> None:
        """Fill one target after the other with bytes from ``start``, without a copy.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        EOFError
            If it is shorter.
        """
        descriptor = self._descriptor(key)
        for first in range(0, len(targets), _TARGETS):
            some = list(targets[first : first + _TARGETS])
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

    def size(self, key: str) -> int:
        """Number of bytes."""
        return (self._folder / key).stat().st_size

    def _descriptor(self, key: str) -> int:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[key] = os.open(self._folder / key, os.O_RDONLY)
        return self._open[key]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class RemoteFiles:
    """Files of any store that Zarr knows."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path

    def name(self, key: str) -> str:
        """Store and key of the file."""
        return f"{self._store}/{self._key(key)}"

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes from ``start``; a negative one counts from the end."""
        from zarr.abc.store import RangeByteRequest, SuffixByteRequest
        from zarr.core.buffer import default_buffer_prototype
        from zarr.core.sync import sync

        wanted = RangeByteRequest(start, start + length) if start >= 0 else SuffixByteRequest(-start)
        found = sync(self._store.get(self._key(key), default_buffer_prototype(), wanted))
        if found is None:
            raise FileNotFoundError(self.name(key))
        data = found.to_bytes()[:length]
        if len(data) < length:
            msg = f"{len(data)} of {length} bytes at {start}"
            raise EOFError(msg)
        return data

    def size(self, key: str) -> int:
        """Number of bytes."""
        from zarr.core.sync import sync

        return sync(self._store.getsize(self._key(key)))

    def _key(self, key: str) -> str:
        return f"{self._path}/{key}" if self._path else key
