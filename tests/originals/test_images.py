"""Compare preprocessed images with the network inputs of Genentech/SCBD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from anndata import AnnData
from conftest import SHARED
from helpers.known_answers import known_answers

from scbd.data import resize_images
from scbd.datasets import colored_mnist
from scbd.datasets._digits import _resize_nearest, colorize
from scbd.nn import Preprocess

HALF_A_LEVEL = 0.5 / 255 + 1e-6


@pytest.fixture(scope="module")
def digits() -> AnnData:
    """The authors' Colored MNIST."""
    if not SHARED.is_dir():
        pytest.skip("MNIST is not here: no folder ../shared/data beside the checkout")
    return colored_mnist(SHARED / "mnist", protocol="authors", seed=5)


def test_colored_mnist_authors_protocol_environments_and_parts_are_equal(digits):
    known = known_answers("scbd_data")
    of_train = digits.obs["split"] != "test"
    codes = digits.obs["environment"][of_train].cat.codes.to_numpy()
    is_train = (digits.obs["split"][of_train] == "train").to_numpy()
    np.testing.assert_array_equal(codes, np.unpackbits(known["cmnist_e_packed"]))
    np.testing.assert_array_equal(is_train, np.unpackbits(known["cmnist_train_mask_packed"]))
    assert np.bincount(codes).tolist() == known["cmnist_e_counts"].tolist()
    assert np.bincount(codes[is_train]).tolist() == known["cmnist_e_counts_train"].tolist()
    assert is_train[known["cmnist_train_first_100_in_order"]].all()


def test_colored_mnist_authors_protocol_pixels_are_equal(digits):
    known = known_answers("scbd_data")
    images, labels = digits.obsm["single_cell_images"], digits.obs["digit"].astype(int).to_numpy()
    for part, first in (("digit", 0), ("test", 60_000)):
        rows = first + known[f"cmnist_{part}_index"]
        np.testing.assert_array_equal(labels[rows], known[f"cmnist_{part}_label"])
        np.testing.assert_allclose(images[rows], known[f"cmnist_{part}_pixels"], rtol=0, atol=1e-7)
    preprocess = Preprocess((3, 32, 32), images.dtype.name, standardize=False)
    shown = preprocess(torch.from_numpy(images[known["cmnist_digit_index"]]))
    torch.testing.assert_close(shown, known.tensor("cmnist_digit_pixels"), rtol=0, atol=1e-7)


def test_colorize_differs_from_original_by_rounding_only():
    known = known_answers("scbd_data")
    grey = _resize_nearest(known["cmnist_digit_grey_uint8"]) / np.float32(255)
    environments = np.array(["red", "green"])[known["cmnist_digit_e"]]
    ours = colorize(grey, known["cmnist_digit_label"], environments) / np.float32(255)
    apart = np.abs(ours - known["cmnist_digit_pixels"])
    assert 0.4 / 255 < apart.max() <= HALF_A_LEVEL  # the original does not round


def test_colorize_white_image_returns_original_colours():
    known = known_answers("scbd_data")
    digits, environments = np.repeat(np.arange(10), 2), np.tile(["red", "green"], 10)
    ours = colorize(np.ones((20, 1, 1)), digits, environments)[:, :, 0, 0] / 255
    np.testing.assert_allclose(ours.reshape(10, 2, 3), known["cmnist_colour_of_white"], rtol=0, atol=HALF_A_LEVEL)


def test_preprocess_funk22_truncated_counts_are_equal_to_original():
    """The original truncates resized counts to integers; scbd keeps fractions.

    The original shifts and scales all channels equally.
    """
    known = known_answers("scbd_data")
    raw, theirs = torch.from_numpy(known["funk22_raw"])[None], torch.from_numpy(known["funk22_network_input"])
    preprocess = Preprocess((4, 100, 100), "uint16", image_size=32, standardize=False)
    ours = (preprocess(raw)[0] - 7) / 7
    assert float((ours - theirs).abs().max()) == pytest.approx(5.5e-4, abs=1e-5)
    whole = resize_images(known["funk22_raw"][None].astype(np.float32), 32)[0].astype(np.uint16)
    np.testing.assert_array_equal(whole, known["funk22_resized"])
    stored = Preprocess((4, 32, 32), "uint16", standardize=False)
    again = (stored(torch.from_numpy(whole)[None])[0] - 7) / 7
    torch.testing.assert_close(again, theirs, rtol=0, atol=1e-6)
