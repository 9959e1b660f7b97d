"""What corrects features and embeddings in closed form, learned from the rows named in ``fit``; and two libraries."""

from __future__ import annotations

import logging
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._checks import check_choice, check_count, check_number, check_unmasked, head, inflect
from scbd._linear_maps import (
    LinearMap,
    column_means,
    covariance,
    discriminants,
    inverse_of_varying,
    label_means,
    mean_and_factor,
    principal_map,
    resolution,
    whitening,
    within_covariance,
)
from scbd.metrics._table import chosen_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

_BLOCK = 8_192


class Table(NamedTuple):
    """Features, and the rows that something is learned from."""

    features: np.ndarray
    """``(N, D)``, floating point, finite."""
    fit: np.ndarray
    """Rows that are learned from, boolean ``(N,)``."""
    controls: np.ndarray | None
    """Those among them that are controls, boolean ``(N,)``; `None` where controls play no part."""
    names: Sequence[Any]
    """Of features: columns of a DataFrame, else their numbers."""

    @property
    def reference(self) -> np.ndarray:
        """What is typical: the controls that are learned from, or all rows that are."""
        return self.fit if self.controls is None else self.controls


def read_table(features: Any, *, fit: ArrayLike | None = None, controls: ArrayLike | None = None) -> Table:
    """Check features and the choice of rows.

    Raises
    ------
    ValueError
        If features are no finite numbers ``(N, D)``, a choice of rows fits none, or fewer than two rows are left.
    """
    values, names = _numbers(features)
    chosen = learned_from("fit", fit, len(values))
    if controls is None:
        return Table(values, _at_least_two(chosen, "fit"), None, names)
    both = learned_from("controls", controls, len(values)) & chosen
    return Table(values, chosen, _at_least_two(both, "controls" if fit is None else "controls in fit"), names)


def learned_from(name: str, chosen: ArrayLike | None, n: int) -> np.ndarray:
    """A mask ``(N,)`` of rows, see :func:`chosen_rows`; a ValueError where there are none."""
    # an empty list is no mask, and has no whole numbers
    mask = chosen_rows(name, chosen, n) if chosen is None or np.size(chosen) else np.zeros(n, dtype=bool)
    if not mask.any():
        msg = f"{name} names none of {n} rows: nothing can be learned from no row."
        raise ValueError(msg)
    return mask


