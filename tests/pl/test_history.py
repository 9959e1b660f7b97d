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


def test_training_curves_and_the_line_of_a_collapsed_embedding():
    axes = pl.history(make_history("train_loss", "validation_loss", "train_supervised_c", "z_c_spread"), ceiling=5.5)
    titles = [ax.get_title().replace("\n", " ") for ax in axes]
    assert titles == ["loss", "supervised loss of z_c", "total variance of z_c (0: collapsed)"]
    assert [line.get_label() for line in axes[1].lines] == ["collapsed (train)", "train"]
    assert axes[0].figure.get_size_inches()[0] <= 7
    np.testing.assert_array_equal(axes[0].lines[1].get_ydata(), [3, 2, 1])


def test_long_runs_can_be_read():
    metrics = ("loss", "supervised_c", "learned_c", "learned_s", "invariance_c", "environment_c", "cycle")
    names = [f"{part}_{name}" for part in ("train", "validation") for name in metrics]
    history = {
        name: frame.set_axis(frame.index * 10_000) * 10_000
        for name, frame in make_history(*names, "z_c_spread").items()
    }
    require_readable_in_print(pl.history(history, ceiling=5.5)[0].figure)


def test_a_single_step_is_seen():
    """A line of one point has no length."""
    history = {name: curve.head(1) for name, curve in make_history("train_loss", "validation_loss").items()}
    assert all(line.get_marker() == "o" for line in pl.history(history)[0].lines)
    assert pl.history(make_history("train_loss"))[0].lines[0].get_marker() == "None"


def test_the_legend_of_training_curves_lies_on_no_line():
    figure = pl.history(make_history("train_loss", "train_supervised_c", "validation_supervised_c"), ceiling=3)[
        0
    ].figure
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["train", "validation", "collapsed (validation)"]
    assert all(ax.get_legend() is None and not legend.get_window_extent().overlaps(ax.bbox) for ax in figure.axes)
    assert legend.get_window_extent().width < figure.bbox.width


def test_the_line_of_a_collapsed_embedding_is_that_of_validation():
    """Batches of training may be larger, and a loss that lies above the line is not one that has collapsed."""
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
def test_curves_of_a_decoder(names, title):
    axes = pl.history(make_history("train_loss", *names))
    assert [ax.get_title() for ax in axes] == ["loss", title]
    assert [line.get_label() for line in axes[1].lines] == ["train", "validation"]


def titles_of(axes) -> list[str]:
    return [ax.get_title().replace("\n", " ") for ax in axes]


def test_history_draws_values_that_are_comparable_between_batch_sizes():
    """Contrastive losses of smaller batches are lower, so validation lay below training everywhere."""
    names = ["loss", "supervised_c", "learned_c", "supervised_s", "learned_s"]
    made = make_history(*(f"{part}_{name}" for part in ("train", "validation") for name in names))
    made["validation_loss"] -= 0.5  # of a smaller batch
    axes = pl.history(made, ceiling=5.5)
    assert titles_of(axes) == [
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
def test_history_marks_chance_where_the_invariance_loss_is_in_standard_errors(in_errors):
    axes = pl.history(make_history("train_loss", "train_invariance_c", *["train_environment_c"] * in_errors))
    title = "invariance loss of z_c"
    assert titles_of(axes)[-1] == (f"{title}, in standard errors" if in_errors else title)
    bands = [patch.get_bbox() for patch in axes[-1].patches]
    assert [(band.y0, band.y1) for band in bands] == ([(-2, 2)] if in_errors else [])


@pytest.mark.parametrize("history", [{}, None])  # as a model has it before training
def test_there_is_nothing_to_draw_before_training(history):
    with pytest.raises(ValueError, match="history"):
        pl.history(history)
