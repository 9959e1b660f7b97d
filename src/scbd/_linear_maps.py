"""Linear maps of feature tables, fitted in closed form: whitening, discriminants. Numpy alone.

Tables are read by blocks of rows: what has a shape and slices of rows, such as a file, will do for an array.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BLOCK = 8_192
# what is left of values that were rounded a few times, in units of what their dtype tells apart; and the rounding of
# a sum of thousands in float64, of which such values often are means
_ROUNDINGS, _OF_SUMS = 8, 1e-12


class LinearMap(NamedTuple):
    """From features ``(N, F)`` to ``features @ matrix + offset``, ``(N, K)``."""

    matrix: np.ndarray
    """``(F, K)``, float64."""
    offset: np.ndarray
    """``(K,)``, float64."""

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Map features, block by block, float32 ``(N, K)``."""
        mapped = np.empty((len(features), len(self.offset)), dtype=np.float32)
        for start in range(0, len(features), BLOCK):
            part = slice(start, start + BLOCK)
            mapped[part] = np.asarray(features[part], dtype=np.float64) @ self.matrix + self.offset
        return mapped

    def then(self, after: LinearMap) -> LinearMap:
        """What this map and another one behind it are together."""
        return LinearMap(self.matrix @ after.matrix, self.offset @ after.matrix + after.offset)


def resolution(dtype: np.dtype) -> float:
    """What is rounding, of the size of values that came in this dtype: 1e-6 of float32, 1e-12 of float64."""
    return max(_OF_SUMS, _ROUNDINGS * float(np.finfo(dtype).eps)) if dtype.kind == "f" else _OF_SUMS


def column_means(features: np.ndarray) -> np.ndarray:
    """Mean of each feature ``(F,)``, float64; summed around the first row, so that large values cost no digits.

    What is constant is its own mean. Else the sum of n rows is off by less than n roundings of the spread; that of the
    values themselves, by n roundings of their size.
    """
    first, total = np.asarray(features[:1], dtype=np.float64)[0], np.zeros(features.shape[1])
    for start in range(0, len(features), BLOCK):
        total += (features[start : start + BLOCK] - first).sum(0)
    return first + total / len(features)


