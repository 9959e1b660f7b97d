"""Embeddings that `scbd run` compares with z_c: the inputs, and inputs and z_c after simple batch corrections."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.linear_maps import column_means
from scbd.corrections._standardize import standardize_by_environment
from scbd.corrections._whitening import sphering, wccn
from scbd.model._reference_cells import choose_reference_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from scbd.model._reference_cells import StandardizeBy

logger = logging.getLogger(__name__)

# minimum number of training controls from which their covariance is estimated
MIN_CONTROLS_TO_SPHERE = 16


@dataclass(frozen=True, kw_only=True)
class CellLabels:
    """Labels of all N cells of a run. Each label is an array ``(N,)`` of text, unless stated otherwise."""

    y_name: str
    """Name of the perturbation's column, or of several crossed columns."""
    y: np.ndarray
    """Perturbation of each cell."""
    environments: Mapping[str, np.ndarray]
    """Environment of each cell, for each column of environments (or each cross of several columns)."""
    is_train: np.ndarray
    """Boolean mask of the cells on which encoders and corrections are trained; all others are held out."""
    is_control: np.ndarray
    """Boolean mask of the controls; all False if the user named no controls."""
    position: np.ndarray | None = None
    """Position of each cell on the plate."""
    mechanisms: Mapping[str, np.ndarray] | None = None
    """Label that several perturbations share, such as the mechanism of action, for each column; "" if missing."""
    guides: Mapping[str, np.ndarray] | None = None
    """Reagent (such as the guide RNA) of each cell, for each column of reagents; "" if missing."""
    places: Mapping[str, np.ndarray] | None = None
    """Plate, well or batch of each cell, for each such column that is not an environment of this run."""

    @property
    def control_names(self) -> list[str]:
        """Perturbation labels of the controls."""
        return sorted(set(self.y[self.is_control]))

    @property
    def is_unseen(self) -> np.ndarray:
        """Boolean mask ``(N,)`` of the cells whose perturbation has no training cells."""
        return ~pd.Series(self.y).isin(pd.unique(self.y[self.is_train])).to_numpy()


class ReferenceCells(NamedTuple):
    """Cells from which the mean and the standard deviation of each environment are estimated."""

    column: str
    """Name of the environment, as in :attr:`CellLabels.environments`."""
    kind: str
    """``"controls"``, or ``"cells"`` for controls and perturbed cells."""
    rows: np.ndarray
    """Boolean mask ``(N,)`` of the reference cells."""


def choose_reference_cells(labels: CellLabels, standardize_by: StandardizeBy = "auto") -> ReferenceCells | None:
    """Choose the reference cells from which the mean and deviation of each environment are estimated.

    With ``"auto"``, the reference cells are all cells if their means can be compared between environments: most
    environments hold the same perturbations, or dozens of different ones. Otherwise the reference cells are the
    controls, if nine tenths of the training cells lie in environments with four or more controls. The model
    (``standardize_by`` of :class:`scbd.SCBDModel`) applies the same thresholds, but prefers controls where environments
    hold dozens of different perturbations.

    If there are several columns of environments, the column with the most environments is chosen, among those for which
    reference cells are found.

    Reference cells are normally training cells. If an environment has fewer than two of these, such as a test plate,
    its held-out cells of the same kind are added. If it still has fewer than two, all of its cells are used.

    Parameters
    ----------
    labels
        Labels of all cells.
    standardize_by
        Setting of the model. `None` has the same effect as ``"auto"``.

    Returns
    -------
    The environment and its reference cells; `None` if no column of environments can be standardised.
    """
    train, y = labels.is_train, pd.factorize(labels.y)[0]
    controls = labels.is_control[train] if labels.is_control.any() else None
    for column, names in sorted(labels.environments.items(), key=lambda item: -len(pd.unique(item[1]))):
        codes = pd.factorize(names)[0]
        kind = standardize_by if standardize_by in ("controls", "cells") else None
        kind = kind or choose_reference_kind("auto", y[train], pd.factorize(codes[train])[0], controls)[1]
        if kind is None:
            continue
        chosen = labels.is_control if kind == "controls" else np.ones(len(codes), dtype=bool)
        rows = np.zeros(len(codes), dtype=bool)
        for cells in (train & chosen, chosen, np.ones(len(codes), dtype=bool)):
            rows |= cells & (np.bincount(codes, weights=rows)[codes] < 2)
        return ReferenceCells(column, kind, rows)
    return None


def standardize_over_training_cells(features: np.ndarray, is_train: np.ndarray) -> np.ndarray:
    """Scale each feature to mean 0 and variance 1 over the training cells; constant features become 0.

    Returns
    -------
    Scaled features of all cells, float32 ``(N, D)``.
    """
    mean = column_means(features[is_train])
    deviation = np.sqrt(column_means(np.square(features[is_train] - mean)))
    return ((features - mean) / np.where(deviation > 0, deviation, np.inf)).astype(np.float32)


def compute_corrected_inputs(
    name: str, inputs: np.ndarray, labels: CellLabels, reference: ReferenceCells | None
) -> dict[str, np.ndarray]:
    """Compute the common batch corrections of the inputs.

    The corrections are, in this order:

    1. the unmodified inputs;
    2. the inputs standardised per environment, if there are reference cells;
    3. 1 and 2 after sphering on the training controls, if there are at least :data:`MIN_CONTROLS_TO_SPHERE` of these;
    4. within-class covariance normalisation (WCCN) of 2, or of 1 if there are no reference cells. With enough training
       controls, WCCN also uses these and their positions.

    Sphering and WCCN are fitted to training cells only. A correction that cannot be computed is missing from the
    result, and the log states why.

    Parameters
    ----------
    name
        Name of the inputs, such as ``"features"``.
    inputs
        Features, or principal components of images, ``(N, D)``.
    labels
        Labels of all cells.
    reference
        Cells with which the inputs are standardised, see :func:`choose_reference_cells`.

    Returns
    -------
    Corrected inputs ``(N, D)`` by name, the simplest first.
    """
    found = {name: inputs}
    add_standardised(found, name, labels, reference)
    *_, last = found
    train_controls = labels.is_control & labels.is_train
    learn_from_controls = train_controls.sum() >= MIN_CONTROLS_TO_SPHERE
    if learn_from_controls:
        for base in list(found):
            _add_corrected(found, f"{base}, sphered", sphering, found[base], controls=train_controls)
    how: dict[str, Any] = {"controls": train_controls, "positions": labels.position} if learn_from_controls else {}
    _add_corrected(found, f"{last}, WCCN", wccn, found[last], labels.y, fit=labels.is_train, **how)
    return found


def add_standardised(
    found: dict[str, np.ndarray], name: str, labels: CellLabels, reference: ReferenceCells | None
) -> None:
    """Standardise an embedding per environment, and add it to ``found``; do nothing without reference cells."""
    if reference is not None:
        title, e = f"{name}, standardised by {reference.column}", labels.environments[reference.column]
        _add_corrected(found, title, standardize_by_environment, found[name], e, fit=reference.rows)


def _add_corrected(
    found: dict[str, np.ndarray], title: str, correct: Callable[..., np.ndarray], *given: Any, **how: Any
) -> None:
    """Compute a correction of an embedding and add it to ``found``, or log why it cannot be computed."""
    try:
        found[title] = correct(*given, **how)
    except ValueError as error:
        logger.info("%s is not compared: %s", title, error)
