"""Environments that were inferred: whether they lie apart, and whether every perturbation in all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd.pl._looks import look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_CELLS = 5_000
_MOST_BARS = 30


def inferred_environments(found: Any, labels: pd.Series, *, seed: int = 0) -> np.ndarray:
    """Draw environments that were inferred, on the axes that tell them apart, and their share of each label.

    Groups that lie apart, each with a share of every perturbation, may be environments. Clouds that run into each
    other were cut somewhere. A bar of one colour is a perturbation that is found in one environment only: they are
    confounded, or the group is what the perturbation does to some of its cells.

    Parameters
    ----------
    found
        What :func:`scbd.data.infer_environments` returned.
    labels
        Perturbation of each cell; or another column of ``obs``, such as a date, to see what a group might be.
    seed
        Of which cells are drawn, where there are more than 5,000.

    Returns
    -------
    Two axes: cells, and a bar for each label, the 30 most frequent.

    Raises
    ------
    ValueError
        If there are not as many labels as cells.

    Examples
    --------
    >>> found = scbd.data.infer_environments(adata, "gene", n_environments=3)
    >>> cells, bars = scbd.pl.inferred_environments(found, adata.obs["gene"])
    """
    import matplotlib.pyplot as plt

    if len(labels) != len(found.labels):
        msg = f"There are {len(labels)} labels and {len(found.labels)} cells: each cell has one."
        raise ValueError(msg)
    values = pd.Series(np.asarray(labels).astype(str))
    environments = pd.Series(found.labels.to_numpy())
    frequent = values.value_counts().index[:_MOST_BARS]
    shares = pd.crosstab(values, environments, normalize="index").loc[np.sort(frequent)]
    height = max(3.2, 0.2 * len(shares) + 1)
    figure, (cells, bars) = plt.subplots(1, 2, figsize=(6.8, height), layout="constrained")
    drawn = np.random.default_rng(seed).permutation(len(environments))[:_MOST_CELLS]
    left = np.zeros(len(shares))
    for i, name in enumerate(found.labels.cat.categories):
        here = drawn[(environments.iloc[drawn] == name).to_numpy()]
        color, marker, _ = look(i)
        cells.scatter(*found.axes[here].T, s=6, color=color, marker=marker, alpha=0.6, lw=0, label=name)
        if name in shares:
            bars.barh(shares.index, shares[name], left=left, color=color)
            left += shares[name].to_numpy()
    cells.set(xlabel="first discriminant", ylabel="second discriminant", title=f"gain {found.gain:.2g} nats a cell")
    if len(found.labels.cat.categories) <= _MOST_BARS:
        _legend(cells)
    bars.set(xlabel="share of the cells", xlim=(0, 1))
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize="small")
    return np.array([cells, bars])


def _legend(ax: Axes) -> None:
    n = len(ax.get_legend_handles_labels()[1])
    ax.legend(frameon=False, fontsize="small", markerscale=2, ncols=1 + n // 8)
