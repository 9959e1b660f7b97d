"""Numbers of a table as one dense array: of a DataFrame, of anything that has rows; or why there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from scbd._messages import head


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
        If a column of a DataFrame holds no numbers.
    ValueError
        If it is sparse.
    """
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
    others = [name for name, dtype in zip(frame.columns, frame.dtypes, strict=True) if not _is_number(dtype)]
    if others:
        msg = (
            f"{where} has columns that hold no numbers ({head(others)}): leave columns of text out or put them into "
            "obs, and cast numbers that are stored as text or objects with astype(float)."
        )
        raise TypeError(msg)
    values = frame.to_numpy()
    return frame.to_numpy(np.float64, na_value=np.nan) if values.dtype == object else values


def _is_number(dtype: Any) -> bool:
    if pd.api.types.is_bool_dtype(dtype):  # PyArrow's are no numbers for pandas, and categories of them are none at all
        return not isinstance(dtype, pd.CategoricalDtype)
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype)
