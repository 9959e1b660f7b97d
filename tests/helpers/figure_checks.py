"""Check that the text in a figure can be read."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from matplotlib.text import Text

_KINDS = (
    "standardised by plate, whitened (controls), {} PCs",
    "SCBD z_c, alpha {}, adapted from the controls",
    "Metadata_{}_corrected_by_Harmony_and_sphered",
)


def long_names(n: int) -> list[str]:
    """Return names of about 45 characters, some of them without a space."""
    return [_KINDS[i % 3].format(i) for i in range(n)]


def texts_of(ax: Axes) -> list[Text]:
    """Return all text that is drawn; labels of ticks outside of the limits are not."""
    found = [ax.title, *ax.texts]
    for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
        low, high = sorted(axis.get_view_interval())
        found.append(axis.label)
        for tick in axis.get_major_ticks():
            if low <= tick.get_loc() <= high:
                found += [tick.label1, tick.label2]
    legend = ax.get_legend()
    found += legend.get_texts() if legend is not None else []
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def require_readable_in_print(figure: Figure | SubFigure) -> None:
    """Require that a figure is readable at its own width, and at the widths of a column and a page of a journal."""
    require_readable(figure)
    for width in (3.5, 7):
        figure.set_figwidth(width)  # type: ignore[union-attr]
        require_readable(figure)


def require_readable(figure: Figure | SubFigure) -> None:
    """Require that text is complete, does not overlap and is large enough for print, and axes are not too small."""
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    texts = [text for ax in figure.axes for text in texts_of(ax)]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    for ax in figure.axes:
        assert min(ax.bbox.width, 3 * ax.bbox.height) > 0.6 * figure.dpi or ax.get_label() == "<colorbar>"
    boxes = pd.Series([text.get_window_extent() for text in texts])
    for text, box in zip(texts, boxes, strict=True):
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside, f"{text.get_text()!r} runs out of the figure"
        assert float(text.get_fontsize()) >= 5
    for (text, box), (other, below) in combinations(zip(texts, boxes, strict=True), 2):
        common = Bbox.intersection(box, below)
        lies = common is not None and min(common.width, common.height) > 2
        assert not lies, f"{text.get_text()!r} lies on {other.get_text()!r}"
