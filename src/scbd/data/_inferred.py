"""Environments that nobody wrote down: groups that cells form at equal label."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._anndata import as_columns, check_anndata, control_names, label_text, label_values
from scbd._checks import check_count, check_unmasked, counted, head
from scbd._linear_maps import resolution
from scbd.data._inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from sklearn.mixture import GaussianMixture

    from scbd.data._inputs import Channels
    from scbd.data._sources import ImageSource

INFERRED = "inferred_environment"
_BLOCK = 4096
# more cells, and more axes, say no more of a few groups
_MOST_CELLS, _MOST_AXES = 20_000, 30
_LEAST_CELLS = 10  # of an environment
# not learned from: whether there are groups is asked of new cells
_TESTED = 0.2
_SURE = 2.0  # standard errors of the gain
_STARTS = 3
_SMALL = 1e-6


class InferredEnvironments(NamedTuple):
    """What :func:`infer_environments` found.

    Examples
    --------
    >>> found = scbd.data.infer_environments(adata, "gene", n_environments=3)
    >>> list(found.labels.cat.categories), found.axes.shape
    (['inferred_1', 'inferred_2', 'inferred_3'], (240, 2))
    """

    labels: pd.Series
    """``"inferred_1"``, the most frequent, and so on, by the index of ``obs``. Infer once, on all cells."""
    axes: np.ndarray
    """Where each cell lies on the two axes that tell them apart best, float32 ``(N, 2)``."""
    gain: float
    """How much better groups describe new cells than one group does, in nats a cell; about 0 if there are none."""


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
    """Find groups that cells form whatever their perturbation: a day, a stain, a microscope that nobody wrote down.

    Of images, the mean and the standard deviation of each channel are looked at; of features, their 30 principal axes.
    What cells of a perturbation have in common is taken away, and a mixture of Gaussians that share one covariance is
    fitted to the rest. So what matters is how far groups lie apart beside what cells of a group differ by, and not
    which features are large.

    Groups are all that it can find: cells in two states (of the cell cycle, say) form groups, too, and environments
    that shift cells by less than these differ among themselves are not found. Make skewed features symmetric first, by
    a logarithm for example: several Gaussians describe one skewed group better than one does. Look at ``axes`` before
    you train.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key
        Column, or columns, of what was done to each cell.
    n_environments
        How many to find.
    e_key
        Environments that are known, such as the plate: what their cells have in common is taken away, too, and what
        is found is a further one.
    image_key, channels, layer, obsm_key
        Where the inputs are, see :meth:`scbd.SCBDModel.setup_anndata`. ``obsm_key`` may name an embedding, such as the
        z_s of a model that was trained on environments inferred before, to refine these.
    control
        Learn groups from the cells of this perturbation alone. All cells get one.
    fit
        Cells to learn groups from, boolean ``(N,)``: not those that a model is tested on. All cells get one.
    seed
        Of the choice of cells and of where the mixture begins.

    Returns
    -------
    Labels, axes to draw them by, and what they gain.

    Raises
    ------
    KeyError, TypeError
        If a key is missing, or inputs cannot be read.
    ValueError
        If there are fewer than ten cells an environment to learn from, inputs are not finite or are the same in all
        cells, a cell has no label, or ``fit`` is no mask of the cells.

    Warns
    -----
    UserWarning
        If groups do not describe new cells better than a single one by more than two standard errors: there are none,
        or cells are too few to tell.

    References
    ----------
    Creager et al. (2021), Environment inference for invariant learning, for the question; groups at equal label by a
    tied mixture are our answer to it.

    Examples
    --------
    >>> found = scbd.data.infer_environments(adata, "gene", n_environments=6)
    >>> adata.obs["look"] = found.labels
    >>> wells = pd.crosstab(adata.obs["look"], adata.obs["well"])  # here they are known
    >>> wells.shape
    (6, 6)
    """
    check_anndata(adata)
    check_count("n_environments", n_environments, least=2)
    codes = [label_values(adata.obs, as_columns(key)).cat.codes.to_numpy() for key in (y_key, e_key) if key is not None]
    learned = _learned(adata, y_key, n_environments, control, fit)
    inputs = Inputs.found(adata, image_key, layer, obsm_key, channels)
    source = inputs.source(adata)
    statistics = _statistics(source, inputs.where)
    apart = _without_means(statistics, codes)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.flatnonzero(learned))[:_MOST_CELLS]
    n_tested = max(1, round(_TESTED * len(rows)))
    space, spread = _whitened(apart, _least(statistics, source.dtype), rows[n_tested:], inputs.where)
    mixture = _mixture(space[rows[n_tested:]], spread, n_environments, seed)
    single = _gaussian(1).fit(space[rows[n_tested:]])
    gains = mixture.score_samples(space[rows[:n_tested]]) - single.score_samples(space[rows[:n_tested]])
    gain, error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(n_tested))
    if gain <= _SURE * error:
        msg = (
            f"Cells of equal {y_key!r} do not form {n_environments} groups: these describe new cells no better than "
            f"one group does, beyond chance ({gain:.2g} nats per cell, standard error {error:.1g})."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    of_cell = mixture.predict(space)
    order = np.argsort(-np.bincount(of_cell, minlength=n_environments), kind="stable")
    names = [f"inferred_{number + 1}" for number in range(n_environments)]
    labels = pd.Categorical.from_codes(np.argsort(order)[of_cell], names)
    return InferredEnvironments(
        pd.Series(labels, index=adata.obs_names, name=INFERRED), _discriminants(space, mixture), gain
    )


def _learned(
    adata: AnnData, y_key: str | Sequence[str], n_environments: int, control: Any, fit: np.ndarray | None
) -> np.ndarray:
    """Which cells groups are learned from, boolean ``(N,)``."""
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
        learned &= np.isin(names, control_names(control, names, y_key))
    least = _LEAST_CELLS * n_environments
    if learned.sum() < least:
        msg = (
            f"There are {learned.sum()} cells to learn {n_environments} environments from: at least {least} are needed."
        )
        raise ValueError(msg)
    return learned


def _statistics(source: ImageSource, where: str) -> np.ndarray:
    """Mean and standard deviation of each channel of images; features as they are. float64 ``(N, D)``."""
    parts = []
    for start in range(0, source.shape[0], _BLOCK):
        values = source.read(np.arange(start, min(start + _BLOCK, source.shape[0])))
        if values.ndim > 2:
            pixels = values.reshape(*values.shape[:2], -1)
            values = np.concatenate([f(pixels, axis=-1, dtype=np.float64) for f in (np.mean, np.std)], axis=1)
        parts.append(values.astype(np.float64))
    statistics = np.concatenate(parts)
    bad = np.flatnonzero(~np.isfinite(statistics).all(1))
    if bad.size:
        cells = f"{counted(bad.size, 'cell')} (rows {head(bad)})"
        msg = f"{where} is NaN or infinite in {cells}: drop them, or fill the values in."
        raise ValueError(msg)
    return statistics


def _without_means(values: np.ndarray, groupings: Sequence[np.ndarray]) -> np.ndarray:
    """What is left when means of all groups are taken away, of one grouping after the other until nothing changes."""
    left = values - values.mean(0)
    scale = np.abs(left).max(0)
    for _ in range(100):
        before = left
        for codes in groupings:
            sums = np.zeros((codes.max() + 1, values.shape[1]))
            np.add.at(sums, codes, left)
            left = left - (sums / np.maximum(np.bincount(codes), 1)[:, None])[codes]
        if len(groupings) == 1 or (np.abs(left - before).max(0) <= _SMALL * scale).all():
            break
    return left


def _least(statistics: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Standard deviation at equal label above which a feature varies, by what it was read and cleared of means in."""
    return np.maximum(resolution(dtype) * np.abs(statistics).max(0), _SMALL * np.ptp(statistics, axis=0))


