"""Tables of cells whose images or features stay in a Zarr store: protection of the store, and copies of the tables."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr
from anndata import AnnData
from zarr.storage import FsspecStore, LocalStore, MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

# attribute of a store, which copies and pickles of the store also have: paths of the arrays that tables read from it
_OPENED = "_arrays_opened_by_scbd"


def keep_on_disk(table: AnnData) -> AnnData:
    """Prepare a table whose arrays were opened from a Zarr store: protect the store, and let ``copy()`` share arrays.

    AnnData empties a Zarr store before it writes to the store. If a table is written to the store that its images are
    read from, the images would be lost. As long as an array of the table exists, removing its folder therefore raises
    an error (:func:`_refuse_removal`). This holds for local folders. Arrays of a store in memory are loaded. Stores on
    other machines are not protected.

    Arrays of Zarr have no method ``copy``, which AnnData calls. The copy of the table has the same arrays, which are
    read-only, and copies of everything else. AnnData chooses the writer of an object by its exact type, so that
    subclasses of the table or of the arrays could not be written. The method is therefore set on this one table.

    Parameters
    ----------
    table
        Opened table. It is modified and returned.
    """
    for slot, key, array in list(_zarr_arrays(table)):
        if isinstance(array.store, MemoryStore):
            _replace(table, slot, key, array[...])
    arrays = [array for _, _, array in _zarr_arrays(table)]
    for array in arrays:
        if _local_folder(array.store):
            vars(array.store).setdefault(_OPENED, set()).add(array.path)
    if arrays:
        table.copy = partial(_copy, table)
    return table


def _zarr_arrays(table: AnnData) -> Iterator[tuple[str, str | None, zarr.Array]]:
    """Yield the Zarr arrays of a table, each with its slot (``"X"``, ``"layers"`` or ``"obsm"``) and its key."""
    if isinstance(table.X, zarr.Array):
        yield "X", None, table.X
    for slot in ("layers", "obsm"):
        for key, array in getattr(table, slot).items():
            # since AnnData 0.13, layers hold X under the key None
            if isinstance(array, zarr.Array) and key is not None:
                yield slot, key, array


def _replace(table: AnnData, slot: str, key: str | None, array: Any) -> None:
    if key is None:
        table.X = array
    else:
        getattr(table, slot)[key] = array


def _copy(table: AnnData, filename: str | os.PathLike[str] | None = None) -> AnnData:
    """Return a copy of a table as :meth:`anndata.AnnData.copy` does, which has the same Zarr arrays as the table."""
    shared = list(_zarr_arrays(table))
    slots = ("layers", "obsm", "varm", "obsp", "varp")
    parts: dict[str, Any] = {slot: {k: v for k, v in getattr(table, slot).items() if k is not None} for slot in slots}
    parts |= {name: getattr(table, name) for name in ("X", "obs", "var", "uns", "raw")}
    for slot, key, _ in shared:
        if key is None:
            parts[slot] = None
        else:
            del parts[slot][key]
    copied = AnnData(**parts).copy(filename)
    for slot, key, array in shared:
        _replace(copied, slot, key, array)
    return keep_on_disk(copied)


def _local_folder(store: Any) -> Path | None:
    """Return the folder of a Zarr store, with links resolved; `None` if the store is not a folder of this machine."""
    if isinstance(store, LocalStore):
        return Path(os.path.realpath(store.root))
    if isinstance(store, FsspecStore) and "file" in store.fs.protocol:
        return Path(os.path.realpath(store.path))
    return None


def _refuse_removal(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise ``PermissionError`` if a folder is to be removed that holds arrays of an opened table, or is part of them.

    Python calls this function at each call of ``shutil.rmtree``, whatever package makes the call. A folder that
    contains the whole store and more may be removed.
    """
    if event != "shutil.rmtree":
        return
    folder = Path(os.path.realpath(os.fsdecode(arguments[0])))
    if not any((place / "zarr.json").exists() for place in (folder, *folder.parents)):
        return
    # tables that nobody can use any more may still exist, since AnnData objects refer to themselves
    gc.collect()
    for store in gc.get_objects():
        if not issubclass(type(store), (LocalStore, FsspecStore)) or (root := _local_folder(store)) is None:
            continue
        opened = [root / path for path in vars(store).get(_OPENED, ())]
        if folder.is_relative_to(root) and any(a.is_relative_to(folder) or folder.is_relative_to(a) for a in opened):
            msg = (
                f"{folder} holds images or features of an opened table, which would be lost: write to another path. To "
                "remove the folder, first delete the table (del adata)."
            )
            raise PermissionError(msg)


# done on import: a process that unpickles an opened table imports this file, and has to protect the store as well
sys.addaudithook(_refuse_removal)
