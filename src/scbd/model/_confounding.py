"""Whether y and e can be told apart in these data at all."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._labels import label_values

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 12


def warn_if_confounded(obs: pd.DataFrame, y_columns: Sequence[str], e_columns: Sequence[str]) -> None:
    """Warn, with the table, where an environment holds one perturbation only, or a perturbation one environment.

    There, what the perturbation does and what the environment does are the same thing to any method: taking the
    environment out of z_c takes the perturbation out too, or leaves both in.
    """
    y, e = label_values(obs, y_columns), label_values(obs, e_columns)
    # by codes: a cross of thousands of perturbations and wells stays an integer table
    table = np.zeros((e.cat.categories.size, y.cat.categories.size), dtype=np.int64)
    np.add.at(table, (e.cat.codes.to_numpy(), y.cat.codes.to_numpy()), 1)
    poor_e = np.flatnonzero((table > 0).sum(1) == 1)
    poor_y = np.flatnonzero((table > 0).sum(0) == 1)
    if not poor_e.size and not poor_y.size:
        return
    found = []
    if poor_e.size:
        found.append(f"{poor_e.size} of {table.shape[0]} environments were seen with one perturbation only")
    if poor_y.size:
        found.append(f"{poor_y.size} of {table.shape[1]} perturbations were seen in one environment only")
    rows = poor_e[:_SHOWN] if poor_e.size else np.arange(min(table.shape[0], _SHOWN))
    columns = poor_y[:_SHOWN] if poor_y.size else np.arange(min(table.shape[1], _SHOWN))
    shown = pd.DataFrame(
        table[np.ix_(rows, columns)],
        index=pd.Index(e.cat.categories[rows], name=" × ".join(e_columns)),
        columns=pd.Index(y.cat.categories[columns], name=" × ".join(y_columns)),
    )
    msg = (
        f"y and e are confounded: {' and '.join(found)}. What such a pair differs in cannot be told to be one or the "
        "other, and removing e from z_c may remove y with it. If e is finer than needed (wells of an arrayed screen), "
        f"use a coarser e_key (the plate). Cells by environment and perturbation, {len(rows)} × {len(columns)} of "
        f"{table.shape[0]} × {table.shape[1]}:\n{shown.to_string()}"
    )
    warnings.warn(msg, UserWarning, stacklevel=3)
