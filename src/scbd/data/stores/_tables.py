"""Tables of a store: what they may hold, and checksums of every value, name and attribute that they are read by."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import zarr
    from anndata import AnnData

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


def check_names(tables: AnnData) -> None:
    """Raise if a table has names or text that no store can hold; before anything is written.

    Raises
    ------
    ValueError
        If so.
    """
    for slot, table in (("obs", tables.obs), ("var", tables.var)):
        for column in table:
            if "/" in str(column) or "\0" in str(column) or str(column) in ("", ".", ".."):
                msg = (
                    f"{slot} has a column {column!r}, of which a store makes a path: rename it, for example "
                    f"adata.{slot} = adata.{slot}.rename(columns={{{column!r}: "
                    f"{str(column).replace('/', '_').strip('.') or 'column'!r}}})."
                )
                raise ValueError(msg)
        for name, values in [("index", table.index), *table.items()]:
            texts = values.cat.categories if values.dtype == "category" else values
            if texts.dtype.kind in "OUT" and any(isinstance(text, str) and "\0" in text for text in texts):
                msg = f"{slot} has text with a NUL character in {name!r}, which cannot be stored: remove it."
                raise ValueError(msg)


def tables_checksums(store: Group, blocks: Layout) -> str:
    """A checksum of each part of a store (``obs``, ``var``, …), as JSON.

    Of HDF5 it is that of values, names and attributes; of Zarr that of all files, which are not decoded: a damaged one
    could ask for any amount of memory.

    Parameters
    ----------
    store
        An AnnData in HDF5 or Zarr.
    blocks
        Arrays with checksums of their own, by path: of these, only shape and dtype count.
    """
    layout = [[path, list(shape), dtype.str] for path, (shape, dtype) in sorted(blocks.items())]
    if isinstance(store, h5py.Group):
        parts = {name: _checksum(store[name], name, blocks) for name in sorted(store)}
        layout.append(_attributes(store))  # type: ignore[arg-type]
    else:
        parts = _checksums_of_files(store, (*blocks, *_SKIPPED))
    return json.dumps(parts | {"layout": hashlib.sha256(json.dumps(layout).encode()).hexdigest()})


def damaged_tables(store: Group, blocks: Layout) -> list[str] | None:
    """Parts of a store that are not what was written; `None` if it does not say what that was."""
    path = f"uns/{STORE_KEY}/{TABLES_KEY}"
    if path not in store:
        return None
    text: Any = store[path][()]  # type: ignore[index]
    written: dict[str, str] = json.loads(text.decode() if isinstance(text, bytes) else str(text))
    found: dict[str, str] = json.loads(tables_checksums(store, blocks))
    return [name for name in sorted(written | found) if written.get(name) != found.get(name)]


def _checksums_of_files(group: zarr.Group, skipped: Collection[str]) -> dict[str, str]:
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    async def files() -> dict[str, str]:
        prefix = f"{group.path}/" if group.path else ""
        digests: dict[str, Any] = {}
        for key in sorted([key async for key in group.store.list_prefix(prefix)]):
            path = key.removeprefix(prefix)
            if not any(path.startswith(f"{other}/") for other in skipped):
                data = await group.store.get(key, default_buffer_prototype())
                digest = digests.setdefault(path.split("/")[0], hashlib.sha256())
                digest.update(path.encode() + b"\0" + (hashlib.sha256(data.to_bytes()).digest() if data else b""))
        return {name: digest.hexdigest() for name, digest in digests.items()}

    return sync(files())


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
