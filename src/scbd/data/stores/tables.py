"""Checksums of the tables of a store: of every value, name and attribute that reading them depends on."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import zarr

    Group: TypeAlias = h5py.Group | zarr.Group
    Layout: TypeAlias = Mapping[str, tuple[tuple[int, ...], np.dtype]]

STORE_KEY = "scbd_store"
TABLES_KEY = "tables"
# what is said there of one store, and not of a copy of it
BOOKKEEPING = ("arrays", "block_size", "checksums", TABLES_KEY)
# what cannot be part of its own checksum, or changes while blocks are written and is compared with them
_SKIPPED = (f"uns/{STORE_KEY}/{TABLES_KEY}", f"uns/{STORE_KEY}/checksums")
# rows of a table that are in memory at once
_ROWS = 65_536


def tables_checksums(store: Group, blocks: Layout) -> str:
    """A checksum of each part of a store (``obs``, ``var``, …), as JSON.

    Parameters
    ----------
    store
        An AnnData in HDF5 or Zarr.
    blocks
        Arrays with checksums of their own, by path: of these, only shape and dtype count.
    """
    said = {name: _checksum(store[name], name, blocks) for name in sorted(store) if name not in blocks}
    layout = [[path, list(shape), dtype.str] for path, (shape, dtype) in sorted(blocks.items())]
    return json.dumps(said | {"": hashlib.sha256(json.dumps([layout, _attributes(store)]).encode()).hexdigest()})


def damaged_tables(store: Group, blocks: Layout) -> list[str] | None:
    """Parts of a store that are not what was written; `None` if it does not say what that was."""
    path = f"uns/{STORE_KEY}/{TABLES_KEY}"
    if path not in store:
        return None
    text: Any = store[path][()]  # type: ignore[index]
    said: dict[str, str] = json.loads(text.decode() if isinstance(text, bytes) else str(text))
    found: dict[str, str] = json.loads(tables_checksums(store, blocks))
    return [name or "the root" for name in sorted(said | found) if said.get(name) != found.get(name)]


def _checksum(node: Any, path: str, blocks: Layout) -> str:
    digest = hashlib.sha256(json.dumps(_attributes(node)).encode())
    if hasattr(node, "shape"):
        for part in _values(node):
            digest.update(part)
    else:
        below = {name: f"{path}/{name}" for name in sorted(node)}
        members = [
            [name, _checksum(node[name], where, blocks)]
            for name, where in below.items()
            if where not in blocks and where not in _SKIPPED
        ]
        digest.update(json.dumps(members).encode())
    return digest.hexdigest()


def _attributes(node: Any) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in sorted(node.attrs.items())}


def _values(array: Any) -> Iterator[bytes]:
    """Shape, dtype and values; of text, in rows of any number, the same bytes."""
    yield json.dumps([list(array.shape or ()), str(array.dtype)]).encode()
    if array.shape is None:  # of HDF5, holds nothing
        return
    rows = array.chunks[0] if array.shape and array.chunks else _ROWS
    starts = range(0, array.shape[0], rows) if array.shape else (None,)
    lengths = hashlib.sha256()
    for start in starts:
        values = np.asarray(array[()] if start is None else array[start : start + rows])
        if values.dtype.kind in "OUT":  # text of any length
            texts = [value if isinstance(value, bytes) else str(value).encode() for value in values.ravel().tolist()]
            lengths.update(np.fromiter(map(len, texts), np.int64, len(texts)).tobytes())
            yield b"".join(texts)
        else:
            yield np.ascontiguousarray(values).tobytes()
    yield lengths.digest()
