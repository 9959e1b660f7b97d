"""Linear maps of features, fitted in closed form with numpy: whitening, principal components, discriminants.

Features are matrices ``(N, F)`` with one row per cell or profile. They are read a few thousand rows at a time. The
functions that compute means or covariances or apply a map also accept an array in a file, or any other object that has
a shape and returns slices of rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

# number of rows of a matrix of features that are processed at a time, to limit memory
ROWS_PER_BLOCK = 8_192
# A feature counts as constant if the ratio of its standard deviation to its largest absolute value is at most the
# larger of two limits. The first limit is _N_EPSILONS times the machine epsilon of the feature's dtype, for values that
# were rounded a few times. The second limit is _MIN_RELATIVE_ERROR, the rounding error of a float64 sum of thousands of
# values, as in a mean.
_N_EPSILONS, _MIN_RELATIVE_ERROR = 8, 1e-12


class LinearMap(NamedTuple):
    """Affine map of features ``(N, F)`` to ``features @ matrix + offset``, ``(N, K)``."""

    matrix: np.ndarray
    """Weight of each feature in each output, ``(F, K)`` float64."""
    offset: np.ndarray
    """Constant added to each output, ``(K,)`` float64."""

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Apply the map to features ``(N, F)``, some rows at a time, and return float32 ``(N, K)``."""
        mapped = np.empty((len(features), len(self.offset)), dtype=np.float32)
        for start in range(0, len(features), ROWS_PER_BLOCK):
            part = slice(start, start + ROWS_PER_BLOCK)
            mapped[part] = np.asarray(features[part], dtype=np.float64) @ self.matrix + self.offset
        return mapped

    def then(self, after: LinearMap) -> LinearMap:
        """Return the single map that is equivalent to this map followed by the map ``after``."""
        return LinearMap(self.matrix @ after.matrix, self.offset @ after.matrix + after.offset)


def relative_rounding_error(dtype: np.dtype) -> float:
    """Return the limit of a feature's standard deviation, relative to its values, up to which it is rounding error.

    The limit is about 1e-6 for values of the dtype float32, and 1e-12 for float64 and whole numbers.
    """
    return (
        max(_MIN_RELATIVE_ERROR, _N_EPSILONS * float(np.finfo(dtype).eps)) if dtype.kind == "f" else _MIN_RELATIVE_ERROR
    )


def column_means(features: np.ndarray) -> np.ndarray:
    """Return the mean of each feature over the rows, ``(F,)`` float64.

    The differences between each row and the first row are summed, not the values themselves. The mean of a constant
    feature is therefore exactly its value, and features with a large mean lose no precision: the rounding error of each
    addition is relative to the differences, which are smaller than the values.
    """
    first, total = np.asarray(features[:1], dtype=np.float64)[0], np.zeros(features.shape[1])
    for start in range(0, len(features), ROWS_PER_BLOCK):
        total += (features[start : start + ROWS_PER_BLOCK] - first).sum(0)
    return first + total / len(features)


