"""Copies of a table that read the same images."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import zarr

from scbd.data.stores._guard import guarded

if TYPE_CHECKING:
    import os

    from anndata import AnnData


def with_copy(table: AnnData) -> AnnData:
    """The table; its ``copy()`` leaves in Zarr what lies there.

    AnnData cannot copy arrays of Zarr (since 0.13 it says so). It writes tables and arrays by their exact type, so that
    neither may be of a class of ours: this one table is given the method.
    """
    if any(_is_shared(array) for array in (table.X, *table.layers.values(), *table.obsm.values())):
        table.copy = partial(_copied, table)
    return table


def _is_shared(array: Any) -> bool:
    return isinstance(array, zarr.Array) and array.read_only


def _copied(table: AnnData, filename: str | os.PathLike[str] | None = None) -> AnnData:
    """As :meth:`anndata.AnnData.copy`; arrays of Zarr that cannot be changed are those of the table."""
    from anndata import AnnData

    parts: dict[str, Any] = {slot: dict(getattr(table, slot)) for slot in ("layers", "obsm", "varm", "obsp", "varp")}
    x = parts["layers"].pop(None, table.X)  # where X is since anndata 0.13
    shared = {
        slot: {key: parts[slot].pop(key) for key, array in [*parts[slot].items()] if _is_shared(array)}
        for slot in ("layers", "obsm")
    }
    parts |= {"X": None if _is_shared(x) else x, "obs": table.obs, "var": table.var, "uns": table.uns, "raw": table.raw}
    copied = AnnData(**parts).copy(filename)
    for slot, arrays in shared.items():
        getattr(copied, slot).update({key: guarded(array) for key, array in arrays.items()})
    if _is_shared(x):
        copied.X = guarded(x)
    return with_copy(copied)
