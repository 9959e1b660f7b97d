from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from helpers.figure_checks import long_names, require_readable

from paper import plots


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_sweep_draws_mean_and_deviation_at_each_value():
    frame = pd.DataFrame({"alpha": [10.0, 10.0, 0.0], "out": [0.8, 0.6, 0.3], "in": [1.0, 1.0, 0.9]})
    ax = plots.sweep(frame, "alpha", {"in": "in distribution", "out": "out"}, control={"out": 0.5})
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "10"]
    line, _, (bars,) = ax.containers[1]
    np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), [0.3, 0.7])
    np.testing.assert_allclose(bars.get_segments()[1][:, 1], [0.7 - 0.02**0.5, 0.7 + 0.02**0.5])
    handles, names = ax.get_legend_handles_labels()
    assert set(names) == {"in distribution", "out", "never trained"} and len(handles) == 3
    assert [0.5, 0.5] in [np.asarray(line.get_ydata(), dtype=object).tolist() for line in ax.lines]
    with pytest.raises(KeyError, match="no column 'beta' to draw"):
        plots.sweep(frame, "beta", {"out": "out"})


def test_sweep_twelve_scores_have_distinct_colours_and_markers():
    frame = pd.DataFrame({"alpha": [0.0, 1.0], **{f"s{i}": [i, i + 1.0] for i in range(12)}})
    ax = plots.sweep(frame, "alpha", {f"s{i}": f"score {i}" for i in range(12)})
    lines = [container[0] for container in ax.containers]
    assert [line.get_ydata()[0] for line in lines] == list(range(12))
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 12
    legend = ax.get_legend()
    assert legend is not None and len(legend.get_texts()) == 12
    groups = pd.concat([frame.assign(size=i) for i in range(7)])
    assert len(plots.by_group(groups, "alpha", "s1", "size").containers) == 7


def test_sweep_text_values_are_tick_labels():
    frame = pd.DataFrame({"style_target": ["ye", "e", "none"], "out": [1.0, 2.0, 3.0]})
    ax = plots.sweep(frame, "style_target", {"out": "out"})
    assert [label.get_text() for label in ax.get_xticklabels()] == ["e", "none", "ye"]


@pytest.mark.parametrize(
    ("values", "names", "places"),
    [
        ([True, False], ["False", "True"], [1, 0]),
        ([None, "ye"], ["ye", "None"], [1, 0]),
        (["ye", True], ["True", "ye"], [1, 0]),
        ([None, 0.5], ["0.5", "None"], [1, 0]),
        (["b", 8, None, "a", 2.5], ["2.5", "8", "a", "b", "None"], [3, 1, 4, 2, 0]),
        (pd.Categorical(["b", "a"], categories=["c", "b", "a"]), ["a", "b"], [1, 0]),
    ],
)
def test_sweep_and_by_group_mixed_types_are_ordered_ticks(values, names, places):
    """Each value has its own position on the axis, with its own scores."""
    frame = pd.DataFrame({"setting": values, "out": np.array(places, dtype=float)})
    frame = pd.concat([frame, frame.assign(out=frame["out"] + 1)])
    for ax in (
        plots.sweep(frame, "setting", {"out": "out"}),
        plots.by_group(frame.assign(of=1), "setting", "out", "of"),
    ):
        assert [label.get_text() for label in ax.get_xticklabels()] == names
        drawn = np.asarray(ax.containers[0][0].get_xydata())
        np.testing.assert_array_equal(drawn, [[i, i + 0.5] for i in range(len(names))])


@pytest.mark.parametrize(("groups", "names"), [([True, False], ["True", "False"]), (["a", None], ["a", "None"])])
def test_by_group_bool_or_missing_group_is_legend_entry(groups, names):
    frame = pd.DataFrame({"alpha": [1.0, 1.0], "out": [0.1, 0.2], "of": groups})
    ax = plots.by_group(frame, "alpha", "out", "of")
    assert ax.get_legend_handles_labels()[1] == names
    assert [float(container[0].get_ydata()[0]) for container in ax.containers] == [0.1, 0.2]


