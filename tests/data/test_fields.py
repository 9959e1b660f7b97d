from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells

from scbd.data import ImageField, LabelField
from scbd.data.fields import CROSS, label_values


def test_image_field_records_what_the_images_are(cells):
    state = ImageField("image", "single_cell_images").register_field(cells)
    assert state["image_shape"] == (2, 16, 16)
    assert state["dtype"] == "uint8"
    assert state["channels"] == state["var_names"] == ["channel_0", "channel_1"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"shape": (3, 16, 16)}, "holds 3 channels of uint8, the model was set up with 2 of uint8"),
        ({"dtype": "uint16"}, "holds 2 channels of uint16, the model was set up with 2 of uint8"),
    ],
)
def test_new_images_are_held_to_the_registered_ones(cells, other, said):
    field = ImageField("image", "single_cell_images")
    state = field.register_field(cells)
    with pytest.raises(ValueError, match=said):
        field.transfer_field(state, make_cells(8, **other))
    assert field.transfer_field(state, make_cells(8))["image_shape"] == (2, 16, 16)


def test_missing_and_bad_images(cells):
    with pytest.raises(
        KeyError, match=r"obsm has no 'single_cell_image' .*Did you mean 'single_cell_images'\?.*image_key"
    ):
        ImageField("image", "single_cell_image").register_field(cells)
    bad = make_cells(20, dtype="float32")
    bad.obsm["single_cell_images"][[3, 11]] = np.nan
    with pytest.raises(ValueError, match=r"NaN or infinite pixels in 2 of 20 cells \(rows 3, 11\): drop these cells"):
        ImageField("image", "single_cell_images").register_field(bad)


def test_one_column_keeps_its_categories(cells):
    field = LabelField("y", "gene")
    state = field.register_field(cells)
    assert state["categories"] == [f"gene_{i}" for i in range(4)]
    codes = field.get_field_data(cells)
    assert codes.dtype == np.int64
    assert [state["categories"][code] for code in codes] == cells.obs["gene"].tolist()
    assert field.get_summary_stats(state) == {"n_y": 4}


def test_several_columns_are_crossed(cells):
    field = LabelField("e", ["plate", "well"])
    state = field.register_field(cells)
    expected = (cells.obs["plate"].astype(str) + CROSS + cells.obs["well"].astype(str)).tolist()
    assert [state["categories"][code] for code in field.get_field_data(cells)] == expected
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
    new.obs["well"] = ["well_9"] * 5 + ["well_1"] * 5
    assert field.transfer_field(state, new)["categories"] == ["well_0", "well_1", "well_2", "well_9"]


def test_bad_labels_get_a_sentence(cells):
    with pytest.raises(KeyError, match=r"obs has no 'genes' .*Did you mean 'gene'\?"):
        label_values(cells.obs, "genes")
    with pytest.raises(ValueError, match="An empty list of obs columns"):
        LabelField("e", [])
    cells.obs["one"] = "same"
    with pytest.raises(ValueError, match=r"Every cell has the same obs\['one'\] \('same'\), used as y"):
        LabelField("y", "one").register_field(cells)
    cells.obs["holes"] = pd.Series(["a", None] * 48, index=cells.obs_names)
    with pytest.raises(ValueError, match=r"no value for 48 of 96 cells \(rows 1, 3, 5, 7, 9, …\): drop these"):
        label_values(cells.obs, ["gene", "holes"])


def test_fields_can_be_shown(cells):
    for field in (ImageField("image", "single_cell_images"), LabelField("e", ["plate", "well"])):
        table = field.view_state_registry(field.register_field(cells))
        assert table is not None
        assert table.row_count == 1
