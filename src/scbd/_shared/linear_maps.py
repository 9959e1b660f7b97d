"""Linear maps of feature tables, fitted in closed form with numpy: whitening, principal components, discriminants.

Tables are read in blocks of rows. For means, covariances and applying a map, an object with a shape and slices of
rows, such as an array in a file, can take the place of an array.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# rows per block
ROWS_PER_BLOCK = 8_192
# A feature counts as constant if its standard deviation, relative to its size, is below the larger of two limits:
# _ROUNDINGS machine epsilons of its dtype (values that were rounded a few times), and _OF_SUMS (the rounding error of
# a float64 sum of thousands of values, as in a mean).
_N_EPSILONS, _MIN_RELATIVE_ERROR = 8, 1e-12


class LinearMap(NamedTuple):
    """Affine map of features ``(N, F)`` to ``features @ matrix + offset``, ``(N, K)``."""

    matrix: np.ndarray
    """Weights ``(F, K)``, float64."""
    offset: np.ndarray
    """Constants ``(K,)``, float64."""

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Map features in blocks of rows; return float32 ``(N, K)``."""
        mapped = np.empty((len(features), len(self.offset)), dtype=np.float32)
        for start in range(0, len(features), ROWS_PER_BLOCK):
            part = slice(start, start + ROWS_PER_BLOCK)
            mapped[part] = np.asarray(features[part], dtype=np.float64) @ self.matrix + self.offset
        return mapped

    def then(self, after: LinearMap) -> LinearMap:
        """Return the composition of this map and a following one."""
        return LinearMap(self.matrix @ after.matrix, self.offset @ after.matrix + after.offset)


def relative_rounding_error(dtype: np.dtype) -> float:
    """Return the relative size below which variation is rounding: 1e-6 for float32, 1e-12 for float64."""
    return (
        max(_MIN_RELATIVE_ERROR, _N_EPSILONS * float(np.finfo(dtype).eps)) if dtype.kind == "f" else _MIN_RELATIVE_ERROR
    )


def column_means(features: np.ndarray) -> np.ndarray:
    """Return the mean of each feature ``(F,)``, float64.

    Rows are summed as differences from the first row, so that features with a large mean lose no precision. A constant
    feature has exactly its own value as mean. For n rows, the error of the sum is less than n rounding errors of the
    size of these differences. A sum of the values themselves would have n rounding errors of the size of the values.
    """
    first, total = np.asarray(features[:1], dtype=np.float64)[0], np.zeros(features.shape[1])
    for start in range(0, len(features), ROWS_PER_BLOCK):
        total += (features[start : start + ROWS_PER_BLOCK] - first).sum(0)
    return first + total / len(features)


