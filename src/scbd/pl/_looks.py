"""How series of one plot are told apart: by colour, marker and line, in grey as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by colour-blind readers; yellow is too faint for a line
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "k", "#E69F00", "#56B4E9", "0.5")
_MARKERS = "os^Dv<>PX*p"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))
# a legend of more series stands beside the axes: on them, it would lie on the series
_INSIDE = 6


class Look(NamedTuple):
    """Arguments of matplotlib's."""

    color: str
    marker: str
    ls: Any


def look(i: int) -> Look:
    """Of the i-th series; no two of the first 88 share colour and marker."""
    return Look(_COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)], _LINES[i % len(_LINES)])


def legend(ax: Axes) -> None:
    """Name the series, if they have names."""
    n = len(ax.get_legend_handles_labels()[1])
    if n > _INSIDE:
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    elif n:
        ax.legend(frameon=False, fontsize="small")
