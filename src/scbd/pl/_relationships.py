"""What is known of genes, and found in an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.pl._looks import legend, look
from scbd.pl._names import height_of, inches, names_beside, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

# of the axes before they are there, what names of complexes take
_NAMES = 0.7


def relationship_curve(
    curves: pd.DataFrame | Mapping[str, pd.DataFrame], *, prevalence: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw precision against recall of known relations.

    Parameters
    ----------
    curves
        From :func:`scbd.metrics.relationship_curve`, one or several by name.
    prevalence
        Fraction of pairs that are related, drawn as a line: the precision without information.
    ax
        Axes to draw on.

    Returns
    -------
    The axes.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> curve = scbd.metrics.relationship_curve(profiles, net)
    >>> ax = scbd.pl.relationship_curve({"z_c": curve})
    """
    import matplotlib.pyplot as plt

    if isinstance(curves, pd.DataFrame):
        curves = {"": curves}
    own = ax is None
    if ax is None:
        _, ax = plt.subplots(figsize=(4.6, 3.6), layout="constrained")
    for i, (name, curve) in enumerate(curves.items()):
        ax.plot(curve["recall"], curve["precision"], **look(i)._asdict(), ms=3, label=name or None)
    if prevalence is not None:
        ax.axhline(prevalence, color="0.5", lw=1, label="no information")
    ax.set(xlabel="recall", ylabel="precision", ylim=(0, None))
    legend(ax, own=own)
    return ax


def complexes(table: pd.DataFrame, *, n: int = 20, ax: Axes | None = None) -> Axes:
    """Draw the mean cosine of the complexes that are found most clearly.

    Parameters
    ----------
    table
        From :func:`scbd.metrics.complex_table`.
    n
        How many.
    ax
        Axes to draw on.

    Returns
    -------
    The axes. Filled: false discovery rate below 5 %.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> table = scbd.metrics.complex_table(profiles, net, n_permutations=50)
    >>> ax = scbd.pl.complexes(table)
    """
    import matplotlib.pyplot as plt

    shown = table.head(n).iloc[::-1]
    names = [f"{name} ({size})" for name, size in zip(shown.index.astype(str), shown["size"], strict=True)]
    if ax is None:
        _, ax = plt.subplots(figsize=(6.5, 1), layout="constrained")
        needed = max(0.28 * len(shown), height_of(names, _NAMES * inches(ax)[0]))
        ax.figure.set_figheight(needed + 1)  # type: ignore[union-attr]
    found = (shown["fdr"] < 0.05).to_numpy()
    places = np.arange(len(names))  # names may be alike
    ax.hlines(places, 0, shown["mean_cosine"], color="0.7")
    names_beside(ax, names, _NAMES * inches(ax)[0])
    ax.scatter(
        shown["mean_cosine"], places, c=np.where(found, "#0072B2", "w"), edgecolors="#0072B2", zorder=3, clip_on=False
    )
    ax.set(xlim=(min(0, shown["mean_cosine"].min()), 1))
    ax.set_xlabel(wrapped("mean cosine between its genes", 0.5 * inches(ax)[0]))
    ax.set_ylim(-0.5, max(len(names), 1) - 0.5)  # a line for each, however few there are
    return ax
