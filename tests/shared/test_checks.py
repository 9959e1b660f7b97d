from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from conftest import make_cells

from scbd import data
from scbd._shared.checks import check_choice, size_after_resizing


@pytest.mark.parametrize(
    ("image_size", "stored", "expected"),
    [
        (None, (12, 8), (12, 8)),
        (6, (12, 12), (6, 6)),
        (np.int64(6), (12, 12), (6, 6)),
        ((6, 4), (12, 8), (6, 4)),
        ([6, 6], (12, 8), (6, 6)),
    ],
)
def test_size_after_resizing_valid_size_returns_height_and_width(image_size, stored, expected):
    assert size_after_resizing(image_size, *stored) == expected


def test_size_after_resizing_non_square_images_raise():
    said = r"squash images of 32 × 160 pixels.*proportions with image_size=\(6, 32\), or .* with image_size=\(32, 32\)"
    with pytest.raises(ValueError, match=said):
        size_after_resizing(32, 32, 160)


@pytest.mark.parametrize("image_size", [0, -1, 2.5, "32", (4,), (4, 4, 4), (0, 4), (4.5, 4), [4, "4"]], ids=str)
def test_size_after_resizing_invalid_size_raises(image_size):
    with pytest.raises(ValueError, match="image_size must be a positive number of pixels, or \\(height, width\\), got"):
        size_after_resizing(image_size, 12, 12)


@pytest.mark.parametrize(
    "take",
    [
        lambda hidden: data.stratified_split([hidden]),
        lambda hidden: data.hold_out_environments(hidden, [0]),
        lambda hidden: data.hold_out_perturbations(hidden),
        lambda hidden: data.Split(hidden, np.arange(12, 14), np.arange(14, 16)),
        lambda hidden: data.infer_environments(make_cells(12), "gene", fit=hidden > 0),
        lambda hidden: data.crop_cells(hidden[None], pd.DataFrame({"y": [0], "x": [0]}), size=2),
        lambda hidden: data.ArraySource(hidden[:, None, None, None].astype(np.float32)),
    ],
)
def test_data_functions_masked_array_raises(take: Callable[[Any], Any]):
    with pytest.raises(TypeError, match="is a masked array, and what its mask hides would be used"):
        take(np.ma.masked_greater(np.arange(12), 8))


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (Literal["a", "b"], "use 'a', 'b'."),
        (("a", None), "use 'a', None."),
        ({"a": "the first", "b": "the other"}, "use 'a' (the first), 'b' (the other)."),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", ["c", 1, ["a"]], ids=str)
def test_check_choice_unknown_value_raises(choices, said, value):
    check_choice("form", "a", choices)
    with pytest.raises(ValueError, match=re.escape(f"form={value!r} is not known: {said}")):
        check_choice("form", value, choices)
