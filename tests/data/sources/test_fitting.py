from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scbd.data.sources._fitting import centred, fitted_size

SIDES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def naive(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pixel by pixel, from the one in the middle."""
    h, w = image.shape
    out = np.zeros((height, width), image.dtype)
    for y in range(height):
        for x in range(width):
            row, column = y - height // 2 + h // 2, x - width // 2 + w // 2
            if 0 <= row < h and 0 <= column < w:
                out[y, x] = image[row, column]
    return out


@given(SIDES, SIDES)
def test_padded_and_cut_about_the_middle(stored, wanted):
    images = np.random.default_rng(0).integers(1, 99, (2, 3, *stored), dtype="uint16")
    fitted = centred(images, wanted)
    assert fitted.dtype == images.dtype
    for n in range(2):
        for c in range(3):
            np.testing.assert_array_equal(fitted[n, c], naive(images[n, c], *wanted))


@given(SIDES, st.integers(0, 5), st.integers(0, 5))
def test_what_was_padded_is_cut_back(stored, more_rows, more_columns):
    image = np.random.default_rng(0).normal(size=stored)
    larger = centred(image, (stored[0] + more_rows, stored[1] + more_columns))
    np.testing.assert_array_equal(centred(larger, stored), image)


@given(st.lists(SIDES, min_size=1))
def test_squares_that_hold_all_and_that_lie_in_all(sizes):
    (low, _), (high, _) = fitted_size("crop", sizes), fitted_size("pad", sizes)
    assert all(low <= side <= high for size in sizes for side in size)
    assert {low, high} <= {side for size in sizes for side in size}
