"""Compute the parts of linear baselines row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from helpers.small_tables import Plates


def within(wells: Plates, fit: np.ndarray, weight: float, by_controls: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return scaled features, and the covariance within compounds plus that of the controls' positions."""
    reference = wells.features[wells.controls & fit if by_controls else fit]
    scaled = (wells.features - reference.mean(0)) / reference.std(0, ddof=1)
    spread, free = np.zeros((scaled.shape[1],) * 2), 0
    for compound in set(wells.compounds[fit]):
        rows = scaled[fit & (wells.compounds == compound)]
        for row in rows - rows.mean(0):
            spread += np.outer(row, row)
        free += len(rows) - 1
    spread /= free
    if weight:
        controls = wells.controls & fit
        means = [scaled[controls & (wells.positions == p)].mean(0) for p in set(wells.positions[controls])]
        spread += weight * np.cov(np.stack(means).T)
    return scaled, spread


def means_of(scaled: np.ndarray, wells: Plates, fit: np.ndarray) -> np.ndarray:
    """Return the mean of each compound's rows in ``fit``."""
    names = sorted(set(wells.compounds[fit]))
    return np.stack([scaled[fit & (wells.compounds == name)].mean(0) for name in names])


def retrieval(z: np.ndarray, positive: np.ndarray, negative: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean average precision over labels, by cosine, given positive and negative pairs ``(N, N)``."""
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    cosines = unit @ unit.T
    found: dict[str, list[float]] = {}
    for i in np.flatnonzero(positive.any(1) & negative.any(1)):
        asked = np.flatnonzero(positive[i] | negative[i])
        hits = positive[i, asked[np.argsort(-cosines[i, asked], kind="stable")]]
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        found.setdefault(labels[i], []).append(float(precision[hits].mean()))
    return float(np.mean([np.mean(values) for values in found.values()]))


def same(values: np.ndarray) -> np.ndarray:
    """Return a mask ``(N, N)`` of the pairs of rows with equal values."""
    return values[:, None] == values
