"""Read numbers from columns of tables, DataFrames and matrices, and check their type and that they are finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from scbd._shared.checks import check_unmasked, join_first
from scbd._shared.labels import MISSING_WORDS, get_obs_column


def is_numeric_column(values: pd.Series) -> bool:
    """Return whether a column has a numeric dtype; columns of truth values, and numbers stored as text, do not."""
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def read_numeric_column(obs: pd.DataFrame, column: str) -> np.ndarray:
    """Return the numbers in a column of ``obs``, the table of cells, as float64 ``(N,)``.

    Raises
    ------
    KeyError
        If the column is missing.
    TypeError
        If the column does not have a numeric dtype.
    ValueError
        If ``obs`` has two columns of this name, or if a value is missing, NaN or infinite. The message lists the first
        rows with such values.
    """
    values = get_obs_column(obs, column)
    if not is_numeric_column(values):
        msg = (
            f"obs[{column!r}] holds no numbers ({values.dtype}): where they are stored as text, make them numbers, "
            "astype(float); of dates, give the hours since the first; other labels have no order."
        )
        raise TypeError(msg)
    numbers = values.to_numpy(dtype=np.float64, copy=True, na_value=np.nan)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        msg = (
            f"obs[{column!r}] has no finite value for {bad.size} of {len(numbers)} cells (rows {join_first(bad)}): "
            "give them one, or leave these rows out."
        )
        raise ValueError(msg)
    return numbers


def is_sparse(values: Any) -> bool:
    """Return whether a matrix, in memory or in a file, is stored as a sparse matrix."""
    return not isinstance(values, np.ndarray) and (
        hasattr(values, "toarray") or "sparse" in type(values).__module__.lower()
    )


def check_dense(values: Any, where: str) -> Any:
    """Check that a matrix is dense, and return it in a form whose rows can be read by slicing.

    A DataFrame is converted to an array. Any other dense matrix, such as an array in memory or a memory-map, is
    returned unmodified.

    Parameters
    ----------
    values
        Matrix ``(N, F)``.
    where
        Name of the matrix in error messages.

    Raises
    ------
    TypeError
        If a column of a DataFrame holds values that are not numbers, or if the matrix is a masked array.
    ValueError
        If the matrix is sparse.
    """
    check_unmasked(where, values)
    if is_sparse(values):
        msg = f"{where} is a sparse matrix, and a dense one is needed: give {where}.toarray()."
        raise ValueError(msg)
    return frame_to_array(values, where) if isinstance(values, pd.DataFrame) else values


def frame_to_array(frame: pd.DataFrame, where: str) -> np.ndarray:
    """Convert a DataFrame of numbers and truth values to an array ``(N, F)``, with NaN for missing values.

    The array has the common dtype of the columns, or float64 if the columns have no common numeric dtype.

    Parameters
    ----------
    frame
        Table ``(N, F)``.
    where
        Name of the table in error messages.

    Raises
    ------
    TypeError
        If a column holds values that are neither numbers nor truth values.
    """
    others = []
    for place, (name, dtype) in enumerate(zip(frame.columns, frame.dtypes, strict=True)):
        if is_number_dtype(dtype):
            continue
        column = frame.iloc[:, place]
        numbers, text = parse_numbers(column)
        # Numbers that are stored as text raise an error, because they may be names, such as the numbers of clusters.
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
            f"{where} has columns that hold no numbers ({join_first(others)}): leave columns of text out or put them "
            "into obs, and cast numbers that are stored as text with astype(float)."
        )
        raise TypeError(msg)
    values = frame.to_numpy()
    return frame.to_numpy(np.float64, na_value=np.nan) if values.dtype == object else values


def parse_numbers(values: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Convert a column of any dtype to numbers, and find the values that cannot be converted.

    Returns
    -------
    Two arrays: the numbers, float64 ``(N,)``, with NaN for missing values and for values that are not numbers; and a
    boolean mask ``(N,)`` of the values that are not numbers. The mask is false for missing values, and for texts that
    stand for a missing value, such as "n/a" (:data:`MISSING_WORDS`).
    """
    if is_number_dtype(values.dtype):
        return values.to_numpy(np.float64, copy=True, na_value=np.nan), np.zeros(len(values), dtype=bool)
    plain = values.astype(object)
    # The kinds "c", "m" and "M" are dtypes of complex numbers, durations and dates. Values of these dtypes are not
    # converted to numbers.
    if values.dtype.kind in "cmM":
        return np.full(len(values), np.nan), plain.notna().to_numpy()
    numbers = pd.to_numeric(plain, errors="coerce").to_numpy(np.float64, copy=True, na_value=np.nan)
    left = np.isnan(numbers) & plain.notna().to_numpy()
    numbers[plain.isna().to_numpy()] = np.nan
    left[left] = [str(value).strip().lower() not in MISSING_WORDS for value in plain[left]]
    return numbers, left


def is_number_dtype(dtype: Any) -> bool:
    """Return whether a dtype is one of real numbers or truth values; a categorical dtype of such values is not."""
    # Truth values are tested before numbers, because is_numeric_dtype returns False for the booleans of PyArrow.
    if pd.api.types.is_bool_dtype(dtype):
        return not isinstance(dtype, pd.CategoricalDtype)
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype)
