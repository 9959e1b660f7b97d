"""How series of one plot are told apart: by colour, marker and line, in grey as well; and where they are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from scbd.pl._names import LARGEST, inches, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend

# Okabe and Ito's palette, told apart by colour-blind readers; yellow is too faint for a line
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "k", "#E69F00", "#56B4E9", "0.5")
_MARKERS = "os^Dv<>PX*p"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))
# a legend of more series stands outside the axes: on them, it would lie on the series
_INSIDE = 6
# of the axes, that a legend takes on them, and beside them
_WIDEST, _HIGHEST, _BESIDE = 0.65, 0.5, 0.5
# in inches, of a legend before its names
_HANDLE = 0.45
# in points, where names would be broken, or take too much of the height
_SMALL = 7.0
# of the width of axes, that of the figure with the numbers at their left
_FIGURE = 1.2


class Look(NamedTuple):
    """Arguments of matplotlib's."""

    color: str
    marker: str
    ls: Any


def look(i: int) -> Look:
    """Of the i-th series; no two of the first 88 share colour and marker."""
    return Look(_COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)], _LINES[i % len(_LINES)])


def legend(ax: Axes, *, inside: bool = True, own: bool = False) -> float:
    """Name the series, if they have names: on the axes, beside them, or below, where the names have room.

    ``own``: the figure is ours, and grows by what stands below. Returns how much of the height, in inches, is taken.
    """
    n = len(ax.get_legend_handles_labels()[1])
    if not n:
        return 0
    width, height = _size(ax.legend(frameon=False, fontsize=LARGEST), ax.figure.dpi)
    room, high = inches(ax)
    if inside and n <= _INSIDE and width <= _WIDEST * room and height <= _HIGHEST * high:
        return 0
    if width <= _BESIDE * room and height <= high:
        ax.legend(frameon=False, fontsize=LARGEST, loc="center left", bbox_to_anchor=(1, 0.5))
        return 0
    below = legend_below(ax, most=None if own else _HIGHEST * high)
    if not own:
        return below
    ax.figure.set_figheight(ax.figure.get_figheight() + below)  # type: ignore[union-attr]
    return 0


def legend_below(ax: Axes, *, most: float | None = None, share: float = 1, markerscale: float = 1) -> float:
    """A legend below the axes, in as many columns as they have room for: its height, in inches.

    In small letters where it would be higher than ``most``, or names have to be broken. ``share`` of the width is left
    to the axes.
    """
    from matplotlib.transforms import ScaledTranslation

    handles, labels = ax.get_legend_handles_labels()
    room, dpi = _FIGURE * inches(ax)[0], ax.figure.dpi
    # behind the label of the axis, however the axes and their numbers change
    label = ax.xaxis.get_tightbbox()
    depth = 0 if label is None else (ax.bbox.y0 - label.y0) / dpi
    under = ax.transAxes + ScaledTranslation(0, -depth, ax.figure.dpi_scale_trans)
    how: dict[str, Any] = {"frameon": False, "handletextpad": 0.4, "columnspacing": 1.0, "labelspacing": 0.35}
    how |= {"markerscale": markerscale, "bbox_transform": under}
    centred: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
    ends_with_axes: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1, 0)}
    height = 0.0
    for points in (LARGEST, _SMALL):
        names = [wrapped(label, room - _HANDLE, points) for label in labels]
        width, _ = _size(ax.legend(handles, names, fontsize=points, **how), dpi)
        ncols = min(max(int(room / width), 1), len(names))
        width, height = _size(ax.legend(handles, names, fontsize=points, ncols=ncols, **how, **centred), dpi)
        if width > share * inches(ax)[0]:  # centred, it would run out at the right
            ax.legend(handles, names, fontsize=points, ncols=ncols, **how, **ends_with_axes)
        if names == labels and (most is None or height <= most):
            break
    return height


def _size(drawn: Legend, dpi: float) -> tuple[float, float]:
    box = drawn.get_window_extent()
    return box.width / dpi, box.height / dpi
