"""Which plates or wells to look at first: those whose cells look unlike those of the others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import median_abs_deviation

from scbd._linear_maps import label_means
from scbd.metrics._table import control_names, label_names, representation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

# from fewer, no scatter of distances can be told
_LEAST = 4
# of the largest value: what lies no farther apart is alike
_ROUNDING = 1e-12


def odd_environments(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    e_key: str | Sequence[str],
    y_key: str | Sequence[str] | None = None,
    control: object | Sequence[object] | None = None,
) -> pd.DataFrame:
    r"""How far each environment stands from all others, the oddest first.

    The distance is that of the mean of its cells from the median, component by component, of the means of the other
    environments, less what so few cells are away by chance (squares are subtracted); it is negative where they are
    nearer than chance alone puts them, as about half of many environments are if none differs, and few of a few. The
    score compares distances with each other: :math:`(d - \mathrm{median}) / (1.4826\, \mathrm{MAD})`. Plates differ in
    clusters, so that scores of 5 or 10 are common, and there is no threshold: look at the images of the first rows.
    What chance adds is subtracted on average, and scatters the more the fewer cells there are: an environment of a
    few cells beside large ones may come first without being odd (see ``n_cells``).

    Give it r_c (``get_latent_representation(representation="intermediate")``). z_s is of no use here: it puts a well
    that it has never seen near one that it has (:doc:`/archive/lab_book`, 40).

    Parameters
    ----------
    adata
        Cells of four environments at least.
    rep
        Key of ``obsm``, or an array ``(N, D)``.
    e_key
        Column of ``obs`` with the environment, or several for their cross.
    y_key, control
        Column with the perturbation, and its value or values for controls: these alone are looked at, so that a plate
        is not odd for what was done to its cells. All cells by default.

    Returns
    -------
    A row an environment: ``n_cells`` (that are looked at), ``distance`` (in the unit of the embedding), ``score``.
    Environments of which fewer than two cells are looked at, such as plates without controls, come last; their distance
    and score are NaN, and it is logged that there are any.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If the embedding is not finite, a cell has no label, no cell is a control, there are fewer than four
        environments with two of the cells that are looked at, or ``control`` is given without ``y_key``.

    Examples
    --------
    >>> r = model.get_latent_representation(representation="intermediate")
    >>> scbd.metrics.odd_environments(adata, r, e_key="well").columns.tolist()
    ['n_cells', 'distance', 'score']
    """
    if (y_key is None) != (control is None):
        msg = "y_key and control go together: the column of the perturbation, and its value for controls."
        raise ValueError(msg)
    x, names = representation(adata, rep), label_names(adata, e_key)
    environments = np.unique(names)
    if y_key is not None:
        labels = label_names(adata, y_key)
        kept = np.isin(labels, control_names(control, labels, y_key))
        x, names = x[kept], names[kept]
    codes, means, counts = label_means(x, names)
    told = np.flatnonzero(counts > 1)
    if len(told) < _LEAST:
        msg = (
            f"{len(told)} environments have two cells to look at, and which of them is odd is told from {_LEAST} on: "
            "give more environments, or look at all cells (control=None)."
        )
        raise ValueError(msg)
    squares = np.bincount(codes, weights=np.square(x - means[codes]).sum(1))
    error = squares / np.maximum(counts - 1, 1) / counts
    distances = np.empty(len(told))
    for place, code in enumerate(told):
        others = np.median(means[told[told != code]], axis=0)
        square = np.square(means[code] - others).sum() - error[code]
        # signed: were half of them cut off at 0, these would have no scatter to compare with
        distances[place] = np.sign(square) * np.sqrt(abs(square))
    frame = pd.DataFrame({"distance": distances, "score": _robust_scores(distances, _ROUNDING * np.abs(x).max())})
    frame = frame.set_axis(np.unique(names)[told]).reindex(environments).rename_axis("environment")
    frame.insert(0, "n_cells", pd.Series(names).value_counts().reindex(environments, fill_value=0).to_numpy())
    if n_untold := len(environments) - len(told):
        logger.warning(
            "%d of %d environments have fewer than two cells to look at: their score is NaN.",
            n_untold,
            len(environments),
        )
    return frame.sort_values("distance", ascending=False, kind="stable")  # and so by score


def _robust_scores(distances: np.ndarray, least: float) -> np.ndarray:
    """How many robust standard deviations each is beyond the median; what is no more than ``least`` away is at 0."""
    away = distances - np.median(distances)
    scatter = max(median_abs_deviation(distances, scale="normal"), least)
    return np.divide(away, scatter, out=np.zeros_like(away), where=np.abs(away) > least)
