"""Read labels of cells from columns of ``obs``, check them, combine several columns, and encode labels as integers.

Several columns are combined ("crossed") into one label per combination of their values, such as plate and well.
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.checks import join_first, missing_key_message, suggest_name
from scbd._shared.messages import warn_user

if TYPE_CHECKING:
    from collections.abc import Sequence

# separator in the name and in the values of a label that combines (crosses) several columns, as in "plate1 × A01"
CROSS_SEPARATOR = " × "
# Pattern of a backslash and the character behind it, in a label that combines several columns. In such a label, a × or
# a backslash that belongs to a single value is preceded by a backslash.
_ESCAPED_CHARACTER = re.compile(r"\\(.)", re.DOTALL)
# texts that stand for a missing value in a table, such as "n/a", in lower case
MISSING_WORDS = (
    *("", "na", "n/a", "#n/a", "#n/a n/a", "#na", "nan", "-nan", "none", "null", "<na>", "nil"),
    *("1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"),
)
# usual names of control perturbations, in the form returned by normalise_name: lower case, letters and digits only
_USUAL_CONTROL_NAMES = (
    "dmso ntc nt nontargeting nontargetingcontrol nontarget control controls ctrl ctl negcon negativecontrol negctrl "
    "untreated mock vehicle scrambled scramble"
).split()
# Python types of labels that can be stored with a saved model; labels of other types, such as dates, intervals and
# Decimal, are converted to text
_STORABLE_LABEL_TYPES = (str, bytes, bool, int, float)

# minimum number of cells per distinct value of a column that holds labels; with fewer, the values are a quantity
MIN_CELLS_PER_VALUE = 8


def check_anndata(adata: Any) -> None:
    """Raise ``TypeError`` if ``adata``, the cells given by the user, is not an AnnData."""
    from anndata import AnnData

    if not isinstance(adata, AnnData):
        msg = (
            f"Cells are given as an AnnData, got {type(adata).__name__}: open a file with scbd.data.open_screen or "
            "read_profiles, load crops with crops.to_memory(), put a table into one with AnnData(values, obs=…), and "
            "several together with anndata.concat."
        )
        raise TypeError(msg)


def as_columns(columns: Any) -> tuple[str, ...]:
    """Return a tuple of column names, from either a single column name or a sequence of column names.

    Raises
    ------
    TypeError
        If ``columns`` is neither a name nor a sequence of names.
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
    r"""Return one categorical label per cell, from one column of ``obs`` or from a combination of several columns.

    - With one column, the labels are the values of the column. Text, numbers and truth values keep their type; other
      values, such as dates, are converted to text.
    - With several columns, the label of a cell consists of the texts of its values, joined with ``×``. A ``×`` inside a
      value is written as ``\×``, so that different combinations of values never get the same label.

    A whole number is the same label whether it is stored as 1 or as 1.0. Categories without cells are dropped.

    Parameters
    ----------
    obs
        Table of the cells.
    columns
        Name of one column, or several names.
    allow_missing
        If true, a cell with a missing value gets a missing label. If false, a missing value is an error.

    Returns
    -------
    Categorical series ``(N,)`` of labels, with the index of ``obs``.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If ``obs`` has two columns of a given name; or if a cell has no value and ``allow_missing`` is false. The error
        message then lists the first rows without a value.
    """
    labels = [_label_column(obs, column, allow_missing) for column in as_columns(columns)]
    crossed = labels[0] if len(labels) == 1 else _cross_labels(labels)
    return pd.Series(crossed, index=obs.index)


