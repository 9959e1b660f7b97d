"""What a report of several embeddings says, drawn: biology up, batch down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._measure_names import measure_name
from scbd.pl._looks import legend, look
from scbd.pl._names import CHARACTER, LARGEST, POINTS, height_of, inches, names_below, names_beside, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOR = "#0072B2"
# of the axes before they are there: what names of embeddings take of a panel of two, and of the table of ranks
_BESIDE_PANELS, _BESIDE_RANKS = 0.85, 0.55
# and what is left of a panel, and of each side of the table
_PANEL, _TABLE = 0.75, 0.7
# in inches, of a number below an axis, of a rank, and of the names above the ranks
_NUMBER, _RANK, _ABOVE = 0.5, 0.5, 1.6
# characters of a rank, and a space
_SHOWN = 5


def benchmark(
    frame: pd.DataFrame, *, biology: str | None = None, batch: str = "e_probe_f1", axes: np.ndarray | None = None
) -> np.ndarray:
    """Draw two panels, one line a representation: how much biology, and how much batch; what chance gives dashed.

    Parameters
    ----------
    frame
        From :func:`scbd.metrics.benchmark`. Each key of a representation (training seed) is a dot, their mean an
        upright bar; a line across is the confidence interval, where the frame has one, of several keys on average.
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
        If a metric is not in the frame, or axes are not two.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> axes = scbd.pl.benchmark(frame, biology="y_probe_f1")
    """
    import matplotlib.pyplot as plt

    biology = _biology(frame, biology)
    rows = [_rows(frame, metric) for metric in (biology, batch)]
    order = list(dict.fromkeys(frame["representation"]))
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(6.6, 2.4), layout="constrained")
        needed = height_of(order, _BESIDE_PANELS * inches(axes[0])[0])
        axes[0].figure.set_figheight(max(2.4, needed + 0.8))
    axes = np.ravel(axes)
    if len(axes) != 2:
        msg = f"axes holds {len(axes)} axes: give two, one for each metric."
        raise ValueError(msg)
    for ax, own, better in zip(axes, rows, ("higher", "lower"), strict=True):
        _dots(ax, own, order)
        width = inches(ax)[0]
        better = own["better"].iloc[0] if "better" in own else better
        chance = own["chance"].mean() if "chance" in own else np.nan
        said = [f"{better} is better"] if better else []
        if np.isfinite(chance):
            ax.axvline(chance, ls="--", color="k", lw=1)
            said.append("dashed: chance")
        panel = _PANEL * width
        ax.set_title("\n".join(wrapped(words, panel, LARGEST) for words in said), fontsize=LARGEST)
        ax.set(xlabel=wrapped(measure_name(own["metric"].iloc[0]), panel), ylim=(len(order) - 0.5, -0.5))
        ax.locator_params(axis="x", nbins=max(int(panel / _NUMBER), 1))
        ax.tick_params(axis="x", labelsize="small")
        names_beside(ax, order, _BESIDE_PANELS * width)
    # panels that stand beside each other share the names
    if np.isclose(*(ax.get_window_extent().y0 for ax in axes)):
        axes[1].tick_params(axis="y", labelleft=False)
    return axes


def biology_against_batch(
    frame: pd.DataFrame, *, biology: str | None = None, batch: str = "e_probe_f1", ax: Axes | None = None
) -> Axes:
    """Draw how much biology an embedding holds against how much batch, with lines where chance is.

    Parameters
    ----------
    frame
        From :func:`scbd.metrics.benchmark`. Each key of a representation (training seed) is a small dot, their mean a
        large one. Keys without a score in one of the two metrics are left out.
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
    both = up[[*each, "value"]].merge(across[[*each, "value"]], on=each, suffixes=("_up", "_across")).dropna()
    if both.empty:
        msg = f"No embedding of the frame has both {biology!r} and {batch!r}: draw metrics that one of them has."
        raise ValueError(msg)
    names = [name for name in dict.fromkeys(frame["representation"]) if (both["representation"] == name).any()]
    own = ax is None
    if ax is None:
        _, ax = plt.subplots(figsize=(4.6, 3.6), layout="constrained")
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
    width, height = inches(ax)
    ax.set_xlabel(wrapped(measure_name(batch), width))
    ax.set_ylabel(wrapped(measure_name(biology), height - legend(ax, own=own)))
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
    The axes. A score that is missing leaves its place empty.

    Examples
    --------
    >>> embeddings = {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> ax = scbd.pl.ranking(scbd.metrics.rank(frame))
    """
    import matplotlib.pyplot as plt

    values = ranked.to_numpy(dtype=float)
    names = [measure_name(str(column)) for column in ranked.columns]
    own = ax is None
    if ax is None:
        _, ax = plt.subplots(figsize=(_RANK * len(names) + 2.4, 1), layout="constrained")
        needed = height_of(ranked.index, _BESIDE_RANKS * inches(ax)[0])
        ax.figure.set_figheight(max(needed, 0.25 * len(values)) / _TABLE + _ABOVE)  # type: ignore[union-attr]
    width, height = inches(ax)
    room = _TABLE * width * POINTS / max(len(names), 1)
    letters = min(LARGEST, room / (_SHOWN * CHARACTER))
    ax.imshow(values.clip(0, 1), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(values)):
        dark = values[row, column] > 0.6
        shown = f"{values[row, column]:.2f}"
        ax.text(column, row, shown, ha="center", va="center", fontsize=letters, color="w" if dark else "k")
    names_below(ax, names, upright=_ABOVE if own else 0.5 * height, share=_TABLE)
    names_beside(ax, ranked.index, _BESIDE_RANKS * width, share=_TABLE)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def _dots(ax: Axes, rows: pd.DataFrame, order: list[str]) -> None:
    """A line a representation: runs, their mean, and the interval."""
    for place, name in enumerate(order):
        own = rows[rows["representation"] == name]
        if not len(own):
            continue
        y = place + (np.linspace(-0.12, 0.12, len(own)) if len(own) > 1 else np.zeros(1))
        ax.plot(own["value"], y, "o", ms=4, mfc="w", mec=_COLOR, zorder=3)
        ax.vlines(own["value"].mean(), place - 0.28, place + 0.28, color=_COLOR, lw=2)
        if "low" in own and own["low"].notna().all():
            ax.hlines(place, own["low"].mean(), own["high"].mean(), color=_COLOR, lw=1)


def _biology(frame: pd.DataFrame, metric: str | None) -> str:
    if metric is not None:
        return metric
    return "relationship_area" if (frame["metric"] == "relationship_area").any() else "y_probe_f1"


def _rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    if not (frame["metric"] == metric).any():
        msg = f"The frame has no metric {metric!r}; there are: {', '.join(frame['metric'].unique())}."
        raise ValueError(msg)
    return frame[frame["metric"] == metric]
