"""Which cells are controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._labels import label_values
from scbd._messages import missing_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd


def check_control(obs: pd.DataFrame, y_columns: Sequence[str], control: Any) -> None:
    """Raise ``ValueError`` if a control is named that no cell is."""
    if control is not None:
        control_labels(control, label_values(obs, y_columns).cat.categories.tolist())


def control_labels(control: Any, categories: Sequence[Any]) -> list[Any]:
    """The categories that are meant by a name or several.

    Raises
    ------
    ValueError
        If one of them is no category.
    """
    found = {one: _category(one, categories) for one in _each(control, categories)}
    for one, meant in found.items():
        if meant is None:
            raise ValueError(missing_label("control", one, categories))
    return list(found.values())


def controls_of(obs: pd.DataFrame, y_columns: Sequence[str], control: Any) -> np.ndarray | None:
    """Mask of the controls, boolean ``(N,)``; `None` without a control, or without the columns to tell by."""
    if control is None or any(column not in obs for column in y_columns):
        return None
    labels = label_values(obs, y_columns, allow_missing=True)
    categories = labels.cat.categories.tolist()
    # new cells need not hold all of them
    meant = [_category(one, categories) for one in _each(control, categories)]
    mask: np.ndarray = labels.isin([label for label in meant if label is not None]).to_numpy()
    return mask


def _each(control: Any, categories: Sequence[Any]) -> list[Any]:
    """Names of controls, of which there may be several; the cross of several columns is one."""
    several = isinstance(control, list | tuple | set | frozenset | np.ndarray) and not any(
        isinstance(control, tuple) and known == control for known in categories
    )
    return list(control) if several else [control]


def _category(control: Any, categories: Sequence[Any]) -> Any:
    """The label that is meant, a number by its text as well; `None` if there is none."""
    alike = [known for known in categories if known == control]
    return next(iter(alike or [known for known in categories if str(known) == str(control)]), None)
