"""Choice of the reference cells from which the effect of an environment is estimated."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from scipy import stats

from scbd.model._interfaces import ReferenceBatches

if TYPE_CHECKING:
    from collections.abc import Callable

    from scbd.data._sources import ImageSource

ReferenceKind = Literal["controls", "cells"]
StandardizeBy = Literal["auto", ReferenceKind] | None

# minimum number of controls for an environment to be standardised by its controls; minimum fraction of the cells that
# lie in such environments for "auto" to choose controls
_MIN_CONTROLS_PER_ENVIRONMENT, _MIN_FRACTION_WITH_CONTROLS = 4, 0.9
# maximum of `unlikeness`: above it, effects of perturbations would be mistaken for the effect of an environment
_MAX_FREQUENCY_DISTANCE = 0.05
# minimum of `in_common` for environments to count as containing the same perturbations; some differ by chance
_MIN_OVERLAP = 0.75
# lower bound of the expected overlap in `in_common`: if randomly drawn cells overlap less with all cells, there are too
# few cells per perturbation (for example on a plate with half of the perturbations, one well each)
_MIN_EXPECTED_OVERLAP = 0.7
# number of reference cells: maximum per environment, maximum over all environments of a column, minimum per environment
# even if the second number is then exceeded (also the minimum of labelled cells to judge which perturbations there are)
_MAX_PER_ENVIRONMENT, _MAX_REFERENCE_CELLS, _MIN_PER_ENVIRONMENT = 256, 65_536, 32
# number of cells that are read at once
_BLOCK = 512


def choose_reference_kind(
    asked: StandardizeBy, y: np.ndarray, e: np.ndarray, controls: np.ndarray | None
) -> tuple[ReferenceKind | None, ReferenceKind | None]:
    """Choose the reference cells for the environments of a column: controls, all cells, or none.

    With ``"auto"``, the first choice that applies is taken:

    1. all cells, if most environments contain the same perturbations;
    2. controls, if at least 90 % of the cells lie in environments with four or more controls;
    3. all cells, if most environments contain enough perturbations that no single one affects their mean;
    4. none.

    If both controls and all cells are possible, inputs are standardised with the controls, and z_c is centred with
    whichever of the two has the smaller standard error of its mean. An environment that contains other perturbations
    than most is standardised with its controls, see :func:`select_reference_cells`.

    Parameters
    ----------
    asked
        Argument ``standardize_by`` of the model. Other values than ``"auto"`` are returned unchanged.
    y, e
        Codes of perturbation and environment of the training cells, ``(N,)``.
    controls
        Mask of the controls among the training cells, boolean ``(N,)``; `None` if controls were not named.

    Returns
    -------
    The choice for the inputs, and the alternative for z_c, which is usually the same. `None` stands for no reference
    cells: inputs are not standardised per environment.

    Warns
    -----
    UserWarning
        If the requested choice removes effects of perturbations along with those of environments, or if many
        environments have too few controls.
    """
    have = (
        0.0
        if controls is None
        else float((np.bincount(e[controls], minlength=e.max() + 1)[e] >= _MIN_CONTROLS_PER_ENVIRONMENT).mean())
    )
    unlike = frequency_distance(y, e, frequencies(y))[e]
    if asked == "auto":
        all_cells: ReferenceKind | None = "cells" if np.median(unlike) < _MAX_FREQUENCY_DISTANCE else None
        same = all_cells is not None and median_overlap(y, e) >= _MIN_OVERLAP
        by_controls = have >= _MIN_FRACTION_WITH_CONTROLS and not same
        return ("controls", all_cells or "controls") if by_controls else (all_cells, all_cells)
    if asked == "controls" and have < _MIN_FRACTION_WITH_CONTROLS:
        _warn(
            f"standardize_by='controls': {1 - have:.0%} of the training cells lie in environments with fewer than "
            f"{_MIN_CONTROLS_PER_ENVIRONMENT} controls, which say little of them: name more controls, or use a coarser "
            "e_key."
        )
    if asked == "cells" and unlike.mean() >= _MAX_FREQUENCY_DISTANCE:
        _warn(
            "standardize_by='cells': environments hold different perturbations, and what these do is taken out of the "
            "inputs with what environments do. Use 'auto', which would not, or a coarser e_key."
        )
    return asked, asked


def frequency_distance(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute how much the perturbation frequencies of each environment differ from those of all cells, ``(E,)``.

    The value is the squared Euclidean distance between both vectors of frequencies, minus its expectation due to
    sampling. It is about 0 if the environment contains the same perturbations as all cells, and close to 1 if it
    contains a single perturbation.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.
    """
    own, of_y, of_e, shares = _frequencies_within_environments(y, e, shares)
    n_cells = np.bincount(e)
    squares = np.bincount(of_e, np.square(own), minlength=len(n_cells))
    common = np.bincount(of_e, own * shares[of_y], minlength=len(n_cells))
    sampling = (1 - squares) / (n_cells - 1).clip(1)
    return np.where(n_cells > 0, squares - 2 * common + np.square(shares).sum() - sampling, 0)


