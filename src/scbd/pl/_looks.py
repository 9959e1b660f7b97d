"""What all plots share: how series differ, where they are named, and how long names are broken."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by colour-blind readers; yellow is too faint for a line
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "k", "#E69F00", "#56B4E9", "0.5")
_MARKERS = "os^Dv<>PX*p"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))
# a legend of more series would lie on them
_INSIDE = 6
# characters of a line where axes share the width with others, or have names on both sides
NARROW = 16


def look(i: int) -> dict[str, Any]:
    """Matplotlib's arguments of the i-th series; no two of the first 88 share colour and marker."""
    return {"color": COLORS[i % len(COLORS)], "marker": _MARKERS[i % len(_MARKERS)], "ls": _LINES[i % len(_LINES)]}


def legend(ax: Axes) -> None:
    """Name the series, if they have names: on the axes, or, of many, beside them."""
    n = len(ax.get_legend_handles_labels()[1])
    if n > _INSIDE:
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    elif n:
        ax.legend(frameon=False, fontsize="small")


def size_of(names: list[str]) -> tuple[float, float]:
    """Width and height in inches of a figure that has room for such a legend."""
    return (
        (4.6, 3.6)
        if len(names) <= _INSIDE
        else (6.4, max(3.6, 1 + height_of([wrapped(name, NARROW) for name in names])))
    )


def wrapped(name: object, width: int = 24) -> str:
    """A name in lines of at most so many characters, broken behind spaces, underscores, slashes and hyphens, too."""
    lines = [""]
    for word in re.findall(rf"[^\s_/-]{{1,{width}}}[\s_/-]*|[\s_/-]+", str(name)):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def height_of(names: list[str], least: float = 0.25) -> float:
    """Height in inches that names on lines of their own take."""
    return sum(max(least, 0.17 * (name.count("\n") + 1)) for name in names)
