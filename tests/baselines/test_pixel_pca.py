from __future__ import annotations

import numpy as np
import pytest
from conftest import make_cells
from sklearn.decomposition import PCA

from scbd.baselines import pixel_pca


def test_small_images_are_those_of_an_exact_pca():
    cells = make_cells(80)
    ours = pixel_pca(cells, n_components=2)
    pixels = cells.obsm["single_cell_images"].reshape(80, -1).astype(float)
    exact = PCA(2, svd_solver="full").fit_transform(pixels)
    for a, b in zip(ours.T, exact.T, strict=True):
        assert abs(np.corrcoef(a, b)[0, 1]) > 0.9999


def test_large_images_are_averaged_and_odd_margins_left_out():
    cells = make_cells(30, shape=(1, 50, 70))
    assert pixel_pca(cells, n_components=500).shape == (30, 30)
    flat = make_cells(30, shape=(1, 33, 33))
    kept = pixel_pca(flat)
    flat.obsm["single_cell_images"][:, :, 32:] = 0
    np.testing.assert_array_equal(pixel_pca(flat), kept)


def test_missing_images(cells):
    with pytest.raises(KeyError, match="obsm has no 'images'"):
        pixel_pca(cells, image_key="images")