def mean_and_inverse_deviation(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each feature and the factor that scales it to a standard deviation of 1, ``(F,)`` each.

    The factor is 0 for features that are constant or vary only by rounding.
    """
    mean = column_means(features)
    squares = np.zeros(features.shape[1])
    for start in range(0, len(features), ROWS_PER_BLOCK):
        squares += ((features[start : start + ROWS_PER_BLOCK] - mean) ** 2).sum(0)
    sd = np.sqrt(squares / max(1, len(features) - 1))
    return mean, inverse_deviations(sd, features)


def inverse_deviations(sd: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Return ``1 / sd`` of each feature ``(F,)``, or 0 where the feature varies only by rounding.

    ``features`` must have their original dtype, because the dtype determines the size of the rounding error.
    """
    largest = np.maximum(features.max(0), -features.min(0))
    return np.divide(1, sd, out=np.zeros_like(sd), where=sd > relative_rounding_error(features.dtype) * largest)


def covariance(features: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """Return the covariance of rows, ``(F, F)`` float64.

    Memory use does not grow with the number of rows. ``mean`` ``(F,)`` can be given if it was computed before.
    """
    return _scatter_matrix(features, column_means(features) if mean is None else mean) / max(1, len(features) - 1)


def principal_components_map(mean: np.ndarray, factor: np.ndarray, spread: np.ndarray, n_components: int) -> LinearMap:
    """Return the map to the leading principal components of features that are scaled by ``factor``.

    ``mean`` ``(F,)`` and ``spread`` (the covariance, ``(F, F)``) describe the features before scaling. The largest
    weight of each component, in absolute value, is positive, as in scikit-learn.
    """
    axes = np.linalg.eigh(spread * np.outer(factor, factor))[1][:, ::-1][:, :n_components]
    signs = np.sign(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0))
    matrix = factor[:, None] * axes * signs
    return LinearMap(matrix, -mean @ matrix)


def effective_rank(features: np.ndarray) -> float:
    """Return the effective number of directions in which rows vary.

    It is the exponential of the entropy of the covariance's normalised spectrum. It is 0 if all rows are equal up to
    rounding, and NaN if any value is not finite.
    """
    if not np.isfinite([features.min(), features.max()]).all():
        return float("nan")
    spectrum = np.linalg.eigvalsh(covariance(features)).clip(min=0)
    if spectrum.sum() <= relative_rounding_error(features.dtype) ** 2 * np.square(
        features, dtype=np.float64
    ).sum() / len(features):
        return 0.0
    share = spectrum[spectrum > 0] / spectrum.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def span_of_rows(features: np.ndarray, n_components: int) -> np.ndarray | None:
    """Return orthonormal axes ``(F, D)`` that span all differences between rows, if there are few rows.

    With far fewer rows than features, no map can learn from directions outside these axes, and working in them avoids
    decompositions of ``(F, F)`` covariances, whose cost grows with the cube of F.

    D is the number of rows, or ``n_components`` if that is larger. If ``n_components`` is larger, directions in which
    rows do not differ are added; they are drawn with a fixed seed. Returns `None` if D is half of F or more.
    """
    n_rows, n_features = features.shape
    if 2 * max(n_rows, n_components) >= n_features:
        return None
    columns = (features - column_means(features)).T
    if n_rows < n_components:
        columns = np.hstack([columns, np.random.default_rng(0).normal(size=(n_features, n_components - n_rows))])
    return np.linalg.qr(columns)[0]


def within_covariance(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the pooled covariance of rows around the mean of their label, ``(F, F)`` float64.

    ``labels`` are values ``(N,)`` of any type.
    """
    codes, means, counts = label_means(features, labels)
    return _scatter_matrix(features, means, codes) / max(1, len(features) - len(counts))


def label_means(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the mean of the rows of each label.

    Returns
    -------
    Three arrays: the code of each row's label ``(N,)``; the mean of each label's rows ``(L, F)``, float64; and the
    number of rows of each label ``(L,)``.
    """
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(codes, kind="stable")
    starts = np.concatenate([[0], counts.cumsum()])
    means = np.empty((len(counts), features.shape[1]))
    for label, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        means[label] = column_means(features[order[start:stop]])
    return codes, means, counts


def whitening_matrix(spread: np.ndarray, regularization: float) -> np.ndarray:
    r"""Return the whitening matrix :math:`V (\Lambda + \lambda I)^{-1/2}` of a covariance :math:`V \Lambda V^T`.

    Columns are sorted by variance, largest first. ``regularization`` is :math:`\lambda`.

    Raises
    ------
    ValueError
        If :math:`\lambda` is 0 and the covariance is singular.
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


def discriminant_axes(
    between: np.ndarray,
    *,
    shrinkage: float = 0.0,
    n_components: int | None = None,
    rows: float | None = None,
    n_features: int | None = None,
) -> np.ndarray:
    """Return the axes along which labels differ most, in a space that is white within labels.

    Parameters
    ----------
    between
        Covariance of the label means ``(D, D)``.
    shrinkage
        Weight, from 0 to 1, with which ``between`` is shrunk towards a multiple of the identity.
    n_components
        Number of axes; all by default.
    rows
        If given, scale each axis by :math:`b / (b + 1 / n)`, with :math:`b` its variance between labels and :math:`n`
        this number of rows (probabilistic discriminants). The factor is the proportion of the variance along the axis,
        for means of n rows, that is due to the label. By default, all axes have length 1.
    n_features
        Number of directions over which the trace of ``between`` is averaged for the shrinkage. By default D. Give a
        larger number if directions without variance were dropped before.

    Returns
    -------
    Axes in columns ``(D, K)``, in order of decreasing variance between labels.
    """
    size = len(between)
    shrunk = (1 - shrinkage) * between + shrinkage * np.trace(between) / (n_features or size) * np.eye(size)
    variances, axes = np.linalg.eigh(shrunk)
    variances, axes = variances[::-1].clip(min=0)[:n_components], axes[:, ::-1][:, :n_components]
    return axes if rows is None else axes * (variances / (variances + 1 / rows))


def random_rotation(size: int) -> np.ndarray:
    """Return a rotation ``(size, size)`` that is random but always the same.

    Rotated axes have no meaning of their own, so that scaling each of them does not undo a weighting of the original
    axes.
    """
    rotation: np.ndarray = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    return rotation


def _scatter_matrix(features: np.ndarray, means: np.ndarray, codes: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of the outer products of centred rows, ``(F, F)``.

    Rows are centred on ``means`` ``(F,)``. If ``codes`` ``(N,)`` are given, ``means`` is ``(L, F)``, and each row is
    centred on the mean of its code.
    """
    total = np.zeros((features.shape[1], features.shape[1]))
    for start in range(0, len(features), ROWS_PER_BLOCK):
        part = slice(start, start + ROWS_PER_BLOCK)
        centred = features[part] - (means if codes is None else means[codes[part]])
        total += centred.T @ centred
    return total