def label_text(value: Any) -> str:
    """Return a label as text; a whole number gives the same text, such as "1", if it is stored as 1 or as 1.0."""
    value = _to_plain_type(value)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def check_control_labels(
    control: Any, labels: Iterable[str], y_key: str | Sequence[str], e_labels: Iterable[str] = ()
) -> list[str]:
    """Return the labels of the controls as text (see :func:`label_text`), and check that cells with these labels exist.

    Parameters
    ----------
    control
        Perturbation label of the controls as stored in the column (text, a number or a truth value), or a list of such
        labels.
    labels
        Perturbation labels of the table of cells, as text: one per row, or only the unique ones.
    y_key
        Column or columns of the perturbation, for error messages.
    e_labels
        Environment labels, as text. If a control occurs here and not among the perturbations, the error message asks
        whether ``y_key`` and ``e_key`` were exchanged.

    Raises
    ------
    ValueError
        If a label in ``control`` is `None` or NaN, or if no row has it as perturbation.
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
    """Return one or several control labels as a list of texts, without checking that cells with these labels exist."""
    return list(dict.fromkeys(map(label_text, as_list(control))))


def warn_if_labels_are_similar(
    labels: Iterable[Any], key: str | Sequence[str], what: str, controls: Sequence[str] = ()
) -> None:
    """Warn if labels differ only in spaces, invisible characters, or upper and lower case.

    A label that differs from a control only in punctuation, such as "non-targeting" from "nontargeting", is similar as
    well. Labels of a single letter, such as "a" and "A", may differ in case, because they may be different classes.

    ``labels`` are the distinct labels of the columns ``key``, and ``what`` is their kind, such as "perturbations".
    """
    control_forms = {re.sub(r"[\W_]", "", control.casefold()) for control in controls} - {""}
    forms: dict[str, list[str]] = {}
    for name in (label for label in labels if isinstance(label, str)):
        text = unicodedata.normalize("NFKC", name if len(name.strip()) == 1 else name.casefold())
        # "Cf" is the category of invisible characters, such as the zero-width space
        form = "".join(mark for mark in text if not mark.isspace() and unicodedata.category(mark) != "Cf")
        reduced = re.sub(r"[\W_]", "", form)
        forms.setdefault(reduced if reduced in control_forms else form, []).append(name)
    several = [some for _, some in sorted(forms.items()) if len(some) > 1 and not set(some) <= set(controls)]
    if similar := [repr(name) for some in several for name in some]:
        warn_user(
            f"{len(similar)} labels of {key!r} differ from others only in blanks, case or punctuation "
            f"({join_first(similar)}), and count as different {what}: write them in the same way."
        )


def find_likely_controls(labels: Iterable[Any]) -> list[str]:
    """Return, as text, the perturbation labels that are usual names of controls, such as DMSO or non-targeting."""
    return [str(label) for label in labels if normalise_name(label) in _USUAL_CONTROL_NAMES]


def normalise_name(name: Any) -> str:
    """Reduce a name to its letters and digits in lower case, without CellProfiler's prefix "Metadata"."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower()).removeprefix("metadata")


