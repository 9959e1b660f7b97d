from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from helpers.figure_checks import require_readable_in_print

from scbd import pl


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def make_history(*names):
    steps = pd.Index([1, 2, 3], name="step")
    return {name: pd.DataFrame({name: [3.0, 2.0, 1.0]}, index=steps) for name in names}


def test_history_with_ceiling_draws_curves_and_collapsed_line():
    axes = pl.history(make_history("train_loss", "validation_loss", "train_supervised_c", "z_c_spread"), ceiling=5.5)
    titles = [ax.get_title().replace("\n", " ") for ax in axes]
    assert titles == ["loss", "supervised loss of z_c", "total variance of z_c (0: collapsed)"]
    assert [line.get_label() for line in axes[1].lines] == ["collapsed (train)", "train"]
    assert axes[0].figure.get_size_inches()[0] <= 7
    np.testing.assert_array_equal(axes[0].lines[1].get_ydata(), [3, 2, 1])


def test_history_long_run_is_readable():
    metrics = ("loss", "supervised_c", "learned_c", "learned_s", "invariance_c", "environment_c", "cycle")
    names = [f"{part}_{name}" for part in ("train", "validation") for name in metrics]
    history = {
        name: frame.set_axis(frame.index * 10_000) * 10_000
        for name, frame in make_history(*names, "z_c_spread").items()
    }
    require_readable_in_print(pl.history(history, ceiling=5.5)[0].figure)


def test_history_single_step_has_markers():
    """Without a marker, a line of one point would be invisible."""
    history = {name: curve.head(1) for name, curve in make_history("train_loss", "validation_loss").items()}
    assert all(line.get_marker() == "o" for line in pl.history(history)[0].lines)
    assert pl.history(make_history("train_loss"))[0].lines[0].get_marker() == "None"


def test_history_legend_is_outside_the_axes():
    figure = pl.history(make_history("train_loss", "train_supervised_c", "validation_supervised_c"), ceiling=3)[
        0
    ].figure
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["train", "validation", "collapsed (validation)"]
    assert all(ax.get_legend() is None and not legend.get_window_extent().overlaps(ax.bbox) for ax in figure.axes)
    assert legend.get_window_extent().width < figure.bbox.width


def test_history_collapsed_line_has_colour_of_validation():
    """Training batches may be larger, and their loss may then exceed the line without a collapse."""
    names = [f"{part}_{name}" for part in ("train", "validation") for name in ("loss", "supervised_c")]
    _, ax = pl.history(make_history(*names), ceiling=3.8)
    line, train, validation = ax.lines
    assert line.get_label() == "collapsed (validation)" and line.get_ydata()[0] == 3.8
    assert line.get_color() == validation.get_color() != train.get_color()


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["decoder_train_loss", "decoder_validation_loss"], "loss of the decoder"),
        (["train_reconstruction", "validation_reconstruction"], "reconstruction loss"),
    ],
)
def test_history_decoder_losses_have_a_panel(names, title):
    axes = pl.history(make_history("train_loss", *names))
    assert [ax.get_title() for ax in axes] == ["loss", title]
    assert [line.get_label() for line in axes[1].lines] == ["train", "validation"]


def get_titles(axes) -> list[str]:
    return [ax.get_title().replace("\n", " ") for ax in axes]


def test_history_unequal_batch_sizes_draws_comparable_values():
    """Contrastive losses are lower for smaller batches, so validation was drawn below training throughout."""
    names = ["loss", "supervised_c", "learned_c", "supervised_s", "learned_s"]
    made = make_history(*(f"{part}_{name}" for part in ("train", "validation") for name in names))
    made["validation_loss"] -= 0.5  # as with a smaller batch
    axes = pl.history(made, ceiling=5.5)
    assert get_titles(axes) == [
        "supervised information of z_c (0: collapsed, 1: all)",
        "supervised information of z_s (0: collapsed, 1: all)",
        "loss, compared with the last step",
    ]
    for ax in axes[:2]:
        line, *curves = ax.lines
        assert line.get_label() == "collapsed" and set(line.get_ydata()) == {0}
        assert [curve.get_label() for curve in curves] == ["train", "validation"]
    for curve in axes[2].lines:
        np.testing.assert_allclose(curve.get_ydata(), [2, 1, 0])


@pytest.mark.parametrize("in_errors", [True, False])
def test_history_invariance_in_standard_errors_marks_chance(in_errors):
    axes = pl.history(make_history("train_loss", "train_invariance_c", *["train_environment_c"] * in_errors))
    title = "invariance loss of z_c"
    assert get_titles(axes)[-1] == (f"{title}, in standard errors" if in_errors else title)
    bands = [patch.get_bbox() for patch in axes[-1].patches]
    assert [(band.y0, band.y1) for band in bands] == ([(-2, 2)] if in_errors else [])


@pytest.mark.parametrize("history", [{}, None])  # the history of a model before training
def test_history_empty_or_none_raises(history):
    with pytest.raises(ValueError, match="history"):
        pl.history(history)
