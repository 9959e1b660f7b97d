"""What all packages read of an AnnData: where things live, columns of labels, controls, numbers and matrices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._checks import check_unmasked, closest, head, missing_key

if TYPE_CHECKING:
    from collections.abc import Sequence


# obsm: images as N x C x H x W, the convention of scPortrait and of annbatch's image tutorial
IMAGE_KEY = "single_cell_images"

# obsm: embeddings, one per block
CONTENT_KEY = "X_scbd_c"
STYLE_KEY = "X_scbd_s"

# obsm: principal components of the inputs
PIXEL_PCA_KEY = "X_pixel_pca"
FEATURE_PCA_KEY = "X_feature_pca"

# obsm, of what a run writes: the best of the embeddings that it compares
BEST_KEY = "X_scbd_best"

# obs, of what a run writes: the part of the split that a cell is in
SPLIT_KEY = "scbd_split"
# obs, of what cross_fit returns: whose model embedded a cell
FOLD_KEY = "scbd_fold"
# what the column of the split says of cells that are in no part
LEFT_OUT = "left out"

# the keys under which a model's registry holds its inputs: images or features, labels, numbers, positions
IMAGE_REGISTRY = "image"
FEATURE_REGISTRY = "features"
POSITION_REGISTRY = "position"
NUMBER_REGISTRY = "numbers"
Y_REGISTRY = "y"
E_REGISTRY = "e"


# joins the names of several columns, and their values
CROSS = " × "
# a cross, or a backslash, of a value's own has a backslash before it
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# what stands in tables for a value that is missing, in small letters
MISSING_WORDS = ("", "na", "n/a", "#n/a", "nan", "none", "null", "<na>", "nil")
# what controls are called, bare
_LIKE_CONTROLS = (
    "dmso ntc nt nontargeting nontargetingcontrol nontarget control controls ctrl ctl negcon negativecontrol negctrl "
    "untreated mock vehicle scrambled scramble"
).split()
# what a saved model may hold; anything else (a date, an interval, a Decimal) is known by its text
_PLAIN = (str, bytes, bool, int, float)


def check_anndata(adata: Any) -> None:
    """Raise ``TypeError`` if cells are given as anything but an AnnData."""
    from anndata import AnnData

    if not isinstance(adata, AnnData):
        msg = (
            f"Cells are given as an AnnData, got {type(adata).__name__}: open a file with scbd.data.open_screen or "
            "read_profiles, load crops with crops.to_memory(), put a table into one with AnnData(values, obs=…), and "
            "several together with anndata.concat."
        )
        raise TypeError(msg)


def as_columns(columns: Any) -> tuple[str, ...]:
    """One column name, or a sequence of several, as a tuple.

    Raises
    ------
    TypeError
        If it is neither.
    ValueError
        If there is none.
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
    r"""One categorical label a cell from one or several obs columns; unused categories are dropped.

    Parameters
    ----------
    obs
        Table of the cells.
    columns
        One column, whose values are the labels: text, numbers and truth values as they are, others as text. Or several,
        whose labels are their values as text with ``×`` between them; where a value has a ``×`` of its own, it becomes
        ``\×``, so that no two crosses share a name. Whole numbers have one name, whether stored as 1 or as 1.0.
    allow_missing
        Leave cells without a label if one of their values is missing, in place of raising an error.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If a column is there twice, or a cell has no value (which rows).
    """
    labels = [_column(obs, column, allow_missing) for column in as_columns(columns)]
    crossed = labels[0] if len(labels) == 1 else _cross(labels)
    return pd.Series(crossed, index=obs.index)


def label_text(value: Any) -> str:
    """A label as text. Whole numbers have one name, whether stored as 1 or as 1.0."""
    value = _plain(value)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def control_names(
    control: Any, labels: Iterable[str], y_key: str | Sequence[str], e_labels: Iterable[str] = ()
) -> list[str]:
    """What controls are called among labels, one value or several, as :func:`label_text` has them.

    Parameters
    ----------
    control
        As the column holds it: text, a number or a truth value, or a list of such.
    labels
        Text of the labels there are, each once or of every row.
    y_key
        Their column or columns.
    e_labels
        Text of the environments, where controls are looked for if y_key and e_key may have been exchanged.

    Raises
    ------
    ValueError
        If a value is missing (`None`, NaN), or no row has one of them.
    """
    values = each(control)
    if any(pd.isna(value) for value in values):
        msg = f"control={control!r} is no value: give control the value of {y_key!r} for unperturbed cells."
        raise ValueError(msg)
    names = control_texts(values)
    there = pd.unique(np.asarray(labels, dtype=object))
    absent = sorted(set(names) - set(there))
    if absent:
        exchanged = absent[0] in e_labels
        hint = " It is in e_key: are the two exchanged?" if exchanged else closest(absent[0], there)
        msg = (
            f"No row has the control {absent[0]!r} in {y_key!r} (it holds {head(there)}): give control the value for "
            f"unperturbed cells.{hint}"
        )
        raise ValueError(msg)
    return names


