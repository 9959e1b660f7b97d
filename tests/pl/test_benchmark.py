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
        ("relationship_area", "ours", "a", 0.5, 0.1, "higher"),
        ("relationship_area", "ours", "b", 0.7, 0.1, "higher"),
        ("relationship_area", "other", "c", 0.2, 0.1, "higher"),
        ("e_probe_f1", "ours", "a", 0.1, 0.03, "lower"),
        ("e_probe_f1", "ours", "b", 0.12, 0.03, "lower"),
        ("e_probe_f1", "other", "c", 0.9, 0.03, "lower"),
        ("silhouette", "ours", "a", -0.2, -0.25, "nearer to chance"),
        ("effective_rank", "ours", "a", 12.0, np.nan, ""),
    ]
    return pd.DataFrame(rows, columns=["metric", "representation", "key", "value", "chance", "better"])


def dots(ax) -> list[list[float]]:
    return [line.get_ydata().tolist() for line in ax.lines if line.get_marker() == "o"]


def test_two_panels_of_runs_and_their_means():
    left, right = pl.benchmark(frame())
    assert dots(left) == [[0.5, 0.7], [0.2]]
    assert dots(right) == [[0.1, 0.12], [0.9]]
    means = [bar.get_segments()[0][0, 1] for bar in left.collections]
    assert means == pytest.approx([0.6, 0.2])
    assert left.get_title() == "higher is better" and right.get_title() == "lower is better"
    assert [label.get_text() for label in left.get_xticklabels()] == ["ours", "other"]
    assert [ax.lines[-1].get_ydata()[0] for ax in (left, right)] == pytest.approx([0.1, 0.03])
    with pytest.raises(ValueError, match="no metric 'ilisi'; there are: relationship_area"):
        pl.benchmark(frame(), batch="ilisi")


def test_what_is_good_and_what_chance_gives_are_the_frames():
    _, ax = pl.benchmark(frame(), batch="silhouette")
    assert ax.get_title() == "nearer to chance is better"
    assert ax.lines[-1].get_ydata()[0] == -0.25
    _, ax = pl.benchmark(frame(), batch="effective_rank")  # neither chance nor a good side
    assert [line.get_marker() for line in ax.lines] == ["o"]
    assert ax.get_title() == ""
    # rows of an experiment have no such columns
    left, _ = pl.benchmark(frame().drop(columns=["chance", "better"]))
    assert left.get_title() == "higher is better"
    assert left.get_legend() is None


def test_intervals_stand_where_there_are_any():
    known = frame()["metric"] == "relationship_area"
    left, right = pl.benchmark(frame().assign(low=np.where(known, 0.15, np.nan), high=np.where(known, 0.8, np.nan)))
    (upright,) = {tuple(bar.get_segments()[0][:, 1]) for bar in left.collections[1::2]}
    assert upright == (0.15, 0.8)
    assert len(right.collections) == 2  # means alone


def test_biology_stands_against_batch():
    ax = pl.biology_against_batch(frame())
    assert ax.get_legend_handles_labels()[1] == ["ours", "other"]
    large = [line for line in ax.lines if line.get_markersize() == 8]
    points = np.concatenate([np.asarray(line.get_xydata()) for line in large])
    np.testing.assert_allclose(points, np.array([(0.11, 0.6), (0.9, 0.2)]))
    assert len({(line.get_color(), line.get_marker()) for line in large}) == 2
    chances = [line for line in ax.lines if line.get_linestyle() == "--"]
    (_, up), (across, _) = (np.asarray(line.get_xydata())[0] for line in chances)
    assert (up, across) == pytest.approx((0.1, 0.03))


def test_keys_without_one_of_the_two_metrics_are_left_out():
    ours_b, other = (frame()["key"] == "b") & (frame()["metric"] == "e_probe_f1"), frame()["key"] == "c"
    ax = pl.biology_against_batch(frame()[~ours_b])
    large = [np.asarray(line.get_xydata()).tolist() for line in ax.lines if line.get_markersize() == 8]
    assert large == [[[0.1, 0.5]], [[0.9, 0.2]]]
    ax = pl.biology_against_batch(frame()[~(other & (frame()["metric"] == "relationship_area"))])
    assert ax.get_legend_handles_labels()[1] == ["ours"]
    with pytest.raises(ValueError, match="No embedding of the frame has both 'relationship_area' and 'e_probe_f1'"):
        pl.biology_against_batch(
            frame()[~ours_b & ~(frame()["metric"].eq("relationship_area") & (frame()["key"] != "b")) & ~(other)]
        )


def many(n: int, name: str = "embedding {}, corrected") -> pd.DataFrame:
    return pd.concat(
        [frame().query("key == 'a'").assign(representation=name.format(i), key=str(i)) for i in range(n)],
        ignore_index=True,
    )


@pytest.mark.parametrize("n", [7, 21, 40])
def test_the_legend_of_many_is_within_the_figure(n):
    ax = pl.biology_against_batch(many(n))
    figure = ax.figure
    figure.canvas.draw()
    legend = ax.get_legend()
    assert legend is not None
    place = legend.get_window_extent()
    assert place.y0 >= 0 and place.y1 <= figure.bbox.height


def test_a_ranking_is_a_table_of_colours():
    ranked = pd.DataFrame(
        {"overall": [0.9, 0.1], "relationship_recall (corum)": [1.0, -0.2], "ilisi": [np.nan, 0.5]},
        index=pd.Index(["ours", "other"], name="representation"),
    )
    ax = pl.ranking(ranked)
    assert sorted(text.get_text() for text in ax.texts) == ["-0.20", "0.10", "0.50", "0.90", "1.00"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ours", "other"]
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "overall",
        "recall of known relations (corum)",
        "mixing of environments (iLISI)",
    ]