def frequency_overlap(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute the overlap of the perturbation frequencies of each environment with those of all cells, ``(E,)``.

    The overlap is the sum over perturbations of the smaller of the two frequencies. It is divided by its expectation
    if the cells of the environment were drawn at random from all cells. The result is at most 1.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.
    """
    own, of_y, of_e, shares = _frequencies_within_environments(y, e, shares)
    n_cells = np.bincount(e)
    found = np.bincount(of_e, np.minimum(own, shares[of_y]), minlength=len(n_cells))
    sizes, of_size = np.unique(n_cells, return_inverse=True)
    kinds, n_of_kind = np.unique(shares, return_counts=True)
    # The frequency f of a perturbation among n cells drawn at random falls short of its frequency p among all cells by
    # E[max(p - f, 0)] = p (1 - p) P(X = floor(n p)), with X binomial of n - 1 trials.
    others = (sizes - 1).clip(0)[:, None]
    below = kinds * (1 - kinds) * stats.binom.pmf(np.floor(sizes[:, None] * kinds), others, kinds)
    by_chance = ((kinds - below) @ n_of_kind)[of_size]
    return np.minimum(found / by_chance.clip(_MIN_EXPECTED_OVERLAP), 1)


def median_overlap(y: np.ndarray, e: np.ndarray) -> float:
    """Return the median over cells of the :func:`frequency_overlap` of their environment with all cells."""
    return float(np.median(frequency_overlap(y, e, frequencies(y))[e]))


def _frequencies_within_environments(
    y: np.ndarray, e: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the frequency of each perturbation within each environment, for the P pairs that occur.

    Returns
    -------
    The frequency of the perturbation in the environment, the code of the perturbation, and the code of the environment,
    each ``(P,)``; and ``shares``, extended by zeros for perturbations that are not in training.
    """
    n_y = max(len(shares), int(y.max(initial=-1)) + 1)
    pairs, counts = np.unique(e.astype(np.int64) * n_y + y, return_counts=True)
    of_e, of_y = np.divmod(pairs, n_y)
    return counts / np.bincount(e)[of_e], of_y, of_e, np.pad(shares, (0, n_y - len(shares)))


def frequencies(codes: np.ndarray) -> np.ndarray:
    return np.bincount(codes) / max(1, len(codes))


def select_reference_cells(
    y: np.ndarray, e: np.ndarray, controls: np.ndarray, shares: np.ndarray, same: float
) -> tuple[np.ndarray, np.ndarray]:
    """Select the reference cells of each environment if the training environments are standardised with all cells.

    If the training environments contain the same perturbations (``same`` is at least 0.75), the reference cells of an
    environment are the first of these that applies:

    1. the cells of perturbations seen in training, if the environment contains these in similar proportions;
    2. its controls, if there are at least four;
    3. all of its cells, if no perturbation is frequent enough to affect their mean, or if few cells have labels.

    If the training environments contain different perturbations, the third rule comes before the second, and the
    first rule does not apply.

    Parameters
    ----------
    y, e, controls
        Code of the perturbation (-1 if missing), code of the environment, and whether a cell is a control, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.
    same
        Median overlap of the training environments, see :func:`median_overlap`.

    Returns
    -------
    Two masks, boolean ``(N,)``. The first marks the reference cells according to rules 1 and 3. The second marks all
    controls in environments with at least four controls. Rule 2 needs both masks: if an environment has no cells in the
    first mask, its controls are brought to the mean and deviation that the controls of other environments have after
    standardisation.
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
    controls = controls & (np.bincount(e[controls], minlength=n_e) >= _MIN_CONTROLS_PER_ENVIRONMENT)[e]
    have = np.bincount(e[controls], minlength=n_e) > 0
    if same >= _MIN_OVERLAP:
        by_all &= ~have
    else:
        alike[:] = False
    return np.where(alike[e], known, by_all[e]), controls


def draw_reference_cells(
    source: ImageSource, rows: np.ndarray, codes: np.ndarray, used: np.ndarray, controls: np.ndarray | None = None
) -> ReferenceBatches:
    """Draw a sample of the reference cells, with at most the same number from each environment of a column.

    Parameters
    ----------
    source
        Inputs of all cells.
    rows
        Rows to draw from.
    codes, used, controls
        Codes of the environments and masks of the reference cells, for all cells, see :class:`Reference`.
    """
    rng, masks = np.random.default_rng(0), [used] if controls is None else [used, controls]
    drawn = [_draw_rows(rng, rows, codes, mask) for mask in masks]
    chosen = np.unique(np.concatenate(drawn))
    blocks = np.array_split(chosen, -(-len(chosen) // _BLOCK)) if len(chosen) else []
    kept = [mask[chosen] & np.isin(chosen, some)[:, None] for mask, some in zip(masks, drawn, strict=True)]
    return ReferenceBatches(lambda: (torch.from_numpy(source.read(block)) for block in blocks), codes[chosen], *kept)


def _draw_rows(rng: np.random.Generator, rows: np.ndarray, codes: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Draw rows from the reference cells of each column, at most the same number per environment."""
    drawn = [np.empty(0, dtype=np.int64)]
    for column, use in zip(codes.T, used.T, strict=True):
        usable = rng.permutation(rows[use[rows]])
        usable = usable[np.argsort(column[usable], kind="stable")]
        _, first, counts = np.unique(column[usable], return_index=True, return_counts=True)
        most = int(np.clip(_MAX_REFERENCE_CELLS // max(1, len(counts)), _MIN_PER_ENVIRONMENT, _MAX_PER_ENVIRONMENT))
        place = np.arange(len(usable)) - np.repeat(first, counts)
        drawn.append(usable[place < most])
    return np.concatenate(drawn)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=8)
