"""Checks of the arguments of corrections: feature tables, labels, and the rows from which a correction is estimated.

A row of a table is a cell or a well.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.checks import check_unmasked, inflect, join_first
from scbd._shared.linear_maps import mean_and_inverse_deviation
from scbd.metrics._arguments import row_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)


class FitTable(NamedTuple):
    """Table of features, with masks of the rows from which a correction is estimated."""

    features: np.ndarray
    """Features of all rows, ``(N, D)``, of floating-point type and finite."""
    fit: np.ndarray
    """Mask of the rows from which the correction is estimated, boolean ``(N,)``."""
    controls: np.ndarray | None
    """Mask of the rows in ``fit`` that are controls, boolean ``(N,)``; `None` if the user gave no controls."""
    names: Sequence[Any]
    """Names of the features: the column names of a DataFrame, or column numbers if the table is an array."""

    @property
    def reference(self) -> np.ndarray:
        """Mask of the rows from which means and standard deviations are estimated, boolean ``(N,)``.

        The mask selects the controls in ``fit`` if controls were given, otherwise all rows in ``fit``.
        """
        return self.fit if self.controls is None else self.controls


def read_table(features: Any, *, fit: ArrayLike | None = None, controls: ArrayLike | None = None) -> FitTable:
    """Check features and the selections ``fit`` and ``controls`` of their rows, and return a :class:`FitTable`.

    Raises
    ------
    ValueError
        If features are not a table ``(N, D)`` of finite numbers, ``fit`` or ``controls`` is not a valid selection of
        rows, or fewer than two rows are selected.
    """
    values, names = _as_float_table(features)
    chosen = selected_rows("fit", fit, len(values))
    chosen_controls, learned, what = None, chosen, "fit"
    if controls is not None:
        chosen_controls = learned = selected_rows("controls", controls, len(values)) & chosen
        what = "controls" if fit is None else "controls in fit"
    if learned.sum() < 2:
        msg = f"There are {learned.sum()} of {len(values)} rows to learn from ({what}): at least two are needed."
        raise ValueError(msg)
    return FitTable(values, chosen, chosen_controls, names)


def selected_rows(name: str, chosen: ArrayLike | None, n: int) -> np.ndarray:
    """Return a boolean mask ``(n,)`` of the rows in ``chosen``, which is a mask, row numbers, or `None` for all rows.

    ``name`` is the name of the argument in error messages.

    Raises
    ------
    ValueError
        If ``chosen`` is not a valid selection of rows, or selects no row.
    """
    # an empty selection is handled separately, because numpy converts an empty list to a float array, which is neither
    # a boolean mask nor row numbers
    mask = row_mask(name, chosen, n) if chosen is None or np.size(chosen) else np.zeros(n, dtype=bool)
    if not mask.any():
        msg = f"{name} selects no row of {n}: at least one row is needed to estimate the correction."
        raise ValueError(msg)
    return mask


def encode_row_labels(name: str, labels: ArrayLike, needed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integer code of each row's label, ``(N,)``, and the distinct labels.

    Rows outside of the mask ``needed`` may lack a label. Rows without a label have the code -1.

    Raises
    ------
    ValueError
        If there is not one label per row, or a row in ``needed`` lacks its label.
    """
    check_unmasked(name, labels)
    # lists become object arrays, because numpy would convert NaN in a list of strings to the string "nan"
    values = np.asarray(labels, dtype=object if isinstance(labels, list | tuple) else None)
    if values.shape != needed.shape:
        msg = f"{name} must have one value for each of {len(needed)} rows of the features, got shape {values.shape}."
        raise ValueError(msg)
    codes, names = pd.factorize(values)
    missing = np.flatnonzero((codes < 0) & needed)
    if missing.size:
        msg = f"{name} has no value for {missing.size} rows ({join_first(missing)}): leave them out, or out of fit."
        raise ValueError(msg)
    return codes, names


