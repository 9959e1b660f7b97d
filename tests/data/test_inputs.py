from __future__ import annotations

import numpy as np
import pytest
from conftest import IMAGE_KEY, make_cells, make_wells

from scbd.data import ImageField, ImageSource, read_crops
from scbd.data._inputs import Inputs, check_like_registered, image_source


def images(channels: int, height: int, width: int) -> ImageSource:
    return image_source(make_cells(8, shape=(channels, height, width)), IMAGE_KEY)


def test_what_was_registered_is_what_the_model_takes_whatever_is_attached():
    field = ImageField("image", IMAGE_KEY)
    state = field.register_field(make_cells())
    larger = make_cells(8, shape=(2, 20, 20))
    larger.var_names = ["DNA", "actin"]
    assert field.transfer_field(state, larger) == state


@pytest.mark.parametrize("resize", [True, False])
def test_sizes_that_a_model_takes(resize):
    state = ImageField("image", IMAGE_KEY).register_field(make_cells(shape=(2, 16, 24)))
    check_like_registered(images(2, 16, 24), state, IMAGE_KEY, resize)
    if resize:
        check_like_registered(images(2, 32, 48), state, IMAGE_KEY, resize)
    else:
        with pytest.raises(ValueError, match="images of 32 × 48 pixels, the model was trained on 16 × 24: resize them"):
            check_like_registered(images(2, 32, 48), state, IMAGE_KEY, resize)
    with pytest.raises(ValueError, match="images of 32 × 32 pixels, the model was trained on 16 × 24"):
        check_like_registered(images(2, 32, 32), state, IMAGE_KEY, resize)
    # where the model is not known yet
    check_like_registered(images(2, 32, 32), state, IMAGE_KEY)


def test_an_array_file_with_channels_last_is_told_from_a_broken_one(tmp_path):
    np.save(tmp_path / "cells.npy", np.zeros((5, 32, 32, 3), dtype="uint8"))
    with pytest.raises(ValueError, match=r"cells.npy has shape \(5, 32, 32, 3\), which looks like"):
        read_crops(tmp_path / "cells.npy")


def test_layers_are_named_without_x():
    """To anndata 0.13 it is one of them."""
    wells = make_wells()
    wells.layers["scaled"] = wells.X
    with pytest.raises(KeyError, match=r"layers has no 'scales' \(its keys: scaled\)\. Did you mean 'scaled'\?"):
        Inputs(layer="scales").array(wells)
