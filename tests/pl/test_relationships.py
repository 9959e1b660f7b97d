from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from readable import long_names, require_readable

from scbd import pl


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_curves_by_name():
    curve = pd.DataFrame({"percentile": [80, 90], "precision": [0.1, 0.3], "recall": [0.6, 0.4]})
    ax = pl.relationship_curve({"ours": curve, "other": curve}, prevalence=0.02)
    assert ax.get_legend_handles_labels()[1] == ["ours", "other", "no information"]
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0.6, 0.4])
    assert len({line.get_linestyle() for line in ax.lines[:2]}) == 2
    assert pl.relationship_curve(curve).get_legend() is None


def test_many_curves_are_told_apart():
    curve = pd.DataFrame({"percentile": [80, 90], "precision": [0.1, 0.3], "recall": [0.6, 0.4]})
    ax = pl.relationship_curve({f"method {i}": curve for i in range(12)})
    assert len({(line.get_color(), line.get_marker()) for line in ax.lines}) == 12


def test_complexes():
    table = pd.DataFrame(
        {"size": [3, 4], "mean_cosine": [0.9, 0.2], "fdr": [0.01, 0.4]}, index=pd.Index(["one", "two"], name="complex")
    )
    ax = pl.complexes(table)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["two (4)", "one (3)"]
    points = ax.collections[1]
    assert np.asarray(points.get_offsets())[:, 0].tolist() == [0.2, 0.9]
    # the one that is sure is filled
    assert np.asarray(points.get_facecolor())[:, :3].min(axis=1).tolist() == [1, 0]


@pytest.mark.parametrize("n", [1, 2, 20])
def test_markers_of_the_outer_complexes_are_whole(n):
    names = [f"complex {i}" for i in range(n)]
    ax = pl.complexes(pd.DataFrame({"size": 3, "mean_cosine": np.linspace(1, -0.5, n), "fdr": 0.01}, index=names))
    plt.gcf().canvas.draw()
    points = ax.collections[1]
    assert isinstance(points, PathCollection)
    radius = np.sqrt(np.asarray(points.get_sizes()).max()) / 2 * ax.figure.dpi / 72
    _, heights = ax.transData.transform(points.get_offsets()).T
    assert heights.min() - radius > ax.bbox.y0 and heights.max() + radius < ax.bbox.y1
    assert not points.get_clip_on()  # of the outer cosines


def test_complexes_whose_names_begin_alike_have_a_line_each():
    names = [f"{'proteasome ' * 6}{i}" for i in "abc"]
    table = pd.DataFrame({"size": 3, "mean_cosine": [0.9, 0.5, 0.2], "fdr": 0.01}, index=names)
    ax = pl.complexes(table)
    offsets = np.asarray(ax.collections[1].get_offsets())
    assert offsets.tolist() == [[0.2, 0], [0.5, 1], [0.9, 2]]
    segments = ax.collections[0].get_segments()  # type: ignore[attr-defined]
    assert [segment[1].tolist() for segment in segments] == offsets.tolist()
    assert len(ax.get_yticklabels()) == 3


@pytest.mark.parametrize("width", [None, 3.5])
@pytest.mark.parametrize("n", [1, 8, 25])
def test_long_names_can_be_read(n, width):
    def ax(height):
        return None if width is None else plt.subplots(figsize=(width, height), layout="constrained")[1]

    curve = pd.DataFrame({"percentile": [80, 90], "precision": [0.1, 0.3], "recall": [0.6, 0.4]})
    curves = dict.fromkeys(long_names(n), curve)
    require_readable(pl.relationship_curve(curves, prevalence=0.02, ax=ax(2.6 + 0.2 * n)).figure)
    names = [f"{name} of the respiratory chain" for name in long_names(n)]
    table = pd.DataFrame({"size": 3, "mean_cosine": np.linspace(0.9, 0.1, n), "fdr": np.nan}, index=names)
    drawn = pl.complexes(table, n=n, ax=ax(1.4 + 0.3 * n))
    require_readable(drawn.figure)
    shown = [label.get_text().replace("\n", "").replace(" ", "") for label in drawn.get_yticklabels()]
    assert shown == [f"{name}(3)".replace(" ", "") for name in names[::-1]]  # whole
