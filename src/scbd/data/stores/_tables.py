"""Tables of a store: what they may hold, and checksums of every value, name and attribute that they are read by."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype, is_bool_dtype, is_integer_dtype, is_numeric_dtype

from scbd._labels import label_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

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
# objects of which pandas makes categories that a store has
_OF_ONE_KIND = ("string", "bytes", "boolean", "integer", "floating", "mixed-integer-float", "empty")
# name of a column with the names of rows
_RESERVED = "_index"
# NUL, and halves of a character, as names of files may have them
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def storable(table: pd.DataFrame, slot: str = "obs") -> pd.DataFrame:
    """A table as a store holds it: dates, intervals, mixed values and the like become categories of text.

    Numbers, truth values, text and categories of them stay as they are, and the table itself is not changed. Text is
    that of labels (:func:`~scbd._labels.label_values`): a model finds the labels that it was set up with.

    Parameters
    ----------
    table
        What is known of each cell.
    slot
        What errors call it.

    Raises
    ------
    ValueError
        If it has a name or text that no store can hold, or values that no text stands for (in which column).
    """
    _check_names(table, slot)
    columns = {name: (values, _held(values, f"{slot}[{name!r}]")) for name, values in table.items()}
    if any(held is not values for values, held in columns.values()):
        # of arrays, since names of rows may repeat; a frame of its own, since a view would write to what it shows
        table = pd.DataFrame({name: held.array for name, (_, held) in columns.items()}, index=pd.Index(table.index))
    _check_text(table, slot)
    return table


def _check_names(table: pd.DataFrame, slot: str) -> None:
    for column in table:
        name = str(column)
        if "/" in name or "\0" in name or name in ("", ".", "..", _RESERVED):
            why = "which a store keeps for itself" if name == _RESERVED else "of which a store makes a path"
            new = name.replace("/", "_").strip("._") or "column"
            msg = (
                f"{slot} has a column {column!r}, {why}: rename it, for example "
                f"adata.{slot} = adata.{slot}.rename(columns={{{column!r}: {new!r}}})."
            )
            raise ValueError(msg)
    twice = table.columns[table.columns.astype(str).duplicated()]
    if len(twice):
        msg = f"{slot} has several columns of the name {twice[0]!r}: rename or drop all but one."
        raise ValueError(msg)
    name = table.index.name
    if name in table and not np.array_equal(table.index, table[name]):
        msg = (
            f"The index of {slot} has the name {name!r}, and so has a column with other values: remove the name, with "
            f"adata.{slot}.index.name = None."
        )
        raise ValueError(msg)


def _check_text(table: pd.DataFrame, slot: str) -> None:
    for name, values in [("index", table.index), *table.items()]:
        texts = values.cat.categories if values.dtype == "category" else values
        found = (_NO_TEXT.search(text) for text in texts if isinstance(text, str)) if texts.dtype.kind in "OUT" else ()
        wrong = next((match[0] for match in found if match), None)
        if wrong is not None:
            what = "a NUL character" if wrong == "\0" else f"half of a character ({ascii(wrong)})"
            msg = f"{slot} has text with {what} in {name!r}, which cannot be stored: remove it."
            raise ValueError(msg)


def _held(values: pd.Series, where: str) -> pd.Series:
    """A column in a type that a store has; the same object if it is."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        return values if _are_held(values.cat.categories) else _with_texts(values, where)
    if isinstance(values.dtype, np.dtype) and values.dtype != object and values.dtype.kind in "biufc":
        return values
    if isinstance(values.array, (pd.arrays.IntegerArray, pd.arrays.BooleanArray)):
        return values
    if is_numeric_dtype(values) or is_bool_dtype(values):  # of arrow, sparse, or floats with a mask
        return _plain_numbers(values)
    values = values.astype(object) if isinstance(values.dtype, pd.StringDtype) else values
    if values.dtype != object:  # dates, intervals: in their order
        return _with_texts(values.astype("category"), where)
    kind = infer_dtype(values, skipna=True)
    if kind == "string" and not values.hasnans:
        return values
    if kind in _OF_ONE_KIND:
        labels = values.astype("category")
        if _are_held(labels.cat.categories):
            return labels
    _check_values(values[values.notna()], where)
    return values.map(_text, na_action="ignore").astype("category")


def _are_held(categories: pd.Index) -> bool:
    if isinstance(categories.dtype, pd.StringDtype):
        return True
    if categories.dtype == object:
        return infer_dtype(categories, skipna=False) in ("string", "bytes", "boolean", "empty")
    return categories.dtype.kind in "biuf" and not isinstance(categories.dtype, pd.IntervalDtype)


def _with_texts(labels: pd.Series, where: str) -> pd.Series:
    """Categories as text, in their order."""
    _check_values(labels.cat.categories, where)
    texts = list(map(_text, labels.cat.categories.tolist()))
    if len(set(texts)) == len(texts):
        return labels.cat.rename_categories(texts)
    return labels.astype(object).map(_text, na_action="ignore").astype("category")  # 1 and "1" are one


def _text(value: Any) -> str:
    if isinstance(value, list):  # Python's own text of one has the types of numbers in it
        return f"[{', '.join(map(_text, value))}]"
    return label_text(value)


def _plain_numbers(values: pd.Series) -> pd.Series:
    if is_bool_dtype(values):
        return values.astype("boolean")
    if is_integer_dtype(values):
        return values.astype("Int64")
    return pd.Series(values.to_numpy(np.float64, na_value=np.nan), index=values.index)


def _check_values(values: Iterable[Any], where: str) -> None:
    unfit = next((value for value in values if not _has_text(value)), None)
    if unfit is not None:
        msg = (
            f"{where} holds values of the type {type(unfit).__name__}, which cannot be stored and for which no text "
            "stands: drop the column, or give numbers or text."
        )
        raise ValueError(msg)


def _has_text(value: Any) -> bool:
    """Whether text stands for all of it, and is the same in the next process."""
    if isinstance(value, (list, tuple)):
        return all(map(_has_text, value))
    is_table = hasattr(value, "__array__") and np.ndim(value) > 0
    return not (is_table or isinstance(value, (set, frozenset, dict)) or type(value).__repr__ is object.__repr__)


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
