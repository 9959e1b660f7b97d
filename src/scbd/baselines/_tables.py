"""Tables of features and what is said of their rows, checked before anything is learned of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._messages import head

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_BLOCK = 8_192


class Table(NamedTuple):
    """Features, and the rows that something is learned from."""

    features: np.ndarray
    """``(N, D)``, floating point, finite."""
    fit: np.ndarray
    """Rows that are learned from, boolean ``(N,)``."""
    controls: np.ndarray | None
    """Those among them that are controls, boolean ``(N,)``; `None` where controls play no part."""

    @property
    def reference(self) -> np.ndarray:
        """What is typical: the controls that are learned from, or all rows that are."""
        return self.fit if self.controls is None else self.controls


def read_table(features: Any, *, fit: ArrayLike | None = None, controls: ArrayLike | None = None) -> Table:
    """Check features and the choice of rows.

    Raises
    ------
    ValueError
        If features are no finite numbers ``(N, D)``, a choice of rows fits none, or fewer than two rows are left.
    """
    values = _numbers(features)
    chosen = as_mask("fit", fit, len(values))
    if controls is None:
        return Table(values, _at_least_two(chosen, "fit"), None)
    both = as_mask("controls", controls, len(values)) & chosen
    return Table(values, chosen, _at_least_two(both, "controls" if fit is None else "controls in fit"))


def as_mask(name: str, chosen: ArrayLike | None, n: int) -> np.ndarray:
    """A choice of rows as booleans ``(N,)``: given so, or as row numbers; all where it is `None`."""
    if chosen is None:
        return np.ones(n, dtype=bool)
    rows = np.asarray(chosen)
    if not rows.size:
        msg = f"{name} is empty: nothing can be learned from no row."
    elif rows.dtype == bool and rows.shape != (n,):
        msg = f"{name} is a mask of shape {rows.shape} for {n} rows: give one truth value a row, or row numbers."
    elif rows.dtype == bool and not rows.any():
        msg = f"{name} is True for none of {n} rows: nothing can be learned from no row."
    elif rows.dtype == bool:
        return rows
    elif rows.dtype.kind not in "iu" or rows.ndim != 1:
        msg = f"{name} must be truth values ({n},) or row numbers, got {rows.dtype} of shape {rows.shape}."
    elif rows.min() < 0 or rows.max() >= n or len(np.unique(rows)) < len(rows):
        msg = f"{name} must be row numbers from 0 to {n - 1}, each once (or truth values, a mask of all rows)."
    else:
        mask = np.zeros(n, dtype=bool)
        mask[rows] = True
        return mask
    raise ValueError(msg)


def as_codes(name: str, labels: ArrayLike, needed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of each row's label ``(N,)``, and the labels; rows that are not ``needed`` may lack one (-1).

    Raises
    ------
    ValueError
        If there is not one label a row, or a needed row lacks its label.
    """
    values = np.asarray(labels, dtype=object if isinstance(labels, list | tuple) else None)  # else nan becomes "nan"
    if values.shape != needed.shape:
        msg = f"{name} must have one value for each of {len(needed)} rows of the features, got shape {values.shape}."
        raise ValueError(msg)
    codes, names = pd.factorize(values)
    missing = np.flatnonzero((codes < 0) & needed)
    if missing.size:
        msg = f"{name} has no value for {missing.size} rows ({head(missing)}): leave them out, or out of fit."
        raise ValueError(msg)
    return codes, names


def environment_codes(environments: ArrayLike, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Number of each row's environment ``(N,)``, and their names; each has rows that it can be learned from.

    Raises
    ------
    ValueError
        If there is not one environment a row, or an environment has fewer than two rows to learn from.
    """
    codes, names = as_codes("environments", environments, np.ones(len(table.fit), dtype=bool))
    few = names[np.bincount(codes[table.reference], minlength=len(names)) < 2]
    if len(few):
        which = ("rows" if table.controls is None else "controls") + ("" if table.fit.all() else " in fit")
        msg = (
            f"{len(few)} environments have fewer than two {which} (such as {min(map(str, few))!r}): what is typical "
            "there is not known. Leave these environments out, or learn from more of their rows (all, with "
            "controls=None; a test plate may take part with its controls)."
        )
        raise ValueError(msg)
    return codes, names


def read_environments(features: ArrayLike, environments: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Features in float64, and the number of each row's environment, for what moves environments onto each other.

    Raises
    ------
    ValueError
        As :func:`read_table` and :func:`environment_codes`; or if there is one environment.
    """
    table = read_table(features)
    codes, names = environment_codes(environments, table)
    if len(names) < 2:
        msg = f"There is one environment ({names[0]}): nothing can be corrected between environments."
        raise ValueError(msg)
    return table.features.astype(np.float64), codes


def _at_least_two(mask: np.ndarray, what: str) -> np.ndarray:
    if mask.sum() < 2:
        msg = f"There are {mask.sum()} of {len(mask)} rows to learn from ({what}): at least two are needed."
        raise ValueError(msg)
    return mask


def _numbers(features: Any) -> np.ndarray:
    if hasattr(features, "toarray"):
        msg = "features are a sparse matrix: give them dense, as features.toarray()."
        raise ValueError(msg)
    values = np.asarray(features)
    if values.dtype == object:  # numbers in a table beside other columns
        values = _unboxed(values)
    if values.dtype.kind not in "fiub":
        msg = f"features are of type {values.dtype}, not numbers: leave out columns of names and labels."
        raise ValueError(msg)
    if values.ndim != 2 or not values.size:
        msg = f"features must be a table (N, D) with rows and columns, got shape {values.shape}."
        raise ValueError(msg)
    values = values if values.dtype.kind == "f" else values.astype(np.float64)
    _check_finite(values, getattr(features, "columns", range(values.shape[1])))
    return values


def _unboxed(values: np.ndarray) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return values


def _check_finite(values: np.ndarray, names: Any) -> None:
    """Name the rows and features that have values missing or infinite."""
    rows = np.zeros(len(values), dtype=bool)
    columns = np.zeros(values.shape[1], dtype=bool)
    for start in range(0, len(values), _BLOCK):
        wrong = ~np.isfinite(values[start : start + _BLOCK])
        rows[start : start + _BLOCK] = wrong.any(1)
        columns |= wrong.any(0)
    if rows.any():
        which = head(names[column] for column in np.flatnonzero(columns))
        msg = (
            f"features are missing or infinite in {rows.sum()} of {len(rows)} rows (rows {head(np.flatnonzero(rows))}) "
            f"and {columns.sum()} of {len(columns)} features ({which}): drop these, or fill them in before."
        )
        raise ValueError(msg)