def mean_and_inverse_deviation(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean ``(F,)`` of each feature, and the factor ``(F,)`` that scales it to a standard deviation of 1.

    The factor is 0 for a feature that is constant, or whose values differ only by rounding errors.
    """
    mean = column_means(features)
    squares = np.zeros(features.shape[1])
    for start in range(0, len(features), ROWS_PER_BLOCK):
        squares += ((features[start : start + ROWS_PER_BLOCK] - mean) ** 2).sum(0)
    sd = np.sqrt(squares / max(1, len(features) - 1))
    return mean, inverse_deviations(sd, features)


def inverse_deviations(sd: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Return the inverse ``(F,)`` of the standard deviation ``sd`` of each feature.

    The result is 0 for a feature whose values differ only by rounding errors. The size of these errors depends on the
    dtype, so that ``features`` must have the dtype in which their values were stored.
    """
    largest = np.maximum(features.max(0), -features.min(0))
    return np.divide(1, sd, out=np.zeros_like(sd), where=sd > relative_rounding_error(features.dtype) * largest)


def covariance(features: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """Return the covariance matrix of the features, ``(F, F)`` float64.

    Memory use does not grow with the number of rows. ``mean``, the means ``(F,)`` of the features, is computed if it is
    not given.
    """
    return _scatter_matrix(features, column_means(features) if mean is None else mean) / max(1, len(features) - 1)


def principal_components_map(mean: np.ndarray, factor: np.ndarray, spread: np.ndarray, n_components: int) -> LinearMap:
    """Return the map from features to their leading principal components, computed from mean and covariance.

    Each feature is first multiplied by its ``factor`` ``(F,)``, such as the inverse of its standard deviation. ``mean``
    ``(F,)`` and ``spread``, the covariance ``(F, F)``, are those of the features before this scaling. The sign of each
    component is chosen so that its weight with the largest absolute value is positive, as in scikit-learn.
    """
    axes = np.linalg.eigh(spread * np.outer(factor, factor))[1][:, ::-1][:, :n_components]
    signs = np.sign(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0))
    matrix = factor[:, None] * axes * signs
    return LinearMap(matrix, -mean @ matrix)


def effective_rank(features: np.ndarray) -> float:
    """Return the effective rank of the covariance of features: the effective number of directions of variance.

    The effective rank is the exponential of the entropy of the eigenvalues of the covariance, divided by their sum. It
    is 0 if all rows are equal up to rounding errors, and NaN if any value is not finite.
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
    """Return orthonormal axes ``(F, D)`` that span all differences between the N rows, if N is much smaller than F.

    With far fewer rows than features, rows do not vary in directions outside these axes. Computing a map in the
    coordinates along these axes loses nothing, and avoids decompositions of covariances ``(F, F)``, whose cost grows
    with the cube of F.

    D is the larger of N and ``n_components``. If ``n_components`` is larger than N, random directions, drawn with a
    fixed seed, are added, in which rows do not differ. The function returns `None` if D is half of F or more.
    """
    n_rows, n_features = features.shape
    if 2 * max(n_rows, n_components) >= n_features:
        return None
    columns = (features - column_means(features)).T
    if n_rows < n_components:
        columns = np.hstack([columns, np.random.default_rng(0).normal(size=(n_features, n_components - n_rows))])
    return np.linalg.qr(columns)[0]


def within_covariance(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the pooled within-label covariance of features, ``(F, F)`` float64.

    The mean of each label's rows is subtracted from these rows before the covariance is computed. ``labels`` ``(N,)``
    holds one label of any type per row.
    """
    codes, means, counts = label_means(features, labels)
    return _scatter_matrix(features, means, codes) / max(1, len(features) - len(counts))


def label_means(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the mean of the features over the rows of each of L labels.

    Returns
    -------
    Three arrays: the integer code (0 to L - 1) of the label of each row, ``(N,)``; the mean features of each label,
    float64 ``(L, F)``; and the number of rows of each label, ``(L,)``.
    """
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(codes, kind="stable")
    starts = np.concatenate([[0], counts.cumsum()])
    means = np.empty((len(counts), features.shape[1]))
    for label, (start, stop) in enumerate(pairwise(starts)):
        means[label] = column_means(features[order[start:stop]])
    return codes, means, counts


def whitening_matrix(spread: np.ndarray, regularization: float) -> np.ndarray:
    r"""Return the whitening matrix :math:`V (\Lambda + \lambda I)^{-1/2}` of a covariance :math:`V \Lambda V^T`.

    ``spread`` is the covariance, and ``regularization`` is :math:`\lambda`. The columns of the whitening matrix are
    sorted by the variance of their directions, largest first.

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
    """Compute linear discriminant axes: the directions in which the means of labels differ most.

    The D features must be white within labels, that is, their within-label covariance is the identity. The axes are
    then the eigenvectors of the covariance of the label means.

    Parameters
    ----------
    between
        Covariance of the label means ``(D, D)``.
    shrinkage
        Weight, from 0 to 1, with which ``between`` is shrunk towards a multiple of the identity matrix.
    n_components
        Number of axes, K. Default: D.
    rows
        Number of rows :math:`n` that will be averaged into one mean. If given, each axis is scaled by
        :math:`b / (b + 1 / n)`, where :math:`b` is the variance of the label means along the axis (probabilistic
        discriminants). This factor is the proportion of the variance of means of n rows that is due to the label. By
        default, all axes have length 1.
    n_features
        Number of directions over which the trace of ``between`` is averaged for the shrinkage. Default: D. Give a
        larger number if directions without variance between labels were dropped before.

    Returns
    -------
    Matrix ``(D, K)`` with one axis per column, in the order of decreasing variance between labels.
    """
    size = len(between)
    shrunk = (1 - shrinkage) * between + shrinkage * np.trace(between) / (n_features or size) * np.eye(size)
    variances, axes = np.linalg.eigh(shrunk)
    variances, axes = variances[::-1].clip(min=0)[:n_components], axes[:, ::-1][:, :n_components]
    return axes if rows is None else axes * (variances / (variances + 1 / rows))


def fit_whitening_matrix(
    features: np.ndarray,
    labels: np.ndarray | None,
    controls: np.ndarray | None,
    positions: np.ndarray | None,
    position_weight: float,
    regularization: float,
    factor: np.ndarray | None = None,
) -> np.ndarray:
    r"""Estimate the matrix that whitens variation of features that is not due to labels.

    With labels, the whitened covariance is that of the rows around the mean of their label (within-class covariance
    normalisation). Without labels, it is that of the controls (sphering).

    Parameters
    ----------
    features
        Features of the rows from which the matrix is estimated, ``(N, D)``.
    labels
        Label of each row, ``(N,)``, or `None`.
    controls, positions
        Which rows are controls, boolean ``(N,)``, and the plate position of each row, ``(N,)``. If labels, controls and
        positions are given, and the controls have several positions, ``position_weight`` times the covariance between
        the positions' mean features of controls is added to the covariance within labels.
    position_weight
        Weight of the covariance between positions.
    regularization
        Variance :math:`\lambda` that is added in all directions; see :func:`whitening_matrix`.
    factor
        Factor ``(D,)`` by which each feature is multiplied before whitening. Features with a factor of 0 are ignored;
        for each of these features, one of the last columns of the matrix is 0. Default: features are not scaled.

    Returns
    -------
    Matrix ``(D, D)``, float64, which includes the multiplication by ``factor``.

    Raises
    ------
    ValueError
        If ``regularization`` is 0 and the covariance is singular.
    """
    spread = covariance(features[controls]) if labels is None else within_covariance(features, labels)
    if labels is not None and controls is not None and positions is not None:
        _, means, _ = label_means(features[controls], positions[controls])
        if len(means) > 1:
            spread += position_weight * covariance(means)
    if factor is None:
        return whitening_matrix(spread, regularization)
    varying = np.flatnonzero(factor)
    scaled = spread[np.ix_(varying, varying)] * np.outer(factor[varying], factor[varying])
    matrix = np.zeros_like(spread)
    matrix[varying, : len(varying)] = factor[varying, None] * whitening_matrix(scaled, regularization)
    return matrix


def fit_discriminant_axes(
    features: np.ndarray,
    labels: np.ndarray,
    white: np.ndarray,
    *,
    weighted: bool,
    shrinkage: float = 0.0,
    n_components: int | None = None,
    n_features: int | None = None,
    whiten_means: bool = False,
) -> tuple[np.ndarray, float]:
    """Estimate the axes along which the means of labels differ most, after whitening within labels.

    Each label has the same weight, whatever its number of rows.

    Parameters
    ----------
    features, labels
        Features ``(N, D)`` and labels ``(N,)`` of the rows from which the axes are estimated.
    white
        Matrix ``(D, D)`` that whitens the variation within labels, from :func:`fit_whitening_matrix`.
    weighted
        Whether the axes are scaled for profiles that are means of :math:`n` rows, with :math:`n` the median number of
        rows per label (probabilistic linear discriminant analysis; see ``rows`` of :func:`discriminant_axes`). If
        false, all axes have length 1, and there are at most L - 1 axes for L labels, because the means of labels do not
        differ in further directions (linear discriminant analysis).
    shrinkage, n_components, n_features
        See :func:`discriminant_axes`.
    whiten_means
        Whether the means of labels are whitened before their covariance is computed. By default, their covariance is
        whitened instead. Both ways give the same covariance up to rounding. With fewer labels than features, however,
        rounding determines how axes of equal variance are rotated, so that coordinates along these axes are reproduced
        only if this argument stays the same.

    Returns
    -------
    Two values: the axes, as the columns of a matrix ``(D, K)`` that is applied after ``white``, in the order of
    decreasing variance between labels; and the variance of the whitened means of labels, averaged over ``n_features``
    directions. If this variance is 0 up to rounding, the axes are arbitrary.
    """
    _, means, counts = label_means(features, labels)
    between = covariance(means @ white) if whiten_means else white.T @ covariance(means) @ white
    rows = float(np.median(counts)) if weighted else None
    axes = discriminant_axes(between, shrinkage=shrinkage, n_components=n_components, rows=rows, n_features=n_features)
    return axes if weighted else axes[:, : len(means) - 1], float(np.trace(between)) / (n_features or len(between))


def random_rotation(size: int) -> np.ndarray:
    """Return a random orthogonal matrix ``(size, size)``; its fixed seed makes it the same in every call.

    An embedding whose axes are weighted is multiplied by it. Scaling each axis of the rotated embedding to unit
    variance, as many analyses do, then does not undo the weights.
    """
    rotation: np.ndarray = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    return rotation


def _scatter_matrix(features: np.ndarray, means: np.ndarray, codes: np.ndarray | None = None) -> np.ndarray:
    """Return the scatter matrix ``(F, F)`` of features: the sum of the outer products of the centred rows.

    Without ``codes``, ``means`` ``(F,)`` is subtracted from all rows. With ``codes`` ``(N,)``, the label of each row as
    an integer, ``means`` is ``(L, F)``, and the mean of its label is subtracted from each row.
    """
    total = np.zeros((features.shape[1], features.shape[1]))
    for start in range(0, len(features), ROWS_PER_BLOCK):
        part = slice(start, start + ROWS_PER_BLOCK)
        centred = features[part] - (means if codes is None else means[codes[part]])
        total += centred.T @ centred
    return total