def test_in_against_out_title_states_correlation_if_defined():
    frame = pd.DataFrame({"own in": [0.1, 0.2, 0.3], "own out": [0.6, 0.4, 0.2]})
    ax = plots.in_against_out(frame)
    assert ax.get_title() == "correlation -1.00, 3 runs"
    np.testing.assert_allclose(np.asarray(ax.collections[0].get_offsets()), frame.to_numpy())
    for n in (1, 2):  # with two points, every correlation is 1 or -1
        assert plots.in_against_out(frame.head(n)).get_title() == ""
    for column in frame:  # without variation there is no correlation
        assert plots.in_against_out(frame.assign(**{column: 0.5})).get_title() == ""


def test_by_group_draws_one_line_per_group_over_missing_values():
    rows = [("a", 0.0, 0.1), ("a", 1.0, 0.2), ("a", 10.0, 0.4), ("a", 10.0, 0.6), ("b", 0.0, 0.3), ("b", 10.0, 0.7)]
    ax = plots.by_group(pd.DataFrame(rows, columns=["size", "alpha", "out"]), "alpha", "out", "size")
    lines = [container[0] for container in ax.containers]
    np.testing.assert_allclose(np.asarray(lines[0].get_xydata()), [[0, 0.1], [1, 0.2], [2, 0.5]])
    np.testing.assert_allclose(np.asarray(lines[1].get_xydata()), [[0, 0.3], [2, 0.7]])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "10"]
    assert ax.get_legend_handles_labels()[1] == ["a", "b"]
    with pytest.raises(KeyError, match="no column 'batch' to draw"):
        plots.by_group(pd.DataFrame({"alpha": [1.0], "out": [1.0]}), "alpha", "out", "batch")


def test_trade_off_draws_one_point_per_setting_and_traced_line():
    rows = [("ERM", "a", 1.0, 0.1), ("SCBD", "0", 0.9, 0.1), ("SCBD", "0", 0.7, 0.5), ("SCBD", "10", 0.6, 0.8)]
    frame = pd.DataFrame(rows, columns=["system", "setting", "in", "out"])
    ax = plots.trade_off(frame, "in", "out", traced=["SCBD"])
    scbd, erm = (container[0] for container in ax.containers)
    np.testing.assert_allclose(np.asarray(scbd.get_xydata()), [[0.8, 0.3], [0.6, 0.8]])
    across, up = (bars.get_segments()[0] for bars in ax.containers[0][2])
    assert np.ptp(across[:, 0]) == pytest.approx(2 * np.std([0.9, 0.7], ddof=1)) and np.ptp(across[:, 1]) == 0
    assert np.ptp(up[:, 1]) == pytest.approx(2 * np.std([0.1, 0.5], ddof=1)) and np.ptp(up[:, 0]) == 0
    assert scbd.get_linestyle() == "-" and erm.get_linestyle() == "None"
    assert ax.get_legend_handles_labels()[1] == ["SCBD", "ERM"]
    with pytest.raises(KeyError, match="no column 'batch'"):
        plots.trade_off(frame, "in", "batch")


def make_runs(settings: list, groups: list) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [(setting, group) for setting in settings for group in groups for _ in range(2)]
    frame = pd.DataFrame(rows, columns=["setting", "system"])
    return frame.assign(**{name: rng.uniform(0.1, 0.9, len(rows)) for name in ("accuracy in", "accuracy out")})


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ([0, 0.01, 0.0316, 0.1, 1, 10], long_names(2)),
        (np.geomspace(1e-4, 1e2, 25).round(6).tolist(), ["a"]),
        ([0, 1], [f"m{i}" for i in range(12)]),
    ],
)
def test_by_group_and_trade_off_many_or_long_names_are_readable(settings, groups):
    frame = make_runs(settings, groups)
    require_readable(plots.by_group(frame, "setting", "accuracy out", "system").figure)
    require_readable(plots.trade_off(frame, "accuracy in", "accuracy out", traced=groups[:1]).figure)


def test_in_against_out_runs_without_score_are_excluded():
    frame = pd.DataFrame({"own in": [0.1, 0.2, 0.3, 0.9, np.nan], "own out": [0.6, 0.4, 0.2, np.nan, 0.9]})
    ax = plots.in_against_out(frame)
    assert ax.get_title() == "correlation -1.00, 3 runs" and len(np.asarray(ax.collections[0].get_offsets())) == 3
    with pytest.raises(KeyError, match=r"no column 'r_c in' to draw \(its columns: own in, own out\)"):
        plots.in_against_out(frame, ins="r_c in")
