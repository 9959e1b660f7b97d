"""Corrections that whiten features: sphering, TVN, WCCN, LDA and PLDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scbd._shared.checks import check_count, check_number
from scbd._shared.linear_maps import (
    LinearMap,
    covariance,
    discriminant_axes,
    inverse_deviations,
    label_means,
    whitening_matrix,
    within_covariance,
)
from scbd.corrections._tables import (
    FitTable,
    encode_row_labels,
    environment_codes,
    log_constant_features,
    read_table,
    reference_scaling,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def sphering(
    features: ArrayLike, *, controls: ArrayLike, fit: ArrayLike | None = None, regularization: float = 1.0
) -> np.ndarray:
    r"""Whiten features by the covariance of controls, whose variation is not due to perturbations.

    Features are first scaled to the standard deviation of the controls. With :math:`V \Lambda V^T` the covariance of
    the scaled controls, the result is :math:`(x - \bar x) V (\Lambda + \lambda I)^{-1/2}`.

    The controls that the transform was fitted to lie close together afterwards. They are therefore not valid negatives
    in a score of replicates. Exclude some controls from ``fit``, and score with these.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    controls
        The controls, booleans ``(N,)`` or row numbers.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default. Only the controls among them are used.
    regularization
        The constant :math:`\lambda`, in units of a feature's variance among controls. The less reliable the covariance
        of the controls, the larger it should be. It has to be large for fewer controls than features: for 904 features
        of wells and 160 controls, 30 was best.

    Returns
    -------
    float32 ``(N, D)``. The first column is the direction in which controls vary most. Features that are constant among
    controls, or vary only by the rounding of their dtype, have no influence; a log message names them.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, fewer than two controls are in ``fit``, or the
        regularization is 0 while controls do not vary in all directions.

    References
    ----------
    Kessy, Lewin and Strimmer (2018), Optimal whitening and decorrelation.

    Examples
    --------
    >>> controls = (adata.obs["gene"] == "nontargeting").to_numpy()
    >>> seen = (adata.obs["plate"] != "plate_1").to_numpy()
    >>> z = scbd.corrections.sphering(adata.obsm["X_scbd_c"], controls=controls, fit=seen)
    >>> z.shape == adata.obsm["X_scbd_c"].shape
    True
    """
    table = read_table(features, fit=fit, controls=controls)
    mean, factor = reference_scaling(table)
    return whitening_map(mean, factor, covariance(table.features[table.reference]), regularization)(table.features)


def whitening_map(mean: np.ndarray, factor: np.ndarray, spread: np.ndarray, regularization: float) -> LinearMap:
    """Return the map that makes a covariance of features white, after features are scaled by ``factor``.

    ``spread`` is the covariance ``(D, D)`` of the features before scaling. Features with a factor of 0 are ignored; for
    each of them, one of the last output columns is 0. The map takes ``mean`` to 0.

    Raises
    ------
    ValueError
        If all factors are 0, the regularization is negative, or it is 0 and the covariance is singular.
    """
    check_number("regularization", regularization)
    varying = np.flatnonzero(factor)
    scaled = spread[np.ix_(varying, varying)] * np.outer(factor[varying], factor[varying])
    if not varying.size:
        msg = "features are constant in all rows that they would be scaled by: nothing can be learned from these."
        raise ValueError(msg)
    matrix = np.zeros_like(spread)
    matrix[varying, : len(varying)] = factor[varying, None] * whitening_matrix(scaled, regularization)
    return LinearMap(matrix, -mean @ matrix)


def tvn(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike,
    fit: ArrayLike | None = None,
    regularization: float = 0.5,
) -> np.ndarray:
    r"""Apply typical variation normalisation (TVN): whiten controls, and align their covariances between environments.

    1. Each environment is centred on the mean of its own controls.
    2. Features are rotated and scaled such that all controls together have unit covariance. Variation among controls is
       not due to perturbations. After this step, directions in which controls vary little have the same weight as
       others.
    3. The covariance :math:`C_e` of each environment's controls is aligned with the other environments by
       :math:`(C_e + \lambda I)^{-1/2} P` (correlation alignment). The matrix :math:`P` is chosen such that all controls
       together remain white.

    Covariances are shrunk, as if D more controls with uncorrelated features had been observed, where D is the number of
    features. With many controls, the result is therefore white in all directions. With few controls, it is white only
    in directions in which these controls vary. The result does not depend on the units of the features.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        The controls, booleans ``(N,)`` or row numbers.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default. Only the controls among them are used.
        Each environment needs at least two of these. To correct a test plate, include its controls.
    regularization
        The constant :math:`\lambda`, in units of the variance of whitened controls. The less reliable the covariances
        of single environments, the larger it should be. With many times more controls per environment than features,
        0.1 preserves more of the perturbation effects.

    Returns
    -------
    float32 ``(N, D)``, with one column fewer for each feature that is constant among the controls of every environment;
    a log message names these features.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, an environment has fewer than two controls, no feature
        varies among the controls within environments, or the regularization is not above 0.

    References
    ----------
    Ando, McLean and Berndl (2017), Improving phenotypic measurements in high-content imaging screens. Sun, Feng and
    Saenko (2016), Return of frustratingly easy domain adaptation.

    Examples
    --------
    >>> features = scbd.baselines.pixel_pca(adata, n_components=8)
    >>> controls = (adata.obs["gene"] == "nontargeting").to_numpy()
    >>> scbd.corrections.tvn(features, np.repeat("plate 1", 240), controls=controls).shape
    (240, 8)
    """
    if not regularization > 0:
        msg = f"regularization={regularization}: a covariance of few controls cannot be inverted, give it more than 0."
        raise ValueError(msg)
    table = read_table(features, fit=fit, controls=controls)
    codes, names = environment_codes(environments, table)
    typical = _estimate_control_variation(table, codes)
    n_columns = typical.white.shape[1]
    corrected = np.empty((len(codes), n_columns), dtype=np.float32)
    total = np.zeros((n_columns, n_columns))
    for code in range(len(names)):
        spread = typical.covariance_of(code)
        variances, axes = np.linalg.eigh(spread)
        matrix = typical.white @ (axes / np.sqrt(variances + regularization)) @ axes.T
        here = codes == code
        corrected[here] = LinearMap(matrix, -typical.means[code] @ matrix)(table.features[here])
        total += typical.weight_of(code) * (axes * (variances / (variances + regularization))) @ axes.T
    variances, axes = np.linalg.eigh(total)
    return LinearMap((axes / np.sqrt(variances)) @ axes.T, np.zeros(n_columns))(corrected)


class _ControlVariation(NamedTuple):
    """Typical variation: the variation of controls around the mean of their environment."""

    means: np.ndarray
    """Mean of the controls of each environment, ``(E, D)``."""
    white: np.ndarray
    """Matrix ``(D, K)`` from features to a space in which the controls of all environments together are white."""
    controls: np.ndarray
    """Controls in this white space, centred on the mean of their environment."""
    codes: np.ndarray
    """Environment codes of these controls."""
    shrinkage: float
    """Weight with which covariances are shrunk towards that of uncorrelated features with unit variance."""
    uncorrelated_variances: np.ndarray
    """Variances of such uncorrelated features in the white space, ``(K,)``."""

    def covariance_of(self, code: int) -> np.ndarray:
        """Return the shrunk covariance of the controls of an environment, in the white space.

        Its mean over environments, weighted by :meth:`weight_of`, is the identity.
        """
        own = self.controls[self.codes == code]
        return (1 - self.shrinkage) * own.T @ own / (len(own) - 1) + np.diag(
            self.shrinkage * self.uncorrelated_variances
        )

    def weight_of(self, code: int) -> float:
        """Return the fraction of the degrees of freedom of all environments that an environment contributes."""
        return ((self.codes == code).sum() - 1) / (len(self.codes) - len(self.means))


def _estimate_control_variation(table: FitTable, codes: np.ndarray) -> _ControlVariation:
    """Estimate the variation of the reference rows (the controls) around the mean of their environment."""
    controls, codes = table.features[table.reference], codes[table.reference]
    _, means, _ = label_means(controls, codes)
    centred = controls - means[codes]
    freedom = len(centred) - len(means)
    factor = inverse_deviations(np.sqrt((centred**2).sum(0) / freedom), controls)
    varying = np.flatnonzero(factor)
    if not varying.size:
        msg = "No feature varies among the controls of an environment: there is no typical variation to learn from."
        raise ValueError(msg)
    log_constant_features(table, factor == 0)
    centred = centred[:, varying] * factor[varying]
    shrinkage = len(varying) / (len(varying) + freedom)
    pooled = centred.T @ centred / freedom
    white = whitening_matrix((1 - shrinkage) * pooled + shrinkage * np.eye(len(varying)), 0)
    matrix = np.zeros((len(factor), len(varying)))
    matrix[varying] = factor[varying, None] * white
    return _ControlVariation(means, matrix, centred @ white, codes, shrinkage, (white**2).sum(0))


def wccn(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    fit: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    position_weight: float = 1.0,
    regularization: float = 3.0,
) -> np.ndarray:
    r"""Apply within-class covariance normalisation (WCCN): whiten the variation within perturbations.

    Features are scaled to the standard deviation of the controls, or of all cells in ``fit`` if no controls are given.
    With :math:`S = V \Lambda V^T` the covariance of scaled cells around the mean of their perturbation, the result is

    .. math:: (x - \bar x) V (\Lambda + \lambda I)^{-1/2}

    where :math:`\bar x` is the mean of the controls, or of all cells in ``fit``.

    If positions are given, :math:`w` times the covariance of the controls' position means is added to :math:`S`. Where
    all replicates of a perturbation lie in the same well position, effects of position and perturbation cannot be
    distinguished, and only the controls show the effects of position.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, including controls. Labels of cells outside of ``fit`` may be missing.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default.
    controls
        The controls, booleans ``(N,)`` or row numbers. Only controls in ``fit`` are used.
    positions
        Position of each cell on its plate (its well), ``(N,)``. Only positions of controls are used.
    position_weight
        The weight :math:`w`. With 0, positions are ignored.
    regularization
        The constant :math:`\lambda`, in units of the variance of a scaled feature.

    Returns
    -------
    float32 ``(N, D)``. The first column is the direction in which cells of a perturbation vary most. Features that are
    constant in the cells to which they are scaled, or vary only by the rounding of their dtype, have no influence; a
    log message names them.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, every perturbation has a single cell, positions are
        given without controls, all controls have the same position, a weight is negative, or the regularization is 0
        while cells of a perturbation do not vary in all directions.

    References
    ----------
    Hatch, Kajarekar and Stolcke (2006), Within-class covariance normalization for SVM-based speaker recognition.

    Examples
    --------
    >>> genes, seen = adata.obs["gene"].to_numpy(), np.arange(240) < 200
    >>> controls = genes == "nontargeting"
    >>> white = scbd.corrections.wccn(adata.obsm["X_scbd_c"], genes, fit=seen, controls=controls)
    >>> float(abs(white[seen & controls].mean()).round(3))  # the controls are the origin
    0.0
    """
    table = read_table(features, fit=fit, controls=controls)
    where = PositionNoise(positions, position_weight)
    return fit_within_label_map(table, labels, where, regularization).white(table.features)


class PositionNoise(NamedTuple):
    """Positions of cells on their plates, and the weight with which their variation counts as noise."""

    values: ArrayLike | None
    weight: float


class WithinLabelMap(NamedTuple):
    """A map that whitens the variation within labels, and the mapped label means."""

    white: LinearMap
    means: np.ndarray
    """Label means after the map without its offset, ``(L, D)``, float64."""
    counts: np.ndarray
    """Number of rows of each label, ``(L,)``."""


def fit_within_label_map(
    table: FitTable, labels: ArrayLike, positions: PositionNoise, regularization: float
) -> WithinLabelMap:
    """Learn the map that gives rows of a label the same variance in all directions."""
    codes, names = encode_row_labels("labels", labels, table.fit)
    learned, codes = table.features[table.fit], codes[table.fit]
    _, means, counts = label_means(learned, codes)
    if counts.max() < 2:
        msg = f"Each of {len(counts)} labels has one row to learn from: how rows of a label differ is not known."
        raise ValueError(msg)
    spread = within_covariance(learned, codes) + _position_covariance(table, positions)
    mean, factor = reference_scaling(table)
    white = whitening_map(mean, factor, spread, regularization)
    return WithinLabelMap(white, means @ white.matrix, counts)


def _position_covariance(table: FitTable, positions: PositionNoise) -> np.ndarray | float:
    """Return the covariance of the controls' position means times its weight; 0 without positions."""
    check_number("position_weight", positions.weight)
    if positions.values is None:
        return 0.0
    if table.controls is None:
        msg = "positions tell something where the perturbation is the same: say which rows are controls (controls=...)."
        raise ValueError(msg)
    codes, _ = encode_row_labels("positions", positions.values, table.controls)
    _, means, counts = label_means(table.features[table.controls], codes[table.controls])
    if len(counts) < 2:
        msg = "Controls have one position: what positions do is not known. Leave positions out."
        raise ValueError(msg)
    return positions.weight * covariance(means)


