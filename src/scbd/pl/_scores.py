"""Plots of scores of embeddings, which are computed by functions of ``scbd.metrics``.

They show benchmarks, ranks, the variance explained by factors, and recovered gene relations and protein complexes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd.metrics._benchmark import score_title
from scbd.pl._style import COLORS, NARROW_WIDTH, add_legend, figure_size, names_height, series_style, wrap_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

_VARIANCE_COLUMNS = ["representation", "key", "factor", "share", "chance", "alone"]
# Height of all lines of a factor together, as a fraction of the distance between two factors, in the plot of explained
# variance. In this plot, each factor has one line per embedding.
_FACTOR_HEIGHT = 0.7


def benchmark(
    frame: pd.DataFrame, *, biology: str | None = None, batch: str = "e_probe_f1", axes: np.ndarray | None = None
) -> np.ndarray:
    """Draw scores of a benchmark in two panels: one score of biological signal, and one score of batch effects.

    Each representation, such as z_c, is drawn at its own height. It can have several ``obsm`` keys, such as one per
    training seed: each key is a dot, and the mean over keys is a vertical bar. A horizontal line is the 95 % confidence
    interval (averaged over keys), if the frame has one. A dashed line is the score that is expected of an embedding
    without information.

    Parameters
    ----------
    frame
        Result of :func:`scbd.metrics.benchmark`.
    biology
        Metric of the first panel. Default: ``"relationship_area"`` if the frame has it, otherwise ``"y_probe_f1"``.
    batch
        Metric of the second panel.
    axes
        Two axes to draw on. Default: axes of a new figure.

    Returns
    -------
    Array of the two axes.

    Raises
    ------
    ValueError
        If the frame lacks a metric, or ``axes`` does not hold two axes.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> axes = scbd.pl.benchmark(frame, biology="y_probe_f1")
    """
    import matplotlib.pyplot as plt

    rows = _rows_of_metrics(frame, biology, batch)
    order = list(dict.fromkeys(frame["representation"]))
    names = [wrap_name(name, NARROW_WIDTH) for name in order]
    if axes is None:
        size = (6.6, max(2.4, names_height(names) + 1))
        _, axes = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    axes = np.ravel(axes)
    if len(axes) != 2:
        msg = f"axes holds {len(axes)} axes: give two, one for each metric."
        raise ValueError(msg)
    for ax, own, better in zip(axes, rows, ("higher", "lower"), strict=True):
        _draw_scores(ax, own, order)
        better = own["better"].iloc[0] if "better" in own else better
        ax.set_title(f"{better} is better" if better else "", fontsize="small")
        if np.isfinite(chance := _chance(own)):
            ax.axvline(chance, ls="--", color="k", lw=1, label="chance")
            add_legend(ax)
        ax.set(xlabel=wrap_name(score_title(own["metric"].iloc[0]), 14), ylim=(len(order) - 0.5, -0.5))
        ax.locator_params(axis="x", nbins=3)
        ax.tick_params(labelsize="small")
        ax.set_yticks(range(len(names)), names, fontsize="small")
    return axes


def biology_against_batch(
    frame: pd.DataFrame, *, biology: str | None = None, batch: str = "e_probe_f1", ax: Axes | None = None
) -> Axes:
    """Draw a score of biological signal against a score of batch effects, with one kind of marker per representation.

    A representation, such as z_c, can have several ``obsm`` keys, such as one per training seed: each key is a small
    marker, and the mean over keys is a large one. Keys that lack one of the two scores are not drawn. Dashed lines are
    the scores that are expected of an embedding without information. A good embedding has a high score of biological
    signal, and a score of batch effects close to its dashed line.

    Parameters
    ----------
    frame
        Result of :func:`scbd.metrics.benchmark`.
    biology, batch
        Metrics of the vertical and of the horizontal axis, see :func:`benchmark`.
    ax
        Axes to draw on. Default: axes of a new figure.

    Returns
    -------
    The axes.

    Raises
    ------
    ValueError
        If the frame lacks a metric, or no key has scores in both metrics.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> ax = scbd.pl.biology_against_batch(frame, biology="y_probe_f1", batch="e_probe_quadratic_f1")
    """
    up, across = _rows_of_metrics(frame, biology, batch)
    biology = up["metric"].iloc[0]
    # Each obsm key of a representation, such as the key of one training seed, is drawn as one small marker.
    each = ["representation", "key"]
    both = up[[*each, "value"]].merge(across[[*each, "value"]], on=each, suffixes=("_up", "_across")).dropna()
    if both.empty:
        msg = f"No embedding of the frame has both {biology!r} and {batch!r}: draw metrics that one of them has."
        raise ValueError(msg)
    names = [name for name in dict.fromkeys(frame["representation"]) if (both["representation"] == name).any()]
    ax = _new_axes(figure_size(names)) if ax is None else ax
    for i, name in enumerate(names):
        y, x = both.loc[both["representation"] == name, ["value_up", "value_across"]].to_numpy().T
        how = series_style(i) | {"ls": ""}
        if len(x) > 1:
            ax.plot(x, y, **how, ms=3, alpha=0.5)
        ax.plot(x.mean(), y.mean(), **how, ms=8, label=wrap_name(name, NARROW_WIDTH))
    for rows, line in ((up, ax.axhline), (across, ax.axvline)):
        if np.isfinite(chance := _chance(rows)):
            line(chance, ls="--", color="0.5", lw=1)
    ax.set(xlabel=wrap_name(score_title(batch)), ylabel=wrap_name(score_title(biology)))
    ax.locator_params(nbins=3)
    add_legend(ax)
    return ax


def ranking(ranked: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw a table of the ranks of several embeddings, with numbers and colours.

    Cells of the table without a score are blank.

    Parameters
    ----------
    ranked
        Result of :func:`scbd.metrics.rank`.
    ax
        Axes to draw on. Default: axes of a new figure.

    Returns
    -------
    The axes.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> ax = scbd.pl.ranking(scbd.metrics.rank(frame))
    """
    values = ranked.to_numpy(dtype=float)
    columns = [wrap_name(score_title(str(column))) for column in ranked.columns]
    names = [wrap_name(name) for name in ranked.index]
    ax = _new_axes((0.5 * len(columns) + 2.4, names_height(names) + 1.8)) if ax is None else ax
    ax.imshow(values.clip(0, 1), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(values)):
        shade = "w" if values[row, column] > 0.6 else "k"
        ax.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize="small", color=shade)
    ax.set_xticks(range(len(columns)), columns, fontsize="small", rotation=90)
    ax.set_yticks(range(len(names)), names, fontsize="small")
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def variance(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the fraction of an embedding's variance that each factor, such as the well, explains.

    One or several embeddings (representations) are drawn for each factor:

    - filled markers: fraction of the variance that the factor explains;
    - hollow markers: fraction that only this factor explains, and no other factor;
    - short black lines: fraction that the factor would explain if its values were permuted (chance).

    If a representation has several ``obsm`` keys, such as one per training seed, markers and lines are means over keys,
    and small black dots are the fractions of single keys.

    Parameters
    ----------
    table
        Result of :func:`scbd.metrics.variance_table`.
    ax
        Axes to draw on. Default: axes of a new figure.

    Returns
    -------
    The axes.

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
    missing = [column for column in _VARIANCE_COLUMNS if column not in table]
    if missing or table.empty:
        what = f"lacks {', '.join(missing)}" if missing else "is empty"
        msg = f"The table {what}: give what scbd.metrics.variance_table returns."
        raise ValueError(msg)
    factors, names = (list(dict.fromkeys(table[column])) for column in ("factor", "representation"))
    lines = [wrap_name(factor, NARROW_WIDTH) for factor in factors]
    if ax is None:
        # The legend is drawn to the right of the axes, and needs this height in inches.
        beside = 0.5 + names_height([wrap_name(name, NARROW_WIDTH) for name in names])
        ax = _new_axes((6.8, 1 + max(beside, names_height(lines, max(0.4, 0.16 * len(names))))))
    place = {factor: i for i, factor in enumerate(factors)}
    for i, name in enumerate(names):
        mine, style = table[table["representation"] == name], series_style(i) | {"ls": "", "clip_on": False}
        mean = mine.groupby("factor", sort=False)[["share", "chance", "alone"]].mean()
        y = np.array([place[factor] for factor in mean.index]) + _FACTOR_HEIGHT * ((i + 0.5) / len(names) - 0.5)
        ax.hlines(y, 0, mean["share"], color=style["color"], lw=1, alpha=0.5)
        ax.plot(mean["share"], y, **style, ms=4, label=wrap_name(name, NARROW_WIDTH))
        ax.plot(mean["alone"], y, **style, ms=8, mfc="none")
        ax.plot(mean["chance"], y, ls="", marker="|", ms=9, mew=1.5, color="k", zorder=4)
        if mine["key"].nunique() > 1:
            at = dict(zip(mean.index, y, strict=True))
            ax.plot(mine["share"], mine["factor"].map(at), ls="", marker=".", ms=2, color="k", zorder=4)
    ax.plot([], [], ls="", marker="o", ms=8, mfc="none", color="0.4", label="alone")
    ax.plot([], [], ls="", marker="|", ms=9, mew=1.5, color="k", label="chance")
    ax.set(xlabel="share of\nthe variance", xlim=(0, None), ylim=(len(factors) - 0.5, -0.5))
    ax.set_yticks(range(len(lines)), lines, fontsize="small")
    ax.locator_params(axis="x", nbins=4)
    for border in range(1, len(factors)):
        ax.axhline(border - 0.5, color="0.9", lw=0.8, zorder=0)
    # The legend is drawn to the right of the axes, because it would cover markers inside the axes.
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def relationship_curve(
    curves: pd.DataFrame | Mapping[str, pd.DataFrame], *, prevalence: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw precision against recall of known relations between perturbations, such as genes of one protein complex.

    Parameters
    ----------
    curves
        Result of :func:`scbd.metrics.relationship_curve`, or a mapping from the names of embeddings to such results.
    prevalence
        Fraction of all pairs of perturbations that are related. It is the precision of an embedding without
        information, and is drawn as a line.
    ax
        Axes to draw on. Default: axes of a new figure.

    Returns
    -------
    The axes.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> curve = scbd.metrics.relationship_curve(profiles, net)
    >>> ax = scbd.pl.relationship_curve({"z_c": curve})
    """
    curves = {"": curves} if isinstance(curves, pd.DataFrame) else curves
    ax = _new_axes(figure_size(list(curves))) if ax is None else ax
    for i, (name, curve) in enumerate(curves.items()):
        label = wrap_name(name, NARROW_WIDTH) or None
        ax.plot(curve["recall"], curve["precision"], **series_style(i), ms=3, label=label)
    if prevalence is not None:
        ax.axhline(prevalence, color="0.5", lw=1, label="no information")
    ax.set(xlabel="recall", ylabel="precision", ylim=(0, None))
    ax.locator_params(nbins=3)
    add_legend(ax)
    return ax


def complexes(table: pd.DataFrame, *, n: int = 20, ax: Axes | None = None) -> Axes:
    """Draw the mean cosine similarity between the genes of each protein complex, for the most significant complexes.

    The marker of a complex is filled if its false discovery rate is below 5 %.

    Parameters
    ----------
    table
        Result of :func:`scbd.metrics.complex_table`, whose first rows are the most significant complexes.
    n
        Maximum number of complexes to draw.
    ax
        Axes to draw on. Default: axes of a new figure.

    Returns
    -------
    The axes.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> table = scbd.metrics.complex_table(profiles, net, n_permutations=50)
    >>> ax = scbd.pl.complexes(table)
    """
    shown = table.head(n).iloc[::-1]
    names = [wrap_name(f"{name} ({size})", 28) for name, size in zip(shown.index, shown["size"], strict=True)]
    ax = _new_axes((6.5, names_height(names) + 1)) if ax is None else ax
    # Complexes are placed by their numbers, because matplotlib would draw complexes with equal names at one place.
    places = np.arange(len(names))
    shades = np.where(shown["fdr"] < 0.05, COLORS[0], "w")
    ax.hlines(places, 0, shown["mean_cosine"], color="0.7")
    ax.scatter(shown["mean_cosine"], places, c=shades, edgecolors=COLORS[0], zorder=3, clip_on=False)
    ax.set_yticks(places, names, fontsize="small")
    ax.set(xlim=(min(0, shown["mean_cosine"].min()), 1), xlabel="mean cosine\nbetween its genes")
    # The vertical axis extends half a line above the first complex and below the last one.
    ax.set_ylim(-0.5, max(len(names), 1) - 0.5)
    return ax


def _new_axes(size: tuple[float, float]) -> Axes:
    """Return the axes of a new matplotlib figure; ``size`` is its width and height in inches."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def _draw_scores(ax: Axes, rows: pd.DataFrame, order: list[str]) -> None:
    """Draw the scores of several representations on one panel, one line per representation.

    The line of a representation holds a dot for each of its ``obsm`` keys, the mean over keys, and the confidence
    interval.
    """
    for place, name in enumerate(order):
        own = rows[rows["representation"] == name]
        if not len(own):
            continue
        y = place + (np.linspace(-0.12, 0.12, len(own)) if len(own) > 1 else np.zeros(1))
        ax.plot(own["value"], y, "o", ms=4, mfc="w", mec=COLORS[0], zorder=3)
        ax.vlines(own["value"].mean(), place - 0.28, place + 0.28, color=COLORS[0], lw=2)
        if "low" in own and own["low"].notna().all():
            ax.hlines(place, own["low"].mean(), own["high"].mean(), color=COLORS[0], lw=1)


def _chance(rows: pd.DataFrame) -> float:
    return rows["chance"].mean() if "chance" in rows else np.nan


def _rows_of_metrics(frame: pd.DataFrame, biology: str | None, batch: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of a benchmark with the metrics ``biology`` (`None` for the default) and ``batch``."""
    if biology is None:
        biology = "relationship_area" if (frame["metric"] == "relationship_area").any() else "y_probe_f1"
    for metric in (biology, batch):
        if not (frame["metric"] == metric).any():
            msg = f"The frame has no metric {metric!r}; there are: {', '.join(frame['metric'].unique())}."
            raise ValueError(msg)
    return frame[frame["metric"] == biology], frame[frame["metric"] == batch]
