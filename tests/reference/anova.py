"""Compute explained variance with loops over labels, and with least squares on all columns at once."""

from __future__ import annotations

import numpy as np


def share_of_labels(x: np.ndarray, labels) -> float:
    """Return the sum of squares between labels, divided by the total; each is summed over components."""
    between = total = 0.0
    for component in x.T:
        total += sum((value - component.mean()) ** 2 for value in component)
        for label in set(labels):
            mine = [value for value, of in zip(component, labels, strict=True) if of == label]
            between += len(mine) * (np.mean(mine) - component.mean()) ** 2
    return between / total


def share_of_columns(x: np.ndarray, *columns: np.ndarray) -> float:
    """Return R squared of a linear model with an intercept; columns are ``(N, P)``."""
    design = np.hstack([np.ones((len(x), 1)), *columns])
    residual = x - design @ np.linalg.lstsq(design, x, rcond=None)[0]
    return float(1 - np.square(residual).sum() / np.square(x - x.mean(0)).sum())


def dummies(labels) -> np.ndarray:
    return np.array([[label == of for label in sorted(set(labels))] for of in labels], dtype=float)
