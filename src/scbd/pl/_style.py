"""Common style of all plots: colours and markers of data series, legends, and line breaks in long names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of data series: the palette of Okabe and Ito, which colour-blind readers can distinguish. Grey replaces the
# yellow of this palette, which is too faint on a white page.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "k", "#E69F00", "#56B4E9", "0.5")
_MARKERS = "os^Dv<>PX*p"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))
# Maximum number of data series for which the legend is drawn inside the axes. The legend of more series would cover the
# data.
_MAX_SERIES_INSIDE = 6
# Maximum number of characters per line of a name in narrow plots. Narrow plots have several axes next to each other, or
# names on both sides.
NARROW_WIDTH = 16


def series_style(i: int) -> dict[str, Any]:
    """Return the colour, marker and line style of the i-th data series of a plot, as arguments of ``Axes.plot``.

    Any two of the first 88 series differ in colour or marker.
    """
    return {"color": COLORS[i % len(COLORS)], "marker": _MARKERS[i % len(_MARKERS)], "ls": _LINES[i % len(_LINES)]}


def add_legend(ax: Axes) -> None:
    """Add a legend to axes whose data series have names: inside the axes, or to the right of more than six series."""
    n = len(ax.get_legend_handles_labels()[1])
    if n > _MAX_SERIES_INSIDE:
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    elif n:
        ax.legend(frameon=False, fontsize="small")


def figure_size(names: list[str]) -> tuple[float, float]:
    """Return the width and height, in inches, of a figure with enough room for a legend with these names of series.

    The legend is drawn by :func:`add_legend`.
    """
    if len(names) <= _MAX_SERIES_INSIDE:
        return 4.6, 3.6
    return 6.4, max(3.6, 1 + names_height([wrap_name(name, NARROW_WIDTH) for name in names]))


def wrap_name(name: object, width: int = 24) -> str:
    """Break a long name, such as that of a gene, into lines of at most ``width`` characters.

    Lines are broken after spaces, underscores, slashes and hyphens if possible, otherwise within a word. Dollar signs
    are escaped (:func:`escape_dollars`).
    """
    lines = [""]
    for word in re.findall(rf"[^\s_/-]{{1,{width}}}[\s_/-]*|[\s_/-]+", str(name)):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return escape_dollars("\n".join(line.rstrip() for line in lines))


def escape_dollars(text: str) -> str:
    """Escape dollar signs, so that matplotlib does not interpret the text between two of them as a formula."""
    return text.replace("$", r"\$")


def names_height(names: list[str], least: float = 0.25) -> float:
    """Return the height in inches of names that are written below each other, as in a legend.

    A name may have several lines. It takes at least ``least`` inches.
    """
    return sum(max(least, 0.17 * (name.count("\n") + 1)) for name in names)
