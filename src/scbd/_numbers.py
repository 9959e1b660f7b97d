"""Columns of numbers, such as the time or a count of cells: the same rule for models and for metrics."""

from __future__ import annotations

import numpy as np
import pandas as pd

from scbd._labels import obs_column
from scbd._messages import head


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
            f"obs[{column!r}] holds no numbers ({values.dtype}): where its values are names of numbers, make them so "
            f"with adata.obs[{column!r}] = adata.obs[{column!r}].astype(float); of dates, give the hours since the "
            "first; other labels have no order."
        )
        raise TypeError(msg)
    numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        msg = (
            f"obs[{column!r}] has no finite value for {bad.size} of {len(numbers)} cells (rows {head(bad)}): drop "
            f"these cells with adata[np.isfinite(adata.obs[{column!r}])].copy(), or give them a value."
        )
        raise ValueError(msg)
    return numbers
