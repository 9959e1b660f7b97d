"""How sure is the profile of a perturbation: by the wells it was seen in, not by its cells."""

from __future__ import annotations

import logging
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd._linear_maps import label_means
from scbd._messages import head
from scbd.metrics._table import control_names, label_names, representation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)


def profile_uncertainty(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    y_key: str | Sequence[str],
    unit_key: str | Sequence[str],
    control: object | Sequence[object] | None = None,
    n_draws: int = 200,
    seed: int = 0,
) -> pd.DataFrame:
    r"""How far the mean embedding of each perturbation can be trusted.

    Cells of a well share what the well adds, so that a thousand cells of two wells are nearer to two observations than
    to a thousand. What is drawn again and again is therefore the unit, such as the well, with all of its cells
    (bootstrap). Deviations are widened, so that few units give no smaller error: by :math:`\sqrt{U / (U - 1)}` for U
    units of one size, and by more where one of them holds most of the cells. With ``control``, units of controls are
    drawn with them: what a plate adds to both is in no profile, and controls of two wells leave all profiles uncertain.
    Where a perturbation is in some of the units of controls only, the error is rather too large (a quarter, in 2 of 3).

    Parameters
    ----------
    adata
        Cells, or wells.
    rep
        Key of ``obsm``, or an array ``(N, D)``.
    y_key
        Column of ``obs`` with the perturbation, or several for their cross.
    unit_key
        Column with what is independent of each other: the well, the plate, the donor; or several for their cross.
    control
        Value or values of ``y_key`` whose mean is subtracted from all profiles; `None` subtracts nothing. Each draw has
        its own mean of controls.
    n_draws
        How often units are drawn.
    seed
        Seed of the draws.

    Returns
    -------
    A row a perturbation: ``n_cells``; ``n_units``; ``length`` of its profile, in the unit of the embedding;
    ``standard_error`` of the profile, likewise (the root of its summed variances); ``standard_error_of_cells``, as it
    would be if cells were independent; ``direction``, the mean cosine of a profile that was drawn again with the
    profile, 1 where all agree. With a single unit, of the perturbation or of all controls, error and direction are not
    known (NaN); nor are they, and that of cells, of the controls themselves.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If the embedding is not finite, a cell has no label, or no cell is a control.

    References
    ----------
    Efron (1979), Bootstrap methods: another look at the jackknife. Drawing whole clusters: Davison and Hinkley (1997),
    Bootstrap methods and their application.

    Examples
    --------
    >>> found = scbd.metrics.profile_uncertainty(adata, "X_scbd_c", y_key="gene", unit_key="well")
    >>> bool((found["standard_error"] > 0).all())
    True
    """
    check_count("n_draws", n_draws)
    x = representation(adata, rep)
    names, units = label_names(adata, y_key), pd.factorize(label_names(adata, unit_key))[0]
    is_control = np.zeros(len(names), dtype=bool)
    if control is not None:
        is_control = np.isin(names, control_names(control, names, y_key))
    controls = _Side.of(x[is_control], units[is_control]) if is_control.any() else None
    rng, rows = np.random.default_rng(seed), {}
    for name, cells in pd.Series(np.arange(len(names))).groupby(names, sort=True):
        own = cells.to_numpy()
        rows[name] = _of_profile(_Side.of(x[own], units[own]), controls, n_draws, rng, known=not is_control[own[0]])
    table = pd.DataFrame.from_dict(rows, orient="index")
    if controls is not None and len(controls.units) == 1:
        logger.warning("All controls are in one unit, so that no profile's error is known.")
    elif len(alone := table.index[(table["n_units"] == 1) & ~table.index.isin(names[is_control])]):
        logger.warning("%d perturbations are in one unit, and their error is not known (%s).", len(alone), head(alone))
    return table.rename_axis("perturbation").astype({"n_cells": int, "n_units": int})


class _Side(NamedTuple):
    """Cells of a perturbation, or controls, by the units that they are in."""

    mean: np.ndarray
    """Of all cells, ``(D,)``."""
    variance: float
    """Of the mean, summed over D, as if cells were independent."""
    units: np.ndarray
    """Their codes, sorted, ``(U,)``."""
    means: np.ndarray
    """``(U, D)``."""
    counts: np.ndarray
    """Cells of each unit, ``(U,)``."""

    @classmethod
    def of(cls, values: np.ndarray, units: np.ndarray) -> _Side:
        _, means, counts = label_means(values, units)
        spread = float(values.var(0, ddof=1, dtype=np.float64).sum()) if len(values) > 1 else np.nan
        return cls(values.mean(0, dtype=np.float64), spread / len(values), np.unique(units), means, counts)

    def deviations(self, drawn: np.ndarray) -> np.ndarray:
        """From its mean, of the mean in each draw of how often each of its units is in it: ``(B, U)`` to ``(B, D)``.

        Widened such that the variance is without bias where units vary independently of their size: the mean moves by
        what the shares of units do, and varies by the shares themselves.
        """
        weights, shares = drawn * self.counts, self.counts / self.counts.sum()
        moved = weights / weights.sum(1, keepdims=True) - shares
        seen = np.square(moved).sum(1).mean() / np.square(shares).sum()
        return moved @ self.means / np.sqrt(seen or 1)  # 0 if each draw has each unit once


def _of_profile(
    own: _Side, controls: _Side | None, n_draws: int, rng: np.random.Generator, *, known: bool
) -> dict[str, float]:
    """A row of the table; ``known`` is false of controls, which have no profile of their own."""
    sides = [own] if controls is None else [own, controls]
    profile = own.mean if controls is None else own.mean - controls.mean
    length = float(np.linalg.norm(profile))
    error = direction = np.nan
    if known and all(len(side.units) > 1 for side in sides):
        parts = [side.deviations(drawn) for side, drawn in zip(sides, _drawn(sides, n_draws, rng), strict=True)]
        moved = parts[0] if controls is None else parts[0] - parts[1]
        error = float(np.sqrt((moved**2).sum(1).mean()))
        again = profile + moved
        direction = float(np.mean(again @ profile / (np.linalg.norm(again, axis=1) * length))) if length > 0 else 0.0
    return {
        "n_cells": own.counts.sum(),
        "n_units": len(own.units),
        "length": length,
        "standard_error": error,
        "standard_error_of_cells": float(np.sqrt(sum(side.variance for side in sides))) if known else np.nan,
        "direction": direction,
    }


def _drawn(sides: list[_Side], n_draws: int, rng: np.random.Generator) -> list[np.ndarray]:
    """How often each unit of each side is in a draw of all, ``(n_draws, U)`` each; a unit of two sides is one."""
    units = reduce(np.union1d, (side.units for side in sides))
    columns = [np.searchsorted(units, side.units) for side in sides]
    share, kept = np.full(len(units), 1 / len(units)), np.empty((0, len(units)), dtype=np.int64)
    while len(kept) < n_draws:  # of draws in which no side is empty
        drawn = rng.multinomial(len(units), share, size=n_draws)
        kept = np.concatenate([kept, drawn[np.all([drawn[:, of].any(1) for of in columns], axis=0)]])
    return [kept[:n_draws, of] for of in columns]
