"""Choice of the reference cells, from which the mean and standard deviation of an environment are estimated.

Reference cells are the controls of the environment or all of its cells. All cells are suitable only if environments
contain the same perturbations, or perturbations so numerous that no single one affects the mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from scipy import stats

from scbd._shared.messages import warn_user
from scbd.model._interfaces import ReferenceBatches

if TYPE_CHECKING:
    from collections.abc import Callable

    from scbd.data._sources import ImageSource

ReferenceKind = Literal["controls", "cells"]
StandardizeBy = Literal["auto", ReferenceKind] | None

# MIN_CONTROLS_PER_ENVIRONMENT is the minimum number of controls with which an environment is standardised by its
# controls. Training may use fewer of them, because some are held out, but at least _MIN_USABLE_CONTROLS.
# _MIN_FRACTION_WITH_CONTROLS is the minimum fraction of the cells that must lie in environments with enough controls
# for standardize_by="auto" to choose controls as reference cells.
MIN_CONTROLS_PER_ENVIRONMENT, _MIN_USABLE_CONTROLS, _MIN_FRACTION_WITH_CONTROLS = 4, 2, 0.9
# maximum distance (see frequency_distance) between the perturbation frequencies of an environment and those of all
# cells; above it, the mean over all cells of the environment would contain effects of its perturbations
_MAX_FREQUENCY_DISTANCE = 0.05
# minimum overlap (see frequency_overlap) of perturbation frequencies at which environments count as containing the same
# perturbations; it is below 1 because frequencies also differ by chance
_MIN_OVERLAP = 0.75
# lower bound of the overlap of perturbation frequencies that is expected by chance, by which the observed overlap is
# divided. The expected overlap is below this bound if an environment has too few cells per perturbation to judge, for
# example on a plate with half of the perturbations in one well each.
_MIN_EXPECTED_OVERLAP = 0.7
# Reference cells are drawn at random: at most _MAX_PER_ENVIRONMENT cells per environment, and at most
# _MAX_REFERENCE_CELLS in total over all environments of a column. With very many environments, the total is exceeded,
# because up to _MIN_PER_ENVIRONMENT cells are drawn from each environment. _MIN_PER_ENVIRONMENT is also the minimum
# number of labelled cells from which the perturbation frequencies of an environment are estimated (fewer suffice if
# they are at least half of the cells of the environment).
_MAX_PER_ENVIRONMENT, _MAX_REFERENCE_CELLS, _MIN_PER_ENVIRONMENT = 256, 65_536, 32
# number of reference cells whose inputs are read at once
_CELLS_PER_READ = 512


def choose_reference_kind(
    asked: StandardizeBy,
    y: np.ndarray,
    e: np.ndarray,
    controls: np.ndarray | None,
    have_controls: np.ndarray | None = None,
) -> tuple[ReferenceKind | None, ReferenceKind | None]:
    """Choose the kind of reference cells for the environments of one column: controls, all cells, or no cells.

    With ``"auto"``, the first choice that applies is taken:

    1. all cells, if most environments contain the same perturbations, not counting controls;
    2. controls, if at least 90 % of the cells lie in environments with four or more controls;
    3. all cells, if most environments contain enough perturbations that no single one affects their mean;
    4. no cells: inputs are not standardised per environment.

    If both the second and the third choice are possible, inputs are standardised with the controls, and the offset of
    an environment in z_c is estimated from controls or from all cells, whichever gives the smaller standard error. Even
    if the choice is all cells, a single environment whose perturbations differ from those of most environments is
    standardised with its controls, see :func:`select_reference_cells`.

    Parameters
    ----------
    asked
        Argument ``standardize_by`` of the model. Values other than ``"auto"`` are returned unchanged.
    y, e
        Codes of perturbation and environment of the training cells, ``(N,)``.
    controls
        Mask of the controls among the training cells, boolean ``(N,)``; `None` if controls were not named.
    have_controls
        Mask of the training cells in environments with enough controls, see :func:`in_environments_with_controls`. By
        default, the controls among the training cells are counted.

    Returns
    -------
    Two kinds of reference cells, ``"controls"``, ``"cells"`` or `None` (no cells). The first is for the inputs. The
    second is the alternative for z_c, and is usually equal to the first.

    Warns
    -----
    UserWarning
        If the requested choice removes effects of perturbations along with those of environments, or if many
        environments have too few controls.
    """
    if have_controls is None and controls is not None:
        have_controls = in_environments_with_controls(e, controls)
    have = 0.0 if have_controls is None else float(have_controls.mean())
    unlike = frequency_distance(y, e, frequencies(y))[e]
    if asked == "auto":
        all_cells: ReferenceKind | None = "cells" if np.median(unlike) < _MAX_FREQUENCY_DISTANCE else None
        # Every environment may contain the same controls, although its perturbations are its own.
        perturbed = np.ones(len(y), dtype=bool) if controls is None or controls.all() else ~controls
        same = all_cells is not None and median_overlap(y[perturbed], e[perturbed]) >= _MIN_OVERLAP
        by_controls = have >= _MIN_FRACTION_WITH_CONTROLS and not same
        return ("controls", all_cells or "controls") if by_controls else (all_cells, all_cells)
    if asked == "controls" and have < _MIN_FRACTION_WITH_CONTROLS:
        warn_user(
            f"standardize_by='controls': {1 - have:.0%} of the training cells lie in environments with fewer than "
            f"{MIN_CONTROLS_PER_ENVIRONMENT} controls, which say little of them: name more controls, or use a coarser "
            "e_key."
        )
    if asked == "cells" and unlike.mean() >= _MAX_FREQUENCY_DISTANCE:
        warn_user(
            "standardize_by='cells': environments hold different perturbations, and what these do is taken out of the "
            "inputs with what environments do. Use 'auto', which would not, or a coarser e_key."
        )
    return asked, asked


def in_environments_with_controls(
    e: np.ndarray, controls: np.ndarray, rows: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Return a mask of the cells in environments with at least four controls, at least two of them usable for training.

    Parameters
    ----------
    e, controls
        Code of the environment (-1 if missing) of each cell of a table, and mask of the controls, ``(N,)``.
    rows
        Rows of the cells that can be used, such as the training cells. Default: all cells.
    """
    usable = np.zeros(len(e), dtype=bool)
    usable[rows] = True
    # cells without an environment have the code -1, which is the index of an additional last count, 0
    n_all, n_usable = (
        np.bincount(e[chosen & (e >= 0)], minlength=int(e.max(initial=-1)) + 2)[e]
        for chosen in (controls, controls & usable)
    )
    return (n_all >= MIN_CONTROLS_PER_ENVIRONMENT) & (n_usable >= _MIN_USABLE_CONTROLS)


