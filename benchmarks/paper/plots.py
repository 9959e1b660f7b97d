"""Results of experiments: a setting against scores, and in against out of distribution."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from scbd._shared.files import save_figure
from scbd.pl._style import add_legend, series_style, wrap_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# characters of all names on an axis that can stand beside each other
_BESIDE = 40


def sweep(
    frame: pd.DataFrame,
    setting: str,
    scores: Mapping[str, str],
    *,
    control: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the mean of scores, with their standard deviation over seeds, at each value of a setting.

    Parameters
    ----------
    frame
        Rows of an experiment, one a run.
    setting
        Column of the setting, such as ``"alpha"``; its values stand at equal distances: numbers, then words and truth
        values, then none (`None`, NaN).
    scores
        Columns to draw, and what they are called.
    control
        Level to draw as a thin line, by column: what an encoder that was never trained scores.
    ax
        Axes to draw on.

    Returns
    -------
    The axes.

    Raises
    ------
    KeyError
        If a column is missing.
    """
    _require(frame, [setting, *scores])
    ax = _new_axes(4.6, 3.4) if ax is None else ax
    places, names = _places(frame[setting])
    for i, (column, name) in enumerate(scores.items()):
        own = series_style(i)
        # a value that was not tried with this score leaves no gap
        tried = frame[column].notna().to_numpy()
        grouped = frame.loc[tried, column].groupby(places[tried])
        mean, sd = grouped.mean(), grouped.std().fillna(0)
        ax.errorbar(mean.index, mean, yerr=sd, **own, ms=5, capsize=3, label=name)
        if control is not None and column in control:
            ax.axhline(control[column], color=own["color"], ls=own["ls"], lw=0.8, alpha=0.6)
    if control is not None:
        ax.plot([], [], color="0.5", lw=0.8, label="never trained")
    long = max(map(len, names), default=0) * len(names) > _BESIDE
    ax.set_xticks(range(len(names)), list(map(wrap_name, names)), rotation=90 if long else 0)
    ax.set_xlabel(setting)
    add_legend(ax)
    return ax


def by_group(frame: pd.DataFrame, setting: str, score: str, group: str, *, ax: Axes | None = None) -> Axes:
    """Draw one score at each value of a setting, one line a group, with standard deviation over seeds.

    Parameters
    ----------
    frame
        Rows of an experiment, one a run.
    setting
        Column of the setting; its values stand as in :func:`sweep`.
    score
        Column to draw.
    group
        Column that tells the lines apart, in the order of the frame.
    ax
        Axes to draw on.

    Returns
    -------
    The axes.

    Raises
    ------
    KeyError
        If a column is missing.
    """
    _require(frame, [setting, score, group])
    lines, names = pd.factorize(frame[group], use_na_sentinel=False)
    # a column a line: where a row is of another, it has no score
    scores = {f"{score} {i}": frame[score].where(lines == i) for i in range(len(names))}
    return sweep(frame[[setting]].assign(**scores), setting, dict(zip(scores, map(_name, names), strict=True)), ax=ax)


def trade_off(
    frame: pd.DataFrame,
    x: str,
    y: str,
    *,
    system: str = "system",
    setting: str = "setting",
    traced: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Draw one score against another, a point a setting of each system: its mean over seeds, with bars of one sd.

    Parameters
    ----------
    frame
        Rows of an experiment, one a run.
    x, y
        Columns of the scores.
    system, setting
        Columns of the system, which has one colour and marker, and of what was varied of it.
    traced
        Systems whose settings are joined by a line, in the order of the frame, such as one of growing alpha.
    ax
        Axes to draw on.

    Returns
    -------
    The axes.

    Raises
    ------
    KeyError
        If a column is missing.
    """
    _require(frame, [x, y, system, setting])
    ax = _new_axes(6.4, 4.0) if ax is None else ax
    # what is traced has the first colours: they are the strongest
    for i, name in enumerate(sorted(frame[system].unique(), key=lambda name: name not in traced)):
        shown = series_style(i)
        points = frame[frame[system] == name].groupby(setting, sort=False)[[x, y]]
        mean, sd = points.mean(), points.std().fillna(0)
        line = "-" if name in traced else "none"
        point: dict[str, Any] = {**shown, "ls": line, "ms": 6, "mec": "k", "mew": 0.5}
        ax.errorbar(mean[x], mean[y], xerr=sd[x], yerr=sd[y], elinewidth=0.6, lw=1, label=str(name), **point)
    ax.set(xlabel=wrap_name(x, 50), ylabel=wrap_name(y, 40))
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def save_axes(ax: Axes, path: Path) -> None:
    """Write the figure of axes to a PNG file."""
    save_figure(cast("Figure", ax.figure), path)


def _new_axes(width: float, height: float) -> Axes:
    """Make a figure of this size, in inches."""
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _places(values: pd.Series) -> tuple[np.ndarray, list[str]]:
    """Where each row's value stands, int64 ``(N,)``, and what the places are called: numbers, words, and none given."""
    codes, found = pd.factorize(values, use_na_sentinel=False)
    kinds = [(pd.isna(value), not _is_number(value)) for value in found]
    keys = [(*kind, str(value) if any(kind) else value) for kind, value in zip(kinds, found, strict=True)]
    order = sorted(range(len(found)), key=keys.__getitem__)
    return np.argsort(order)[codes], [_name(found[i]) for i in order]


def _is_number(value: Any) -> bool:
    """Whether a value has a place of its own among others; truth values are words."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _name(value: Any) -> str:
    if pd.isna(value):
        return "None"
    return f"{value:g}" if _is_number(value) else str(value)


def _require(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in frame]
    if missing:
        msg = f"The frame has no column {missing[0]!r} to draw (its columns: {', '.join(map(str, frame.columns))})."
        raise KeyError(msg)


def in_against_out(frame: pd.DataFrame, *, ins: str = "own in", outs: str = "own out", ax: Axes | None = None) -> Axes:
    """Draw accuracy in distribution against that out of distribution, one point a run, with their correlation.

    A negative correlation is what SCBD needs to help (paper, section 4.1): see
    :func:`scbd.check_assumption`.

    Parameters
    ----------
    frame
        Rows of an experiment, one a run.
    ins, outs
        Columns. Runs without a score in one of them are left out.
    ax
        Axes to draw on.

    Returns
    -------
    The axes.

    Raises
    ------
    KeyError
        If a column is missing.
    """
    _require(frame, [ins, outs])
    ax = _new_axes(3.6, 3.4) if ax is None else ax
    x, y = frame[[ins, outs]].astype(float).dropna().to_numpy().T
    ax.scatter(x, y, color="#0072B2", edgecolors="k", s=28, linewidths=0.5)
    if len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0:
        ax.set_title(f"correlation {np.corrcoef(x, y)[0, 1]:.2f}, {len(x)} runs", fontsize="medium")
    ax.set(xlabel="accuracy in distribution", ylabel="accuracy out of distribution")
    return ax