def lda(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    n_components: int = 128,
    fit: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    position_weight: float = 1.0,
    regularization: float = 1.0,
) -> np.ndarray:
    r"""Compute linear discriminants: directions in which perturbations differ most, relative to variation within them.

    They are the principal axes of the perturbations' means after :func:`wccn`. Each perturbation has the same weight,
    whatever its number of cells.

    ``regularization`` is equivalent to shrinking the covariance :math:`S` within perturbations to

    .. math:: (1 - s) S + s \bar v I, \qquad \lambda = s \bar v / (1 - s)

    with :math:`\bar v` the mean variance of scaled features within perturbations.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, including controls. Labels of cells outside of ``fit`` may be missing.
    n_components
        Maximum number of directions. There are at most as many as perturbations in ``fit``, minus one.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default.
    controls
        The controls, booleans ``(N,)`` or row numbers. Features are scaled to the standard deviation of the controls in
        ``fit``, whose mean becomes the origin. Without controls, all cells in ``fit`` are used for this.
    positions, position_weight
        Position of each cell on its plate, and the weight with which the covariance of the controls' position means is
        added to the variation within perturbations; see :func:`wccn`.
    regularization
        The constant :math:`\lambda`, added to all variances within perturbations, in units of the variance of a scaled
        feature.

    Returns
    -------
    float32 ``(N, K)``. The first column is the direction in which perturbations differ most.

    Raises
    ------
    ValueError
        If ``fit`` contains a single perturbation; see also :func:`wccn`.

    References
    ----------
    Friedman (1989), Regularized discriminant analysis.

    Examples
    --------
    >>> genes = adata.obs["gene"].to_numpy()
    >>> scbd.corrections.lda(adata.obsm["X_scbd_c"], genes, n_components=2, fit=np.arange(240) < 200).shape
    (240, 2)
    """
    check_count("n_components", n_components)
    table = read_table(features, fit=fit, controls=controls)
    within = fit_within_label_map(table, labels, PositionNoise(positions, position_weight), regularization)
    between = _between_covariance(within)
    axes = discriminant_axes(between, n_components=min(n_components, len(within.means) - 1, len(between)))
    return _project(table, within, axes)


