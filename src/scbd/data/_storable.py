"""Tables converted to types that AnnData can write."""

from __future__ import annotations

import logging
import os
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import pandas as pd
from anndata import AnnData
from pandas.api.types import infer_dtype, is_bool_dtype, is_integer_dtype, is_numeric_dtype

from scbd._shared.checks import join_first
from scbd._shared.labels import label_text
from scbd.data._readers import (
    Crops,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    Plate: TypeAlias = Crops | AnnData | str | os.PathLike[str]

logger = logging.getLogger(__name__)

# kinds of objects, named as in pandas, whose categories a store may be able to hold
_STORABLE_KINDS = ("string", "bytes", "boolean", "integer", "floating", "mixed-integer-float", "empty")


# names that a column cannot have in a store; a name with a "/" cannot be used either, since it would make a folder
_RESERVED = ("", ".", "..", "_index")


def as_storable(table: pd.DataFrame, slot: str = "obs") -> pd.DataFrame:
    """Convert a table to types and column names that a store can hold.

    - Columns of numbers, truth values or text, and of categories of these, keep their values.
    - Columns of dates, intervals, mixed values and the like become categories of text. The text is the same as that of
      labels (:func:`~scbd._shared.labels.label_values`), so that a model finds the labels that it was set up with.
    - Columns with a name that no store can hold, such as a name with a ``/``, get another name (:func:`stored_names`).
      A log line names them.

    The given table does not change. It is returned itself if there is nothing to convert.

    Parameters
    ----------
    table
        Table of the cells.
    slot
        Name of the table in messages.

    Raises
    ------
    ValueError
        If two columns have the same name, a name is not text, or a column holds values that cannot be written as text
        (the message names the column).
    """
    if numbers := [name for name in table.columns if not isinstance(name, str)]:
        msg = f"{slot} has columns whose names are not text ({join_first(numbers)}): use {slot}.columns.astype(str)."
        raise ValueError(msg)
    names = table.columns
    if not names.is_unique:
        msg = f"{slot} has several columns named {names[names.duplicated()][0]!r}: rename or drop all but one."
        raise ValueError(msg)
    columns = {name: (values, _storable_column(values, f"{slot}[{name!r}]")) for name, values in table.items()}
    others = stored_names(names)
    if not others and all(held is values for values, held in columns.values()):
        return table
    if others:
        pairs = join_first(f"{name!r} as {other!r}" for name, other in others.items())
        logger.info("%s: columns whose names a file cannot hold are stored under others: %s.", slot, pairs)
    # build a new frame, since a view would write to the given table; from arrays, since names of rows may be repeated
    held = {others.get(name, name): values.array for name, (_, values) in columns.items()}
    return pd.DataFrame(held, index=pd.Index(table.index))


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """Return another name for each column whose own name no store can hold, such as ``a_b`` for ``a/b``."""
    taken, found = set(names), {}
    for name in names:
        if "/" not in name and name not in _RESERVED:
            continue
        plain = name.replace("/", "_")
        plain = f"column{plain}" if plain in _RESERVED else plain
        found[name] = next(other for n in count(1) if (other := plain if n == 1 else f"{plain}_{n}") not in taken)
        taken.add(found[name])
    return found


def _storable_column(values: pd.Series, where: str) -> pd.Series:
    """Return a column in a type that a store can hold; the same object if its type is one already."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        return values if _are_categories_storable(values.cat.categories) else _categories_as_text(values, where)
    if isinstance(values.dtype, np.dtype) and values.dtype != object and values.dtype.kind in "biufc":
        return values
    if isinstance(values.array, (pd.arrays.IntegerArray, pd.arrays.BooleanArray)):
        return values
    if is_numeric_dtype(values) or is_bool_dtype(values):  # arrow, sparse, or floats with a mask
        kind = "boolean" if is_bool_dtype(values) else "Int64" if is_integer_dtype(values) else None
        plain = values.astype(kind) if kind else pd.Series(values.to_numpy(np.float64, na_value=np.nan), values.index)
        return cast("pd.Series", plain)
    values = values.astype(object) if isinstance(values.dtype, pd.StringDtype) else values
    if values.dtype != object:  # dates and intervals keep their order
        return _categories_as_text(values.astype("category"), where)
    kind = infer_dtype(values, skipna=True)
    if kind == "string" and not values.hasnans:
        return values
    if kind in _STORABLE_KINDS:
        labels = values.astype("category")
        if _are_categories_storable(labels.cat.categories):
            return labels
    _check_values(values[values.notna()], where)
    return values.map(_text, na_action="ignore").astype("category")


def _are_categories_storable(categories: pd.Index) -> bool:
    """Return whether a store can hold categories of this type."""
    if isinstance(categories.dtype, pd.StringDtype):
        return True
    if categories.dtype == object:
        return infer_dtype(categories, skipna=False) in ("string", "bytes", "boolean", "empty")
    return categories.dtype.kind in "biuf" and not isinstance(categories.dtype, pd.IntervalDtype)


def _categories_as_text(labels: pd.Series, where: str) -> pd.Series:
    """Return a categorical column with its categories as text, in their order."""
    _check_values(labels.cat.categories, where)
    texts = list(map(_text, labels.cat.categories.tolist()))
    if len(set(texts)) == len(texts):
        return labels.cat.rename_categories(texts)
    return labels.astype(object).map(_text, na_action="ignore").astype("category")  # 1 and "1" have the same text


def _text(value: Any) -> str:
    """Return the text of a value, as in labels."""
    if isinstance(value, list):  # str() of a list would include the types of numbers
        return f"[{', '.join(map(_text, value))}]"
    return label_text(value)


def _check_values(values: Iterable[Any], where: str) -> None:
    """Raise ``ValueError`` if a value of a column cannot be written as text."""
    unfit = next((value for value in values if not _has_text(value)), None)
    if unfit is not None:
        msg = (
            f"{where} holds values of the type {type(unfit).__name__}, for which no text stands: drop the column, or "
            "give numbers or text."
        )
        raise ValueError(msg)


def _has_text(value: Any) -> bool:
    """Return whether the text of a value represents it completely, and is the same in another process."""
    if isinstance(value, (list, tuple)):
        return all(map(_has_text, value))
    is_table = hasattr(value, "__array__") and np.ndim(value) > 0
    return not (is_table or isinstance(value, (set, frozenset, dict)) or type(value).__repr__ is object.__repr__)
