"""Conversion of tables to types and column names that AnnData can write to a file."""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype, is_bool_dtype, is_integer_dtype, is_numeric_dtype

from scbd._shared.checks import join_first
from scbd._shared.labels import label_text

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

# Kinds of values in a column of Python objects, as named by pandas.api.types.infer_dtype. AnnData may be able to write
# columns of these kinds as categories. Columns of all other kinds are converted to text.
_STORABLE_KINDS = ("string", "bytes", "boolean", "integer", "floating", "mixed-integer-float", "empty")
# Names that a column of a table cannot have in an AnnData file. A name that contains "/" is not possible either, since
# it would create a folder (group) in the file.
_RESERVED = ("", ".", "..", "_index")


def as_storable(table: pd.DataFrame, slot: str = "obs") -> pd.DataFrame:
    """Convert a table to column types and column names that AnnData can write to a file.

    - Columns of numbers, truth values or text, and categorical columns of such values, keep their values.
    - Columns of other values, such as dates, intervals, or numbers mixed with text, become categorical columns of text.
      The text is the same as in perturbation and environment labels (:func:`~scbd._shared.labels.label_values`), so
      that a model finds the labels that it was set up with.
    - Columns whose name cannot be written, such as a name with a ``/``, get a different name (:func:`stored_names`). A
      log line states the new names.

    - The name of the index is dropped if it cannot be written, for example because a column has the same name. The
      names of rows are kept.

    The given table is not modified. If nothing needs a conversion, the given table itself is returned.

    Parameters
    ----------
    table
        Table to be written, such as ``obs`` with one row per cell.
    slot
        Name of the table in messages, such as ``"obs"``.

    Raises
    ------
    ValueError
        If two columns have the same name, a column name is not text, or a column holds values that cannot be written
        as text (the message names the column).
    """
    if numbers := [name for name in table.columns if not isinstance(name, str)]:
        msg = f"{slot} has columns whose names are not text ({join_first(numbers)}): use {slot}.columns.astype(str)."
        raise ValueError(msg)
    names = table.columns
    if not names.is_unique:
        msg = f"{slot} has several columns named {names[names.duplicated()][0]!r}: rename or drop all but one."
        raise ValueError(msg)
    label = table.index.name
    if label is not None and (not isinstance(label, str) or label in names or stored_names([label])):
        table = table.rename_axis(index=None)
    columns = {name: (values, storable_column(values, f"{slot}[{name!r}]")) for name, values in table.items()}
    others = stored_names(names)
    if not others and all(held is values for values, held in columns.values()):
        return table
    if others:
        pairs = join_first(f"{name!r} as {other!r}" for name, other in others.items())
        logger.info("%s: columns whose names a file cannot hold are stored under others: %s.", slot, pairs)
    # Build a new table, since assigning columns to a view would modify the given table. Build it from arrays without
    # an index, since pandas cannot align columns if names of rows are repeated.
    held = {others.get(name, name): values.array for name, (_, values) in columns.items()}
    return pd.DataFrame(held, index=pd.Index(table.index))


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """Choose new names for columns whose names cannot be written to an AnnData file, such as ``a_b`` for ``a/b``.

    Returns
    -------
    Dictionary from present to new names. It contains only the columns that need a new name.
    """
    taken, found = set(names), {}
    for name in names:
        if "/" not in name and name not in _RESERVED:
            continue
        plain = name.replace("/", "_")
        plain = f"column{plain}" if plain in _RESERVED else plain
        found[name] = next(other for n in count(1) if (other := plain if n == 1 else f"{plain}_{n}") not in taken)
        taken.add(found[name])
    return found


def storable_column(values: pd.Series, where: str) -> pd.Series:
    """Convert a column of a table to a type that AnnData can write to a file.

    If the column has such a type already, the given object itself is returned.

    Parameters
    ----------
    values
        Column to convert.
    where
        Name of the column, for error messages.
    """
    if isinstance(values.dtype, pd.CategoricalDtype):
        return values if _are_categories_storable(values.cat.categories) else _categories_as_text(values, where)
    if isinstance(values.dtype, np.dtype) and values.dtype != object and values.dtype.kind in "biufc":
        return values
    if isinstance(values.array, (pd.arrays.IntegerArray, pd.arrays.BooleanArray)):
        return values
    # convert numbers and truth values in types of pandas that AnnData cannot write (Arrow, sparse, or floats with a
    # mask)
    if is_numeric_dtype(values) or is_bool_dtype(values):
        kind = "boolean" if is_bool_dtype(values) else "Int64" if is_integer_dtype(values) else None
        plain = values.astype(kind) if kind else pd.Series(values.to_numpy(np.float64, na_value=np.nan), values.index)
        return cast("pd.Series", plain)
    values = values.astype(object) if isinstance(values.dtype, pd.StringDtype) else values
    # dates and intervals are first made categories, which are in the order of time or of numbers
    if values.dtype != object:
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
    """Return whether AnnData can write a categorical column with these categories to a file."""
    if isinstance(categories.dtype, pd.StringDtype):
        return True
    if categories.dtype == object:
        return infer_dtype(categories, skipna=False) in ("string", "bytes", "boolean", "empty")
    return categories.dtype.kind in "biuf" and not isinstance(categories.dtype, pd.IntervalDtype)


def _categories_as_text(labels: pd.Series, where: str) -> pd.Series:
    """Convert the categories of a categorical column to text, and keep the order of the categories if possible.

    The order is kept unless two categories, such as the number 1 and the text "1", have the same text.

    Parameters
    ----------
    labels
        Categorical column.
    where
        Name of the column, for error messages.
    """
    _check_values(labels.cat.categories, where)
    texts = list(map(_text, labels.cat.categories.tolist()))
    if len(set(texts)) == len(texts):
        return labels.cat.rename_categories(texts)
    # merge categories that have the same text, such as the number 1 and the text "1"
    return labels.astype(object).map(_text, na_action="ignore").astype("category")


def _text(value: Any) -> str:
    """Convert a value of a column to the same text that it has in perturbation and environment labels."""
    # str() of a list of numpy numbers would include their types, as in [np.int64(1)]
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return label_text(value)


def _check_values(values: Iterable[Any], where: str) -> None:
    """Raise ``ValueError`` if a value of a column, such as an array or a set, cannot be converted to text."""
    unfit = next((value for value in values if not _has_text(value)), None)
    if unfit is not None:
        msg = (
            f"{where} holds values of the type {type(unfit).__name__}, for which no text stands: drop the column, or "
            "give numbers or text."
        )
        raise ValueError(msg)


def _has_text(value: Any) -> bool:
    """Return whether a value can be replaced by its text without loss.

    The text must represent the whole value, and must be the same in each process. Arrays, sets, dictionaries, and
    objects whose text is only their type and memory address do not meet these conditions.
    """
    if isinstance(value, (list, tuple)):
        return all(map(_has_text, value))
    is_table = hasattr(value, "__array__") and np.ndim(value) > 0
    return not (is_table or isinstance(value, (set, frozenset, dict)) or type(value).__repr__ is object.__repr__)
