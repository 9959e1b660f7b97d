from __future__ import annotations

import numpy as np
import pytest
import torch

from scbd.data import resize_images
from scbd.nn import Preprocess

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 2, 12, 8)).astype("uint8")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32"])
def test_resize_images_is_equal_to_preprocess_up_to_rounding(dtype, monkeypatch):
    monkeypatch.setattr("scbd.data._loading._RESIZE_BLOCK_IMAGES", 2)
    images = IMAGES.astype(dtype)
    resized = resize_images(images, (6, 5))
    assert resized.shape == (5, 2, 6, 5)
    assert resized.dtype == dtype
    as_one_goes = Preprocess((2, 12, 8), dtype, image_size=(6, 5), intensity="none", standardize=False)
    difference = as_one_goes(torch.from_numpy(images)).numpy() - resized.astype("float32")
    assert abs(difference).max() <= (0.5 if dtype.startswith("u") else 0.1 if dtype == "float16" else 0)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_resize_images_extreme_values_are_unchanged(dtype):
    top = np.iinfo(dtype).max
    images = np.stack([np.zeros((1, 9, 9)), np.full((1, 9, 9), top)]).astype(dtype)
    assert np.unique(resize_images(images, 4)).tolist() == [0, top]


def test_resize_images_out_given_is_filled():
    out = np.empty((5, 2, 3, 3), dtype="uint8")
    assert resize_images(IMAGES, (3, 3), out=out) is out
    np.testing.assert_array_equal(out, resize_images(IMAGES, (3, 3)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: resize_images(IMAGES, 0), "image_size must be a positive number of pixels.* got 0"),
        (lambda: resize_images(IMAGES, 4), "would squash images of 12 × 8 pixels"),
        (lambda: resize_images(IMAGES[0], 4), "images must be 4-D"),
        (lambda: resize_images(IMAGES, (4, 4), out=np.empty((5, 2, 4, 4))), "out has shape .* and dtype float64"),
    ],
)
def test_resize_images_invalid_input_raises(call, said):
    with pytest.raises(ValueError, match=said):
        call()
