"""Pictures as the networks of Genentech/SCBD get them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from known_answers import known_answers

from scbd.data import resize_images
from scbd.datasets import colorize
from scbd.datasets._digits import _nearest
from scbd.nn import Preprocess

HALF_A_LEVEL = 0.5 / 255 + 1e-6


def test_colours_of_digits_are_theirs_to_half_a_level():
    known = known_answers("scbd_data")
    grey = _nearest(known["cmnist_digit_grey_uint8"]) / np.float32(255)
    environments = np.array(["red", "green"])[known["cmnist_digit_e"]]
    ours = colorize(grey, known["cmnist_digit_label"], environments) / np.float32(255)
    apart = np.abs(ours - known["cmnist_digit_pixels"])
    assert apart.max() <= HALF_A_LEVEL
    assert apart.max() > 0.4 / 255  # they do not round


def test_colours_of_white():
    known = known_answers("scbd_data")
    digits, environments = np.repeat(np.arange(10), 2), np.tile(["red", "green"], 10)
    ours = colorize(np.ones((20, 1, 1)), digits, environments)[:, :, 0, 0] / 255
    np.testing.assert_allclose(ours.reshape(10, 2, 3), known["cmnist_colour_of_white"], rtol=0, atol=HALF_A_LEVEL)


def test_crops_are_theirs_where_fractions_of_counts_are_cut_off():
    """They cut off what is no whole count after resizing; we go on with it. One shift and scale serves all channels."""
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
