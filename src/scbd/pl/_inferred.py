"""Environments that were inferred: whether they lie apart, and whether every perturbation in all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from scbd.pl._looks import legend_below, look
from scbd.pl._names import height_of, inches, names_beside

_MOST_CELLS = 5_000
_MOST_BARS = 30
# of the axes before they are there, what names of labels take
_NAMES = 0.8
# in points: of 30 long names, larger ones would make a figure of more than a page
_SMALL = 7


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
    known = np.asarray(pd.notna(labels))
    values = pd.Series(np.where(known, np.asarray(labels).astype(str), "missing"))
    environments = pd.Series(found.labels.to_numpy())
    frequent = values.value_counts().index[:_MOST_BARS]
    shares = pd.crosstab(values, environments, normalize="index").loc[np.sort(frequent)]
    figure, (cells, bars) = plt.subplots(1, 2, figsize=(6.8, 3.2), layout="constrained")
    needed = max(0.2 * len(shares), height_of(shares.index, _NAMES * inches(bars)[0], _SMALL))
    figure.set_figheight(max(3.2, needed + 1))
    places = np.arange(len(shares))
    drawn = np.random.default_rng(seed).permutation(len(environments))[:_MOST_CELLS]
    left = np.zeros(len(shares))
    for i, name in enumerate(found.labels.cat.categories):
        here = drawn[(environments.iloc[drawn] == name).to_numpy()]
        color, marker, _ = look(i)
        cells.scatter(*found.axes[here].T, s=6, color=color, marker=marker, alpha=0.6, lw=0, label=name)
        if name in shares:
            bars.barh(places, shares[name], left=left, color=color)
            left += shares[name].to_numpy()
    cells.set(xlabel="first discriminant", ylabel="second discriminant")
    cells.set_title(f"gain {found.gain:.2g} nats a cell", fontsize="medium")
    if len(found.labels.cat.categories) <= _MOST_BARS:
        figure.set_figheight(figure.get_figheight() + legend_below(cells, markerscale=2))
    n_labels = values.nunique()
    if n_labels > len(shares):
        bars.set_title(f"{len(shares)} most frequent of {n_labels}", fontsize="medium")
    bars.set(xlabel="share of the cells", xlim=(0, 1))
    bars.invert_yaxis()
    names_beside(bars, shares.index, _NAMES * inches(bars)[0])
    return np.array([cells, bars])
