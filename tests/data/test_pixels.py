from __future__ import annotations

import numpy as np
import pytest
from conftest import IMAGE_KEY, make_cells

from scbd.data import ArraySource, ImageField, memory_map_h5ad
from scbd.data._pixels import check_pixels


@pytest.fixture
def read(monkeypatch):
    """Rows that were read, one number a row."""
    rows: list[int] = []
    original = ArraySource.read

    def recorded(self, wanted, out=None):
        rows.extend(np.arange(self.shape[0])[wanted].tolist())
        return original(self, wanted, out)

    monkeypatch.setattr(ArraySource, "read", recorded)
    return rows


def mapped(tmp_path, n=300, bad=()):
    cells = make_cells(n, dtype="float32")
    cells.obsm[IMAGE_KEY][list(bad)] = np.nan
    cells.write_h5ad(tmp_path / "cells.h5ad")
    cells.obsm[IMAGE_KEY] = memory_map_h5ad(tmp_path / "cells.h5ad", f"obsm/{IMAGE_KEY}")
    return cells


def test_set_up_looks_at_a_few_cells_of_images_on_disk(tmp_path, read):
    """It read every pixel of float images, twice where a model was loaded with them."""
    cells, field = mapped(tmp_path), ImageField("image", IMAGE_KEY)
    state = field.register_field(cells)
    assert len(read) == len(set(read)) == 64
    field.transfer_field(state, cells)
    assert len(read) == 128
    field.validate_field(cells)
    assert len(read) == 128


def test_images_in_memory_are_looked_at_once(read):
    ImageField("image", IMAGE_KEY).register_field(make_cells(300, dtype="float32"))
    assert np.bincount(read, minlength=300).min() == 1
    assert len(read) == 300 + 64


def test_bad_pixels_are_named_wherever_they_are_seen(tmp_path):
    names = ["a", "b"]
    images = make_cells(300, dtype="float32").obsm[IMAGE_KEY]
    images[[3, 299], 1, 2, 2] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"in 2 of 300 cells \(rows 3, 299\): drop these cells"):
        check_pixels(ArraySource(images), names, IMAGE_KEY)
    on_disk = ArraySource(mapped(tmp_path, bad=range(0, 300, 2)).obsm[IMAGE_KEY])
    with pytest.raises(ValueError, match=r"in \d+ of 64 cells that were looked at \(rows (\d*[02468], ){5}…\)"):
        check_pixels(on_disk, names, IMAGE_KEY)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_channel_that_shows_nothing_is_named(tmp_path, on_disk):
    """The transparency of PNG files, for one."""
    cells = make_cells(shape=(3, 8, 8))
    cells.obsm[IMAGE_KEY][:, 1] = 255
    if on_disk:
        cells.write_h5ad(tmp_path / "cells.h5ad")
        cells.obsm[IMAGE_KEY] = memory_map_h5ad(tmp_path / "cells.h5ad", f"obsm/{IMAGE_KEY}")
    said = r"one value in every pixel of channel_1 \(255\), in 64 cells.*it out: channels=\['channel_0', 'channel_2'\]"
    with pytest.warns(UserWarning, match=said):
        ImageField("image", IMAGE_KEY).register_field(cells)


def test_one_cell_says_nothing_of_a_channel():
    check_pixels(ArraySource(np.full((1, 2, 1, 1), 7, dtype="uint8")), ["a", "b"], IMAGE_KEY)
