from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scbd.datasets._simulated_plates import LAYOUT, SHAPES, add_layout, well_name


@pytest.mark.parametrize(("row", "column", "name"), [(0, 0, "A01"), (15, 23, "P24"), (25, 9, "Z10"), (26, 47, "AA48")])
def test_names_of_wells(row, column, name):
    assert well_name(row, column) == name


@pytest.mark.parametrize("n_wells", SHAPES)
def test_layout_is_standardised_where_it_varies(n_wells):
    shape = SHAPES[n_wells]
    row, column = (axis.ravel() for axis in np.indices(shape))
    layout = add_layout(pd.DataFrame({"row": row, "column": column}), shape)[list(LAYOUT)]
    np.testing.assert_allclose(layout.mean(), 0, atol=1e-12)
    # all wells of a plate of six lie at its edge
    np.testing.assert_allclose(layout.var(ddof=0), [1, 1, n_wells > 6], rtol=0.3)
    edge = (row == 0) | (column == 0) | (row == shape[0] - 1) | (column == shape[1] - 1)
    assert n_wells == 6 or layout["edge"][edge].min() > layout["edge"][~edge].max()
