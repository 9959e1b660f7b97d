from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from readable import long_names, require_readable

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
    return [line.get_xdata().tolist() for line in ax.lines if line.get_marker() == "o"]


def test_two_panels_of_runs_and_their_means():
    left, right = pl.benchmark(frame())
    assert dots(left) == [[0.5, 0.7], [0.2]]
    assert dots(right) == [[0.1, 0.12], [0.9]]
    means = [bar.get_segments()[0][0, 0] for bar in left.collections]
    assert means == pytest.approx([0.6, 0.2])
    titles = [f"{side} is better\ndashed: chance" for side in ("higher", "lower")]
    assert [left.get_title(), right.get_title()] == titles
    assert [label.get_text() for label in left.get_yticklabels()] == ["ours", "other"]
    assert left.get_ylim()[0] > left.get_ylim()[1]  # from the top
    assert [ax.lines[-1].get_xdata()[0] for ax in (left, right)] == pytest.approx([0.1, 0.03])
    with pytest.raises(ValueError, match="no metric 'ilisi'; there are: relationship_area"):
        pl.benchmark(frame(), batch="ilisi")


def test_what_is_good_and_what_chance_gives_are_the_frames():
    _, ax = pl.benchmark(frame(), batch="silhouette")
    assert ax.get_title() == "nearer to chance is\nbetter\ndashed: chance"
    assert ax.lines[-1].get_xdata()[0] == -0.25
    _, ax = pl.benchmark(frame(), batch="effective_rank")  # neither chance nor a good side
    assert [line.get_marker() for line in ax.lines] == ["o"]
    assert ax.get_title() == ""
    # rows of an experiment have no such columns
    left, _ = pl.benchmark(frame().drop(columns=["chance", "better"]))
    assert left.get_title() == "higher is better"


def test_intervals_stand_where_there_are_any():
    known = frame()["metric"] == "relationship_area"
    left, right = pl.benchmark(frame().assign(low=np.where(known, 0.15, np.nan), high=np.where(known, 0.8, np.nan)))
    (across,) = {tuple(bar.get_segments()[0][:, 0]) for bar in left.collections[1::2]}
    assert across == (0.15, 0.8)
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


def named(names: list[str]) -> pd.DataFrame:
    """Rows of several seeds each."""
    rng = np.random.default_rng(0)
    rows = [(name, key, metric) for name in names for key in "ab" for metric in ("relationship_area", "e_probe_f1")]
    return pd.DataFrame(rows, columns=["representation", "key", "metric"]).assign(
        value=rng.uniform(0.1, 0.9, len(rows)), chance=0.05, better="higher"
    )


def names_of(n: int, long: bool) -> list[str]:
    return long_names(n) if long else [f"m{i}" for i in range(n)]


@pytest.mark.parametrize("width", [None, 3.5])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("n", [1, 2, 8, 25])
def test_names_of_embeddings_can_be_read(n, long, width):
    """As in print: 3.5 inches are a column."""
    axes = None if width is None else plt.subplots(1, 2, figsize=(width, 2.2 + 0.3 * n), layout="constrained")[1]
    left, right = pl.benchmark(named(names_of(n, long)), axes=axes)
    require_readable(left.figure)
    assert [label.get_text().replace("\n", " ").replace("_ ", "_") for label in left.get_yticklabels()] == names_of(
        n, long
    )
    assert not any(label.get_visible() for label in right.get_yticklabels())


def test_panels_above_each_other_have_the_names_both():
    _, axes = plt.subplots(2, 1, figsize=(3.5, 4), layout="constrained")
    for ax in pl.benchmark(frame(), axes=axes):
        assert [label.get_text() for label in ax.get_yticklabels() if label.get_visible()] == ["ours", "other"]
    with pytest.raises(ValueError, match="axes holds 1 axes: give two, one for each metric"):
        pl.benchmark(frame(), axes=np.array(plt.figure().gca()))


@pytest.mark.parametrize("width", [None, 3.5])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("n", [1, 2, 8, 25])
def test_names_of_a_legend_can_be_read(n, long, width):
    ax = None if width is None else plt.subplots(figsize=(width, 2.6 + 0.2 * n), layout="constrained")[1]
    require_readable(pl.biology_against_batch(named(names_of(n, long)), ax=ax).figure)


def test_embeddings_without_a_score_are_not_in_the_legend():
    """They would have a mark there, and none on the axes."""
    values = frame().assign(value=lambda rows: rows["value"].where(rows["representation"] == "ours"))
    assert pl.biology_against_batch(values).get_legend_handles_labels()[1] == ["ours"]


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
    assert [label.get_text().replace("\n", " ") for label in ax.get_xticklabels()] == [
        "overall",
        "recall of known relations (corum)",
        "mixing of environments (iLISI)",
    ]


@pytest.mark.parametrize("width", [None, 3.5])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("n", [1, 2, 8, 25])
def test_names_of_a_ranking_can_be_read(n, long, width):
    metrics = [
        "overall",
        "relationship_average_precision (corum)",
        "e_probe_quadratic_f1",
        "y_probe_f1",
        "ilisi",
        "a",
        "b",
    ]
    ranked = pd.DataFrame(np.linspace(-1, 1, n)[:, None] * np.ones(7), index=names_of(n, long), columns=metrics)
    ax = None if width is None else plt.subplots(figsize=(width, 2.4 + 0.3 * n), layout="constrained")[1]
    require_readable(pl.ranking(ranked, ax=ax).figure)