def environment_codes(environments: ArrayLike, table: FitTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the integer code of each row's environment, ``(N,)``, and the names of the environments.

    Raises
    ------
    ValueError
        If there is not one environment per row, or an environment has fewer than two rows in the mask
        ``table.reference``, from which its mean and standard deviation would be estimated.
    """
    codes, names = encode_row_labels("environments", environments, np.ones(len(table.fit), dtype=bool))
    few = names[np.bincount(codes[table.reference], minlength=len(names)) < 2]
    if len(few):
        which = ("rows" if table.controls is None else "controls") + ("" if table.fit.all() else " in fit")
        environments_have = inflect(len(few), "environment has", "environments have")
        msg = (
            f"{len(few)} {environments_have} fewer than two {which} (such as {min(map(str, few))!r}): what is typical "
            "there is not known. Leave these environments out, or learn from more of their rows (all, with "
            "controls=None; a test plate may take part with its controls)."
        )
        raise ValueError(msg)
    return codes, names


def read_environments(features: ArrayLike, environments: ArrayLike) -> tuple[FitTable, np.ndarray]:
    """Return the checked table of features and the environment code of each row, for ComBat and Harmony.

    Raises
    ------
    ValueError
        If there is only one environment; see also :func:`read_table` and :func:`environment_codes`.
    """
    table = read_table(features)
    codes, names = environment_codes(environments, table)
    if len(names) < 2:
        msg = f"There is only one environment ({names[0]}): a correction between environments needs two."
        raise ValueError(msg)
    return table, codes


def _as_float_table(features: Any) -> tuple[np.ndarray, Sequence[Any]]:
    """Return features as a floating-point array ``(N, D)``, and the names of the features.

    Raises
    ------
    ValueError
        If features are sparse, masked, not numeric, not finite, or not a table with rows and columns.
    """
    if hasattr(features, "toarray"):
        msg = "features are a sparse matrix: give them dense, as features.toarray()."
        raise ValueError(msg)
    check_unmasked("An array of features", features)
    values = np.asarray(features)
    # A DataFrame whose columns have different numeric types becomes an array of objects, which is converted to numbers.
    if values.dtype == object:
        with suppress(TypeError, ValueError):
            values = values.astype(np.float64)
    if values.dtype.kind not in "fiub":
        msg = f"features are of type {values.dtype}, not numbers: drop columns of names and labels."
        raise ValueError(msg)
    if values.ndim != 2 or not values.size:
        msg = f"features must be a table (N, D) with rows and columns, got shape {values.shape}."
        raise ValueError(msg)
    values = values if values.dtype.kind == "f" else values.astype(np.float64)
    names = getattr(features, "columns", range(values.shape[1]))
    finite = np.isfinite(values)
    if not finite.all():
        rows, columns = np.flatnonzero(~finite.all(1)), np.flatnonzero(~finite.all(0))
        msg = (
            f"features are missing or infinite in {len(rows)} of {len(values)} rows (rows {join_first(rows)}) and "
            f"{len(columns)} of {values.shape[1]} features ({join_first(names[column] for column in columns)}): drop "
            "these, or fill them in before."
        )
        raise ValueError(msg)
    return values, names


def reference_scaling(table: FitTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each feature, and the factor that scales the feature to standard deviation 1.

    Mean and factor are estimated from the rows in ``table.reference``, which are the controls if controls were given.
    Constant features have the factor 0 and are named in a log message.

    Returns
    -------
    Mean and factor of each feature, float64 ``(D,)`` each.
    """
    mean, factor = mean_and_inverse_deviation(table.features[table.reference])
    log_constant_features(table, factor == 0)
    return mean, factor


def log_constant_features(table: FitTable, constant: np.ndarray, done: str = "Left out") -> None:
    """Write a log message that names the constant features, and states what was done with these features.

    ``constant`` is a boolean mask ``(D,)`` of the features that are constant over the rows in ``table.reference``. The
    message begins with the text ``done``, which states what was done.
    """
    if constant.any():
        rows = "rows" if table.controls is None else "controls"
        said = "%s %d of %d features that are constant among %s, or vary by rounding alone (%s)."
        logger.info(said, done, constant.sum(), len(constant), rows, join_first(compress(table.names, constant)))
