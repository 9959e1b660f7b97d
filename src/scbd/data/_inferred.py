"""Inference of unrecorded environments (such as imaging days) from groups that cells of one perturbation form."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.checks import check_count, check_unmasked, format_count, join_first
from scbd._shared.labels import as_columns, check_anndata, check_control_labels, label_text, label_values
from scbd._shared.linear_maps import relative_rounding_error
from scbd._shared.messages import warn_user
from scbd.data._input_location import InputLocation
from scbd.data._sources import iterate_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from sklearn.mixture import GaussianMixture

    from scbd.data._channels import Channels
    from scbd.data._sources import ImageSource

INFERRED = "inferred_environment"
# number of cells whose inputs are read at a time
_CELLS_PER_BLOCK = 4096
# _MAX_CELLS: maximum number of cells from which groups are learned. _MAX_AXES: maximum number of principal axes on
# which groups are learned. More cells or axes do not improve the estimate of a few groups.
_MAX_CELLS, _MAX_AXES = 20_000, 30
# Minimum number of cells, per environment to infer, from which groups are learned. With fewer cells, an error is
# raised.
_MIN_CELLS_PER_ENVIRONMENT = 10
# fraction of the cells that are held out when the mixture of Gaussians is fitted, to test whether cells form groups
_HELD_OUT_FRACTION = 0.2
# Gain in log-likelihood of the held-out cells, in standard errors of the gain, above which cells are considered to form
# groups. Otherwise, a warning is raised.
_MIN_GAIN_IN_STANDARD_ERRORS = 2.0
# number of random seeds with which each of the three initialisations of the mixture of Gaussians is repeated
_N_SEEDS = 3
# Differences, standard deviations and variances up to this fraction of the largest value count as zero.
_RELATIVE_TOLERANCE = 1e-6


class InferredEnvironments(NamedTuple):
    """Result of :func:`infer_environments`: inferred environments of cells, and measures of their separation.

    Examples
    --------
    >>> found = scbd.data.infer_environments(adata, "gene", n_environments=3)
    >>> list(found.labels.cat.categories), found.axes.shape
    (['inferred_1', 'inferred_2', 'inferred_3'], (240, 2))
    """

    labels: pd.Series
    """Inferred environment of each cell, categorical, with the index of ``obs``.

    ``"inferred_1"`` is the most frequent environment, ``"inferred_2"`` the second most frequent, and so on. The same
    name in two runs does not refer to the same environment. Infer environments once, on all cells.
    """
    axes: np.ndarray
    """Coordinates of each cell on the two axes that best separate the inferred environments, float32 ``(N, 2)``."""
    gain: float
    """Mean gain in log-likelihood of held-out cells by a mixture of Gaussians over one Gaussian, in nats per cell.

    The gain is about 0 if cells do not form groups.
    """


def infer_environments(
    adata: AnnData,
    y_key: str | Sequence[str],
    n_environments: int = 2,
    *,
    e_key: str | Sequence[str] | None = None,
    image_key: str | None = None,
    channels: Channels | None = None,
    layer: str | None = None,
    obsm_key: str | None = None,
    control: str | int | float | None = None,
    fit: np.ndarray | None = None,
    seed: int = 0,
) -> InferredEnvironments:
    """Infer unrecorded environments, such as imaging days or microscopes, as groups of cells within perturbations.

    The method has three steps:

    1. A cell is described by the mean and the standard deviation of each channel of its image, or by its features.
    2. The mean of each perturbation (and of each known environment, see ``e_key``) is subtracted. The residuals are
       scaled to unit variance and projected on up to 30 principal axes, and each axis is scaled to unit variance.
    3. A mixture of Gaussians with one common covariance is fitted. Groups are therefore separated by the distance of
       their means relative to the variation within groups, and not by the scale of features.

    Limitations:

    - Inferred groups need not be environments: cells in two states (of the cell cycle, for example) form groups, too.
    - Environments are not found if the shift between them is smaller than the variation among cells of one environment.
    - A skewed feature of a single group is described better by several Gaussians than by one. Make skewed features
      symmetric first, for example by a logarithm.

    Plot ``axes`` before you train a model with the inferred environments.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key
        Column, or columns, of ``obs`` with the perturbation of each cell.
    n_environments
        Number of environments to infer, at least 2.
    e_key
        Column, or columns, of ``obs`` with known environments, such as the plate. The means of known environments are
        subtracted, too, so that the inferred environments describe further differences.
    image_key, channels, layer, obsm_key
        Location of the images or features, see :meth:`scbd.SCBDModel.setup_anndata`. ``obsm_key`` may name an
        embedding, for example z_s of a model that was trained with inferred environments, in order to refine these
        environments.
    control
        Value of ``y_key`` for controls. If given, groups are learned from controls only. Every cell is nevertheless
        assigned to an environment.
    fit
        Mask of the cells from which groups are learned, boolean ``(N,)``. Exclude the cells on which a model is tested.
        Every cell is nevertheless assigned to an environment.
    seed
        Random seed of the choice of cells from which groups are learned, and of the initialisation of the mixture.

    Returns
    -------
    Inferred environment of each cell, axes to plot the environments, and the gain in log-likelihood over a single
    group, see :class:`InferredEnvironments`.

    Raises
    ------
    KeyError, TypeError
        If a key is missing, or if the inputs cannot be read.
    ValueError
        If there are fewer than ten cells to learn from per environment to infer, if images or features are not finite
        or do not vary within perturbations, if a cell has no perturbation or known environment, or if ``fit`` is not a
        boolean mask of the cells.

    Warns
    -----
    UserWarning
        If the gain in log-likelihood on held-out cells (20 % of the cells) is at most two standard errors. Either cells
        do not form groups, or there are too few cells to detect the groups.

    References
    ----------
    Creager et al. (2021), Environment inference for invariant learning, poses the problem. The solution, a Gaussian
    mixture with common covariance within perturbations, is ours.

    Examples
    --------
    >>> found = scbd.data.infer_environments(adata, "gene", n_environments=6)
    >>> adata.obs["look"] = found.labels
    >>> wells = pd.crosstab(adata.obs["look"], adata.obs["well"])  # the wells are the true environments here
    >>> wells.shape
    (6, 6)
    """
    check_anndata(adata)
    check_count("n_environments", n_environments, least=2)
    codes = [label_values(adata.obs, as_columns(key)).cat.codes.to_numpy() for key in (y_key, e_key) if key is not None]
    learned = _learning_mask(adata, y_key, n_environments, control, fit)
    inputs = InputLocation.found(adata, image_key, layer, obsm_key, channels)
    source = inputs.source(adata)
    statistics = _cell_statistics(source, inputs.where)
    apart = _subtract_group_means(statistics, codes)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.flatnonzero(learned))[:_MAX_CELLS]
    n_tested = max(1, round(_HELD_OUT_FRACTION * len(rows)))
    # Standard deviation up to which a feature counts as constant within perturbations. It covers the rounding error of
    # the dtype in which the features are stored, and the numerical error of the subtraction of group means.
    least = np.maximum(
        relative_rounding_error(source.dtype) * np.abs(statistics).max(0),
        _RELATIVE_TOLERANCE * np.ptp(statistics, axis=0),
    )
    space, spread = _whiten(apart, least, rows[n_tested:], inputs.where)
    mixture = _fit_mixture(space[rows[n_tested:]], spread, n_environments, seed)
    single = _new_mixture(1).fit(space[rows[n_tested:]])
    gains = mixture.score_samples(space[rows[:n_tested]]) - single.score_samples(space[rows[:n_tested]])
    gain, error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(n_tested))
    if gain <= _MIN_GAIN_IN_STANDARD_ERRORS * error:
        msg = (
            f"Cells of equal {y_key!r} do not form {n_environments} groups: these describe new cells no better than "
            f"one group does, beyond chance ({gain:.2g} nats per cell, standard error {error:.1g})."
        )
        warn_user(msg)
    of_cell = mixture.predict(space)
    order = np.argsort(-np.bincount(of_cell, minlength=n_environments), kind="stable")
    names = [f"inferred_{number + 1}" for number in range(n_environments)]
    labels = pd.Categorical.from_codes(np.argsort(order)[of_cell], names)
    return InferredEnvironments(
        pd.Series(labels, index=adata.obs_names, name=INFERRED), _project_on_group_axes(space, mixture), gain
    )


def _learning_mask(
    adata: AnnData, y_key: str | Sequence[str], n_environments: int, control: Any, fit: np.ndarray | None
) -> np.ndarray:
    """Return a mask of the cells from which groups are learned, boolean ``(N,)``.

    Raises
    ------
    ValueError
        If ``fit`` is not a boolean mask of the cells, if no cell has the label ``control``, or if there are fewer than
        ten cells per environment to infer.
    """
    learned = np.ones(adata.n_obs, dtype=bool)
    if fit is not None:
        check_unmasked("fit", fit)
        fit = np.asarray(fit)
        if fit.dtype != bool or fit.shape != learned.shape:
            msg = f"fit must say of each of the {adata.n_obs} cells whether it is learned from, True or False."
            raise ValueError(msg)
        learned &= fit
    if control is not None:
        names = label_values(adata.obs, as_columns(y_key)).map(label_text).astype(str).to_numpy()
        learned &= np.isin(names, check_control_labels(control, names, y_key))
    least = _MIN_CELLS_PER_ENVIRONMENT * n_environments
    if learned.sum() < least:
        msg = (
            f"There are {learned.sum()} cells to learn {n_environments} environments from: at least {least} are needed."
        )
        raise ValueError(msg)
    return learned


def _cell_statistics(source: ImageSource, where: str) -> np.ndarray:
    """Return the D numbers that describe each cell, float64 ``(N, D)``.

    For images, these are the mean and the standard deviation of the pixels of each channel. Features are returned
    unmodified.

    Raises
    ------
    ValueError
        If a number is NaN or infinite.
    """
    parts = []
    for rows in iterate_blocks(source.shape[0], _CELLS_PER_BLOCK):
        values = source.read(rows)
        if values.ndim > 2:
            pixels = values.reshape(*values.shape[:2], -1)
            mean, deviation = pixels.mean(-1, dtype=np.float64), pixels.std(-1, dtype=np.float64)
            values = np.concatenate([mean, deviation], axis=1)
        parts.append(values.astype(np.float64))
    statistics = np.concatenate(parts)
    bad = np.flatnonzero(~np.isfinite(statistics).all(1))
    if bad.size:
        cells = f"{format_count(bad.size, 'cell')} (rows {join_first(bad)})"
        msg = f"{where} is NaN or infinite in {cells}: drop them, or fill the values in."
        raise ValueError(msg)
    return statistics


def _subtract_group_means(values: np.ndarray, groupings: Sequence[np.ndarray]) -> np.ndarray:
    """Subtract the mean of its group from each cell, for one or several groupings of the cells.

    A grouping divides the cells by a label, such as their perturbation or their plate. The means of the groups of
    several groupings are subtracted in turn until the values converge, in at most 100 iterations.

    Parameters
    ----------
    values
        Statistics of the cells, ``(N, D)``.
    groupings
        One array ``(N,)`` per grouping, with the integer code of each cell's group.
    """
    left = values - values.mean(0)
    scale = np.abs(left).max(0)
    for _ in range(100):
        before = left
        for codes in groupings:
            sums = np.zeros((codes.max() + 1, values.shape[1]))
            np.add.at(sums, codes, left)
            left = left - (sums / np.maximum(np.bincount(codes), 1)[:, None])[codes]
        if len(groupings) == 1 or (np.abs(left - before).max(0) <= _RELATIVE_TOLERANCE * scale).all():
            break
    return left


def _whiten(apart: np.ndarray, least: np.ndarray, rows: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Project cells on principal axes, and scale each axis to unit variance.

    Before the projection, each feature is scaled to unit variance. Constant features are excluded.

    Parameters
    ----------
    apart
        Features of all cells, ``(N, D)``, after subtraction of the means of perturbations (and known environments).
    least
        Standard deviation of each feature up to which it counts as constant, ``(D,)``.
    rows
        Row numbers of the cells from which the scales of features and the principal axes are estimated.
    where
        Location of the inputs in the AnnData, for errors.

    Returns
    -------
    Coordinates of all cells on the K axes, ``(N, K)`` with K up to 30; and the standard deviation along each axis
    before its scaling, ``(K,)``.

    Raises
    ------
    ValueError
        If all features are constant.
    """
    scale = apart[rows].std(0)
    varies = scale > least  # features differ in unit, so each has its own threshold
    if not varies.any():
        msg = f"All cells have the same {where} at equal label: there is nothing to tell environments by."
        raise ValueError(msg)
    apart = apart[:, varies] / scale[varies]
    values, vectors = np.linalg.eigh(np.cov(apart[rows], rowvar=False).reshape(apart.shape[1], -1))
    kept = np.flatnonzero(values > _RELATIVE_TOLERANCE * values[-1])[::-1][:_MAX_AXES]
    spread = np.sqrt(values[kept])
    return apart @ (vectors[:, kept] / spread), spread


