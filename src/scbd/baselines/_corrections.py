"""Correct batch effects in features and embeddings: closed-form methods, and the libraries of ComBat and Harmony.

The closed-form methods learn only from the rows selected with ``fit``, and are applied to all rows.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._checks import check_choice, check_count, check_number, check_unmasked, inflect, join_first
from scbd._linear_maps import (
    LinearMap,
    column_means,
    covariance,
    discriminant_axes,
    inverse_deviations,
    label_means,
    mean_and_inverse_deviation,
    principal_components_map,
    relative_rounding_error,
    whitening_matrix,
    within_covariance,
)
from scbd.metrics._table import row_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

# rows that are checked at once
_BLOCK = 8_192


class FitTable(NamedTuple):
    """A feature table with the rows that a correction learns from."""

    features: np.ndarray
    """``(N, D)``, floating point, finite."""
    fit: np.ndarray
    """Mask of the rows to learn from, boolean ``(N,)``."""
    controls: np.ndarray | None
    """Mask of the controls among the rows to learn from, boolean ``(N,)``; `None` if no controls were given."""
    names: Sequence[Any]
    """Names of the features: the columns of a DataFrame, otherwise their numbers."""

    @property
    def reference(self) -> np.ndarray:
        """Mask of the rows that means and deviations are estimated from: controls if given, else rows in ``fit``."""
        return self.fit if self.controls is None else self.controls


def read_table(features: Any, *, fit: ArrayLike | None = None, controls: ArrayLike | None = None) -> FitTable:
    """Check a feature table and its selections of rows.

    Raises
    ------
    ValueError
        If features are not a table ``(N, D)`` of finite numbers, a selection does not fit the table, or fewer than two
        rows remain.
    """
    values, names = _as_float_table(features)
    chosen = selected_rows("fit", fit, len(values))
    if controls is None:
        return FitTable(values, _at_least_two(chosen, "fit"), None, names)
    both = selected_rows("controls", controls, len(values)) & chosen
    return FitTable(values, chosen, _at_least_two(both, "controls" if fit is None else "controls in fit"), names)


def selected_rows(name: str, chosen: ArrayLike | None, n: int) -> np.ndarray:
    """Return a selection of rows as a mask ``(N,)``, see :func:`chosen_rows`.

    Raises
    ------
    ValueError
        If the selection is not valid, or is empty.
    """
    # numpy makes an empty list a float array, which is neither a mask nor row numbers
    mask = row_mask(name, chosen, n) if chosen is None or np.size(chosen) else np.zeros(n, dtype=bool)
    if not mask.any():
        msg = f"{name} names none of {n} rows: nothing can be learned from no row."
        raise ValueError(msg)
    return mask


def encode_row_labels(name: str, labels: ArrayLike, needed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the code of each row's label ``(N,)``, and the labels.

    Rows outside of the mask ``needed`` may lack a label; their code is -1.

    Raises
    ------
    ValueError
        If there is not one label per row, or a row in ``needed`` lacks its label.
    """
    check_unmasked(name, labels)
    # object, because numpy would turn NaN in a list of texts into the text "nan"
    values = np.asarray(labels, dtype=object if isinstance(labels, list | tuple) else None)
    if values.shape != needed.shape:
        msg = f"{name} must have one value for each of {len(needed)} rows of the features, got shape {values.shape}."
        raise ValueError(msg)
    codes, names = pd.factorize(values)
    missing = np.flatnonzero((codes < 0) & needed)
    if missing.size:
        msg = f"{name} has no value for {missing.size} rows ({join_first(missing)}): leave them out, or out of fit."
        raise ValueError(msg)
    return codes, names


