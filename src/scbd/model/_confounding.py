"""Whether y and e can be told apart in these data at all."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from scbd._labels import label_values
from scbd._numbers import number_values
from scbd.nn import Numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 12
# share of the contrasts that can be told, below which it is said: the invariance loss has a fifth of its force
_TOO_FEW = 0.2
# share of the perturbations, or of the environments, that are seen with one of the other only, and are told of
_MANY = 0.1


def contrasts_told(y: np.ndarray, e: np.ndarray) -> float:
    """Share of what environments can differ in that is seen at equal perturbation, from 0 to 1.

    It is 1 where each perturbation is in all environments in equal proportions, and 0 where one can be told from the
    other. If a share p of all cells follow a rule, such as one plate for each compound, about 1 - p² is left: 0.19 if
    p is 90 percent. The invariance loss then sees the same differences of environments at that share of its standard
    errors. Of a few cells a perturbation, n, it is (n - 1) / n at best.

    In terms of matrices, with R taking from cells the mean of their perturbation and K averaging over environments, it
    is the trace of R K R, in units of how many environments there are less one; or the same with the two exchanged, if
    perturbations are fewer. It is 1 less the square of Cramér's V.

    Parameters
    ----------
    y, e
        Codes, non-negative integers ``(N,)``.
    """
    pairs, counts = np.unique(y.astype(np.int64) * (int(e.max()) + 1) + e, return_counts=True)
    of_y, of_e = np.divmod(pairs, int(e.max()) + 1)
    n_y, n_e = np.bincount(y), np.bincount(e)
    in_common = float((counts / n_y[of_y] * (counts / n_e[of_e])).sum())
    fewer = min(np.count_nonzero(n_y), np.count_nonzero(n_e))
    # rounding may leave less than nothing
    return max(0.0, (fewer - in_common) / (fewer - 1)) if fewer > 1 else 0.0


def order_told(y: np.ndarray, numbers: np.ndarray) -> float:
    """Share of what changes slowly with numbers ``(N,)`` that is seen at equal perturbation, from 0 to 1.

    As :func:`contrasts_told`, with smooth functions of the numbers in place of environments: 1 where each perturbation
    is everywhere in their order, and 0 where perturbations tell them, or they tell perturbations, if these are fewer.
    """
    terms = Numbers(torch.from_numpy(numbers)).terms.numpy()
    counts = np.bincount(y)
    sums = np.stack([np.bincount(y, weights=term) for term in terms.T], axis=1)
    in_common = float((np.square(sums[counts > 0]).sum(1) / counts[counts > 0]).sum())
    fewer = min(np.square(terms).sum().round(), np.count_nonzero(counts) - 1)
    return max(0.0, (fewer - in_common) / fewer) if fewer else 0.0


def warn_if_confounded(obs: pd.DataFrame, y_columns: Sequence[str], e_columns: Sequence[str]) -> None:
    """Warn, with the table, where little of what y and e differ in can be told from each other.

    The rest is the same thing to any method: taking the environment out of z_c takes the perturbation out too, or
    leaves both in. So it is, too, where many perturbations were seen in one environment only. ``e_columns`` are
    crossed; columns side by side are looked at one by one.
    """
    y, e = label_values(obs, y_columns), label_values(obs, e_columns)
    told = contrasts_told(y.cat.codes.to_numpy(), e.cat.codes.to_numpy())
    # by codes: a cross of thousands of perturbations and wells stays an integer table
    table = np.zeros((e.cat.categories.size, y.cat.categories.size), dtype=np.int64)
    np.add.at(table, (e.cat.codes.to_numpy(), y.cat.codes.to_numpy()), 1)
    poor_e = np.flatnonzero((table > 0).sum(1) == 1)
    poor_y = np.flatnonzero((table > 0).sum(0) == 1)
    many = poor_e.size >= _MANY * table.shape[0] or poor_y.size >= _MANY * table.shape[1]
    if told >= _TOO_FEW and not many:
        return
    found = []
    if told < _TOO_FEW:
        one, other = ("environments", "perturbations")[:: 1 if table.shape[0] <= table.shape[1] else -1]
        found.append(f"{told:.0%} of what {one} can differ in is seen apart from what {other} differ in")
    if poor_e.size:
        found.append(f"{poor_e.size} of {table.shape[0]} environments were seen with one perturbation only")
    if poor_y.size:
        found.append(f"{poor_y.size} of {table.shape[1]} perturbations were seen in one environment only")
    rows, columns = _shown(table, poor_e, poor_y)
    shown = pd.DataFrame(
        table[np.ix_(rows, columns)],
        index=pd.Index(e.cat.categories[rows], name=" × ".join(e_columns)),
        columns=pd.Index(y.cat.categories[columns], name=" × ".join(y_columns)),
    )
    crossed = ", or columns side by side (e_columns of SCBDModel)" if len(e_columns) > 1 else ""
    msg = (
        f"y and e are confounded ({' × '.join(e_columns)}): {', and '.join(found)}. What such pairs differ in can be "
        "due to either, and removing e from z_c may remove y with it. If e is finer than needed "
        f"(wells of an arrayed screen), use a coarser e_key (the plate){crossed}. Cells by environment and "
        f"perturbation, {len(rows)} × {len(columns)} of {table.shape[0]} × {table.shape[1]}:\n{shown.to_string()}"
    )
    warnings.warn(msg, UserWarning, stacklevel=3)


def _shown(table: np.ndarray, poor_e: np.ndarray, poor_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows and columns are shown: all of a small table, else some that are meant, and what these hold."""
    if max(table.shape) <= _SHOWN:
        return np.arange(table.shape[0]), np.arange(table.shape[1])
    if not (poor_e.size or poor_y.size):  # of the fewer most cells are in one place
        fewer = np.arange(min(table.shape))
        poor_e, poor_y = (fewer, poor_y) if table.shape[0] <= table.shape[1] else (poor_e, fewer)
    n = _SHOWN // 2 if poor_e.size and poor_y.size else _SHOWN
    rows, columns = poor_e[:n], poor_y[:n]
    return np.union1d(rows, table[:, columns].argmax(0)), np.union1d(columns, table[rows].argmax(1))


def warn_if_ordered_alike(obs: pd.DataFrame, y_columns: Sequence[str], column: str) -> None:
    """Warn where little of what changes with a column of numbers can be told from what perturbations differ in."""
    told = order_told(label_values(obs, y_columns).cat.codes.to_numpy(), number_values(obs, column))
    if told < _TOO_FEW:
        msg = (
            f"y and {column!r} are confounded: perturbations ({' × '.join(y_columns)}) differ in where they lie, "
            f"and {told:.0%} of what can change with {column!r} is seen within them. The rest can be due to either, "
            f"and stays in z_c: leave {column!r} out of continuous_covariate_keys."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