def as_codes(name: str, labels: ArrayLike, needed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of each row's label ``(N,)``, and the labels; rows that are not ``needed`` may lack one (-1).

    Raises
    ------
    ValueError
        If there is not one label a row, or a needed row lacks its label.
    """
    check_unmasked(name, labels)
    values = np.asarray(labels, dtype=object if isinstance(labels, list | tuple) else None)  # else nan becomes "nan"
    if values.shape != needed.shape:
        msg = f"{name} must have one value for each of {len(needed)} rows of the features, got shape {values.shape}."
        raise ValueError(msg)
    codes, names = pd.factorize(values)
    missing = np.flatnonzero((codes < 0) & needed)
    if missing.size:
        msg = f"{name} has no value for {missing.size} rows ({head(missing)}): leave them out, or out of fit."
        raise ValueError(msg)
    return codes, names


def environment_codes(environments: ArrayLike, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Number of each row's environment ``(N,)``, and their names; each has rows that it can be learned from.

    Raises
    ------
    ValueError
        If there is not one environment a row, or an environment has fewer than two rows to learn from.
    """
    codes, names = as_codes("environments", environments, np.ones(len(table.fit), dtype=bool))
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


def read_environments(features: ArrayLike, environments: ArrayLike) -> tuple[Table, np.ndarray]:
    """Features, and the number of each row's environment, for what moves environments onto each other.

    Raises
    ------
    ValueError
        As :func:`read_table` and :func:`environment_codes`; or if there is one environment.
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


def _numbers(features: Any) -> tuple[np.ndarray, Sequence[Any]]:
    if hasattr(features, "toarray"):
        msg = "features are a sparse matrix: give them dense, as features.toarray()."
        raise ValueError(msg)
    check_unmasked("An array of features", features)
    values = np.asarray(features)
    if values.dtype == object:  # numbers in a table beside other columns
        values = _unboxed(values)
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


def _unboxed(values: np.ndarray) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return values


def _check_finite(values: np.ndarray, names: Any) -> None:
    """Name the rows and features that have values missing or infinite."""
    rows = np.zeros(len(values), dtype=bool)
    columns = np.zeros(values.shape[1], dtype=bool)
    for start in range(0, len(values), _BLOCK):
        wrong = ~np.isfinite(values[start : start + _BLOCK])
        rows[start : start + _BLOCK] = wrong.any(1)
        columns |= wrong.any(0)
    if rows.any():
        which = head(names[column] for column in np.flatnonzero(columns))
        msg = (
            f"features are missing or infinite in {rows.sum()} of {len(rows)} rows (rows {head(np.flatnonzero(rows))}) "
            f"and {columns.sum()} of {len(columns)} features ({which}): drop these, or fill them in before."
        )
        raise ValueError(msg)


def scaling_of(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Mean and factor of features by the rows that are typical, see :func:`mean_and_factor`; the log names those of 0.

    Returns
    -------
    ``(D,)`` each, float64.
    """
    mean, factor = mean_and_factor(table.features[table.reference])
    tell_constant(table, factor == 0)
    return mean, factor


def tell_constant(table: Table, constant: np.ndarray, done: str = "Left out") -> None:
    """Log which features, boolean ``(D,)``, count as constant among rows that are typical, and what was done."""
    if constant.any():
        rows = "rows" if table.controls is None else "controls"
        said = "%s %d of %d features that are constant among %s, or vary by rounding alone (%s)."
        logger.info(said, done, constant.sum(), len(constant), rows, head(compress(table.names, constant)))


def standardize_by_environment(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike | None = None,
    fit: ArrayLike | None = None,
    scale: bool = True,
) -> np.ndarray:
    """Give every environment mean 0 and variance 1, feature by feature.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Which cells mean and variance are taken from, booleans ``(N,)`` or row numbers; all by default. With controls,
        an environment that holds other perturbations keeps what those do.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default. Every environment needs
        two of them at least: a test plate takes part with its controls.
    scale
        Also divide by the standard deviation; `False` centres only. A feature that is constant in an environment, or
        varies by what its dtype cannot tell from its size, is centred only, which the log tells.

    Returns
    -------
    float32 ``(N, D)``.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, or an environment has fewer than two rows to learn from.

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
        mean, factor = mean_and_factor(table.features[here & table.reference])
        centred = table.features[here] - mean
        # of what is constant here, rounding is left: a probe that scales it would read the environment from it
        rounding = resolution(table.features.dtype) * np.abs(mean)
        centred[:, (factor == 0) & (np.abs(centred).max(0) <= rounding)] = 0
        corrected[here] = centred * np.where(factor > 0, factor, 1) if scale else centred
        constant |= factor == 0
    if scale:
        tell_constant(table, constant, "Only centred, in one environment or more,")
    return corrected


def sphering(
    features: ArrayLike, *, controls: ArrayLike, fit: ArrayLike | None = None, regularization: float = 1.0
) -> np.ndarray:
    r"""Whiten by the covariance of controls: what varies among them is no phenotype.

    Features are scaled to the controls' standard deviation. With :math:`V \Lambda V^T` the covariance of the scaled
    controls, the result is :math:`(x - \bar x) V (\Lambda + \lambda I)^{-1/2}`.

    Controls that this was fitted on lie close together: they are no negatives for a score of replicates. Keep some out
    of ``fit`` to score with.

    Parameters
    ----------
    features
        ``(N, D)``.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default. Only the controls among
        them matter.
    regularization
        :math:`\lambda`, in units of a feature's variance among controls: how far their covariance is trusted. With
        fewer controls than features it has to be large: on 904 features of wells and 160 controls, 30 was best.

    Returns
    -------
    float32 ``(N, D)``, the direction in which controls vary most first. A feature that is constant among controls, or
    varies by what its dtype cannot tell from its size, counts as 0, which the log tells.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, fewer than two controls are in ``fit``, or controls do
        not vary in all directions and the regularization is 0.

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
    mean, factor = scaling_of(table)
    return white_map(mean, factor, covariance(table.features[table.reference]), regularization)(table.features)


def white_map(mean: np.ndarray, factor: np.ndarray, spread: np.ndarray, regularization: float) -> LinearMap:
    """From features to where a covariance of theirs, once they are scaled by ``factor``, is white; ``mean`` becomes 0.

    Raises
    ------
    ValueError
        If no feature varies, the regularization is negative, or it is 0 and the covariance has no inverse.
    """
    check_number("regularization", regularization)
    varying = np.flatnonzero(factor)
    scaled = spread[np.ix_(varying, varying)] * np.outer(factor[varying], factor[varying])
    if not varying.size:
        msg = "features are constant in all rows that they would be scaled by: nothing can be learned from these."
        raise ValueError(msg)
    matrix = np.zeros_like(spread)
    matrix[varying, : len(varying)] = factor[varying, None] * whitening(scaled, regularization)
    return LinearMap(matrix, -mean @ matrix)


def tvn(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike,
    fit: ArrayLike | None = None,
    regularization: float = 0.5,
) -> np.ndarray:
    r"""Typical variation normalisation: make controls white, and alike in all environments.

    Each environment is centred on its own controls. Features are then rotated and scaled such that all controls
    together have unit covariance: what varies among controls is no phenotype, and directions in which they vary little
    count as much as the others. There, the covariance :math:`C_e` of each environment's controls is aligned with that
    of the others by :math:`(C_e + \lambda I)^{-1/2} P` (correlation alignment), with the :math:`P` that leaves all
    controls together white.

    Covariances are shrunk as if as many controls more had been seen as there are features, whose features know nothing
    of each other: many controls are white in the end, few in the directions that they tell of. The units of features do
    not matter.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default. Only the controls among
        them matter. Every environment needs two of them at least: a test plate takes part with its controls.
    regularization
        :math:`\lambda`, in units of the white controls' variance: how far covariances of single environments are
        trusted. With many times more controls in each than there are features, 0.1 leaves more of the perturbations.

    Returns
    -------
    float32 ``(N, D)``; a column less for each feature that is constant among the controls of every environment, which
    the log tells.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, an environment has fewer than two controls, no feature
        varies among them, or the regularization is not above 0.

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
    typical = _typical(table, codes)
    n_columns = typical.white.shape[1]
    corrected = np.empty((len(codes), n_columns), dtype=np.float32)
    total = np.zeros((n_columns, n_columns))
    for code in range(len(names)):
        spread = typical.spread_of(code)
        variances, axes = np.linalg.eigh(spread)
        matrix = typical.white @ (axes / np.sqrt(variances + regularization)) @ axes.T
        here = codes == code
        corrected[here] = LinearMap(matrix, -typical.means[code] @ matrix)(table.features[here])
        total += typical.share_of(code) * (axes * (variances / (variances + regularization))) @ axes.T
    variances, axes = np.linalg.eigh(total)
    return LinearMap((axes / np.sqrt(variances)) @ axes.T, np.zeros(n_columns))(corrected)


class _Typical(NamedTuple):
    """How controls vary around the mean of their environment."""

    means: np.ndarray
    """Of each environment's controls, ``(E, D)``."""
    white: np.ndarray
    """From features to where controls of all environments are white, ``(D, K)``."""
    controls: np.ndarray
    """There, the controls, around the means of their environments."""
    codes: np.ndarray
    """The environments of those."""
    shrinkage: float
    """Of covariances, towards that of scaled features which know nothing of each other."""
    unrelated: np.ndarray
    """The variances of such features there, ``(K,)``."""

    def spread_of(self, code: int) -> np.ndarray:
        """Covariance of an environment's controls, shrunk; over environments, the identity on average."""
        own = self.controls[self.codes == code]
        return (1 - self.shrinkage) * own.T @ own / (len(own) - 1) + np.diag(self.shrinkage * self.unrelated)

    def share_of(self, code: int) -> float:
        """Of all that is known of covariances, what an environment knows; they add up to 1."""
        return ((self.codes == code).sum() - 1) / (len(self.codes) - len(self.means))


def _typical(table: Table, codes: np.ndarray) -> _Typical:
    controls, codes = table.features[table.reference], codes[table.reference]
    _, means, _ = label_means(controls, codes)
    centred = controls - means[codes]
    freedom = len(centred) - len(means)
    factor = inverse_of_varying(np.sqrt((centred**2).sum(0) / freedom), controls)
    varying = np.flatnonzero(factor)
    if not varying.size:
        msg = "No feature varies among the controls of an environment: there is no typical variation to learn from."
        raise ValueError(msg)
    tell_constant(table, factor == 0)
    centred = centred[:, varying] * factor[varying]
    shrinkage = len(varying) / (len(varying) + freedom)
    pooled = centred.T @ centred / freedom
    white = whitening((1 - shrinkage) * pooled + shrinkage * np.eye(len(varying)), 0)
    matrix = np.zeros((len(factor), len(varying)))
    matrix[varying] = factor[varying, None] * white
    return _Typical(means, matrix, centred @ white, codes, shrinkage, (white**2).sum(0))


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
    r"""Within-class covariance normalisation: whiten by how cells of one perturbation differ.

    Features are scaled to the standard deviation of the controls, or of all rows in ``fit`` where none are given. With
    :math:`S` the covariance of rows around the mean of their label, the result is :math:`(x - \bar x) V (\Lambda +
    \lambda I)^{-1/2}`, where :math:`S = V \Lambda V^T` and :math:`\bar x` is the mean of the controls, or of all in
    ``fit``. Given positions, :math:`S` has :math:`w` times the covariance of the controls' means by position added:
    where replicates share a well, position looks like perturbation, and only controls can tell.

    Parameters
    ----------
    features
        ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, controls included. Cells that are not in ``fit`` may have none.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers; those in ``fit`` are used.
    positions
        Position of each cell on its plate (its well), ``(N,)``; only those of controls matter.
    position_weight
        :math:`w`; 0 is without positions.
    regularization
        :math:`\lambda`, in units of a scaled feature's variance.

    Returns
    -------
    float32 ``(N, D)``, the direction in which replicates vary most first. A feature that is constant in the rows that
    it is scaled by, or varies by what its dtype cannot tell from its size, counts as 0, which the log tells.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, every label has one row, positions come without
        controls or controls have one position, a weight is negative, or the regularization is 0 where replicates do not
        vary in all directions.

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
    where = Positions(positions, position_weight)
    return within_map(table, labels, where, regularization).white(table.features)


class Positions(NamedTuple):
    """Where cells lie on their plates, and how much that is taken for noise."""

    values: ArrayLike | None
    weight: float


class Within(NamedTuple):
    """Where replicates are white, and the labels' means there."""

    white: LinearMap
    means: np.ndarray
    """``(L, D)``, float64, without offset."""
    counts: np.ndarray
    """How many rows each has, ``(L,)``."""


def within_map(table: Table, labels: ArrayLike, positions: Positions, regularization: float) -> Within:
    """Learn where rows of a label vary alike in all directions."""
    codes, names = as_codes("labels", labels, table.fit)
    learned, codes = table.features[table.fit], codes[table.fit]
    _, means, counts = label_means(learned, codes)
    if counts.max() < 2:
        msg = f"Each of {len(counts)} labels has one row to learn from: how rows of a label differ is not known."
        raise ValueError(msg)
    spread = within_covariance(learned, codes) + _of_positions(table, positions)
    mean, factor = scaling_of(table)
    white = white_map(mean, factor, spread, regularization)
    return Within(white, means @ white.matrix, counts)


def _of_positions(table: Table, positions: Positions) -> np.ndarray | float:
    """Covariance of the controls' means by position, weighted; 0 without positions."""
    check_number("position_weight", positions.weight)
    if positions.values is None:
        return 0.0
    if table.controls is None:
        msg = "positions tell something where the perturbation is the same: say which rows are controls (controls=...)."
        raise ValueError(msg)
    codes, _ = as_codes("positions", positions.values, table.controls)
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
    r"""Linear discriminants: the directions in which labels differ most, where rows of a label are white.

    After :func:`wccn`, the principal axes of the labels' means; every label counts alike, however many rows it has.
    ``regularization`` makes of it the shrinkage form: another way to write :math:`(1 - s) S + s \bar v I`, with
    :math:`\lambda = s \bar v / (1 - s)` and :math:`\bar v` the mean variance of scaled features within labels.

    Parameters
    ----------
    features
        ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, controls included. Cells that are not in ``fit`` may have none.
    n_components
        How many directions, at most: one less than there are labels in ``fit``.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers: features are scaled to those in ``fit``, and their
        mean is the origin. All in ``fit`` where none are given.
    positions, position_weight
        Position of each cell on its plate, and how much of the covariance of the controls' means by position counts as
        variation within labels; see :func:`wccn`.
    regularization
        :math:`\lambda`, added to all variances within labels, in units of a scaled feature's variance.

    Returns
    -------
    float32 ``(N, K)``, the direction in which labels differ most first.

    Raises
    ------
    ValueError
        As :func:`wccn`; or if ``fit`` has one label.

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
    within = within_map(table, labels, Positions(positions, position_weight), regularization)
    between = _between(within)
    axes = discriminants(between, n_components=min(n_components, len(within.means) - 1, len(between)))
    return _along(table, within, axes)


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
    r"""Probabilistic linear discriminants: each direction counts by how much of it belongs to the label.

    After :func:`wccn`, where the variance within labels is about 1, each principal axis of the labels' means is scaled
    by :math:`b / (b + 1 / n)`, with :math:`b` its variance between labels: what is to be expected of the label, given a
    profile, the mean of as many rows as a label has in the middle (n). Shrinkage of :math:`b` towards its mean keeps
    directions that only labels outside of ``fit`` may use.

    Parameters
    ----------
    features
        ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, controls included. Cells that are not in ``fit`` may have none.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    controls
        Which cells are controls, booleans ``(N,)`` or row numbers: features are scaled to those in ``fit``, and their
        mean is the origin. All in ``fit`` where none are given.
    positions, position_weight
        Position of each cell on its plate, and how much of the covariance of the controls' means by position counts as
        variation within labels; see :func:`wccn`.
    regularization
        Added to all variances within labels, in units of a scaled feature's variance.
    shrinkage
        Of variances between labels towards their mean, from 0 to 1.

    Returns
    -------
    float32 ``(N, D)``, the direction in which labels differ most first.

    Raises
    ------
    ValueError
        As :func:`wccn`; or if ``fit`` has one label, or the shrinkage is not from 0 to 1.

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
    within = within_map(table, labels, Positions(positions, position_weight), regularization)
    rows = float(np.median(within.counts))
    return _along(table, within, discriminants(_between(within), shrinkage=shrinkage, rows=rows))


def _between(within: Within) -> np.ndarray:
    if len(within.means) < 2:
        msg = "There is one label to learn from: in what labels differ is not known."
        raise ValueError(msg)
    return covariance(within.means)


def _along(table: Table, within: Within, axes: np.ndarray) -> np.ndarray:
    return within.white.then(LinearMap(axes, np.zeros(axes.shape[1])))(table.features)


def combat(features: ArrayLike, environments: ArrayLike) -> np.ndarray:
    """ComBat: shift and scale each feature of each environment, shrunk towards those of the other features.

    Computed by :func:`scanpy.pp.combat`, without covariates. It sees all rows by construction: there is no ``fit``, and
    nothing that it could be applied to later. Perturbations that are only in some environments lose what these share.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``; at least two, of two cells or more.

    Returns
    -------
    float32 ``(N, D)``. A feature that is constant in every environment is constant.

    Raises
    ------
    ValueError
        If features are no finite numbers, shapes do not match, there is one environment or one of fewer than two cells,
        or fewer than two features vary within environments.

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
    varying = inverse_of_varying(sd, table.features) > 0
    if varying.sum() < 2:
        msg = f"{varying.sum()} features vary within environments: ComBat learns from one feature about the others."
        raise ValueError(msg)
    tell_constant(table, ~varying)
    corrected = np.broadcast_to(column_means(table.features), table.features.shape).astype(np.float32)
    corrected[:, varying] = _by_scanpy(table.features[:, varying].astype(np.float64), codes)
    return corrected


def _by_scanpy(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    import scanpy
    from anndata import AnnData

    obs = pd.DataFrame({"environment": pd.Categorical(codes.astype(str))}, index=np.arange(len(codes)).astype(str))
    with np.errstate(divide="ignore", invalid="ignore"):  # it measures change relative to what may be 0
        return scanpy.pp.combat(AnnData(values, obs=obs), key="environment", inplace=False)


def harmony(
    features: ArrayLike, environments: ArrayLike, *, n_components: int | None = 100, seed: int = 0
) -> np.ndarray:
    """Harmony: move soft clusters of each environment onto those of the others.

    Computed by harmonypy at its defaults. It sees all rows by construction: there is no ``fit``, and nothing that it
    could be applied to later; perturbations play no part.

    Parameters
    ----------
    features
        ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``; at least two, of two cells or more.
    n_components
        Principal components of the features, scaled to variance 1, that it moves; fewer where there are fewer features
        or cells. `None` takes the features as they are: for an embedding, whose columns have a common unit.
    seed
        Seed of the clusters.

    Returns
    -------
    float32 ``(N, n_components)``, or ``(N, D)`` with `None`.

    Raises
    ------
    ImportError
        If harmonypy is not installed.
    ValueError
        If features are no finite numbers, shapes do not match, there is one environment or one of fewer than two cells,
        or there are not more cells than columns.

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
        mean, factor = scaling_of(table)
        values = principal_map(mean, factor, covariance(values, mean), min(n_components, len(values) - 1))(values)
    values = values.astype(np.float64)
    if len(values) <= values.shape[1]:
        msg = f"Harmony needs more rows than columns, got {values.shape}: give n_components."
        raise ValueError(msg)
    obs = pd.DataFrame({"environment": codes.astype(str)})
    moved = harmonypy.run_harmony(values, obs, "environment", random_state=seed, verbose=False).Z_corr
    moved = moved if moved.shape == values.shape else moved.T  # before its version 2
    return np.ascontiguousarray(moved, dtype=np.float32)


def _harmonypy() -> ModuleType:
    try:
        import harmonypy
    except ImportError as error:
        msg = "Harmony needs one more package: pip install harmonypy."
        raise ImportError(msg) from error
    return harmonypy


_MEANT = {
    "environments": "the environment of each cell",
    "labels": "the perturbation of each cell",
    "controls": "which cells are controls",
}


class Correction(NamedTuple):
    """A function of features, and what it is told of cells."""

    function: Callable[..., np.ndarray]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ("fit",)
    """Beside what it needs, where it is known. Without ``fit``, all cells are learned from."""


_WITHIN = ("fit", "controls", "positions")
CORRECTIONS: dict[str, Correction] = {
    "centred": Correction(partial(standardize_by_environment, scale=False), ("environments", "controls")),
    "standardised": Correction(standardize_by_environment, ("environments",)),
    "standardised on controls": Correction(standardize_by_environment, ("environments", "controls")),
    "ComBat": Correction(combat, ("environments",), ()),
    "Harmony": Correction(harmony, ("environments",), ()),
    "sphering": Correction(sphering, ("controls",)),
    "TVN": Correction(tvn, ("environments", "controls")),
    "WCCN": Correction(wccn, ("labels",), _WITHIN),
    "LDA": Correction(lda, ("labels",), _WITHIN),
    "PLDA": Correction(plda, ("labels",), _WITHIN),
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
    """Correct features, or an embedding of any origin, by the name of a correction.

    ==============================  ==================================  ================================
    name                            function                            learns from
    ==============================  ==================================  ================================
    ``"centred"``                   :func:`standardize_by_environment`  controls in ``fit``; means alone
    ``"standardised"``              :func:`standardize_by_environment`  all cells in ``fit``
    ``"standardised on controls"``  :func:`standardize_by_environment`  controls in ``fit``
    ``"sphering"``                  :func:`sphering`                    controls in ``fit``
    ``"TVN"``                       :func:`tvn`                         controls in ``fit``
    ``"WCCN"``                      :func:`wccn`                        labels of cells in ``fit``
    ``"LDA"``                       :func:`lda`                         labels of cells in ``fit``
    ``"PLDA"``                      :func:`plda`                        labels of cells in ``fit``
    ``"ComBat"``                    :func:`combat`                      all cells, by construction
    ``"Harmony"``                   :func:`harmony`                     all cells, by construction
    ==============================  ==================================  ================================

    Each takes what it learns from of the following, and leaves the rest: the same call serves them all.

    Parameters
    ----------
    features
        ``(N, D)``.
    correction
        Name.
    environments, labels, controls, positions
        Of each cell its environment, its perturbation, whether it is a control, and its position on the plate, each
        ``(N,)``.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    **settings
        Further arguments of the function.

    Returns
    -------
    float32 ``(N, K)``, see the function.

    Raises
    ------
    ValueError
        If the name is not known, something that the correction learns from is not given, or see the function.
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
    """Raise a ValueError unless there is a correction of this name, and what it needs is among what is known."""
    check_choice("correction", correction, CORRECTIONS.keys())
    for name in CORRECTIONS[correction].needs:
        if name not in known:
            msg = f"{correction} learns from {name}, and none are given: say {_MEANT[name]} ({name}=...)."
            raise ValueError(msg)
