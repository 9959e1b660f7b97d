"""What explains an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd.pl._looks import legend_below, look
from scbd.pl._names import height_of, inches, names_beside

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_COLUMNS = ["representation", "key", "factor", "share", "chance", "alone"]
# of the space between two factors, that all representations take
_HEIGHT = 0.7
# of the axes before they are there, what names of factors take
_NAMES = 0.5


def variance(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw which share of its variance each factor explains, of one embedding or several.

    Parameters
    ----------
    table
        From :func:`scbd.metrics.variance_table`. Of several keys of a representation (training seeds), large marks are
        means, and small dots the keys.
    ax
        Axes to draw on.

    Returns
    -------
    The axes. Filled marks are shares; hollow ones what the factor alone explains, and no other; black lines what
    permuted labels would explain.

    Raises
    ------
    ValueError
        If the table is empty, or lacks a column.

    Examples
    --------
    >>> factors = {"well": "well", "perturbation": "gene"}
    >>> table = scbd.metrics.variance_table(adata, {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}, factors)
    >>> ax = scbd.pl.variance(table)
    """
    import matplotlib.pyplot as plt

    missing = [column for column in _COLUMNS if column not in table]
    if missing or table.empty:
        what = f"lacks {', '.join(missing)}" if missing else "is empty"
        msg = f"The table {what}: give what scbd.metrics.variance_table returns."
        raise ValueError(msg)
    factors, names = (list(dict.fromkeys(table[column])) for column in ("factor", "representation"))
    own = ax is None
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 1), layout="constrained")
        lines = max(len(factors) * max(0.4, 0.16 * len(names)), height_of(factors, _NAMES * inches(ax)[0]))
        ax.figure.set_figheight(0.8 + lines)  # type: ignore[union-attr]
    place = {factor: i for i, factor in enumerate(factors)}
    for i, name in enumerate(names):
        mine, (color, marker, _) = table[table["representation"] == name], look(i)
        mean = mine.groupby("factor", sort=False)[["share", "chance", "alone"]].mean()
        y = np.array([place[factor] for factor in mean.index]) + _HEIGHT * ((i + 0.5) / len(names) - 0.5)
        ax.hlines(y, 0, mean["share"], color=color, lw=1, alpha=0.5)
        ax.plot(mean["share"], y, ls="", marker=marker, ms=4, color=color, label=name, clip_on=False)
        ax.plot(mean["alone"], y, ls="", marker=marker, ms=8, mfc="none", color=color, clip_on=False)
        ax.plot(mean["chance"], y, ls="", marker="|", ms=9, mew=1.5, color="k", zorder=4)
        if mine["key"].nunique() > 1:
            at = dict(zip(mean.index, y, strict=True))
            ax.plot(mine["share"], mine["factor"].map(at), ls="", marker=".", ms=2, color="k", zorder=4)
    ax.plot([], [], ls="", marker="o", ms=8, mfc="none", color="0.4", label="alone")
    ax.plot([], [], ls="", marker="|", ms=9, mew=1.5, color="k", label="chance")
    ax.set(xlabel="share of the variance", xlim=(0, None))
    names_beside(ax, factors, _NAMES * inches(ax)[0])
    ax.set_ylim(len(factors) - 0.5, -0.5)  # the first on top
    for border in range(1, len(factors)):
        ax.axhline(border - 0.5, color="0.9", lw=0.8, zorder=0)
    below = legend_below(ax, share=1 - _NAMES)  # on the axes, it would lie on the marks
    if own:
        ax.figure.set_figheight(ax.figure.get_figheight() + below)  # type: ignore[union-attr]
    return ax
