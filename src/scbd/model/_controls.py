"""Which cells are controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd._labels import label_values
from scbd._messages import missing_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import pandas as pd


def check_control(obs: pd.DataFrame, y_columns: Sequence[str], control: Any) -> None:
    """Raise ``ValueError`` if a control is named that no cell is."""
    if control is None:
        return
    categories = label_values(obs, y_columns).cat.categories.tolist()
    if _category(control, categories) is None:
        raise ValueError(missing_label("control", control, categories))


def controls_of(obs: pd.DataFrame, y_columns: Sequence[str], control: Any) -> np.ndarray | None:
    """Mask of the controls, boolean ``(N,)``; `None` without a control, or without the columns to tell by."""
    if control is None or any(column not in obs for column in y_columns):
        return None
    labels = label_values(obs, y_columns, allow_missing=True)
    mask: np.ndarray = (labels == _category(control, labels.cat.categories.tolist())).to_numpy()
    return mask


def _category(control: Any, categories: Sequence[Any]) -> Any:
    """The label that is meant, a number by its text as well; `None` if there is none."""
    alike = [known for known in categories if known == control]
    return next(iter(alike or [known for known in categories if str(known) == str(control)]), None)
