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


def table(names=("ours", "theirs"), keys=2) -> pd.DataFrame:
    rows = [
        (name, f"{name} {key}", factor, 0.1 * i + 0.1 * j + 0.05 * key, 0.02, 0.1 * i)
        for i, name in enumerate(names)
        for key in range(keys)
        for j, factor in enumerate(["well", "gene"])
    ]
    return pd.DataFrame(rows, columns=["representation", "key", "factor", "share", "chance", "alone"])


def test_each_factor_has_a_mark_of_each_representation():
    ax = pl.variance(table())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["well", "gene"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # from the top
    marks = [(line.get_label(), line.get_marker(), np.array(line.get_data())) for line in ax.lines]
    shares = {label: data for label, _, data in marks}
    np.testing.assert_allclose(shares["ours"][0], np.array([0.025, 0.125]))  # means of the keys
    np.testing.assert_allclose(shares["theirs"][0], np.array([0.125, 0.225]))
    ours, theirs = shares["ours"][1], shares["theirs"][1]
    assert (ours < theirs).all() and (np.round((ours + theirs) / 2) == [0, 1]).all()
    dots = np.concatenate([data[0] for _, marker, data in marks if marker == "."])
    np.testing.assert_allclose(np.sort(dots), np.sort(table()["share"].to_numpy()))
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "theirs", "alone", "chance"]


def test_twelve_representations_are_told_apart():
    names = [f"system {i}" for i in range(12)]
    ax = pl.variance(table(names, keys=1))
    shown = {(line.get_color(), line.get_marker()) for line in ax.lines if line.get_label() in names}
    assert len(shown) == 12 and not [line for line in ax.lines if line.get_marker() == "."]


def test_a_table_of_another_kind():
    _, ax = plt.subplots()
    assert pl.variance(table(), ax=ax) is ax
    with pytest.raises(ValueError, match="The table lacks chance: give what"):
        pl.variance(table().drop(columns="chance"))
    with pytest.raises(ValueError, match="The table is empty"):
        pl.variance(table().head(0))


@pytest.mark.parametrize("width", [None, 3.5])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("n", [1, 8, 25])
def test_names_of_factors_and_representations_can_be_read(n, long, width):
    drawn = table(long_names(n) if long else [f"m{i}" for i in range(n)], keys=1)
    if long:
        drawn["factor"] = drawn["factor"].map(
            {"well": "Metadata_well_position_by_row", "gene": "gene and guide, as given"}
        )
    ax = None if width is None else plt.subplots(figsize=(width, 3 + 0.25 * n), layout="constrained")[1]
    require_readable(pl.variance(drawn, ax=ax).figure)
