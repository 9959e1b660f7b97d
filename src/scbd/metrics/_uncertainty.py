"""How sure is the profile of a perturbation: by the wells it was seen in, not by its cells."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

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
    (bootstrap). Deviations are widened by :math:`\sqrt{U / (U - 1)}` for U units, so that few units give no smaller
    error.

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
        Value or values of ``y_key`` whose mean is subtracted from all profiles; `None` subtracts nothing.
    n_draws
        How often units are drawn.
    seed
        Seed of the draws.

    Returns
    -------
    A row a perturbation: ``n_cells``; ``n_units``; ``length`` of its profile, in the unit of the embedding;
    ``standard_error`` of the profile, likewise (the root of its summed variances); ``standard_error_of_cells``, as it
    would be if cells were independent; ``direction``, the mean cosine of a profile that was drawn again with the
    profile, 1 where all agree. With a single unit, error and direction are not known (NaN).

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
    names, units = label_names(adata, y_key), label_names(adata, unit_key)
    centre = np.zeros(x.shape[1])
    if control is not None:
        centre = x[np.isin(names, control_names(control, names, y_key))].mean(0, dtype=np.float64)
    unit_codes = pd.factorize(units)[0]
    rng, rows, alone = np.random.default_rng(seed), {}, []
    for name, cells in pd.Series(np.arange(len(names))).groupby(names, sort=True):
        own = cells.to_numpy()
        rows[name] = _of_profile(x[own] - centre, unit_codes[own], n_draws, rng)
        if rows[name]["n_units"] == 1:
            alone.append(name)
    if alone:
        logger.warning("%d perturbations are in one unit, and their error is not known (%s).", len(alone), head(alone))
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table.rename_axis("perturbation").astype({"n_cells": int, "n_units": int})


def _of_profile(values: np.ndarray, units: np.ndarray, n_draws: int, rng: np.random.Generator) -> dict[str, float]:
    """Of the cells ``(N, D)`` of one perturbation, with the code of each one's unit."""
    codes, means, counts = label_means(values, units)
    n_cells, n_units = len(codes), len(counts)
    profile = values.mean(0, dtype=np.float64)
    length = float(np.linalg.norm(profile))
    found = {"n_cells": n_cells, "n_units": n_units, "length": length}
    spread = float(values.var(0, ddof=1, dtype=np.float64).sum()) if n_cells > 1 else np.nan
    error = direction = np.nan
    if n_units > 1:
        drawn = rng.multinomial(n_units, np.full(n_units, 1 / n_units), size=n_draws) * counts
        moved = drawn / drawn.sum(1, keepdims=True) @ means - profile
        moved *= np.sqrt(n_units / (n_units - 1))
        error = float(np.sqrt((moved**2).sum(1).mean()))
        again = profile + moved
        direction = float(np.mean(again @ profile / (np.linalg.norm(again, axis=1) * length))) if length > 0 else 0.0
    return found | {
        "standard_error": error,
        "standard_error_of_cells": float(np.sqrt(spread / n_cells)),
        "direction": direction,
    }
