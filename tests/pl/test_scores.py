from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from helpers.figure_checks import long_names, require_readable_in_print
from matplotlib.collections import PathCollection

from scbd import pl


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def make_frame() -> pd.DataFrame:
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


def get_dots(ax) -> list[list[float]]:
    return [line.get_xdata().tolist() for line in ax.lines if line.get_marker() == "o"]


def test_benchmark_draws_runs_and_means_in_two_panels():
    left, right = pl.benchmark(make_frame())
    assert get_dots(left) == [[0.5, 0.7], [0.2]]
    assert get_dots(right) == [[0.1, 0.12], [0.9]]
    means = [bar.get_segments()[0][0, 0] for bar in left.collections]
    assert means == pytest.approx([0.6, 0.2])
    assert [left.get_title(), right.get_title()] == ["higher is better", "lower is better"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["ours", "other"]
    assert left.get_ylim()[0] > left.get_ylim()[1]  # from the top
    assert [ax.lines[-1].get_xdata()[0] for ax in (left, right)] == pytest.approx([0.1, 0.03])
    with pytest.raises(ValueError, match="no metric 'ilisi'; there are: relationship_area"):
        pl.benchmark(make_frame(), batch="ilisi")


def test_benchmark_direction_and_chance_are_taken_from_frame():
    _, ax = pl.benchmark(make_frame(), batch="silhouette")
    assert ax.get_title() == "nearer to chance is better"
    assert ax.lines[-1].get_xdata()[0] == -0.25
    _, ax = pl.benchmark(make_frame(), batch="effective_rank")  # has neither chance nor a better direction
    assert [line.get_marker() for line in ax.lines] == ["o"]
    assert ax.get_title() == ""
    # frames of an experiment lack these columns
    left, _ = pl.benchmark(make_frame().drop(columns=["chance", "better"]))
    assert left.get_title() == "higher is better"


def test_benchmark_intervals_are_drawn_where_present():
    known = make_frame()["metric"] == "relationship_area"
    left, right = pl.benchmark(
        make_frame().assign(low=np.where(known, 0.15, np.nan), high=np.where(known, 0.8, np.nan))
    )
    (across,) = {tuple(bar.get_segments()[0][:, 0]) for bar in left.collections[1::2]}
    assert across == (0.15, 0.8)
    assert len(right.collections) == 2  # means only


def test_biology_against_batch_draws_means_and_chance():
    ax = pl.biology_against_batch(make_frame())
    assert ax.get_legend_handles_labels()[1] == ["ours", "other"]
    large = [line for line in ax.lines if line.get_markersize() == 8]
    points = np.concatenate([np.asarray(line.get_xydata()) for line in large])
    np.testing.assert_allclose(points, np.array([(0.11, 0.6), (0.9, 0.2)]))
    assert len({(line.get_color(), line.get_marker()) for line in large}) == 2
    chances = [line for line in ax.lines if line.get_linestyle() == "--"]
    (_, up), (across, _) = (np.asarray(line.get_xydata())[0] for line in chances)
    assert (up, across) == pytest.approx((0.1, 0.03))


def test_biology_against_batch_incomplete_keys_are_excluded():
    ours_b, other = (make_frame()["key"] == "b") & (make_frame()["metric"] == "e_probe_f1"), make_frame()["key"] == "c"
    ax = pl.biology_against_batch(make_frame()[~ours_b])
    large = [np.asarray(line.get_xydata()).tolist() for line in ax.lines if line.get_markersize() == 8]
    assert large == [[[0.1, 0.5]], [[0.9, 0.2]]]
    ax = pl.biology_against_batch(make_frame()[~(other & (make_frame()["metric"] == "relationship_area"))])
    assert ax.get_legend_handles_labels()[1] == ["ours"]
    with pytest.raises(ValueError, match="No embedding of the frame has both 'relationship_area' and 'e_probe_f1'"):
        pl.biology_against_batch(
            make_frame()[
                ~ours_b & ~(make_frame()["metric"].eq("relationship_area") & (make_frame()["key"] != "b")) & ~(other)
            ]
        )


def make_variance_table(names=("ours", "theirs"), keys=2) -> pd.DataFrame:
    rows = [
        (name, f"{name} {key}", factor, 0.1 * i + 0.1 * j + 0.05 * key, 0.02, 0.1 * i)
        for i, name in enumerate(names)
        for key in range(keys)
        for j, factor in enumerate(["well", "gene"])
    ]
    return pd.DataFrame(rows, columns=["representation", "key", "factor", "share", "chance", "alone"])


def test_variance_each_factor_has_a_mark_per_representation():
    ax = pl.variance(make_variance_table())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["well", "gene"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # from the top
    marks = [(line.get_label(), line.get_marker(), np.array(line.get_data())) for line in ax.lines]
    shares = {label: data for label, _, data in marks}
    np.testing.assert_allclose(shares["ours"][0], np.array([0.025, 0.125]))  # means of the keys
    np.testing.assert_allclose(shares["theirs"][0], np.array([0.125, 0.225]))
    ours, theirs = shares["ours"][1], shares["theirs"][1]
    assert (ours < theirs).all() and (np.round((ours + theirs) / 2) == [0, 1]).all()
    dots = np.concatenate([data[0] for _, marker, data in marks if marker == "."])
    np.testing.assert_allclose(np.sort(dots), np.sort(make_variance_table()["share"].to_numpy()))
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "theirs", "alone", "chance"]


def test_variance_twelve_representations_are_distinct():
    names = [f"system {i}" for i in range(12)]
    ax = pl.variance(make_variance_table(names, keys=1))
    shown = {(line.get_color(), line.get_marker()) for line in ax.lines if line.get_label() in names}
    assert len(shown) == 12 and not [line for line in ax.lines if line.get_marker() == "."]


def test_variance_incomplete_or_empty_table_raises():
    _, ax = plt.subplots()
    assert pl.variance(make_variance_table(), ax=ax) is ax
    with pytest.raises(ValueError, match="The table lacks chance: give what"):
        pl.variance(make_variance_table().drop(columns="chance"))
    with pytest.raises(ValueError, match="The table is empty"):
        pl.variance(make_variance_table().head(0))


def test_relationship_curve_dict_draws_named_curves():
    curve = pd.DataFrame({"percentile": [80, 90], "precision": [0.1, 0.3], "recall": [0.6, 0.4]})
    ax = pl.relationship_curve({"ours": curve, "other": curve}, prevalence=0.02)
    assert ax.get_legend_handles_labels()[1] == ["ours", "other", "no information"]
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0.6, 0.4])
    assert len({line.get_linestyle() for line in ax.lines[:2]}) == 2
    assert pl.relationship_curve(curve).get_legend() is None


