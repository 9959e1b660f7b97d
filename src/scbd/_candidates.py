"""Embeddings that `scbd run` compares with z_c: the inputs, and corrections of inputs and z_c that cost little."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._linear_maps import column_means
from scbd.baselines._corrections import sphering, standardize_by_environment, wccn
from scbd.model._environments import known_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from scbd.model._environments import StandardizeBy

logger = logging.getLogger(__name__)

# minimum number of training controls from which their covariance is estimated
MIN_CONTROLS_TO_SPHERE = 16


@dataclass(frozen=True, kw_only=True)
class CellLabels:
    """Labels of all N cells of a run, each an array ``(N,)`` of text."""

    y_name: str
    y: np.ndarray
    environments: Mapping[str, np.ndarray]
    """By column, or by the name of several crossed columns."""
    is_train: np.ndarray
    """Cells that encoders and corrections are trained on, boolean."""
    is_control: np.ndarray
    """Boolean; False everywhere where no controls were named."""
    position: np.ndarray | None = None
    """Position on the plate."""
    mechanisms: Mapping[str, np.ndarray] | None = None
    """Labels that several perturbations share, such as the mechanism of action, by column; empty where missing."""
    guides: Mapping[str, np.ndarray] | None = None
    """Reagents of a perturbation, by column; empty where missing."""
    places: Mapping[str, np.ndarray] | None = None
    """Plates, wells or batches that are not environments of this run, by column."""

    @property
    def control_names(self) -> list[str]:
        """Perturbation labels of the controls."""
        return sorted(set(self.y[self.is_control]))

    @property
    def is_unseen(self) -> np.ndarray:
        """Cells of perturbations that no training cell has, boolean ``(N,)``."""
        return ~pd.Series(self.y).isin(pd.unique(self.y[self.is_train])).to_numpy()


class ReferenceCells(NamedTuple):
    """Cells from which the mean and the standard deviation of each environment are estimated."""

    column: str
    """The environment."""
    kind: str
    """``"controls"`` or ``"cells"``."""
    rows: np.ndarray
    """Boolean ``(N,)``."""


def reference_cells(labels: CellLabels, standardize_by: StandardizeBy = "auto") -> ReferenceCells | None:
    """Choose the cells that candidates are standardised with, by the same rule as the model.

    Parameters
    ----------
    labels
        Labels of all cells.
    standardize_by
        Setting of the model; `None` chooses as ``"auto"`` does.

    Returns
    -------
    The finest environment that can be estimated; `None` if there is none. An environment with fewer than two training
    cells of that kind is estimated from all of its cells of that kind, or else from all of its cells.
    """
    train, y = labels.is_train, pd.factorize(labels.y)[0]
    controls = labels.is_control[train] if labels.is_control.any() else None
    for column, names in sorted(labels.environments.items(), key=lambda item: -len(pd.unique(item[1]))):
        codes = pd.factorize(names)[0]
        kind = standardize_by if standardize_by in ("controls", "cells") else None
        kind = kind or known_by("auto", y[train], pd.factorize(codes[train])[0], controls)[1]
        if kind is None:
            continue
        chosen = labels.is_control if kind == "controls" else np.ones(len(codes), dtype=bool)
        rows = np.zeros(len(codes), dtype=bool)
        for cells in (train & chosen, chosen, np.ones(len(codes), dtype=bool)):
            rows |= cells & (np.bincount(codes, weights=rows)[codes] < 2)
        return ReferenceCells(column, kind, rows)
    return None


def scaled(features: np.ndarray, is_train: np.ndarray) -> np.ndarray:
    """Give each feature mean 0 and variance 1 over the training cells, float32 ``(N, D)``; constant ones become 0."""
    mean = column_means(features[is_train])
    deviation = np.sqrt(column_means(np.square(features[is_train] - mean)))
    return ((features - mean) / np.where(deviation > 0, deviation, np.inf)).astype(np.float32)


def corrected_inputs(
    name: str, inputs: np.ndarray, labels: CellLabels, reference: ReferenceCells | None
) -> dict[str, np.ndarray]:
    """Return the inputs and the field's corrections of them by name, the simplest first.

    Everything is learned from training cells. What cannot be computed is missing, and the log states why.

    Parameters
    ----------
    name
        Name of the inputs, such as ``"features"``.
    inputs
        ``(N, D)``.
    labels
        Labels of all cells.
    reference
        Cells to standardise with, see :func:`reference_cells`.
    """
    found = {name: inputs}
    add_standardised(found, name, labels, reference)
    *_, last = found
    train_controls = labels.is_control & labels.is_train
    learn_from_controls = train_controls.sum() >= MIN_CONTROLS_TO_SPHERE
    if learn_from_controls:
        for base in list(found):
            _add(found, f"{base}, sphered", sphering, found[base], controls=train_controls)
    how: dict[str, Any] = {"controls": train_controls, "positions": labels.position} if learn_from_controls else {}
    _add(found, f"{last}, WCCN", wccn, found[last], labels.y, fit=labels.is_train, **how)
    return found


def add_standardised(
    found: dict[str, np.ndarray], name: str, labels: CellLabels, reference: ReferenceCells | None
) -> None:
    """Add an embedding after it was standardised within each environment; none without reference cells."""
    if reference is not None:
        title, e = f"{name}, standardised by {reference.column}", labels.environments[reference.column]
        _add(found, title, standardize_by_environment, found[name], e, fit=reference.rows)


def _add(found: dict[str, np.ndarray], title: str, correct: Callable[..., np.ndarray], *given: Any, **how: Any) -> None:
    """Add a corrected embedding, or log why it cannot be computed."""
    try:
        found[title] = correct(*given, **how)
    except ValueError as error:
        logger.info("%s is not compared: %s", title, error)
