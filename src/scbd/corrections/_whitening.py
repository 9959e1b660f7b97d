"""Linear corrections that whiten features: sphering, TVN, WCCN, LDA and PLDA.

Sphering and TVN whiten the variation among controls. WCCN, LDA and PLDA whiten the variation among cells of the same
perturbation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._shared.checks import check_count, check_number
from scbd._shared.linear_maps import (
    LinearMap,
    fit_discriminant_axes,
    fit_whitening_matrix,
    inverse_deviations,
    label_means,
    whitening_matrix,
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

    Features are first scaled by the standard deviation of the controls. With :math:`\bar x` the mean and
    :math:`V \Lambda V^T` the covariance of the scaled controls, the result is
    :math:`(x - \bar x) V (\Lambda + \lambda I)^{-1/2}`.

    After the transform, the controls to which it was fitted lie close together. They are therefore not valid negatives
    in a score that compares replicates with controls. Exclude some controls from ``fit``, and use the excluded controls
    as negatives.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    controls
        Boolean mask ``(N,)`` or row numbers of the controls.
    fit
        Cells from which the correction is estimated, as a boolean mask ``(N,)`` or row numbers. Default: all cells.
        Only the controls among these cells are used.
    regularization
        Constant :math:`\lambda` that is added to all variances, in units of a feature's variance among controls. The
        less reliable the covariance of the controls is, the larger the constant should be, especially with fewer
        controls than features: for 904 features of wells and 160 controls, 30 was best.

    Returns
    -------
    Whitened features, float32 ``(N, D)``. The first column is the direction in which controls vary most. Features that
    are constant among controls, or vary only by the rounding of their dtype, have no influence; a log message names
    these features.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, fewer than two controls are in ``fit``, or
        ``regularization`` is 0 although the controls do not vary in all directions.

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
    return _fit_whitening_map(table, None, None, 0.0, regularization)(table.features)


def tvn(
    features: ArrayLike,
    environments: ArrayLike,
    *,
    controls: ArrayLike,
    fit: ArrayLike | None = None,
    regularization: float = 0.5,
) -> np.ndarray:
    r"""Apply typical variation normalisation (TVN): whiten controls, and align their covariances between environments.

    1. The cells of each environment are centred on the mean of the environment's own controls.
    2. Features are rotated and scaled such that all controls together have unit covariance. Variation among controls is
       not due to perturbations. After this step, directions in which controls vary little have the same weight as all
       other directions.
    3. The covariance :math:`C_e` of each environment's controls is aligned with those of the other environments by the
       transform :math:`(C_e + \lambda I)^{-1/2} P` (correlation alignment). The matrix :math:`P` is chosen such that
       all controls together remain white.

    Covariances are shrunk, as if D more controls with uncorrelated features had been observed, where D is the number of
    features. With many controls, the controls are therefore white in all directions of the result. With few controls,
    they are white only in the directions in which these controls vary. The result does not depend on the units of the
    features.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    environments
        Environment of each cell, ``(N,)``.
    controls
        Boolean mask ``(N,)`` or row numbers of the controls.
    fit
        Cells from which the correction is estimated, as a boolean mask ``(N,)`` or row numbers. Default: all cells.
        Only the controls among these cells are used. Each environment needs at least two of these controls. To correct
        a test plate, include its controls.
    regularization
        Constant :math:`\lambda`, in units of the variance of whitened controls. The less reliable the covariances of
        single environments are, the larger the constant should be. With many times more controls per environment than
        features, 0.1 preserves more of the perturbation effects than the default.

    Returns
    -------
    Corrected features, float32 ``(N, D)``, with one column fewer for each feature that is constant among the controls
    of every environment; a log message names these features.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, an environment has fewer than two controls, no feature
        varies among the controls within environments, or ``regularization`` is not above 0.

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
    controls_codes, controls_features = codes[table.reference], table.features[table.reference]
    _, means, _ = label_means(controls_features, controls_codes)
    centred = controls_features - means[controls_codes]
    freedom = len(centred) - len(means)
    factor = inverse_deviations(np.sqrt((centred**2).sum(0) / freedom), controls_features)
    varying = np.flatnonzero(factor)
    if not varying.size:
        msg = "No feature varies among the controls of an environment: there is no typical variation to learn from."
        raise ValueError(msg)
    log_constant_features(table, factor == 0)

    # map of the features to a whitened space, in which all controls together have unit covariance
    centred = centred[:, varying] * factor[varying]
    shrinkage = len(varying) / (len(varying) + freedom)
    pooled = centred.T @ centred / freedom
    whitening = whitening_matrix((1 - shrinkage) * pooled + shrinkage * np.eye(len(varying)), 0)
    white = np.zeros((len(factor), len(varying)))
    white[varying] = factor[varying, None] * whitening
    centred = centred @ whitening
    # covariance, in the whitened space, of uncorrelated features with variance 1 before whitening
    uncorrelated = np.diag(shrinkage * (whitening**2).sum(0))

    corrected = np.empty((len(codes), len(varying)), dtype=np.float32)
    total = np.zeros((len(varying), len(varying)))
    for code in range(len(names)):
        # the mean of the environments' shrunk covariances, weighted by degrees of freedom, is the identity matrix
        own = centred[controls_codes == code]
        spread = (1 - shrinkage) * own.T @ own / (len(own) - 1) + uncorrelated
        variances, axes = np.linalg.eigh(spread)
        matrix = white @ (axes / np.sqrt(variances + regularization)) @ axes.T
        here = codes == code
        corrected[here] = LinearMap(matrix, -means[code] @ matrix)(table.features[here])
        weight = (len(own) - 1) / freedom
        total += weight * (axes * (variances / (variances + regularization))) @ axes.T
    variances, axes = np.linalg.eigh(total)
    return LinearMap((axes / np.sqrt(variances)) @ axes.T, np.zeros(len(varying)))(corrected)


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
    r"""Apply within-class covariance normalisation (WCCN): whiten the variation among cells of the same perturbation.

    Features are first scaled by the standard deviation of the controls, or of all cells in ``fit`` if no controls are
    given. With :math:`S = V \Lambda V^T` the covariance of scaled cells around the mean of their perturbation, the
    result is

    .. math:: (x - \bar x) V (\Lambda + \lambda I)^{-1/2}

    where :math:`\bar x` is the mean of the controls, or of all cells in ``fit`` if no controls are given.

    If positions are given, variation between well positions is whitened as well: the features of controls are averaged
    per position, and :math:`w` times the covariance of these averages is added to :math:`S`. Controls are used
    because the effects of position and perturbation cannot be distinguished in other cells, if all replicates of a
    perturbation lie in the same position.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, including controls. Labels of cells outside of ``fit`` may be missing.
    fit
        Cells from which the correction is estimated, as a boolean mask ``(N,)`` or row numbers. Default: all cells.
    controls
        Boolean mask ``(N,)`` or row numbers of the controls. Only controls in ``fit`` are used.
    positions
        Position of each cell's well on the plate, such as ``"A01"``, ``(N,)``. Only the positions of controls are used.
    position_weight
        Weight :math:`w` of the variation between positions. With 0, positions are ignored.
    regularization
        Constant :math:`\lambda` that is added to all variances, in units of the variance of a scaled feature.

    Returns
    -------
    Whitened features, float32 ``(N, D)``. The first column is the direction in which cells of a perturbation vary most.
    Features that are constant among the controls (without controls: among the cells in ``fit``), or vary only by the
    rounding of their dtype, have no influence; a log message names these features.

    Raises
    ------
    ValueError
        If features are not finite numbers, shapes do not match, every perturbation has a single cell, positions are
        given without controls, all controls have the same position, ``position_weight`` or ``regularization`` is
        negative, or ``regularization`` is 0 although cells of a perturbation do not vary in all directions.

    References
    ----------
    Hatch, Kajarekar and Stolcke (2006), Within-class covariance normalization for SVM-based speaker recognition.

    Examples
    --------
    >>> genes, seen = adata.obs["gene"].to_numpy(), np.arange(240) < 200
    >>> controls = genes == "nontargeting"
    >>> white = scbd.corrections.wccn(adata.obsm["X_scbd_c"], genes, fit=seen, controls=controls)
    >>> float(abs(white[seen & controls].mean()).round(3))  # the mean of the controls is the origin
    0.0
    """
    table = read_table(features, fit=fit, controls=controls)
    codes = _replicated_label_codes(table, labels)
    return _fit_whitening_map(table, codes, positions, position_weight, regularization)(table.features)


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

    The discriminants are the principal axes of the perturbations' means after :func:`wccn`. Each perturbation has the
    same weight, whatever its number of cells.

    The addition of the constant :math:`\lambda` (``regularization``) to the variances within perturbations is
    equivalent to shrinking the covariance :math:`S` within perturbations, with a weight :math:`s`, to

    .. math:: (1 - s) S + s \bar v I, \qquad \lambda = s \bar v / (1 - s)

    with :math:`\bar v` the mean variance of scaled features within perturbations.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, including controls. Labels of cells outside of ``fit`` may be missing.
    n_components
        Maximum number of directions. There are at most as many directions as perturbations in ``fit``, minus one.
    fit
        Cells from which the directions are estimated, as a boolean mask ``(N,)`` or row numbers. Default: all cells.
    controls
        Boolean mask ``(N,)`` or row numbers of the controls. Features are scaled by the standard deviation of the
        controls in ``fit``, and the mean of these controls becomes the origin. Without controls, all cells in ``fit``
        are used instead.
    positions, position_weight
        Position of each cell's well on the plate, and the weight with which the variation of controls between positions
        is added to the variation within perturbations; see :func:`wccn`.
    regularization
        Constant :math:`\lambda` that is added to all variances within perturbations, in units of the variance of a
        scaled feature.

    Returns
    -------
    Coordinates of the cells along K directions, float32 ``(N, K)``. The first column is the direction in which
    perturbations differ most.

    Raises
    ------
    ValueError
        If ``fit`` contains cells of only one perturbation; see also :func:`wccn`.

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
    codes = _replicated_label_codes(table, labels)
    white = _fit_whitening_map(table, codes, positions, position_weight, regularization)
    return _project_on_discriminants(table, codes, white, weighted=False, n_components=n_components)


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
    """Compute probabilistic linear discriminants (PLDA): axes scaled by how reliably they reflect the perturbation.

    After :func:`wccn`, the variance within perturbations is about 1 in all directions. Each principal axis of the
    perturbations' means is then scaled by :math:`b / (b + 1 / n)`, with :math:`b` the variance of the perturbations'
    means along the axis and :math:`n` the median number of cells per perturbation. For profiles that are means of
    :math:`n` cells, :math:`b / (b + 1 / n)` is the expected proportion of the variance along the axis that is due to
    the perturbation.

    The variances :math:`b` are shrunk towards their mean over axes. Shrinkage preserves directions in which
    perturbations in ``fit`` do not differ, but other perturbations may.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    labels
        Perturbation of each cell, ``(N,)``, including controls. Labels of cells outside of ``fit`` may be missing.
    fit
        Cells from which the axes are estimated, as a boolean mask ``(N,)`` or row numbers. Default: all cells.
    controls
        Boolean mask ``(N,)`` or row numbers of the controls. Features are scaled by the standard deviation of the
        controls in ``fit``, and the mean of these controls becomes the origin. Without controls, all cells in ``fit``
        are used instead.
    positions, position_weight
        Position of each cell's well on the plate, and the weight with which the variation of controls between positions
        is added to the variation within perturbations; see :func:`wccn`.
    regularization
        Constant that is added to all variances within perturbations, in units of the variance of a scaled feature.
    shrinkage
        Weight, from 0 to 1, with which the variances :math:`b` between perturbations are shrunk towards their mean over
        axes.

    Returns
    -------
    Scaled coordinates of the cells along the D axes, float32 ``(N, D)``. The first column is the axis along which
    perturbations differ most.

    Raises
    ------
    ValueError
        If ``fit`` contains cells of only one perturbation, or ``shrinkage`` is not between 0 and 1; see also
        :func:`wccn`.

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
    codes = _replicated_label_codes(table, labels)
    white = _fit_whitening_map(table, codes, positions, position_weight, regularization)
    return _project_on_discriminants(table, codes, white, weighted=True, shrinkage=shrinkage)


def _replicated_label_codes(table: FitTable, labels: ArrayLike) -> np.ndarray:
    """Return the label codes ``(n_fit,)`` of the rows in ``table.fit``, from which a correction is estimated.

    Raise a ``ValueError`` if every label has a single row, because the variation within labels is then unknown.
    """
    codes = encode_row_labels("labels", labels, table.fit)[0][table.fit]
    n_labels = len(np.unique(codes))
    if n_labels == len(codes):
        msg = f"Each of {n_labels} labels has one row to learn from: how rows of a label differ is not known."
        raise ValueError(msg)
    return codes


def _fit_whitening_map(
    table: FitTable, codes: np.ndarray | None, positions: ArrayLike | None, weight: float, regularization: float
) -> LinearMap:
    """Return the linear map that scales features by their standard deviation, and then whitens the scaled features.

    Mean and standard deviation are those of the rows in ``table.reference``; the mean is mapped to 0. ``codes`` holds
    the label codes ``(n_fit,)`` of the rows in ``table.fit``, or is `None`. :func:`fit_whitening_matrix` describes the
    covariance that is whitened in both cases. ``positions`` holds the well position of every row, ``(N,)``, and
    ``weight`` is the weight of the variation between positions.
    """
    check_number("position_weight", weight)
    check_number("regularization", regularization)
    # without labels (sphering), the covariance is estimated from the controls alone
    rows = table.reference if codes is None else table.fit
    controls = None if table.controls is None else table.controls[rows]
    places = None
    if positions is not None:
        if table.controls is None:
            msg = "positions need controls: choose the rows that are controls with controls=…."
            raise ValueError(msg)
        places = encode_row_labels("positions", positions, table.controls)[0][rows]
        if np.ptp(places[controls]) == 0:
            msg = (
                "All controls have the same position, so that effects of positions cannot be estimated: drop positions."
            )
            raise ValueError(msg)
    mean, factor = reference_scaling(table)
    if not factor.any():
        msg = "all features are constant in the rows of the fit: use other rows, or drop these features."
        raise ValueError(msg)
    learned = table.features[rows]
    matrix = fit_whitening_matrix(learned, codes, controls, places, weight, regularization, factor)
    return LinearMap(matrix, -mean @ matrix)


def _project_on_discriminants(table: FitTable, codes: np.ndarray, white: LinearMap, **settings: Any) -> np.ndarray:
    """Whiten the features by the map ``white``, and project them on the discriminant axes of labels.

    The axes are estimated from the rows in ``table.fit`` and their label codes ``codes`` ``(n_fit,)``. ``settings`` are
    further arguments of :func:`fit_discriminant_axes`.
    """
    if np.ptp(codes) == 0:
        msg = "There is one label to learn from: in what labels differ is not known."
        raise ValueError(msg)
    axes, _ = fit_discriminant_axes(table.features[table.fit], codes, white.matrix, whiten_means=True, **settings)
    return white.then(LinearMap(axes, np.zeros(axes.shape[1])))(table.features)
