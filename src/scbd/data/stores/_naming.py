"""Which row of a table is which image: by their names, where images have any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._messages import head
from scbd._progress import say

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_numbered(names: pd.Index) -> bool:
    """Whether rows have no names, but their numbers."""
    return bool((names.astype(str) == np.arange(len(names)).astype(str)).all())


def in_order_of(names: pd.Index, table: pd.DataFrame, path: str, *, ordered: bool) -> pd.DataFrame:
    """The table's rows in the order of images, and under their names.

    Parameters
    ----------
    names
        Of the images.
    table
        As many rows. Its index, or one of its columns, holds the names.
    path
        Where the images are.
    ordered
        Whether images have an order that whoever wrote the table knows: a table that has no names is then taken in it,
        and a sentence says so.

    Raises
    ------
    ValueError
        If the table has other names, if two of its columns have them in different orders, or if it has none and images
        are not ordered.
    """
    names = names.astype(str)
    if names.equals(table.index.astype(str)):
        return table
    found = {place: rows for place, values in _places(table) if (rows := _rows(names, values)) is not None}
    if len(found) > 1 and is_numbered(table.index):  # which pandas has made
        found.pop("the index", None)
    if found:
        (first, rows), *others = found.items()
        for other, rows_too in others:
            if not np.array_equal(rows, rows_too):
                msg = f"{first} and {other} of the table have the names in {path} in different orders: drop one."
                raise ValueError(msg)
        return table.iloc[rows].set_axis(names)
    if ordered and is_numbered(table.index):
        say(f"{path}: the table names no cell ({head(names, 3)}), and so is taken to have the same order.")
        return table
    unnamed = min((names[~names.isin(values)] for _, values in _places(table)), key=len)
    msg = (
        f"The table does not say which row is which image of {path}: {len(unnamed)} of {len(names)} names, such as "
        f"{(unnamed if len(unnamed) else names)[0]}, are in none of its columns; add one that has each name once, or "
        "where the table itself names image files, read it in place of them (file_columns=…)."
    )
    raise ValueError(msg)


def _places(table: pd.DataFrame) -> Iterator[tuple[str, pd.Index]]:
    """What may hold names, as text."""
    yield "the index", table.index.astype(str)
    for number, column in enumerate(table):
        if table.dtypes.iloc[number].kind not in "fbmM":
            yield f"column {column!r}", pd.Index(table.iloc[:, number].astype(str))


def _rows(names: pd.Index, values: pd.Index) -> np.ndarray | None:
    """Of each name its row, if each has one."""
    if not names.is_unique or values[0] not in names:
        return None
    places = names.get_indexer(values)
    rows = np.full(len(names), -1)
    rows[places] = np.arange(len(places))
    return rows if (places >= 0).all() and (rows >= 0).all() else None