def environment_codes(environments: ArrayLike, table: FitTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the code of each row's environment ``(N,)``, and the names of the environments.

    Raises
    ------
    ValueError
        If there is not one environment per row, or an environment has fewer than two rows in ``table.reference``.
    """
    codes, names = encode_row_labels("environments", environments, np.ones(len(table.fit), dtype=bool))
    few = names[np.bincount(codes[table.reference], minlength=len(names)) < 2]
    if len(few):
        which = ("rows" if table.controls is None else "controls") + ("" if table.fit.all() else " in fit")
        environments_have = inflect(len(few), "environment has", "environments have")
        msg = (
            f"{len(few)} {environments_have} fewer than two {which} (such as {min(map(str, few))!r}): what is typical "
            "there is not known. Leave these environments out, or learn from more of their rows (all, with "
            "controls=None; a test plate may take part with its controls)."
        )
        raise ValueError(msg)
    return codes, names


def read_environments(features: ArrayLike, environments: ArrayLike) -> tuple[FitTable, np.ndarray]:
    """Return the checked features, and the code of each row's environment, for ComBat and Harmony.

    Raises
    ------
    ValueError
        If there is only one environment; see also :func:`read_table` and :func:`environment_codes`.
    """
    table = read_table(features)
    codes, names = environment_codes(environments, table)
    if len(names) < 2:
        msg = f"There is one environment ({names[0]}): nothing can be corrected between environments."
        raise ValueError(msg)
    return table, codes


def _at_least_two(mask: np.ndarray, what: str) -> np.ndarray:
    if mask.sum() < 2:
        msg = f"There are {mask.sum()} of {len(mask)} rows to learn from ({what}): at least two are needed."
        raise ValueError(msg)
    return mask


def _as_float_table(features: Any) -> tuple[np.ndarray, Sequence[Any]]:
    """Return features as a floating-point array, and their names; raise a ValueError if they are not usable."""
    if hasattr(features, "toarray"):
        msg = "features are a sparse matrix: give them dense, as features.toarray()."
        raise ValueError(msg)
    check_unmasked("An array of features", features)
    values = np.asarray(features)
    if values.dtype == object:  # numeric columns of a table with mixed column types
        values = _as_float64(values)
    if values.dtype.kind not in "fiub":
        msg = f"features are of type {values.dtype}, not numbers: leave out columns of names and labels."
        raise ValueError(msg)
    if values.ndim != 2 or not values.size:
        msg = f"features must be a table (N, D) with rows and columns, got shape {values.shape}."
        raise ValueError(msg)
    values = values if values.dtype.kind == "f" else values.astype(np.float64)
    names = getattr(features, "columns", range(values.shape[1]))
    _check_finite(values, names)
    return values, names


def _as_float64(values: np.ndarray) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return values


def _check_finite(values: np.ndarray, names: Any) -> None:
    """Raise a ValueError that names the rows and features with missing or infinite values, if there are any."""
    rows = np.zeros(len(values), dtype=bool)
    columns = np.zeros(values.shape[1], dtype=bool)
    for start in range(0, len(values), _BLOCK):
        wrong = ~np.isfinite(values[start : start + _BLOCK])
        rows[start : start + _BLOCK] = wrong.any(1)
        columns |= wrong.any(0)
    if rows.any():
        which = join_first(names[column] for column in np.flatnonzero(columns))
        msg = (
            f"features are missing or infinite in {rows.sum()} of {len(rows)} rows (rows "
            f"{join_first(np.flatnonzero(rows))}) "
            f"and {columns.sum()} of {len(columns)} features ({which}): drop these, or fill them in before."
        )
        raise ValueError(msg)


def reference_scaling(table: FitTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the scale factor of each feature over the reference rows, see :func:`mean_and_factor`.

    A log message names the constant features, whose factor is 0.

    Returns
    -------
    Mean and factor, ``(D,)`` each, float64.
    """
    mean, factor = mean_and_inverse_deviation(table.features[table.reference])
    log_constant_features(table, factor == 0)
    return mean, factor


def log_constant_features(table: FitTable, constant: np.ndarray, done: str = "Left out") -> None:
    """Log which features, boolean ``(D,)``, are constant over the reference rows, and how they were treated."""
    if constant.any():
        rows = "rows" if table.controls is None else "controls"
        said = "%s %d of %d features that are constant among %s, or vary by rounding alone (%s)."
        logger.info(said, done, constant.sum(), len(constant), rows, join_first(compress(table.names, constant)))


def standardize_by_environment(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike | None = None,
    fit: ArrayLike | None = None,
    scale: bool = True,
) -> np.ndarray:
    """Standardise each feature to mean 0 and variance 1 within each environment.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Cells from which mean and variance are estimated, booleans ``(N,)`` or row numbers; all by default. If
        environments hold different perturbations, controls preserve the perturbation effects, whereas all cells remove
        part of them.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default. Each environment needs at least two of
        them (two controls, if ``controls`` are given). To correct a test plate, include its controls.
    scale
        Divide by the standard deviation, in addition to subtracting the mean. Features that are constant in an
        environment, or vary only by the rounding of their dtype, are not divided; a log message names them.

    Returns
    -------
    float32 ``(N, D)``.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, or an environment has fewer than two rows to learn
        from.

    Examples
    --------
    >>> features = np.array([[1.0], [3.0], [11.0], [13.0]])  # the second well is brighter
    >>> scbd.baselines.standardize_by_environment(features, ["A1", "A1", "A2", "A2"], scale=False).ravel().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    table = read_table(features, fit=fit, controls=controls)
    codes, names = environment_codes(environments, table)
    corrected = np.empty(table.features.shape, dtype=np.float32)
    constant = np.zeros(table.features.shape[1], dtype=bool)
    for code in range(len(names)):
        here = codes == code
        mean, factor = mean_and_inverse_deviation(table.features[here & table.reference])
        centred = table.features[here] - mean
        # set rounding errors of constant features to 0: a probe that rescales them could predict the environment
        rounding = relative_rounding_error(table.features.dtype) * np.abs(mean)
        centred[:, (factor == 0) & (np.abs(centred).max(0) <= rounding)] = 0
        corrected[here] = centred * np.where(factor > 0, factor, 1) if scale else centred
        constant |= factor == 0
    if scale:
        log_constant_features(table, constant, "Only centred, in one environment or more,")
    return corrected


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
    >>> z = scbd.baselines.sphering(adata.obsm["X_scbd_c"], controls=controls, fit=seen)
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
    >>> scbd.baselines.tvn(features, np.repeat("plate 1", 240), controls=controls).shape
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
    >>> white = scbd.baselines.wccn(adata.obsm["X_scbd_c"], genes, fit=seen, controls=controls)
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
    >>> scbd.baselines.lda(adata.obsm["X_scbd_c"], genes, n_components=2, fit=np.arange(240) < 200).shape
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
    >>> z = scbd.baselines.plda(adata.obsm["X_scbd_c"], genes, controls=genes == "nontargeting")
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


def combat(features: ArrayLike, environments: ArrayLike) -> np.ndarray:
    """Apply ComBat: shift and scale each feature of each environment, with shrunk parameters.

    The parameters of each feature are shrunk towards those of the other features (empirical Bayes).

    The correction is computed by :func:`scanpy.pp.combat`, without covariates. ComBat learns from all rows: there is no
    ``fit``, and the correction cannot be applied to new rows later. If environments hold different perturbations, the
    part of the effect that is common to the perturbations of an environment is removed.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``. At least two environments are needed, with at least two cells each.

    Returns
    -------
    float32 ``(N, D)``. Features that are constant in every environment are set to their overall mean.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, there is only one environment, an environment has fewer
        than two cells, or fewer than two features vary within environments.

    References
    ----------
    Johnson, Li and Rabinovic (2007), Adjusting batch effects in microarray expression data using empirical Bayes
    methods.

    Examples
    --------
    >>> features = adata.obsm["X_scbd_c"]
    >>> scbd.baselines.combat(features, adata.obs["well"]).shape == features.shape
    True
    """
    table, codes = read_environments(features, environments)
    _, means, _ = label_means(table.features, codes)
    sd = np.sqrt(((table.features - means[codes]) ** 2).mean(0))
    varying = inverse_deviations(sd, table.features) > 0
    if varying.sum() < 2:
        msg = f"{varying.sum()} features vary within environments: ComBat learns from one feature about the others."
        raise ValueError(msg)
    log_constant_features(table, ~varying)
    corrected = np.broadcast_to(column_means(table.features), table.features.shape).astype(np.float32)
    corrected[:, varying] = _by_scanpy(table.features[:, varying].astype(np.float64), codes)
    return corrected


def _by_scanpy(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    import scanpy
    from anndata import AnnData

    obs = pd.DataFrame({"environment": pd.Categorical(codes.astype(str))}, index=np.arange(len(codes)).astype(str))
    with np.errstate(divide="ignore", invalid="ignore"):  # scanpy's convergence test divides by estimates that may be 0
        return scanpy.pp.combat(AnnData(values, obs=obs), key="environment", inplace=False)


def harmony(
    features: ArrayLike, environments: ArrayLike, *, n_components: int | None = 100, seed: int = 0
) -> np.ndarray:
    """Apply Harmony: move soft clusters of each environment towards the same clusters of the other environments.

    The correction is computed by harmonypy with its default settings. Harmony learns from all rows: there is no
    ``fit``, and the correction cannot be applied to new rows later. It does not use perturbations.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``. At least two environments are needed, with at least two cells each.
    n_components
        Number of principal components to correct, of features scaled to variance 1. There are fewer components if there
        are fewer features or cells. `None` corrects the features themselves, which suits embeddings, whose columns have
        a common unit.
    seed
        Seed of the clustering.

    Returns
    -------
    float32 ``(N, n_components)``, or ``(N, D)`` with `None`.

    Raises
    ------
    ImportError
        If harmonypy is not installed.
    ValueError
        If features are not finite numbers, shapes do not match, there is only one environment, an environment has fewer
        than two cells, or there are not more cells than columns.

    References
    ----------
    Korsunsky et al. (2019), Fast, sensitive and accurate integration of single-cell data with Harmony.

    Examples
    --------
    >>> scbd.baselines.harmony(adata.obsm["X_scbd_c"], adata.obs["well"])  # doctest: +SKIP
    """
    harmonypy = _harmonypy()
    table, codes = read_environments(features, environments)
    values = table.features
    if n_components is not None:
        check_count("n_components", n_components)
        mean, factor = reference_scaling(table)
        values = principal_components_map(mean, factor, covariance(values, mean), min(n_components, len(values) - 1))(
            values
        )
    values = values.astype(np.float64)
    if len(values) <= values.shape[1]:
        msg = f"Harmony needs more rows than columns, got {values.shape}: give n_components."
        raise ValueError(msg)
    obs = pd.DataFrame({"environment": codes.astype(str)})
    moved = harmonypy.run_harmony(values, obs, "environment", random_state=seed, verbose=False).Z_corr
    moved = moved if moved.shape == values.shape else moved.T  # harmonypy before version 2 returns the transpose
    return np.ascontiguousarray(moved, dtype=np.float32)


def _harmonypy() -> ModuleType:
    try:
        import harmonypy
    except ImportError as error:
        msg = "Harmony needs one more package: pip install harmonypy."
        raise ImportError(msg) from error
    return harmonypy


# descriptions of required arguments, for error messages
_ARGUMENT_DESCRIPTIONS = {
    "environments": "the environment of each cell",
    "labels": "the perturbation of each cell",
    "controls": "which cells are controls",
}


class Correction(NamedTuple):
    """A correction with the names of its arguments."""

    function: Callable[..., np.ndarray]
    """Function of features and these arguments."""
    needs: tuple[str, ...]
    """Required arguments."""
    takes: tuple[str, ...] = ("fit",)
    """Optional arguments, which are used if given. Corrections without ``"fit"`` learn from all cells."""


# optional arguments of corrections that use the variation within labels
_LABEL_ARGUMENTS = ("fit", "controls", "positions")
CORRECTIONS: dict[str, Correction] = {
    "centred": Correction(partial(standardize_by_environment, scale=False), ("environments", "controls")),
    "standardised": Correction(standardize_by_environment, ("environments",)),
    "standardised on controls": Correction(standardize_by_environment, ("environments", "controls")),
    "ComBat": Correction(combat, ("environments",), ()),
    "Harmony": Correction(harmony, ("environments",), ()),
    "sphering": Correction(sphering, ("controls",)),
    "TVN": Correction(tvn, ("environments", "controls")),
    "WCCN": Correction(wccn, ("labels",), _LABEL_ARGUMENTS),
    "LDA": Correction(lda, ("labels",), _LABEL_ARGUMENTS),
    "PLDA": Correction(plda, ("labels",), _LABEL_ARGUMENTS),
}


def correct(
    features: ArrayLike,
    correction: str,
    *,
    environments: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    fit: ArrayLike | None = None,
    **settings: Any,
) -> np.ndarray:
    """Correct features, or any embedding, with a correction given by name.

    ==============================  ==================================  =================================
    name                            function                            learns from
    ==============================  ==================================  =================================
    ``"centred"``                   :func:`standardize_by_environment`  controls in ``fit``, only means
    ``"standardised"``              :func:`standardize_by_environment`  all cells in ``fit``
    ``"standardised on controls"``  :func:`standardize_by_environment`  controls in ``fit``
    ``"sphering"``                  :func:`sphering`                    controls in ``fit``
    ``"TVN"``                       :func:`tvn`                         controls in ``fit``
    ``"WCCN"``                      :func:`wccn`                        perturbations of cells in ``fit``
    ``"LDA"``                       :func:`lda`                         perturbations of cells in ``fit``
    ``"PLDA"``                      :func:`plda`                        perturbations of cells in ``fit``
    ``"ComBat"``                    :func:`combat`                      all cells, by construction
    ``"Harmony"``                   :func:`harmony`                     all cells, by construction
    ==============================  ==================================  =================================

    Each correction uses the arguments that it learns from and ignores the others, so that the same call works for all
    corrections.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    correction
        Name of the correction.
    environments
        Environment of each cell, ``(N,)``.
    labels
        Perturbation of each cell, ``(N,)``.
    controls
        The controls, booleans ``(N,)`` or row numbers.
    positions
        Position of each cell on its plate, ``(N,)``.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default.
    **settings
        Further arguments of the function.

    Returns
    -------
    float32 ``(N, K)``, see the function.

    Raises
    ------
    ValueError
        If there is no correction of this name, or an argument that it needs is missing; see also the function.
    ImportError
        If the correction needs a package that is not installed.

    Examples
    --------
    >>> known = {"environments": adata.obs["well"], "controls": adata.obs["gene"] == "nontargeting"}
    >>> z = scbd.baselines.correct(adata.obsm["X_scbd_c"], "TVN", **known, fit=np.arange(240) < 200)
    >>> z.shape == adata.obsm["X_scbd_c"].shape
    True
    """
    known = {"environments": environments, "labels": labels, "controls": controls, "positions": positions, "fit": fit}
    known = {name: given for name, given in known.items() if given is not None}
    check_correction(correction, known)
    function, needs, takes = CORRECTIONS[correction]
    return function(features, **{name: known[name] for name in (*needs, *takes) if name in known}, **settings)


def check_correction(correction: str, known: Any) -> None:
    """Raise a ValueError unless there is a correction of this name and ``known`` contains all that it requires."""
    check_choice("correction", correction, CORRECTIONS.keys())
    for name in CORRECTIONS[correction].needs:
        if name not in known:
            msg = (
                f"{correction} learns from {name}, and none are given: say {_ARGUMENT_DESCRIPTIONS[name]} ({name}=...)."
            )
            raise ValueError(msg)
