"""Directions of the variance of standardised features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

# rows read at a time
_BLOCK = 1 << 17
# of the largest variance: what is less is rounding
_NOTHING = 1e-7


class PrincipalAxes(NamedTuple):
    """In falling order of their variance, without those that have none, but always one."""

    mean: np.ndarray
    """Of the features, ``(D,)``."""
    sd: np.ndarray
    """Of the features, ``(D,)``; 1 for those that do not vary."""
    variance: np.ndarray
    """Of the standardised features along each axis, ``(R,)``; ``R`` is at most the number of rows."""
    axes: np.ndarray
    """Orthonormal columns, ``(D, R)``."""


def principal_axes(x: Any, rows: np.ndarray) -> PrincipalAxes:
    """Of some rows of an array or a memory-map ``(N, D)``, read in blocks, in float64."""
    n, d = len(rows), x.shape[1]
    origin = np.asarray(x[rows[0]], dtype=np.float64)  # close to the data: squares lose no digits to a large mean
    shift = sum(block.sum(axis=0) for block in _differences(x, rows, origin)) / n
    if n < d:
        # the square of few rows is smaller than that of many features, and as good
        (centred,) = _differences(x, rows, origin + shift)
        sd = _not_zero(np.sqrt(np.square(centred).mean(axis=0)))
        centred /= sd
        variance, of_rows = _decomposed(centred @ centred.T / n)
        axes = centred.T @ of_rows / np.sqrt(n * _not_zero(variance))
    else:
        squares = sum(block.T @ block for block in _differences(x, rows, origin))
        covariance = squares / n - np.outer(shift, shift)
        sd = _not_zero(np.sqrt(np.clip(np.diag(covariance), 0, None)))
        variance, axes = _decomposed(covariance / np.outer(sd, sd))
    return PrincipalAxes(shift + origin, sd, variance, axes)


def _differences(x: Any, rows: np.ndarray, origin: np.ndarray) -> Iterator[np.ndarray]:
    size = max(_BLOCK, x.shape[1])
    return (x[rows[s : s + size]] - origin for s in range(0, len(rows), size))


def _decomposed(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(square)
    keep = values > _NOTHING * values[-1]
    keep[-1] = True
    return np.clip(values[keep], 0, None)[::-1], vectors[:, keep][:, ::-1]


def _not_zero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, 1.0)
