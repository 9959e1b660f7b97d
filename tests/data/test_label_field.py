from __future__ import annotations

import numpy as np
import pytest
from conftest import make_cells

from scbd._labels import CROSS
from scbd.data import LabelField


def test_one_column_keeps_its_categories(cells):
    field = LabelField("y", "gene")
    state = field.register_field(cells)
    assert state["categories"] == [f"gene_{i}" for i in range(4)]
    codes, unknown = field.codes(cells, state["categories"])
    assert unknown == []
    assert [state["categories"][code] for code in codes] == cells.obs["gene"].tolist()
    assert field.get_summary_stats(state) == {"n_y": 4}


def test_codes_do_not_follow_the_order_of_the_table_s_own_categories(cells):
    field = LabelField("y", "gene")
    categories = field.register_field(cells)["categories"]
    before, _ = field.codes(cells, categories)
    cells.obs["gene"] = cells.obs["gene"].cat.reorder_categories(categories[::-1])
    np.testing.assert_array_equal(field.codes(cells, categories)[0], before)


def test_several_columns_are_crossed(cells):
    field = LabelField("e", ["plate", "well"])
    state = field.register_field(cells)
    expected = (cells.obs["plate"].astype(str) + CROSS + cells.obs["well"].astype(str)).tolist()
    assert [state["categories"][code] for code in field.codes(cells, state["categories"])[0]] == expected
    assert field.get_field_data(cells).tolist() == expected
    assert "plate" in cells.obs and len(cells.obs.columns) == 3  # nothing was added


def test_unused_categories_and_numbers(cells):
    kept = cells[cells.obs["gene"] != "gene_2"].copy()
    assert LabelField("y", "gene").register_field(kept)["categories"] == ["gene_0", "gene_1", "gene_3"]
    kept.obs["dose"] = np.arange(kept.n_obs) % 3
    assert LabelField("y", "dose").register_field(kept)["categories"] == [0, 1, 2]


def test_unseen_labels_extend_the_registered_ones(cells):
    field = LabelField("e", "well")
    state = field.register_field(cells)
    new = make_cells(10)
    new.obs["well"] = ["well_9"] * 4 + ["well_1"] * 4 + [None] * 2
    assert field.transfer_field(state, new)["categories"] == ["well_0", "well_1", "well_2", "well_9"]
    _, unknown = field.codes(new[:8], state["categories"])
    assert unknown == ["well_9"]
    assert field.unknown(unknown).startswith("obs['well'] holds 1 label that the model was not set up with ('well_9')")


def test_one_value_is_nothing_to_contrast(cells):
    cells.obs["one"] = "same"
    with pytest.raises(
        ValueError,
        match=r"Every cell has the same obs\['one'\] \('same'\), used as y.* attach old and new cells together",
    ):
        LabelField("y", "one").register_field(cells)


@pytest.mark.parametrize("text", ["nan", "", "None"])
def test_texts_of_missing_values_are_warned_of(cells, text):
    cells.obs["gene"] = np.where(np.arange(96) < 7, text, cells.obs["gene"].astype(str))
    with pytest.warns(UserWarning, match=f"7 of 96 cells have the y {text!r}"):
        state = LabelField("y", "gene").register_field(cells)
    assert text in state["categories"]


def test_the_field_can_be_shown(cells):
    field = LabelField("e", ["plate", "well"])
    table = field.view_state_registry(field.register_field(cells))
    assert table is not None
    assert table.row_count == 1
