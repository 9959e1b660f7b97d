"""What a report of several embeddings says, drawn: biology up, batch down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._measure_names import measure_name
from scbd.pl._looks import legend, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOR = "#0072B2"
_FEW = 7
# in inches, of a name in a legend
_NAME_HEIGHT = 0.2


def benchmark(
    frame: pd.DataFrame, *, biology: str | None = None, batch: str = "e_probe_f1", axes: np.ndarray | None = None
) -> np.ndarray:
    """Draw two panels, one column a representation: how much biology, and how much batch; what chance gives as a line.

    Parameters
    ----------
    frame
        From :func:`scbd.metrics.benchmark`. Each key of a representation (training seed) is a dot, their mean a bar
        across; a vertical line is the confidence interval, where the frame has one, of several keys on average.
    biology, batch
        Metrics of the panels. By default the first there is of the relationship area and the perturbation probe.
    axes
        Two axes to draw on.

    Returns
    -------
    The two axes.

    Raises
    ------
    ValueError
        If a metric is not in the frame.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> axes = scbd.pl.benchmark(frame, biology="y_probe_f1")
    """
    import matplotlib.pyplot as plt

    biology = _biology(frame, biology)
    rows = [_rows(frame, metric) for metric in (biology, batch)]
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(6.6, 3.6), layout="constrained")
    order = list(dict.fromkeys(frame["representation"]))
    for ax, own, better in zip(axes, rows, ("higher", "lower"), strict=True):
        _dots(ax, own, order)
        better = own["better"].iloc[0] if "better" in own else better
        title = f"{better} is better" if better else ""
        ax.set(ylabel=measure_name(own["metric"].iloc[0]), title=title, xlim=(-0.6, len(order) - 0.4))
        steep = 35 if len(order) <= _FEW else 70  # names of many would lie on each other
        ax.set_xticks(range(len(order)), order, rotation=steep, ha="right", rotation_mode="anchor")
        chance = own["chance"].mean() if "chance" in own else np.nan
        if np.isfinite(chance):
            ax.axhline(chance, ls="--", color="k", lw=1, label="chance")
            ax.legend(frameon=False)
    return axes


def biology_against_batch(
    frame: pd.DataFrame, *, biology: str | None = None, batch: str = "e_probe_f1", ax: Axes | None = None
) -> Axes:
    """Draw how much biology an embedding holds against how much batch, with lines where chance is.

    Parameters
    ----------
    frame
        From :func:`scbd.metrics.benchmark`. Each key of a representation (training seed) is a small dot, their mean a
        large one. Keys without one of the two metrics are left out.
    biology, batch
        Metrics of the two axes, see :func:`benchmark`.
    ax
        Axes to draw on.

    Returns
    -------
    The axes. Good embeddings are high, and near the line of chance of the batch.

    Raises
    ------
    ValueError
        If a metric is not in the frame, or no key has both.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> ax = scbd.pl.biology_against_batch(frame, biology="y_probe_f1", batch="e_probe_quadratic_f1")
    """
    import matplotlib.pyplot as plt

    biology = _biology(frame, biology)
    up, across = (_rows(frame, metric) for metric in (biology, batch))
    each = ["representation", "key"]  # one dot
    both = up[[*each, "value"]].merge(across[[*each, "value"]], on=each, suffixes=("_up", "_across"))
    if both.empty:
        msg = f"No embedding of the frame has both {biology!r} and {batch!r}: draw metrics that one of them has."
        raise ValueError(msg)
    names = [name for name in dict.fromkeys(frame["representation"]) if (both["representation"] == name).any()]
    if ax is None:
        _, ax = plt.subplots(figsize=(4.6, max(3.6, _NAME_HEIGHT * len(names) + 0.4)), layout="constrained")
    for i, name in enumerate(names):
        y, x = both.loc[both["representation"] == name, ["value_up", "value_across"]].to_numpy().T
        how = look(i)._replace(ls="")._asdict()
        if len(x) > 1:
            ax.plot(x, y, **how, ms=3, alpha=0.5)
        ax.plot(x.mean(), y.mean(), **how, ms=8, label=name)
    for rows, line in ((up, ax.axhline), (across, ax.axvline)):
        chance = rows["chance"].mean() if "chance" in rows else np.nan
        if np.isfinite(chance):
            line(chance, ls="--", color="0.5", lw=1)
    ax.set(xlabel=measure_name(batch), ylabel=measure_name(biology))
    legend(ax)
    return ax


def ranking(ranked: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw ranks of several embeddings as a table of colours.

    Parameters
    ----------
    ranked
        From :func:`scbd.metrics.rank`.
    ax
        Axes to draw on.

    Returns
    -------
    The axes.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> ax = scbd.pl.ranking(scbd.metrics.rank(frame))
    """
    import matplotlib.pyplot as plt

    values = ranked.to_numpy(dtype=float)
    if ax is None:
        _, ax = plt.subplots(figsize=(1.6 + 0.6 * values.shape[1], 1.9 + 0.32 * len(values)), layout="constrained")
    ax.imshow(values.clip(0, 1), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(values)):
        dark = values[row, column] > 0.6
        shown = f"{values[row, column]:.2f}"
        ax.text(column, row, shown, ha="center", va="center", fontsize="small", color="w" if dark else "k")
    names = [measure_name(str(column)) for column in ranked.columns]
    ax.set_xticks(range(len(names)), names, rotation=35, ha="left", rotation_mode="anchor")
    ax.set_yticks(range(len(ranked)), [str(name) for name in ranked.index])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def _dots(ax: Axes, rows: pd.DataFrame, order: list[str]) -> None:
    """A column a representation: runs, their mean, and the interval."""
    for place, name in enumerate(order):
        own = rows[rows["representation"] == name]
        if not len(own):
            continue
        x = place + (np.linspace(-0.12, 0.12, len(own)) if len(own) > 1 else np.zeros(1))
        ax.plot(x, own["value"], "o", ms=5, mfc="w", mec=_COLOR, zorder=3)
        ax.hlines(own["value"].mean(), place - 0.28, place + 0.28, color=_COLOR, lw=2)
        if "low" in own and own["low"].notna().all():
            ax.vlines(place, own["low"].mean(), own["high"].mean(), color=_COLOR, lw=1)


def _biology(frame: pd.DataFrame, metric: str | None) -> str:
    if metric is not None:
        return metric
    return "relationship_area" if (frame["metric"] == "relationship_area").any() else "y_probe_f1"


def _rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    if not (frame["metric"] == metric).any():
        msg = f"The frame has no metric {metric!r}; there are: {', '.join(frame['metric'].unique())}."
        raise ValueError(msg)
    return frame[frame["metric"] == metric]
