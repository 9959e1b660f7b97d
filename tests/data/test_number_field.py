from __future__ import annotations

import numpy as np
import pytest
from conftest import make_cells

from scbd.data import NumberField


def test_the_order_is_what_is_told():
    cells = make_cells(6)
    cells.obs["time"] = [1.7e9 + 2, 1.7e9, 1.7e9 + 1, 1.7e9 + 2, 9e9, 1.7e9]  # seconds, which float32 has not
    cells.obs["row"] = [2, 2, 1, 1, 5, 5]
    field = NumberField("numbers", ["time", "row"])
    places = field.places(cells)
    assert places.tolist() == [[2, 1], [0, 1], [1, 0], [2, 0], [3, 2], [0, 2]]
    assert places.dtype == np.int64
    np.testing.assert_array_equal(field.get_field_data(cells), cells.obs[["time", "row"]])
    state = field.register_field(cells)
    assert state == {"columns": ["time", "row"]}
    assert field.get_summary_stats(state) == {"n_numbers": 2}
    assert field.view_state_registry(state) is not None


def test_new_cells_need_none():
    cells = make_cells(6)
    assert NumberField("numbers", "time").transfer_field({"columns": ["time"]}, cells) == {"columns": ["time"]}


def test_a_number_that_never_changes_is_said():
    cells = make_cells(6)
    cells.obs["time"] = 3.5
    with pytest.raises(ValueError, match=r"Every cell has the same obs\['time'\] \(3.5\)"):
        NumberField("numbers", "time").register_field(cells)
