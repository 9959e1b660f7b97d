"""Names of any length: broken into lines, and as large as the axes have room for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

# in points, of names on an axis: below the smallest, none can be read in print
LARGEST, _SMALLEST = 9.0, 5.0
POINTS = 72
# of the size of the font: how wide a character is on average, and how far lines are apart
CHARACTER, _LINE = 0.55, 1.25
# of names that are read beside each other
_MOST_LINES = 3
# characters of a line: broken into less, no name can be read
_FEWEST = 12
# of a figure, what matplotlib gives its axes
_AXES = 0.77


class _Fitted(NamedTuple):
    names: list[str]
    points: float


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of axes as they are now, before names and a legend take their part."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def wrapped(name: object, width: float, points: float = 10) -> str:
    """A name in lines of at most this width, in inches.

    It is broken behind spaces, underscores, slashes and hyphens, as names of columns have them too; formulas between
    dollars stay whole. A word that is wider than the line is cut.
    """
    most = max(int(width * POINTS / (CHARACTER * points)), _FEWEST)
    lines = [""]
    for word in re.findall(rf"(?:\$[^$]*\$|[^\s_/-]){{1,{most}}}[\s_/-]*|[\s_/-]+", str(name)):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > most:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def height_of(names: Sequence[object], width: float, points: float = LARGEST) -> float:
    """Height in inches of a figure whose axes have names of this width on lines of their own, in this size."""
    most = max((_n_lines(wrapped(name, width, points)) for name in names), default=1)
    return len(names) * most * _LINE * points / POINTS / _AXES


def names_beside(ax: Axes, names: Sequence[object], width: float, *, share: float = 1) -> None:
    """Names at the left of lines 0, 1 and so on, in this width; ``share`` of the height is left to the lines."""
    fitted = _fitted(names, width, share * inches(ax)[1])
    ax.set_yticks(range(len(names)), fitted.names, fontsize=fitted.points)


def names_below(ax: Axes, names: Sequence[object], *, upright: float | None = None, share: float = 1) -> None:
    """Names at columns 0, 1 and so on: beside each other where words stay whole in a few lines, or else upright.

    ``upright``: all stand, in this height, in inches. ``share`` of the width is left to the columns.
    """
    width, height = inches(ax)
    pitch = share * width / max(len(names), 1)
    for points in (10, 9, 8) if upright is None else ():
        shown = [wrapped(name, 0.9 * pitch, points) for name in names]
        longest = max((len(line) for name in shown for line in name.split("\n")), default=0)
        fit = longest * CHARACTER * points <= 0.9 * POINTS * pitch
        whole = all(word in line for name, line in zip(names, shown, strict=True) for word in str(name).split())
        if fit and whole and max(map(_n_lines, shown), default=1) <= _MOST_LINES:
            ax.set_xticks(range(len(names)), shown, fontsize=points)
            return
    fitted = _fitted(names, upright or 0.55 * height, share * width)
    ax.set_xticks(range(len(names)), fitted.names, fontsize=fitted.points, rotation=90)


def _fitted(names: Sequence[object], width: float, room: float) -> _Fitted:
    """The largest font in which all names fit beside each other into the room, each within the width."""
    points = LARGEST
    while True:
        shown = [wrapped(name, width, points) for name in names]
        needed = len(names) * max(map(_n_lines, shown), default=1) * _LINE * points / POINTS
        if needed <= room or points <= _SMALLEST:
            return _Fitted(shown, points)
        points -= 0.5


def _n_lines(name: str) -> int:
    return name.count("\n") + 1
