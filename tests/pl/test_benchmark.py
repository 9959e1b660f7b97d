from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from scbd import pl


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def frame() -> pd.DataFrame:
    rows = [
        ("relationship_area", "ours", "a", 0.5),
        ("relationship_area", "ours", "b", 0.7),
        ("relationship_area", "other", "c", 0.2),
        ("e_probe_f1", "ours", "a", 0.1),
        ("e_probe_f1", "ours", "b", 0.1),
        ("e_probe_f1", "other", "c", 0.9),
        ("e_probe_chance_f1", "other", "c", 0.03),
    ]
    return pd.DataFrame(rows, columns=["metric", "representation", "key", "value"])


def test_two_panels_of_means_with_deviations():
    left, right = pl.benchmark(frame())
    assert [bar.get_height() for bar in left.patches] == pytest.approx([0.6, 0.2])
    assert [bar.get_height() for bar in right.patches] == pytest.approx([0.1, 0.9])
    assert left.get_title() == "higher is better" and right.get_title() == "lower is better"
    assert [label.get_text() for label in left.get_xticklabels()] == ["ours", "other"]
    assert right.lines[-1].get_ydata()[0] == 0.03
    with pytest.raises(ValueError, match="no metric 'ilisi'; there are: relationship_area"):
        pl.benchmark(frame(), batch="ilisi")


@pytest.mark.parametrize(
    ("metric", "chance", "good"),
    [
        ("ilisi", "ilisi_expected", "higher"),
        ("e_probe_quadratic_f1", "e_probe_quadratic_chance_f1", "lower"),
        ("silhouette", "silhouette_expected", "nearer to chance"),
        ("same_environment_neighbours", "same_environment_expected", "nearer to chance"),
    ],
)
def test_batch_metrics_are_drawn_with_their_chance_and_what_is_good_of_them(metric, chance, good):
    rows = pd.DataFrame({"metric": [metric, chance], "representation": "ours", "key": "a", "value": [0.2, 0.26]})
    _, ax = pl.benchmark(pd.concat([frame(), rows]), batch=metric)
    assert ax.get_title() == f"{good} is better"
    assert ax.lines[-1].get_ydata()[0] == 0.26


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
