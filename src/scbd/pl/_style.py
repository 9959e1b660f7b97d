"""Common style of all plots: colours and markers of series, legends, and line breaks in long names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can distinguish, with grey in place of yellow, which is too faint
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "k", "#E69F00", "#56B4E9", "0.5")
_MARKERS = "os^Dv<>PX*p"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))
# maximum number of series with a legend inside the axes; a larger legend would cover the series
_MAX_SERIES_INSIDE = 6
# characters per line of a name, for plots with several axes side by side, or with names on both sides
NARROW_WIDTH = 16


def series_style(i: int) -> dict[str, Any]:
    """Return colour, marker and line style of the i-th series, as arguments of matplotlib.

    No two of the first 88 series have both the same colour and the same marker.
    """
    return {"color": COLORS[i % len(COLORS)], "marker": _MARKERS[i % len(_MARKERS)], "ls": _LINES[i % len(_LINES)]}


def add_legend(ax: Axes) -> None:
    """Add a legend if the series have names: inside the axes, or to the right of them for more than six series."""
    n = len(ax.get_legend_handles_labels()[1])
    if n > _MAX_SERIES_INSIDE:
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    elif n:
        ax.legend(frameon=False, fontsize="small")


def figure_size(names: list[str]) -> tuple[float, float]:
    """Return width and height, in inches, of a figure with room for a legend of these names, see :func:`add_legend`."""
    return (
        (4.6, 3.6)
        if len(names) <= _MAX_SERIES_INSIDE
        else (6.4, max(3.6, 1 + names_height([wrap_name(name, NARROW_WIDTH) for name in names])))
    )


def wrap_name(name: object, width: int = 24) -> str:
    """Break a name into lines of at most ``width`` characters.

    Lines are broken after spaces, underscores, slashes and hyphens if possible, otherwise within a word.
    """
    lines = [""]
    for word in re.findall(rf"[^\s_/-]{{1,{width}}}[\s_/-]*|[\s_/-]+", str(name)):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def names_height(names: list[str], least: float = 0.25) -> float:
    """Return the height, in inches, of names below each other; a name takes at least ``least`` inches."""
    return sum(max(least, 0.17 * (name.count("\n") + 1)) for name in names)
