from __future__ import annotations

import numpy as np
import pytest
from conftest import IMAGE_KEY, make_cells

from scbd.data import resize_images, write_screen


def test_whole_numbers_are_not_rounded(tmp_path):
    cells = make_cells(20, dtype="uint16")
    cells.obsm[IMAGE_KEY][0] = 2049
    with pytest.raises(ValueError, match="dtype='float16' rounds whole numbers above 2,048, and has none above 65,504"):
        write_screen(tmp_path / "screen.h5ad", cells, y_key="gene", dtype="float16")
    kept = write_screen(tmp_path / "screen.h5ad", make_cells(20), y_key="gene", dtype="float16")
    assert kept.obsm[IMAGE_KEY].dtype == np.float16


def test_crops_that_are_not_square_are_stretched_only_when_asked(tmp_path):
    square, wide = make_cells(20), make_cells(20, shape=(2, 8, 40))
    with pytest.raises(ValueError, match=r"plate 1: image_size=8 would squash images of 8 × 40 pixels"):
        write_screen(tmp_path / "screen.h5ad", [square, wide], y_key="gene", image_size=8)
    assert not list(tmp_path.iterdir())
    screen = write_screen(tmp_path / "screen.h5ad", [square, wide], y_key="gene", image_size=(8, 12))
    assert screen.obsm[IMAGE_KEY].shape == (40, 2, 8, 12)
    kept = write_screen(tmp_path / "kept.h5ad", wide, y_key="gene", image_size=(4, 20))
    expected = resize_images(wide[kept.obs_names].obsm[IMAGE_KEY], (4, 20))
    np.testing.assert_array_equal(kept.obsm[IMAGE_KEY], expected)