def plda(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    fit: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    position_weight: float = 1.0,
    regularization: float = 1.0,
    shrinkage: float = 0.1,
) -> np.ndarray:
    """Compute probabilistic linear discriminants, scaled by how reliably they reflect the perturbation.

    After :func:`wccn`, the variance within perturbations is about 1. Each principal axis of the perturbations' means is
    then scaled by :math:`b / (b + 1 / n)`, with :math:`b` the variance of these means along the axis and :math:`n` the
    median number of cells per perturbation. The factor is the proportion of a profile (a mean of n cells) that is
    expected to be due to the perturbation.

    :math:`b` is shrunk towards its mean over axes. This preserves directions in which only perturbations outside of
    ``fit`` may differ.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, including controls. Labels of cells outside of ``fit`` may be missing.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default.
    controls
        The controls, booleans ``(N,)`` or row numbers. Features are scaled to the standard deviation of the controls in
        ``fit``, whose mean becomes the origin. Without controls, all cells in ``fit`` are used for this.
    positions, position_weight
        Position of each cell on its plate, and the weight with which the covariance of the controls' position means is
        added to the variation within perturbations; see :func:`wccn`.
    regularization
        Constant that is added to all variances within perturbations, in units of the variance of a scaled feature.
    shrinkage
        Weight, from 0 to 1, with which variances between perturbations are shrunk towards their mean.

    Returns
    -------
    float32 ``(N, D)``. The first column is the direction in which perturbations differ most.

    Raises
    ------
    ValueError
        If ``fit`` contains a single perturbation, or the shrinkage is not between 0 and 1; see also :func:`wccn`.

    References
    ----------
    Ioffe (2006), Probabilistic linear discriminant analysis.

    Examples
    --------
    >>> genes = adata.obs["gene"].to_numpy()
    >>> z = scbd.corrections.plda(adata.obsm["X_scbd_c"], genes, controls=genes == "nontargeting")
    >>> z.shape == adata.obsm["X_scbd_c"].shape
    True
    """
    check_number("shrinkage", shrinkage, most=1)
    table = read_table(features, fit=fit, controls=controls)
    within = fit_within_label_map(table, labels, PositionNoise(positions, position_weight), regularization)
    rows = float(np.median(within.counts))
    return _project(table, within, discriminant_axes(_between_covariance(within), shrinkage=shrinkage, rows=rows))


def _between_covariance(within: WithinLabelMap) -> np.ndarray:
    if len(within.means) < 2:
        msg = "There is one label to learn from: in what labels differ is not known."
        raise ValueError(msg)
    return covariance(within.means)


def _project(table: FitTable, within: WithinLabelMap, axes: np.ndarray) -> np.ndarray:
    return within.white.then(LinearMap(axes, np.zeros(axes.shape[1])))(table.features)