def mean_and_factor(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each feature ``(F,)``, and what scales it to a standard deviation of 1; 0 where it is constant."""
    mean = column_means(features)
    squares = np.zeros(features.shape[1])
    for start in range(0, len(features), BLOCK):
        squares += ((features[start : start + BLOCK] - mean) ** 2).sum(0)
    sd = np.sqrt(squares / max(1, len(features) - 1))
    return mean, inverse_of_varying(sd, features)


def inverse_of_varying(sd: np.ndarray, features: np.ndarray) -> np.ndarray:
    """One by standard deviations ``(F,)`` of features as they came; 0 where one varies by no more than rounding."""
    largest = np.maximum(features.max(0), -features.min(0))
    return np.divide(1, sd, out=np.zeros_like(sd), where=sd > resolution(features.dtype) * largest)


def covariance(features: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """Covariance of rows, ``(F, F)`` float64, in memory that does not grow with them; their mean may be known."""
    return _scatter(features, column_means(features) if mean is None else mean) / max(1, len(features) - 1)


def principal_map(mean: np.ndarray, factor: np.ndarray, spread: np.ndarray, n_components: int) -> LinearMap:
    """To principal components of features with this mean and covariance, once they are scaled by ``factor``.

    The largest weight of each is positive, as in scikit-learn.
    """
    axes = np.linalg.eigh(spread * np.outer(factor, factor))[1][:, ::-1][:, :n_components]
    signs = np.sign(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0))
    matrix = factor[:, None] * axes * signs
    return LinearMap(matrix, -mean @ matrix)


def effective_rank(features: np.ndarray) -> float:
    """Directions that rows use: the exponential of the entropy of their spectrum; 0 for a point, NaN if not finite."""
    if not np.isfinite([features.min(), features.max()]).all():
        return float("nan")
    spectrum = np.linalg.eigvalsh(covariance(features)).clip(min=0)
    if spectrum.sum() <= resolution(features.dtype) ** 2 * np.square(features, dtype=np.float64).sum() / len(features):
        return 0.0
    share = spectrum[spectrum > 0] / spectrum.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def span_of_few(features: np.ndarray, n_components: int) -> np.ndarray | None:
    """Orthonormal axes ``(F, D)`` that hold all in which a few rows differ; None where they are half of F or more.

    Of rows that are far fewer than features, no map learns anything beside these axes, and decompositions of a
    covariance take a cube of their number. Where rows are fewer than the components that are asked for, axes in which
    no row differs follow, the same ones each time.
    """
    n_rows, n_features = features.shape
    if 2 * max(n_rows, n_components) >= n_features:
        return None
    columns = (features - column_means(features)).T
    if n_rows < n_components:
        columns = np.hstack([columns, np.random.default_rng(0).normal(size=(n_features, n_components - n_rows))])
    return np.linalg.qr(columns)[0]


def within_covariance(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Covariance of rows around the mean of their label, pooled; ``labels`` are any values ``(N,)``."""
    codes, means, counts = label_means(features, labels)
    return _scatter(features, means, codes) / max(1, len(features) - len(counts))


def label_means(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Code of each row's label, and of each label the mean of its rows ``(L, F)`` float64 and their number."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(codes, kind="stable")
    starts = np.concatenate([[0], counts.cumsum()])
    means = np.empty((len(counts), features.shape[1]))
    for label, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        means[label] = column_means(features[order[start:stop]])
    return codes, means, counts


def whitening(spread: np.ndarray, regularization: float) -> np.ndarray:
    r"""Matrix :math:`V (\Lambda + \lambda I)^{-1/2}` of a covariance :math:`V \Lambda V^T`, largest variance first.

    Raises
    ------
    ValueError
        If :math:`\lambda` is 0, and the covariance has no inverse.
    """
    variances, axes = np.linalg.eigh(spread)
    variances, axes = variances[::-1].clip(min=0), axes[:, ::-1]
    if not regularization and variances[-1] <= variances[0] * len(variances) * np.finfo(variances.dtype).eps:
        msg = (
            "regularization=0: the covariance has no inverse, as rows are fewer than features, or some features are "
            "made of others. Give it more than 0."
        )
        raise ValueError(msg)
    return axes / np.sqrt(variances + regularization)


def discriminants(
    between: np.ndarray,
    *,
    shrinkage: float = 0.0,
    n_components: int | None = None,
    rows: float | None = None,
    n_features: int | None = None,
) -> np.ndarray:
    r"""Axes in which labels differ most, of the covariance of label means in a space that is white within labels.

    Parameters
    ----------
    between
        Covariance of label means ``(D, D)``.
    shrinkage
        Of that towards a multiple of the identity, from 0 to 1.
    n_components
        How many axes; all by default.
    rows
        Scale each axis by :math:`b / (b + 1 / n)`, with :math:`b` its variance between labels: the share of what is
        seen there of the mean of n rows that belongs to the label (probabilistic discriminants). Otherwise axes count
        alike.
    n_features
        Directions that its trace is shared by; D by default, more where others were left out that have none of it.

    Returns
    -------
    ``(D, K)``.
    """
    size = len(between)
    shrunk = (1 - shrinkage) * between + shrinkage * np.trace(between) / (n_features or size) * np.eye(size)
    variances, axes = np.linalg.eigh(shrunk)
    variances, axes = variances[::-1].clip(min=0)[:n_components], axes[:, ::-1][:, :n_components]
    return axes if rows is None else axes * (variances / (variances + 1 / rows))


def turn(size: int) -> np.ndarray:
    """A rotation ``(size, size)``, always the same: of axes that it has turned, none means anything by itself."""
    rotation: np.ndarray = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    return rotation


def _scatter(features: np.ndarray, means: np.ndarray, codes: np.ndarray | None = None) -> np.ndarray:
    """Sum of squares and products around one mean, or around that of each row's code."""
    total = np.zeros((features.shape[1], features.shape[1]))
    for start in range(0, len(features), BLOCK):
        part = slice(start, start + BLOCK)
        centred = features[part] - (means if codes is None else means[codes[part]])
        total += centred.T @ centred
    return total