def encode_labels(labels: pd.Series, known: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    """Encode labels as integers according to a list of known labels, and return the labels that are not in the list.

    The code of a label in ``known`` is its position in this list. Labels that are not in ``known`` get the next larger
    numbers, and a missing label gets -1. Labels with the same text, such as 1 and "1", are equal.

    Parameters
    ----------
    labels
        Categorical labels of the cells ``(N,)``.
    known
        List of known labels, such as the perturbations that a model was trained on.

    Returns
    -------
    Codes of the cells, int64 ``(N,)``, and the list of labels that are not in ``known``.
    """
    found = labels.cat.categories.tolist()
    places = {label_text(label): place for place, label in enumerate(known)}
    unknown = [label for label in found if label_text(label) not in places]
    places |= {label_text(label): len(known) + place for place, label in enumerate(unknown)}
    lookup = np.array([*(places[label_text(label)] for label in found), -1], dtype=np.int64)
    return lookup[labels.cat.codes.to_numpy()], unknown


def encode_crossed_columns(crossed: Sequence[str]) -> np.ndarray:
    """Split labels that combine C columns into their values, and return an integer code for each value.

    Such labels are made by :func:`label_values` from several columns. For L labels, the codes are int64 ``(L, C)``. The
    values of a column are numbered in the order in which they first occur, so that appending labels does not change the
    codes of earlier labels.
    """
    parts = np.array([split_crossed_label(label) for label in crossed], dtype=object)
    return np.stack([pd.factorize(part)[0] for part in parts.T], axis=1)


def split_crossed_label(crossed: str) -> list[str]:
    """Split a label that :func:`label_values` made from several columns into the texts of the columns' values."""
    return [_ESCAPED_CHARACTER.sub(r"\1", part) for part in crossed.split(CROSS_SEPARATOR)]


def get_obs_column(obs: pd.DataFrame, column: str) -> pd.Series:
    """Return one column of ``obs``, the table of cells, or raise an error with advice.

    Raises
    ------
    KeyError
        If the column is missing.
    ValueError
        If ``obs`` has two columns of this name.
    """
    if column not in obs:
        raise KeyError(missing_key_message("obs", column, obs.columns))
    values = obs[column]
    if isinstance(values, pd.DataFrame):
        msg = f"obs has {values.shape[1]} columns of the name {column!r}: rename or drop all but one."
        raise ValueError(msg)
    return values


def as_list(names: Any) -> list[Any]:
    """Return the items of a sequence as a list, and a single value as a list of one item; a text is a single value."""
    return list(names) if isinstance(names, Iterable) and not isinstance(names, str | bytes) else [names]


def _label_column(obs: pd.DataFrame, column: str, allow_missing: bool) -> pd.Categorical:
    values = get_obs_column(obs, column)
    # Missing values are searched in a numpy array. For a Series, pandas would first build a lookup table of its index.
    missing = np.flatnonzero(values.isna().to_numpy())
    if missing.size and not allow_missing:
        msg = (
            f"obs[{column!r}] has no value for {missing.size} of {len(obs)} cells (rows {join_first(missing)}): give "
            "them "
            "one (untreated cells a perturbation such as 'control', named with control=…), or leave these rows out."
        )
        raise ValueError(msg)
    labels = values.astype("category").array.remove_unused_categories()
    given = labels.categories.tolist()
    names = [_to_plain_type(category) for category in given]
    # Values with the same text become one label, such as a date and its text, or 1 and "1" in a column that was
    # concatenated from two tables.
    merged = list({label_text(name): name for name in reversed(names)}.values())[::-1]
    if all(map(operator.is_, names, given)) and len(merged) == len(names):
        return labels
    place = {label_text(name): number for number, name in enumerate(merged)}
    places = np.array([*(place[label_text(name)] for name in names), -1])
    return pd.Categorical.from_codes(places[labels.codes], categories=merged)


def _cross_labels(labels: Sequence[pd.Categorical]) -> pd.Categorical:
    """Combine several categorical columns into one; a combined label consists of the joined texts of its values.

    The texts are joined once per combination of values, not once per cell.
    """
    codes = pd.DataFrame({number: label.codes for number, label in enumerate(labels)})
    known = codes[(codes >= 0).all(axis=1)]
    combinations = known.drop_duplicates()
    texts = [_escaped_texts(label)[combinations[number]] for number, label in enumerate(labels)]
    names = [CROSS_SEPARATOR.join(parts) for parts in zip(*texts, strict=True)]
    # Like names, ngroup numbers the combinations in the order in which they first occur.
    crossed = np.full(len(codes), -1)
    crossed[known.index] = known.groupby([*known], sort=False).ngroup()
    return pd.Categorical.from_codes(crossed, names).reorder_categories(sorted(names))


def _escaped_texts(labels: pd.Categorical) -> np.ndarray:
    texts = map(label_text, labels.categories.tolist())
    return np.array([text.replace("\\", "\\\\").replace("×", "\\×") for text in texts], dtype=object)


def _to_plain_type(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, _STORABLE_LABEL_TYPES) else str(value)