def _whitened(apart: np.ndarray, least: np.ndarray, rows: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """All cells on the principal axes of some, each of variance 1 there; and the standard deviation that it had."""
    scale = apart[rows].std(0)
    varies = scale > least  # each by its own values: some have small units
    if not varies.any():
        msg = f"All cells have the same {where} at equal label: there is nothing to tell environments by."
        raise ValueError(msg)
    apart = apart[:, varies] / scale[varies]
    values, vectors = np.linalg.eigh(np.cov(apart[rows], rowvar=False).reshape(apart.shape[1], -1))
    kept = np.flatnonzero(values > _SMALL * values[-1])[::-1][:_MOST_AXES]
    spread = np.sqrt(values[kept])
    return apart @ (vectors[:, kept] / spread), spread


def _mixture(space: np.ndarray, spread: np.ndarray, n: int, seed: int) -> GaussianMixture:
    """The most likely of several mixtures, begun from groups of cells as they are, whitened, and on one axis alone."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the best so far is as good a beginning
        for start in range(_STARTS):
            for begun in (space * spread, space, _least_peaked(space, seed + start)):
                groups = KMeans(n, n_init=2, random_state=seed + start).fit_predict(begun)
                means = np.stack([space[groups == group].mean(0) for group in range(n)])
                found.append(_gaussian(n, means_init=means, random_state=seed).fit(space))
    return max(found, key=lambda mixture: mixture.lower_bound_)


def _least_peaked(space: np.ndarray, seed: int) -> np.ndarray:
    """The independent axis that is least like a peak, ``(N, 1)``: of groups on a line, many axes beside hide them."""
    from scipy.stats import kurtosis
    from sklearn.decomposition import FastICA

    axes = FastICA(whiten=False, random_state=seed).fit_transform(space)
    return axes[:, [int(kurtosis(axes).argmin())]]


def _gaussian(n: int, **how: Any) -> GaussianMixture:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(n, covariance_type="tied", max_iter=200, **how)


def _discriminants(space: np.ndarray, mixture: GaussianMixture) -> np.ndarray:
    """The two axes on which means lie farthest apart, where cells of a group have variance 1."""
    toward = mixture.precisions_cholesky_
    center = mixture.weights_ @ mixture.means_
    between = np.sqrt(mixture.weights_)[:, None] * ((mixture.means_ - center) @ toward)
    axes = np.linalg.svd(between)[2][:2]
    placed = (space - center) @ toward @ axes.T
    return np.pad(placed, ((0, 0), (0, 2 - placed.shape[1]))).astype(np.float32)
