"""What corrections are told of cells: perturbation, environment, controls, and which cells are learned from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._labels import control_names
from scbd.metrics import label_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


def known_of(
    adata: AnnData,
    *,
    y_key: str,
    e_key: str | Sequence[str],
    control: object | Sequence[object] | None = None,
    position_key: str | None = None,
    fit: np.ndarray | None = None,
) -> dict[str, Any]:
    """Arguments of :func:`scbd.baselines.correct`, of all cells; what is not known is left out.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If a cell has no label, or none is a control.
    """
    keys = {"labels": y_key, "environments": e_key, "positions": position_key}
    known: dict[str, Any] = {name: label_names(adata, key) for name, key in keys.items() if key is not None}
    if control is not None:
        labels = known["labels"]
        known["controls"] = np.isin(labels, control_names(control, labels, y_key))
    return known if fit is None else known | {"fit": fit}
