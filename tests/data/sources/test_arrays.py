from __future__ import annotations

import h5py
import numpy as np
import pytest
import zarr
from conftest import make_cells

from scbd.data import ArraySource, memory_map_h5ad
from scbd.data.sources import IMAGE_DTYPES, non_finite_rows

KEY = "obsm/single_cell_images"


@pytest.mark.parametrize("dtype", IMAGE_DTYPES)
def test_memory_and_memory_map_read_the_same_rows_as_asked(tmp_path, dtype):
    cells = make_cells(20, dtype=dtype)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    mapped = memory_map_h5ad(tmp_path / "cells.h5ad", KEY)
    assert isinstance(mapped.base, np.memmap)
    images = cells.obsm["single_cell_images"]
    for rows in (np.array([7, 3, 3, 19]), slice(4, 9), np.array([], dtype=int)):
        for source in (ArraySource(images), ArraySource(mapped)):
            read = source.read(rows)
            assert type(read) is np.ndarray
            assert read.dtype == dtype
            np.testing.assert_array_equal(read, images[rows])


@pytest.mark.parametrize("rows", [np.array([2, 0, 2]), slice(1, 3)], ids=str)
def test_rows_are_read_into_a_given_array(rows):
    images = np.arange(3 * 16, dtype="uint16").reshape(3, 1, 4, 4)
    out = np.empty_like(images[rows])
    assert ArraySource(images).read(rows, out) is out
    np.testing.assert_array_equal(out, images[rows])


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_that_does_not_exist_is_refused(row):
    with pytest.raises(IndexError, match="were asked for, there are 3"):
        ArraySource(np.zeros((3, 1, 4, 4), dtype="uint8")).read(np.array([0, row]))


def test_a_view_is_read_without_copying_all_of_it(monkeypatch):
    """Channels last turned to channels first, as many have them: numpy's take would copy the whole array."""
    images = np.moveaxis(np.arange(3 * 4 * 4 * 2, dtype="uint16").reshape(3, 4, 4, 2), -1, 1)
    monkeypatch.setattr(np, "take", None)
    np.testing.assert_array_equal(ArraySource(images).read(np.array([2, 0])), images[[2, 0]])


def test_what_was_read_is_free_to_change():
    images = np.zeros((3, 1, 4, 4), dtype="uint8")
    ArraySource(images).read(slice(0, 2))[:] = 1
    assert images.sum() == 0


def test_non_finite_rows_are_found_in_any_block():
    images = np.zeros((10, 2, 3, 3), dtype="float32")
    images[2, 1, 0, 0], images[9, 0, 2, 2] = np.nan, -np.inf
    assert non_finite_rows(ArraySource(images), block=4).tolist() == [2, 9]
    assert non_finite_rows(ArraySource(np.full((3, 1, 2, 2), 255, dtype="uint8"))).size == 0


def test_images_that_are_no_images(tmp_path):
    with pytest.raises(ValueError, match=r"shape \(5, 16, 16\), images must be 4-D.*add an axis"):
        ArraySource(np.zeros((5, 16, 16), dtype="uint8"))
    with pytest.raises(ValueError, match=r"shape \(5, 0, 4, 4\): there is nothing to read"):
        ArraySource(np.zeros((5, 0, 4, 4), dtype="uint8"))
    for dtype in ("float64", "int16", ">u2", "bool"):
        with pytest.raises(TypeError, match="cast it to one of uint8, uint16, float16, float32"):
            ArraySource(np.zeros((5, 1, 4, 4), dtype=dtype))


def test_lazy_arrays_are_refused_rather_than_misread(tmp_path):
    lazy = zarr.create_array(store={}, shape=(4, 1, 8, 8), dtype="uint8")
    with pytest.raises(TypeError, match=r"zarr.*cannot be read by row safely"):
        ArraySource(lazy)
    make_cells(6).write_h5ad(tmp_path / "c.h5ad")
    with h5py.File(tmp_path / "c.h5ad") as file, pytest.raises(TypeError, match="h5py.*open_screen"):
        ArraySource(file[KEY])


@pytest.mark.parametrize(
    "shape", [(16, 16, 2), (64, 64, 12), (64, 48, 3), (64, 64, 4), (8, 8, 1), (16, 100, 5)], ids=str
)
def test_channels_last_are_refused(shape):
    with pytest.raises(
        ValueError, match=r"looks like \(cells, height, width, channels\).*np.moveaxis\(images, -1, 1\)"
    ):
        ArraySource(np.zeros((5, *shape), dtype="uint8"))
    turned = np.moveaxis(np.zeros((5, *shape), dtype="uint8"), -1, 1)
    assert ArraySource(turned).shape == (5, shape[2], shape[0], shape[1])


@pytest.mark.parametrize(
    "shape",
    [(2, 16, 16), (1, 1, 1), (4, 3, 3), (3, 3, 3), (40, 5, 5), (40, 40, 40), (2, 16, 24), (4, 32, 160), (5, 100, 1)]
    + [(40, 12, 9), (2048, 1, 1), (3, 3, 2), (1, 64, 64), (16, 16, 24), (160, 32, 32)],
    ids=str,
)
def test_channels_first_of_any_number_and_size_are_not(shape):
    assert ArraySource(np.zeros((5, *shape), dtype="uint8")).shape == (5, *shape)


def test_what_a_mask_hides_is_not_shown():
    hidden = np.ma.masked_greater(np.arange(5 * 16, dtype="uint8").reshape(5, 1, 4, 4), 30)
    with pytest.raises(TypeError, match=r"is a masked array, .*filled\(0\)"):
        ArraySource(hidden)
    assert ArraySource(hidden.filled(0)).read(slice(None)).max() == 30
