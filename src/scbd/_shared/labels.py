"""Labels in columns of ``obs``: read, crossed, checked for missing values, and encoded as integers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.checks import join_first, missing_key_message, suggest_name

if TYPE_CHECKING:
    from collections.abc import Sequence

# separator between the names of crossed columns, and between their values in a crossed label
CROSS_SEPARATOR = " × "
# a value that itself contains × or a backslash has it escaped with a backslash
_ESCAPED_CHARACTER = re.compile(r"\\(.)", re.DOTALL)
# texts that stand for a missing value in tables, in lower case
MISSING_WORDS = ("", "na", "n/a", "#n/a", "nan", "none", "null", "<na>", "nil")
# usual names of controls, as bare_name returns them
_USUAL_CONTROL_NAMES = (
    "dmso ntc nt nontargeting nontargetingcontrol nontarget control controls ctrl ctl negcon negativecontrol negctrl "
    "untreated mock vehicle scrambled scramble"
).split()
# types of labels that a saved model can hold; labels of other types (date, interval, Decimal) are converted to text
_STORABLE_LABEL_TYPES = (str, bytes, bool, int, float)


def check_anndata(adata: Any) -> None:
    """Raise ``TypeError`` if the cells are not given as an AnnData."""
    from anndata import AnnData

    if not isinstance(adata, AnnData):
        msg = (
            f"Cells are given as an AnnData, got {type(adata).__name__}: open a file with scbd.data.open_screen or "
            "read_profiles, load crops with crops.to_memory(), put a table into one with AnnData(values, obs=…), and "
            "several together with anndata.concat."
        )
        raise TypeError(msg)


def as_columns(columns: Any) -> tuple[str, ...]:
    """Return one column name, or a sequence of column names, as a tuple.

    Raises
    ------
    TypeError
        If ``columns`` is neither a name nor a sequence.
    ValueError
        If the sequence is empty.
    """
    if columns is None or not np.iterable(columns):
        msg = f"Columns of obs are given as a name or a list of names, got {columns!r}."
        raise TypeError(msg)
    columns = (columns,) if isinstance(columns, str) else tuple(columns)
    if not columns:
        msg = "An empty list of obs columns was given: name at least one."
        raise ValueError(msg)
    return tuple(str(column) if isinstance(column, str) else column for column in columns)


def label_values(obs: pd.DataFrame, columns: str | Sequence[str], *, allow_missing: bool = False) -> pd.Series:
    r"""Return one categorical label per cell, from one column of ``obs`` or from the cross of several.

    - One column: the labels are its values. Text, numbers and truth values keep their type; other values, such as
      dates, are converted to text.
    - Several columns: a label is the text of the values, joined with ``×``. A ``×`` inside a value is written as
      ``\×``, so that different combinations never get the same label.

    A whole number is the same label whether it is stored as 1 or as 1.0. Unused categories are dropped.

    Parameters
    ----------
    obs
        Table of the cells.
    columns
        Name of one column, or several names.
    allow_missing
        If true, a cell with a missing value gets no label. Otherwise a missing value is an error.

    Returns
    -------
    Categorical series ``(N,)`` with the index of ``obs``.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If ``obs`` has two columns of this name; or if a cell has no value, unless ``allow_missing`` is true. The
        message lists the rows.
    """
    labels = [_label_column(obs, column, allow_missing) for column in as_columns(columns)]
    crossed = labels[0] if len(labels) == 1 else _cross_labels(labels)
    return pd.Series(crossed, index=obs.index)


def label_text(value: Any) -> str:
    """Return a label as text; a whole number gives the same text whether it is stored as 1 or as 1.0."""
    value = _to_plain_type(value)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def check_control_labels(
    control: Any, labels: Iterable[str], y_key: str | Sequence[str], e_labels: Iterable[str] = ()
) -> list[str]:
    """Return the labels of the controls as text (see :func:`label_text`), and check that they occur in the table.

    Parameters
    ----------
    control
        Label of the controls as stored in the column (text, a number or a truth value), or a list of labels.
    labels
        Text of the labels in the table: one per row, or only the unique ones.
    y_key
        Column or columns of the perturbation, for error messages.
    e_labels
        Text of the environments. If a missing control is found here, the error message suggests that ``y_key`` and
        ``e_key`` were exchanged.

    Raises
    ------
    ValueError
        If a given label is missing (`None`, NaN), or if it occurs in no row.
    """
    values = as_list(control)
    if any(pd.isna(value) for value in values):
        msg = f"control={control!r} is no value: give control the value of {y_key!r} for unperturbed cells."
        raise ValueError(msg)
    names = control_label_texts(values)
    there = pd.unique(np.asarray(labels, dtype=object))
    absent = sorted(set(names) - set(there))
    if absent:
        exchanged = absent[0] in e_labels
        hint = " It is in e_key: are the two exchanged?" if exchanged else suggest_name(absent[0], there)
        msg = (
            f"No row has the control {absent[0]!r} in {y_key!r} (it holds {join_first(there)}): give control the value "
            f"for unperturbed cells.{hint}"
        )
        raise ValueError(msg)
    return names


def control_label_texts(control: Any) -> list[str]:
    """Return the text of one or several control labels, without checking that they occur in the table."""
    return list(dict.fromkeys(map(label_text, as_list(control))))


def find_likely_controls(labels: Iterable[Any]) -> list[str]:
    """Return the labels that have a usual name of controls, such as DMSO, as text."""
    return [str(label) for label in labels if normalise_name(label) in _USUAL_CONTROL_NAMES]


def normalise_name(name: Any) -> str:
    """Return only the letters and digits of a name, in lower case and without CellProfiler's prefix "Metadata"."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower()).removeprefix("metadata")