def test_relationship_curve_twelve_curves_are_distinct():
    curve = pd.DataFrame({"percentile": [80, 90], "precision": [0.1, 0.3], "recall": [0.6, 0.4]})
    ax = pl.relationship_curve({f"method {i}": curve for i in range(12)})
    assert len({(line.get_color(), line.get_marker()) for line in ax.lines}) == 12


def test_complexes_only_significant_markers_are_filled():
    table = pd.DataFrame(
        {"size": [3, 4], "mean_cosine": [0.9, 0.2], "fdr": [0.01, 0.4]}, index=pd.Index(["one", "two"], name="complex")
    )
    ax = pl.complexes(table)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["two (4)", "one (3)"]
    points = ax.collections[1]
    assert np.asarray(points.get_offsets())[:, 0].tolist() == [0.2, 0.9]
    # only the significant complex is filled
    assert np.asarray(points.get_facecolor())[:, :3].min(axis=1).tolist() == [1, 0]


@pytest.mark.parametrize("n", [1, 2, 20])
def test_complexes_outer_markers_are_not_clipped(n):
    names = [f"complex {i}" for i in range(n)]
    ax = pl.complexes(pd.DataFrame({"size": 3, "mean_cosine": np.linspace(1, -0.5, n), "fdr": 0.01}, index=names))
    plt.gcf().canvas.draw()
    points = ax.collections[1]
    assert isinstance(points, PathCollection)
    radius = np.sqrt(np.asarray(points.get_sizes()).max()) / 2 * ax.figure.dpi / 72
    _, heights = ax.transData.transform(points.get_offsets()).T
    assert heights.min() - radius > ax.bbox.y0 and heights.max() + radius < ax.bbox.y1
    assert not points.get_clip_on()  # markers of the outermost cosines are drawn completely


def test_complexes_names_with_common_prefix_have_a_line_each():
    names = [f"{'proteasome ' * 6}{i}" for i in "abc"]
    table = pd.DataFrame({"size": 3, "mean_cosine": [0.9, 0.5, 0.2], "fdr": 0.01}, index=names)
    ax = pl.complexes(table)
    offsets = np.asarray(ax.collections[1].get_offsets())
    assert offsets.tolist() == [[0.2, 0], [0.5, 1], [0.9, 2]]
    segments = ax.collections[0].get_segments()  # type: ignore[attr-defined]
    assert [segment[1].tolist() for segment in segments] == offsets.tolist()
    assert len(ax.get_yticklabels()) == 3


@pytest.mark.parametrize("n", [1, 2, 12])
def test_score_plots_long_names_are_readable(n):
    names = long_names(n)
    rng = np.random.default_rng(0)
    rows = [(name, key, metric) for name in names for key in "ab" for metric in ("relationship_area", "e_probe_f1")]
    frame = pd.DataFrame(rows, columns=["representation", "key", "metric"])
    frame = frame.assign(value=rng.uniform(0.1, 0.9, len(rows)), chance=0.05, better="higher")
    curve = pd.DataFrame({"percentile": [80, 90], "precision": [0.1, 0.3], "recall": [0.6, 0.4]})
    complexes = pd.DataFrame({"size": 3, "mean_cosine": np.linspace(0.9, 0.1, n), "fdr": np.nan}, index=names)
    drawn = [
        pl.benchmark(frame)[0],
        pl.biology_against_batch(frame),
        pl.ranking(pd.DataFrame(0.5, index=names, columns=["y_probe_f1", "e_probe_quadratic_f1", "overall"])),
        pl.variance(make_variance_table(names, keys=1)),
        pl.relationship_curve(dict.fromkeys(names, curve), prevalence=0.02),
        pl.complexes(complexes),
    ]
    for ax in drawn:
        require_readable_in_print(ax.figure)


def test_ranking_missing_rank_is_left_empty():
    ax = pl.ranking(pd.DataFrame({"y_probe_f1": [1.0, np.nan], "overall": [0.75, 0.25]}, index=["a", "b"]))
    assert sorted(text.get_text() for text in ax.texts) == ["0.25", "0.75", "1.00"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
