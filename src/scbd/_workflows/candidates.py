"""Compute the simple embeddings with which ``scbd.run`` compares z_c.

The simple embeddings are the inputs of the model (features of cells, or principal components of images of cells), and
the inputs and z_c after simple batch corrections.
"""

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
from scbd.model._reference_cells import choose_reference_kind, in_environments_with_controls

if TYPE_CHECKING:
    from collections.abc import Callable

    from scbd.model._reference_cells import StandardizeBy

logger = logging.getLogger(__name__)

# Minimum number of training controls for which embeddings are sphered, that is, whitened by the covariance of the
# training controls. With fewer training controls, no embedding is sphered.
MIN_CONTROLS_TO_SPHERE = 16


@dataclass(frozen=True, kw_only=True)
class CellLabels:
    """Labels of all N cells that ``scbd.run`` analyses.

    Labels of cells are arrays ``(N,)`` of text. If there can be several labels of one kind, such as plate and well as
    environments, they are a mapping from the name of the column in ``obs`` to such an array.
    """

    y_name: str
    """Name of the ``obs`` column of the perturbation; several columns are combined into one."""
    y: np.ndarray
    """Perturbation of each cell, text ``(N,)``."""
    environments: Mapping[str, np.ndarray]
    """Mapping from each column of environments to the environment of each cell, text ``(N,)``."""
    is_train: np.ndarray
    """Boolean mask ``(N,)`` of the cells to which encoders and corrections are fitted; the other cells are held out."""
    is_control: np.ndarray
    """Boolean mask ``(N,)`` of the control cells; all false if the user named no controls."""
    position: np.ndarray | None = None
    """Position of each cell on the plate, such as the well, text ``(N,)``; `None` if no positions were given."""
    mechanisms: Mapping[str, np.ndarray] | None = None
    """Mapping from each column of mechanisms to the mechanism of action of each cell, text ``(N,)``.

    A mechanism can be any label that several perturbations share. Cells without a mechanism have the text "". The
    attribute is `None` if no column was given.
    """
    guides: Mapping[str, np.ndarray] | None = None
    """Mapping from each column of guides (reagents) to the guide of each cell, text ``(N,)``, "" without a guide."""
    places: Mapping[str, np.ndarray] | None = None
    """Mapping from each column of plates, wells or batches, except environments, to the text ``(N,)`` of its values."""

    @property
    def control_names(self) -> list[str]:
        """Perturbation labels that occur among the control cells, sorted."""
        return sorted(set(self.y[self.is_control]))

    @property
    def is_unseen(self) -> np.ndarray:
        """Boolean mask ``(N,)`` of the cells whose perturbation is unseen, that is, has no training cells."""
        return ~pd.Series(self.y).isin(pd.unique(self.y[self.is_train])).to_numpy()


class ReferenceCells(NamedTuple):
    """Cells from which the mean and standard deviation of each environment are estimated, to standardise embeddings."""

    column: str
    """Name of the ``obs`` column of environments, a key of :attr:`CellLabels.environments`."""
    kind: str
    """Kind of reference cells: ``"controls"`` for control cells only, ``"cells"`` for controls and perturbed cells."""
    rows: np.ndarray
    """Boolean mask ``(N,)`` that is true for the reference cells."""


def choose_reference_cells(labels: CellLabels, standardize_by: StandardizeBy = "auto") -> ReferenceCells | None:
    """Choose the reference cells from which the mean and deviation of each environment are estimated.

    With ``standardize_by="auto"``, all cells are reference cells if the means of all cells can be compared between
    environments. This is the case if most environments contain the same perturbations or dozens of perturbations each.
    Otherwise, the reference cells are the controls, if nine tenths of the training cells lie in environments with four
    or more controls. The setting ``standardize_by="auto"`` of :class:`scbd.SCBDModel` has the same thresholds, but it
    prefers controls where environments contain dozens of different perturbations.

    If there are several columns of environments, only one is standardised: the column with the most environments, of
    the columns for which reference cells are found.

    Reference cells are training cells where possible. If an environment, such as a test plate, has fewer than two
    training cells of the chosen kind (controls or all cells), its held-out cells of this kind are added. If it still
    has fewer than two reference cells, all of its cells become reference cells.

    Parameters
    ----------
    labels
        Labels of all cells.
    standardize_by
        Setting ``standardize_by`` of the model: ``"controls"``, ``"cells"`` or ``"auto"``. `None` has the same effect
        as ``"auto"``.

    Returns
    -------
    The chosen column of environments and its reference cells; `None` if no column of environments can be standardised.
    """
    train, y = labels.is_train, pd.factorize(labels.y)[0]
    has_controls = labels.is_control.any()
    controls = labels.is_control[train] if has_controls else None
    for column, names in sorted(labels.environments.items(), key=lambda item: -len(pd.unique(item[1]))):
        codes = pd.factorize(names)[0]
        enough = in_environments_with_controls(codes, labels.is_control, train)[train] if has_controls else None
        kind = standardize_by if standardize_by in ("controls", "cells") else None
        kind = kind or choose_reference_kind("auto", y[train], pd.factorize(codes[train])[0], controls, enough)[1]
        if kind is None:
            continue
        chosen = labels.is_control if kind == "controls" else np.ones(len(codes), dtype=bool)
        rows = np.zeros(len(codes), dtype=bool)
        for cells in (train & chosen, chosen, np.ones(len(codes), dtype=bool)):
            rows |= cells & (np.bincount(codes, weights=rows)[codes] < 2)
        return ReferenceCells(column, kind, rows)
    return None


def standardize_over_training_cells(features: np.ndarray, is_train: np.ndarray) -> np.ndarray:
    """Shift and scale each feature of all cells so that it has mean 0 and variance 1 over the training cells.

    Features that are constant over the training cells become 0.

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
    """Compute common batch corrections of the inputs, which ``scbd.run`` compares with z_c.

    The result contains, in this order:

    1. the unmodified inputs;
    2. the inputs standardised per environment, if there are reference cells;
    3. the embeddings 1 and 2, each sphered on the training controls (rotated and scaled so that controls vary equally
       in all directions), if there are at least 16 training controls;
    4. embedding 2, or embedding 1 if there are no reference cells, after within-class covariance normalisation (WCCN,
       which makes cells of one perturbation vary equally in all directions). With at least 16 training controls, WCCN
       also uses the controls and their positions on the plate.

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
        Reference cells from which the mean and deviation of each environment are estimated, see
        :func:`choose_reference_cells`; `None` if there are none.

    Returns
    -------
    The embeddings ``(N, D)`` by name, the simplest first. A name includes the correction, such as
    ``"features, sphered"``.
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
    """Standardise the embedding ``found[name]`` per environment, and add the result to ``found`` under a new name.

    If there are no reference cells (``reference`` is `None`), ``found`` does not change.
    """
    if reference is not None:
        title, e = f"{name}, standardised by {reference.column}", labels.environments[reference.column]
        _add_corrected(found, title, standardize_by_environment, found[name], e, fit=reference.rows)


def _add_corrected(
    found: dict[str, np.ndarray], title: str, correct: Callable[..., np.ndarray], *given: Any, **how: Any
) -> None:
    """Call the batch correction ``correct``, and add the corrected embedding to ``found`` under the name ``title``.

    If the correction raises a ``ValueError``, ``found`` does not change, and the error message is written to the log.
    """
    try:
        found[title] = correct(*given, **how)
    except ValueError as error:
        logger.info("%s is not compared: %s", title, error)
