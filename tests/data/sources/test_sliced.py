from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data.sources import SlicedSource

IMAGES = np.arange(23 * 32, dtype="uint16").reshape(23, 2, 4, 4)


@pytest.fixture(params=[None, (4, 1, 2, 4)], ids=["contiguous", "chunked"])
def dataset(request, tmp_path):
    kwargs = {} if request.param is None else {"chunks": request.param, "compression": "gzip"}
    with h5py.File(tmp_path / "c.h5", "w") as file:
        yield file.create_dataset("images", data=IMAGES, **kwargs)


def test_rows_as_asked(dataset):
    source = SlicedSource(dataset)
    assert source.shape == IMAGES.shape and source.dtype == np.uint16

    @given(st.lists(st.integers(0, 22), max_size=40))
    def check(rows):
        np.testing.assert_array_equal(source.read(np.array(rows, dtype=int)), IMAGES[rows])

    check()
    out = np.empty_like(IMAGES[3:9])
    assert source.read(slice(3, 9), out) is out
    np.testing.assert_array_equal(out, IMAGES[3:9])
    with pytest.raises(IndexError, match="there are 23"):
        source.read(np.array([23]))


def test_a_damaged_file_names_the_rows(tmp_path):
    with h5py.File(tmp_path / "c.h5", "w") as file:
        images = file.create_dataset("images", data=IMAGES, chunks=(4, 2, 4, 4), compression="gzip")
        at = images.id.get_chunk_info(1).byte_offset
    data = bytearray((tmp_path / "c.h5").read_bytes())
    data[at : at + 8] = b"damaged!"
    (tmp_path / "c.h5").write_bytes(bytes(data))
    with h5py.File(tmp_path / "c.h5") as file:
        source = SlicedSource(file["images"], "obsm['x']")
        source.read(np.array([0, 3]))
        with pytest.raises(ValueError, match="obsm.'x'. is damaged or truncated: rows 4 to 5 cannot be read"):
            source.read(np.array([4, 5]))
