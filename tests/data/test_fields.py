from __future__ import annotations

import numpy as np
import pytest
from conftest import make_cells

from scbd.data import ImageField


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


def test_the_field_can_be_shown(cells):
    field = ImageField("image", "single_cell_images")
    table = field.view_state_registry(field.register_field(cells))
    assert table is not None
    assert table.row_count == 1