def control_texts(control: Any) -> list[str]:
    """Text of each control that was named, one value or several, whether or not a row has it."""
    return list(dict.fromkeys(map(label_text, each(control))))


def likely_controls(labels: Iterable[Any]) -> list[str]:
    """Those labels that are named as controls are."""
    return [str(label) for label in labels if bare_name(label) in _LIKE_CONTROLS]


def bare_name(name: Any) -> str:
    """Letters and digits of a name, in lower case, without what CellProfiler puts before it."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower()).removeprefix("metadata")


def label_codes(labels: pd.Series, known: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    """Places of labels in a list of known ones, int64 ``(N,)``, and the labels that are not in it.

    Unknown labels count on behind the known ones, missing ones are -1. Labels with one text are one: 1 and "1".
    """
    found = labels.cat.categories.tolist()
    places = {label_text(label): place for place, label in enumerate(known)}
    unknown = [label for label in found if label_text(label) not in places]
    places |= {label_text(label): len(known) + place for place, label in enumerate(unknown)}
    lookup = np.array([*(places[label_text(label)] for label in found), -1], dtype=np.int64)
    return lookup[labels.cat.codes.to_numpy()], unknown


def column_codes(crossed: Sequence[str]) -> np.ndarray:
    """Codes of the single columns of labels that :func:`label_values` made of several, int64 ``(L, C)``.

    Values are numbered as they come: labels that are added behind change no code.
    """
    parts = np.array([column_values(label) for label in crossed], dtype=object)
    return np.stack([pd.factorize(part)[0] for part in parts.T], axis=1)


def column_values(crossed: str) -> list[str]:
    """What the single columns say in a label that :func:`label_values` made of several, as text."""
    return [_ESCAPED.sub(r"\1", part) for part in crossed.split(CROSS)]


def obs_column(obs: pd.DataFrame, column: str) -> pd.Series:
    """A column of the table.

    Raises
    ------
    KeyError
        If it is missing.
    ValueError
        If it is there twice.
    """
    if column not in obs:
        raise KeyError(missing_key("obs", column, obs.columns))
    values = obs[column]
    if isinstance(values, pd.DataFrame):
        msg = f"obs has {values.shape[1]} columns of the name {column!r}: rename or drop all but one."
        raise ValueError(msg)
    return values


def each(names: Any) -> list[Any]:
    """Several names as they are, or the one that was given."""
    return list(names) if isinstance(names, Iterable) and not isinstance(names, str | bytes) else [names]


def _column(obs: pd.DataFrame, column: str, allow_missing: bool) -> pd.Categorical:
    values = obs_column(obs, column)
    missing = np.flatnonzero(values.isna().to_numpy())  # looking at a Series would make a table of its index
    if missing.size and not allow_missing:
        msg = (
            f"obs[{column!r}] has no value for {missing.size} of {len(obs)} cells (rows {head(missing)}): give them "
            "one (untreated cells a perturbation such as 'control', named with control=…), or leave these rows out."
        )
        raise ValueError(msg)
    labels = values.astype("category").array.remove_unused_categories()
    names = [_plain(category) for category in labels.categories.tolist()]
    # a date and its text, or 1 and "1" of two tables that were put together, are one label
    merged = list({label_text(name): name for name in reversed(names)}.values())[::-1]
    if names == labels.categories.tolist() and len(merged) == len(names):
        return labels
    place = {label_text(name): number for number, name in enumerate(merged)}
    places = np.array([*(place[label_text(name)] for name in names), -1])
    return pd.Categorical.from_codes(places[labels.codes], categories=merged)


def _cross(labels: Sequence[pd.Categorical]) -> pd.Categorical:
    """By codes, two at a time: a name is made for each label, not for each cell."""
    first, *others = labels
    codes, names = first.codes.astype(np.int64), _texts(first)
    for other in others:
        n = len(other.categories)
        both = np.where((codes < 0) | (other.codes < 0), -1, codes * n + other.codes)
        there = both >= 0
        codes[~there] = -1
        codes[there], found = pd.factorize(both[there])  # by hashes, where numpy would sort all cells
        pairs = zip(names[found // n], _texts(other)[found % n], strict=True)
        names = np.array([CROSS.join(pair) for pair in pairs], dtype=object)
    order = np.argsort(names, kind="stable")
    rank = np.full(len(order) + 1, -1)
    rank[order] = np.arange(len(order))
    return pd.Categorical.from_codes(rank[codes], categories=names[order])


def _texts(labels: pd.Categorical) -> np.ndarray:
    return np.array([_text(value) for value in labels.categories.tolist()], dtype=object)


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, _PLAIN) else str(value)


def _text(value: Any) -> str:
    return label_text(value).replace("\\", "\\\\").replace("×", "\\×")


def is_number(values: pd.Series) -> bool:
    """Whether a column holds numbers: integers or floating point, no truth values, no labels that look like numbers."""
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def number_values(obs: pd.DataFrame, column: str) -> np.ndarray:
    """A column of numbers, float64 ``(N,)``.

    Raises
    ------
    KeyError
        If it is missing.
    TypeError
        If it holds no numbers.
    ValueError
        If it is there twice, or a value is missing, NaN or infinite (which rows).
    """
    values = obs_column(obs, column)
    if not is_number(values):
        msg = (
            f"obs[{column!r}] holds no numbers ({values.dtype}): where they are stored as text, make them numbers, "
            "astype(float); of dates, give the hours since the first; other labels have no order."
        )
        raise TypeError(msg)
    numbers = values.to_numpy(dtype=np.float64, copy=True, na_value=np.nan)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        msg = (
            f"obs[{column!r}] has no finite value for {bad.size} of {len(numbers)} cells (rows {head(bad)}): give them "
            "one, or leave these rows out."
        )
        raise ValueError(msg)
    return numbers


def is_sparse(values: Any) -> bool:
    """Whether it is a sparse matrix, in memory or in a file."""
    return not isinstance(values, np.ndarray) and (
        hasattr(values, "toarray") or "sparse" in type(values).__module__.lower()
    )


def dense(values: Any, where: str) -> Any:
    """What can be read by row: a DataFrame as an array, an array or a memory-map as it is.

    Parameters
    ----------
    values
        ``(N, F)``.
    where
        What errors call it.

    Raises
    ------
    TypeError
        If a column of a DataFrame holds no numbers, or it is a masked array.
    ValueError
        If it is sparse.
    """
    check_unmasked(where, values)
    if is_sparse(values):
        msg = f"{where} is a sparse matrix, and a dense one is needed: give {where}.toarray()."
        raise ValueError(msg)
    return frame_numbers(values, where) if isinstance(values, pd.DataFrame) else values


def frame_numbers(frame: pd.DataFrame, where: str) -> np.ndarray:
    """Numbers and truth values of a DataFrame ``(N, F)``, of one dtype if it has one, else float64; NaN where missing.

    Raises
    ------
    TypeError
        If a column holds something else.
    """
    others = []
    for place, (name, dtype) in enumerate(zip(frame.columns, frame.dtypes, strict=True)):
        if is_number_type(dtype):
            continue
        column = frame.iloc[:, place]
        numbers, text = column_numbers(column)
        # what is stored as text may be a name, such as that of a cluster
        text = text | (str(dtype) != "object") | column.map(lambda value: isinstance(value, str)).to_numpy(bool)
        if text.any():
            first = int(np.argmax(text))
            others.append(
                f"{name} in {text.sum():,} of {len(text):,} rows, such as {column.iloc[first]!r} in row {first}"
            )
        else:
            frame = frame.copy(deep=False)
            frame.isetitem(place, numbers)
    if others:
        msg = (
            f"{where} has columns that hold no numbers ({head(others)}): leave columns of text out or put them into "
            "obs, and cast numbers that are stored as text with astype(float)."
        )
        raise TypeError(msg)
    values = frame.to_numpy()
    return frame.to_numpy(np.float64, na_value=np.nan) if values.dtype == object else values


def column_numbers(values: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of a column, however they are typed, float64 ``(N,)``, and where it holds something else, boolean.

    What is missing, or text that says so, is NaN, and nothing else.
    """
    if is_number_type(values.dtype):
        return values.to_numpy(np.float64, copy=True, na_value=np.nan), np.zeros(len(values), dtype=bool)
    plain = values.astype(object)
    if values.dtype.kind in "cmM":  # dates and the like are quantities, but no numbers
        return np.full(len(values), np.nan), plain.notna().to_numpy()
    numbers = pd.to_numeric(plain, errors="coerce").to_numpy(np.float64, copy=True, na_value=np.nan)
    left = np.isnan(numbers) & plain.notna().to_numpy()
    numbers[plain.isna().to_numpy()] = np.nan
    left[left] = [str(value).strip().lower() not in MISSING_WORDS for value in plain[left]]
    return numbers, left


def is_number_type(dtype: Any) -> bool:
    """Whether a dtype is that of numbers or truth values."""
    if pd.api.types.is_bool_dtype(dtype):  # PyArrow's are no numbers for pandas, and categories of them are none at all
        return not isinstance(dtype, pd.CategoricalDtype)
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype)
