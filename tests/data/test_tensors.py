from __future__ import annotations

import numpy as np
import pytest
import torch

from scbd.data import ArraySource, TensorSource, read_tensor
from scbd.data._tensors import _COPIED_AT_ONCE
from scbd.data.sources import IMAGE_DTYPES

ROWS = [np.array([7, 3, 3, 19]), slice(4, 9), np.array([], dtype=int)]


def images_of(dtype: str, n: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, (n, 2, 3, 5)).astype(dtype)


@pytest.mark.parametrize("dtype", IMAGE_DTYPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_a_resident_source_reads_what_the_array_holds(dtype, rows):
    images = images_of(dtype)
    images[3] = np.iinfo(dtype).max if dtype.startswith("u") else -1.5
    resident = TensorSource.on_device(ArraySource(images), torch.device("cpu"))
    assert resident.shape == images.shape
    assert resident.dtype == images.dtype
    np.testing.assert_array_equal(resident.tensor(rows).numpy(), images[rows])
    np.testing.assert_array_equal(resident.read(rows), images[rows])
    out = np.empty_like(images[rows])
    assert resident.read(rows, out) is out
    np.testing.assert_array_equal(out, images[rows])
    for source in (resident, ArraySource(images)):
        np.testing.assert_array_equal(read_tensor(source, rows).numpy(), images[rows])


def test_images_are_copied_block_by_block(monkeypatch):
    asked = []

    class Source(ArraySource):
        def read(self, rows, out=None):
            asked.append(rows)
            return super().read(rows, out)

    images = images_of("uint8")
    monkeypatch.setattr("scbd.data._tensors._COPIED_AT_ONCE", 7 * images[0].nbytes)
    resident = TensorSource.on_device(Source(images), torch.device("cpu"))
    assert asked == [slice(0, 7), slice(7, 14), slice(14, 21)]
    np.testing.assert_array_equal(resident.read(slice(None)), images)
    monkeypatch.setattr("scbd.data._tensors._COPIED_AT_ONCE", images[0].nbytes // 2)  # an image is larger
    resident = TensorSource.on_device(Source(images[:3]), torch.device("cpu"))
    assert asked[3:] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert _COPIED_AT_ONCE >= 2**20


def test_what_was_read_is_free_to_change():
    resident = TensorSource(torch.zeros(3, 1, 4, 4, dtype=torch.uint8))
    resident.read(slice(0, 2))[:] = 1
    assert resident.read(slice(None)).sum() == 0


def test_images_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    with pytest.raises(ValueError, match="all inputs take 0.0 GiB, cuda:0 has 0.0 GiB free: leave preload out"):
        TensorSource.on_device(ArraySource(images_of("float32")), torch.device("cuda:0"))