def _fit_mixture(space: np.ndarray, spread: np.ndarray, n: int, seed: int) -> GaussianMixture:
    """Fit mixtures of Gaussians from several initialisations, and return the mixture with the highest likelihood.

    The means of each mixture are initialised by a k-means clustering of the cells. Coordinates of the cells in the
    clustering are the principal axes in their original scale, the whitened axes, or a single independent component.
    Each of these three is repeated with three seeds.

    Parameters
    ----------
    space
        Whitened coordinates of the cells from which groups are learned, ``(N, K)``.
    spread
        Standard deviation along each axis before whitening, ``(K,)``.
    n
        Number of groups, which is the number of Gaussians.
    seed
        Random seed of clustering and mixture.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    found = []
    with warnings.catch_warnings():
        # a mixture that has not converged is still compared with the other mixtures
        warnings.simplefilter("ignore", ConvergenceWarning)
        for start in range(_N_SEEDS):
            for begun in (space * spread, space, _flattest_component(space, seed + start)):
                groups = KMeans(n, n_init=2, random_state=seed + start).fit_predict(begun)
                means = np.stack([space[groups == group].mean(0) for group in range(n)])
                found.append(_new_mixture(n, means_init=means, random_state=seed).fit(space))
    return max(found, key=lambda mixture: mixture.lower_bound_)


def _flattest_component(space: np.ndarray, seed: int) -> np.ndarray:
    """Return the coordinates of cells on the independent component with the lowest kurtosis, ``(N, 1)``.

    If groups of cells lie along one line, the distribution on this component is flat or bimodal. In a clustering on all
    axes, the variation along the remaining axes would hide these groups.
    """
    from scipy.stats import kurtosis
    from sklearn.decomposition import FastICA

    axes = FastICA(whiten=False, random_state=seed).fit_transform(space)
    return axes[:, [int(kurtosis(axes).argmin())]]


def _new_mixture(n: int, **how: Any) -> GaussianMixture:
    """Create a mixture of ``n`` Gaussians with a common covariance, which is not yet fitted."""
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(n, covariance_type="tied", max_iter=200, **how)


def _project_on_group_axes(space: np.ndarray, mixture: GaussianMixture) -> np.ndarray:
    """Project cells on the two axes along which the groups of a mixture differ most, float32 ``(N, 2)``.

    The axes are linear discriminants: along each, the variance within groups is 1. If there are only two groups, they
    differ along one axis, and the second coordinate of all cells is 0.
    """
    toward = mixture.precisions_cholesky_
    center = mixture.weights_ @ mixture.means_
    between = np.sqrt(mixture.weights_)[:, None] * ((mixture.means_ - center) @ toward)
    axes = np.linalg.svd(between)[2][:2]
    placed = (space - center) @ toward @ axes.T
    return np.pad(placed, ((0, 0), (0, 2 - placed.shape[1]))).astype(np.float32)