def encode_labels(labels: pd.Series, known: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    """Return the integer code of each label, and the labels that are not in the list of known labels.

    A known label has its position in ``known`` as code. Other labels get the next numbers, and a missing label is -1.
    Labels with the same text are equal, such as 1 and "1".

    Parameters
    ----------
    labels
        Categorical labels ``(N,)``.
    known
        Known labels, such as those that a model was trained on.

    Returns
    -------
    Codes, int64 ``(N,)``, and the list of labels that are not in ``known``.
    """
    found = labels.cat.categories.tolist()
    places = {label_text(label): place for place, label in enumerate(known)}
    unknown = [label for label in found if label_text(label) not in places]
    places |= {label_text(label): len(known) + place for place, label in enumerate(unknown)}
    lookup = np.array([*(places[label_text(label)] for label in found), -1], dtype=np.int64)
    return lookup[labels.cat.codes.to_numpy()], unknown


def encode_crossed_columns(crossed: Sequence[str]) -> np.ndarray:
    """Split crossed labels into their C columns, and return integer codes for each column, int64 ``(L, C)``.

    Crossed labels are made by :func:`label_values` from several columns. Values are numbered in the order in which they
    first occur, so that appending labels does not change the codes of earlier labels.
    """
    parts = np.array([split_crossed_label(label) for label in crossed], dtype=object)
    return np.stack([pd.factorize(part)[0] for part in parts.T], axis=1)


def split_crossed_label(crossed: str) -> list[str]:
    """Split a label that :func:`label_values` crossed from several columns into the text of each column's value."""
    return [_ESCAPED_CHARACTER.sub(r"\1", part) for part in crossed.split(CROSS_SEPARATOR)]


def get_obs_column(obs: pd.DataFrame, column: str) -> pd.Series:
    """Return a column of the table of cells.

    Raises
    ------
    KeyError
        If the column is missing.
    ValueError
        If the table has two columns of this name.
    """
    if column not in obs:
        raise KeyError(missing_key_message("obs", column, obs.columns))
    values = obs[column]
    if isinstance(values, pd.DataFrame):
        msg = f"obs has {values.shape[1]} columns of the name {column!r}: rename or drop all but one."
        raise ValueError(msg)
    return values


def as_list(names: Any) -> list[Any]:
    """Return a list: all items of a sequence, or one single value (a text counts as a single value)."""
    return list(names) if isinstance(names, Iterable) and not isinstance(names, str | bytes) else [names]


def _label_column(obs: pd.DataFrame, column: str, allow_missing: bool) -> pd.Categorical:
    values = get_obs_column(obs, column)
    missing = np.flatnonzero(values.isna().to_numpy())  # on a Series, pandas would build a lookup table of the index
    if missing.size and not allow_missing:
        msg = (
            f"obs[{column!r}] has no value for {missing.size} of {len(obs)} cells (rows {join_first(missing)}): give "
            "them "
            "one (untreated cells a perturbation such as 'control', named with control=…), or leave these rows out."
        )
        raise ValueError(msg)
    labels = values.astype("category").array.remove_unused_categories()
    names = [_to_plain_type(category) for category in labels.categories.tolist()]
    # values with the same text become one label: a date and its text, or 1 and "1" from two concatenated tables
    merged = list({label_text(name): name for name in reversed(names)}.values())[::-1]
    if names == labels.categories.tolist() and len(merged) == len(names):
        return labels
    place = {label_text(name): number for number, name in enumerate(merged)}
    places = np.array([*(place[label_text(name)] for name in names), -1])
    return pd.Categorical.from_codes(places[labels.codes], categories=merged)


def _cross_labels(labels: Sequence[pd.Categorical]) -> pd.Categorical:
    """Cross several categoricals into one, whose labels are the joined texts of their labels.

    Two categoricals are combined at a time, by their codes. Texts are thus joined once per label, not once per cell.
    """
    first, *others = labels
    codes, names = first.codes.astype(np.int64), _escaped_texts(first)
    for other in others:
        n = len(other.categories)
        both = np.where((codes < 0) | (other.codes < 0), -1, codes * n + other.codes)
        there = both >= 0
        codes[~there] = -1
        codes[there], found = pd.factorize(both[there])  # hashing is faster than np.unique, which sorts all cells
        pairs = zip(names[found // n], _escaped_texts(other)[found % n], strict=True)
        names = np.array([CROSS_SEPARATOR.join(pair) for pair in pairs], dtype=object)
    order = np.argsort(names, kind="stable")
    rank = np.full(len(order) + 1, -1)
    rank[order] = np.arange(len(order))
    return pd.Categorical.from_codes(rank[codes], categories=names[order])


def _escaped_texts(labels: pd.Categorical) -> np.ndarray:
    return np.array([_escape_text(value) for value in labels.categories.tolist()], dtype=object)


def _to_plain_type(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, _STORABLE_LABEL_TYPES) else str(value)


def _escape_text(value: Any) -> str:
    return label_text(value).replace("\\", "\\\\").replace("×", "\\×")
