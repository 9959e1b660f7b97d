from __future__ import annotations

import numpy as np
import pytest
from conftest import make_cells
from small_models import QUICK, make_model

pytestmark = pytest.mark.filterwarnings("ignore:z_c has collapsed")


def test_cells_are_as_they_are_before_and_after_training():
    model = make_model(augment=True)
    pixels = model.adata.obsm["single_cell_images"] / np.float32(255)
    np.testing.assert_allclose(model.get_intensities(), pixels, atol=1e-6)  # not turned, as training images are
    model.train(**QUICK)
    np.testing.assert_allclose(model.get_intensities(), pixels, atol=1e-6)


def test_what_is_not_finite_is_refused():
    model, cells = make_model(make_cells(dtype="float32")), make_cells(dtype="float32")
    cells.obsm["single_cell_images"][7] = np.inf
    with pytest.raises(ValueError, match=r"Images of 1 of 2 cells .* \(rows 7\)"):
        model.get_intensities(cells, [3, 7])
