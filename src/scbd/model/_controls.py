"""Which cells are controls."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from scbd._labels import control_names, control_texts, label_text, label_values
from scbd._messages import closest, head

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import pandas as pd


logger = logging.getLogger(__name__)

# a label that may be that of controls: its share of the rows, its size beside the median, and how many labels there are
_LARGE_SHARE, _LARGER, _SEVERAL = 0.15, 5, 5


def check_control(obs: pd.DataFrame, y_key: str | Sequence[str], control: Any) -> None:
    """Ask, where no control is named and one label stands out; see :func:`control_names` for one that no cell is."""
    labels = label_values(obs, y_key)
    if control is None:
        _ask_for_control(labels)
    else:
        control_names(control, [label_text(label) for label in labels.cat.categories], y_key)


def control_labels(control: Any, categories: Iterable[Any]) -> list[Any]:
    """Those of the categories that are meant by a name or several; a number has one name, as text, too."""
    names = control_texts(control)
    return [label for label in categories if label_text(label) in names]


def controls_of(obs: pd.DataFrame, y_columns: Sequence[str], control: Any) -> np.ndarray | None:
    """Mask of the controls, boolean ``(N,)``; `None` without a control, or without the columns to tell by."""
    if control is None or any(column not in obs for column in y_columns):
        return None
    labels = label_values(obs, y_columns, allow_missing=True)
    mask: np.ndarray = labels.isin(control_labels(control, labels.cat.categories)).to_numpy()
    return mask


def called_otherwise(obs: pd.DataFrame, y_key: str | Sequence[str], control: Any, known: Iterable[Any]) -> str:
    """What labels there are in rows that lack controls, those first, and asked for, that the model does not know."""
    names, trained = control_texts(control), {label_text(label) for label in known}
    labels = [label_text(label) for label in label_values(obs, y_key, allow_missing=True).cat.categories]
    new = [label for label in labels if label not in trained]
    meant = next((question for name in names if (question := closest(name, new))), "")
    there = head([*new, *(label for label in labels if label in trained)])
    fact = f"Controls are {head(map(repr, names))} of {y_key!r}, which holds {there} there."
    return f"{fact}{meant} Name them as in the training"


def _ask_for_control(labels: pd.Series) -> None:
    """What is told of rare labels drowns among many rows of one, which nothing tells apart if they are controls."""
    counts = labels.value_counts()
    if len(counts) >= _SEVERAL and counts.iloc[0] >= max(_LARGE_SHARE * len(labels), _LARGER * counts.median()):
        largest = counts.index.tolist()[0]  # a number of Python's, as one types it
        logger.warning(
            "%.0f%% of the rows are %r. If these are controls, name them: control=%r.",
            100 * counts.iloc[0] / len(labels),
            largest,
            largest,
        )