def frequency_distance(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute how much the perturbation frequencies within each environment differ from those of the training cells.

    Two vectors of frequencies are compared, one for the cells of the environment and one for all training cells. The
    value is the squared Euclidean distance between them, minus the distance expected from random sampling. It is about
    0 if the environment contains the same perturbations as the training cells, and close to 1 if it contains a single
    perturbation.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment of the cells, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.

    Returns
    -------
    The distance for each environment, ``(E,)``.
    """
    own, of_y, of_e, shares = _frequencies_within_environments(y, e, shares)
    n_cells = np.bincount(e)
    squares = np.bincount(of_e, np.square(own), minlength=len(n_cells))
    common = np.bincount(of_e, own * shares[of_y], minlength=len(n_cells))
    sampling = (1 - squares) / (n_cells - 1).clip(1)
    return np.where(n_cells > 0, squares - 2 * common + np.square(shares).sum() - sampling, 0)


def frequency_overlap(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute the overlap between the perturbation frequencies within each environment and those of the training cells.

    Each perturbation has a frequency within the environment and a frequency among the training cells. The overlap is
    the sum, over perturbations, of the smaller of these two frequencies. It is divided by the overlap expected for
    cells drawn at random from the training cells. The result is at most 1.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment of the cells, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.

    Returns
    -------
    The overlap for each environment, ``(E,)``.
    """
    own, of_y, of_e, shares = _frequencies_within_environments(y, e, shares)
    n_cells = np.bincount(e)
    found = np.bincount(of_e, np.minimum(own, shares[of_y]), minlength=len(n_cells))
    sizes, of_size = np.unique(n_cells, return_inverse=True)
    kinds, n_of_kind = np.unique(shares, return_counts=True)
    # Expected overlap for n cells drawn at random. A perturbation has frequency p among all cells and frequency f among
    # the n cells, and contributes min(p, f) to the overlap. The expectation of min(p, f) is p - E[max(p - f, 0)], where
    # E[max(p - f, 0)] = p (1 - p) P(X = floor(n p)), and X is binomial with n - 1 trials and probability p.
    others = (sizes - 1).clip(0)[:, None]
    below = kinds * (1 - kinds) * stats.binom.pmf(np.floor(sizes[:, None] * kinds), others, kinds)
    by_chance = ((kinds - below) @ n_of_kind)[of_size]
    return np.minimum(found / by_chance.clip(_MIN_EXPECTED_OVERLAP), 1)


def median_overlap(y: np.ndarray, e: np.ndarray) -> float:
    """Return the median of :func:`frequency_overlap` over the cells, each of which has the overlap of its environment.

    A value near 1 means that most environments contain the same perturbations in similar proportions.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment of the training cells, ``(N,)``.
    """
    return float(np.median(frequency_overlap(y, e, frequencies(y))[e]))


def _frequencies_within_environments(
    y: np.ndarray, e: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the frequency of each perturbation within each environment, for pairs of the two that occur.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment of the cells, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.

    Returns
    -------
    Four arrays. The first three have one entry per pair: the frequency of the perturbation within the environment, the
    code of the perturbation, and the code of the environment. The fourth is ``shares``, extended by zeros for
    perturbations that are absent from the training cells.
    """
    n_y = max(len(shares), int(y.max(initial=-1)) + 1)
    pairs, counts = np.unique(e.astype(np.int64) * n_y + y, return_counts=True)
    of_e, of_y = np.divmod(pairs, n_y)
    return counts / np.bincount(e)[of_e], of_y, of_e, np.pad(shares, (0, n_y - len(shares)))


def frequencies(codes: np.ndarray) -> np.ndarray:
    return np.bincount(codes) / max(1, len(codes))


def select_reference_cells(
    y: np.ndarray, e: np.ndarray, controls: np.ndarray, shares: np.ndarray, same: float
) -> np.ndarray:
    """Select the reference cells of each environment, for a model that uses all cells as reference cells by default.

    A single environment may contain other perturbations than the training cells, so that the mean of all of its cells
    would contain effects of its perturbations. If the training environments contain the same perturbations (``same`` is
    at least 0.75), the reference cells of an environment are the first of these that applies:

    1. the cells of perturbations seen in training, if the environment contains these in similar proportions;
    2. its controls, if there are at least four;
    3. all of its cells, if no perturbation is frequent enough to affect their mean, or if few cells have labels.

    If the training environments contain different perturbations, the third rule comes before the second, and the
    first rule does not apply.

    Parameters
    ----------
    y, e, controls
        Code of the perturbation (-1 if missing), code of the environment, and mask of the controls that lie in
        environments with enough controls (see :func:`in_environments_with_controls`), ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.
    same
        Median overlap of perturbation frequencies between a training environment and all training cells, see
        :func:`median_overlap`.

    Returns
    -------
    Mask of the reference cells according to rules 1 and 3, boolean ``(N,)``. Rule 2 applies to environments without
    cells in this mask: the environment is standardised such that its controls get the mean and standard deviation that
    the controls of other environments have after standardisation.
    """
    n_e = int(e.max(initial=-1)) + 1
    n_cells = np.bincount(e)
    labelled = y >= 0
    known = np.isin(y, np.flatnonzero(shares))

    def of_each(function: Callable[..., np.ndarray], chosen: np.ndarray) -> np.ndarray:
        values = function(y[chosen], e[chosen], shares)
        return np.pad(values, (0, n_e - len(values)))

    def few(chosen: np.ndarray) -> np.ndarray:
        n_chosen = np.bincount(e[chosen], minlength=n_e)
        return (n_chosen < _MIN_PER_ENVIRONMENT) & (2 * n_chosen < n_cells)

    alike = (
        (of_each(frequency_overlap, known) >= _MIN_OVERLAP * same)
        & (of_each(frequency_distance, known) < _MAX_FREQUENCY_DISTANCE)
        & ~few(known)
    )
    by_all = few(labelled) | (of_each(frequency_distance, labelled) < _MAX_FREQUENCY_DISTANCE)
    have = np.bincount(e[controls], minlength=n_e) > 0
    if same >= _MIN_OVERLAP:
        by_all &= ~have
    else:
        alike[:] = False
    return np.where(alike[e], known, by_all[e])


def draw_reference_cells(
    source: ImageSource, rows: np.ndarray, codes: np.ndarray, used: np.ndarray, controls: np.ndarray | None = None
) -> ReferenceBatches:
    """Draw a random sample of the reference cells, with a common maximum number of cells per environment of a column.

    Parameters
    ----------
    source
        Inputs of all cells.
    rows
        Rows from which reference cells may be drawn.
    codes, used, controls
        For all cells: codes of their environments, mask of the reference cells, and mask of the controls that replace
        missing reference cells, each ``(N, K)``; see :class:`ReferenceBatches`.
    """
    rng, masks, drawn = np.random.default_rng(0), [used] if controls is None else [used, controls], []
    for mask in masks:
        of_mask = [np.empty(0, dtype=np.int64)]
        for column, use in zip(codes.T, mask.T, strict=True):
            usable = rng.permutation(rows[use[rows]])
            usable = usable[np.argsort(column[usable], kind="stable")]
            _, first, counts = np.unique(column[usable], return_index=True, return_counts=True)
            most = int(np.clip(_MAX_REFERENCE_CELLS // max(1, len(counts)), _MIN_PER_ENVIRONMENT, _MAX_PER_ENVIRONMENT))
            # number of each cell among the cells of its environment, in random order
            place = np.arange(len(usable)) - np.repeat(first, counts)
            of_mask.append(usable[place < most])
        drawn.append(np.concatenate(of_mask))
    chosen = np.unique(np.concatenate(drawn))
    blocks = np.array_split(chosen, -(-len(chosen) // _CELLS_PER_READ)) if len(chosen) else []
    kept = [mask[chosen] & np.isin(chosen, some)[:, None] for mask, some in zip(masks, drawn, strict=True)]
    return ReferenceBatches(lambda: (torch.from_numpy(source.read(block)) for block in blocks), codes[chosen], *kept)
