from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from readable import long_names, require_readable

from scbd import pl
from scbd.data import InferredEnvironments


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def make_found(names: list[str], axes: np.ndarray) -> InferredEnvironments:
    labels = pd.Series(pd.Categorical(names, [f"inferred_{i + 1}" for i in range(3)]), index=[f"c{n}" for n in names])
    return InferredEnvironments(labels, axes.astype(np.float32), 0.5)


def test_cells_where_they_lie_and_shares_of_each_label():
    axes = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
    found = make_found(["inferred_1", "inferred_1", "inferred_2", "inferred_1"], axes)
    cells, bars = pl.inferred_environments(found, pd.Series(["a", "b", "b", "b"]))
    drawn = {c.get_label(): np.asarray(c.get_offsets()) for c in cells.collections}
    assert {name: len(places) for name, places in drawn.items()} == {"inferred_1": 3, "inferred_2": 1, "inferred_3": 0}
    np.testing.assert_array_equal(drawn["inferred_2"], [[4, 5]])
    assert cells.get_title() == "gain 0.5 nats a cell"
    assert [t.get_text() for t in bars.get_yticklabels()] == ["a", "b"]
    first, second = bars.containers
    np.testing.assert_allclose([bar.get_width() for bar in first], [1, 2 / 3])
    np.testing.assert_allclose([bar.get_x() for bar in second], [1, 2 / 3])


def test_of_many_labels_the_most_frequent():
    labels = np.repeat([f"g{i:02}" for i in range(40)], np.arange(1, 41))
    found = make_found(["inferred_1"] * len(labels), np.zeros((len(labels), 2)))
    _, bars = pl.inferred_environments(found, pd.Series(labels))
    assert [t.get_text() for t in bars.get_yticklabels()] == [f"g{i:02}" for i in range(10, 40)]


def test_as_many_labels_as_cells():
    with pytest.raises(ValueError, match="There are 3 labels and 1 cells"):
        pl.inferred_environments(make_found(["inferred_1"], np.zeros((1, 2))), pd.Series(["a"] * 3))


@pytest.mark.parametrize("n", [1, 5, 100])
def test_long_names_of_labels_can_be_read(n):
    labels = np.repeat(long_names(n), 4)
    axes = np.random.default_rng(0).normal(size=(len(labels), 2))
    cells, bars = pl.inferred_environments(make_found(["inferred_1"] * len(labels), axes), pd.Series(labels))
    require_readable(cells.figure)
    assert cells.figure.get_size_inches()[1] < 11  # of a page
    assert bars.get_title() == ("30 most frequent of 100" if n == 100 else "")


def test_cells_without_a_label_are_a_bar_of_their_own():
    found = make_found(["inferred_1", "inferred_2", "inferred_2"], np.zeros((3, 2)))
    _, bars = pl.inferred_environments(found, pd.Series(["a", None, np.nan]))
    assert [t.get_text() for t in bars.get_yticklabels()] == ["a", "missing"]
