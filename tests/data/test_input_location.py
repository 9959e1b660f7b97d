"""Where inputs lie, which channels of images are taken, and which a model knows again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import IMAGE_KEY, make_cells, make_wells
from hypothesis import given
from hypothesis import strategies as st

from scbd import SCBDModel
from scbd.data import ArraySource, ImageSource, read_crops, write_screen
from scbd.data._channels import channel_names, check_channel_names, check_images_match_registered, resolve_channels
from scbd.data._fields import ImageField
from scbd.data._input_location import InputLocation, image_source
from scbd.data._sources import select_columns


def register(cells: AnnData, channels=None) -> dict:
    return ImageField("image", IMAGE_KEY, channels).register_field(cells)


def named(names: list[str], column: bool = True) -> AnnData:
    """Return cells whose channels are named, and have their own number in the first pixel."""
    cells = make_cells(shape=(len(names), 8, 8))
    cells.var_names = names
    if column:
        cells.var["channels"] = names
    cells.obsm[IMAGE_KEY][:, :, 0, 0] = np.arange(len(names))
    return cells


def portrait() -> AnnData:
    """Return cells as scPortrait stores them: masks are the first channels of the array."""
    cells = named(["nucleus", "cell", "DAPI", "ER"])
    cells.var["channel_mapping"] = ["mask", "mask", "image_channel", "image_channel"]
    cells.obsm[IMAGE_KEY][:, :, 1, 1] = np.arange(96)[:, None]  # no channel is constant
    return cells


def numbers(images: np.ndarray) -> list[int]:
    return images[0, :, 0, 0].tolist()


@pytest.mark.parametrize(
    ("var", "names"),
    [
        (pd.DataFrame({"channels": ["DAPI", "actin"]}, index=["a", "b"]), ["DAPI", "actin"]),
        (pd.DataFrame(index=["a", "b"]), ["a", "b"]),
        (pd.DataFrame(), ["channel_0", "channel_1"]),
        (pd.DataFrame(index=[f"gene_{i}" for i in range(300)]), ["channel_0", "channel_1"]),  # features in X
    ],
)
def test_channel_names_any_var_returns_column_index_or_numbers(var, names):
    assert channel_names(var, 2, IMAGE_KEY) == names


@pytest.mark.parametrize("column", [True, False])
def test_channel_names_fewer_than_channels_raises(tmp_path, column):
    """`adata[:, names]` selects rows of var but not channels of images, which would all be used under numbers."""
    cut = named(["a", "b", "c"], column)[:, ["a", "c"]].copy()
    cut.write_h5ad(tmp_path / "mapped.h5ad")
    cut.write_h5ad(tmp_path / "chunked.h5ad", compression="gzip")
    for read, what in (
        (register, cut),
        (read_crops, tmp_path / "mapped.h5ad"),
        (read_crops, tmp_path / "chunked.h5ad"),
    ):
        with pytest.raises(ValueError, match=r"2 (channels|names) \(a, c\), .* has 3"):
            read(what)
    if not column:  # var may describe something else
        assert register(cut, [0, 1, 2])["channels"] == ["channel_0", "channel_1", "channel_2"]


def test_check_channel_names_other_order_raises_other_names_warns():
    known = register(named(["a", "b", "c"]))
    check_channel_names(named(["a", "b", "c"]).var, 3, known, IMAGE_KEY)
    with pytest.raises(ValueError, match="channels c, a, b, .* with a, b, c"):
        check_channel_names(named(["c", "a", "b"]).var, 3, known, IMAGE_KEY)
    with pytest.warns(UserWarning, match="a, d, c"):
        check_channel_names(named(["a", "d", "c"]).var, 3, known, IMAGE_KEY)
    for unnamed in (pd.DataFrame(), pd.DataFrame(index=["0", "1", "2"])):
        check_channel_names(unnamed, 3, known, IMAGE_KEY)
    numbered = known | {name: ["channel_0", "channel_1", "channel_2"] for name in ("channels", "stored")}
    check_channel_names(named(["a", "b", "c"]).var, 3, numbered, IMAGE_KEY)


def test_channels_masks_are_excluded_and_logged(tmp_path, caplog):
    cells = portrait()
    said = "nucleus, cell are masks (var['channel_mapping'])"
    state = register(cells)
    assert state["channels"] == ["DAPI", "ER"] and state["image_shape"] == (2, 8, 8)
    assert caplog.text.count(said) == 1
    cells.write_h5ad(tmp_path / "cells.h5sc", compression="gzip")
    assert read_crops(tmp_path / "cells.h5sc").channels == ["DAPI", "ER"]
    assert caplog.text.count(said) == 2
    everything = read_crops(tmp_path / "cells.h5sc", channels=["nucleus", "cell", "DAPI", "ER"])
    assert everything.images.shape[1] == 4 and caplog.text.count(said) == 2
    cells.var["channel_mapping"] = "mask"
    assert register(cells)["channels"] == ["nucleus", "cell", "DAPI", "ER"]


@pytest.mark.parametrize(
    ("channels", "places", "names"),
    [
        (["ER", "nucleus"], [3, 0], ["ER", "nucleus"]),
        ([2, "cell"], [2, 1], ["DAPI", "cell"]),
        (["3", np.int64(0)], [3, 0], ["ER", "nucleus"]),
        ("DAPI", [2], ["DAPI"]),
        ({"dna": "DAPI", "mask": 0}, [2, 0], ["dna", "mask"]),
    ],
)
def test_channels_given_select_equal_channels_in_all_readers(tmp_path, channels, places, names):
    cells = portrait()
    cells.write_h5ad(tmp_path / "cells.h5ad")
    crops = read_crops(tmp_path / "cells.h5ad", channels=channels)
    assert crops.channels == names and numbers(crops.images.read(slice(0, 1))) == places
    screen = write_screen(tmp_path / "screen.zarr", cells, y_key="gene", channels=channels)
    assert numbers(np.asarray(screen.obsm[IMAGE_KEY][:])) == places and screen.var["channels"].tolist() == names
    chosen = register(cells, channels)
    assert chosen["channels"] == names and chosen["image_shape"][0] == len(places)


@given(st.permutations(range(4)), st.integers(1, 4), st.lists(st.integers(0, 95), max_size=5))
def test_select_columns_any_channels_is_equal_to_indexing(order, k, rows):
    images = make_cells(shape=(4, 3, 3)).obsm[IMAGE_KEY]
    names = ["a", "b", "c", "d"]
    places, called = resolve_channels(names, [names[place] for place in order[:k]], "images")
    source = select_columns(ArraySource(images), places)
    np.testing.assert_array_equal(source.read(np.array(rows, int)), images[np.array(rows, int)][:, order[:k]])
    assert called == [names[place] for place in order[:k]] and source.shape == (96, k, 3, 3)


def test_resolve_channels_default_names_are_replaced():
    assert resolve_channels(["channel_0", "channel_1"], ["dna", "actin"], "x") == ([0, 1], ["dna", "actin"])
    assert resolve_channels(["channel_0", "channel_1"], ["channel_1"], "x") == ([1], ["channel_1"])
    with pytest.raises(KeyError, match="x has 2 channels without names: name all of them, or give numbers, not 'dna'"):
        resolve_channels(["channel_0", "channel_1"], ["dna"], "x")


@pytest.mark.parametrize(
    ("channels", "error", "message"),
    [
        ([], ValueError, "a, b, b"),
        (["c"], KeyError, "no 'c'"),
        ([3], ValueError, "there is no 3"),
        ([-1], ValueError, "there is no -1"),
        (["b"], ValueError, "2 channels of the name 'b'"),
        (["a", 0], ValueError, "twice"),
    ],
)
def test_resolve_channels_invalid_channels_raises(channels, error, message):
    with pytest.raises(error, match=message):
        resolve_channels(["a", "b", "b"], channels, "images")


@pytest.mark.filterwarnings("ignore:z_c has collapsed")  # two steps do not train a model
def test_model_cells_with_other_channels_are_matched_or_raises(hasty):
    cells = portrait()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well", channels=[3, "DAPI"])
    model = SCBDModel(cells)
    model.train()
    expected = model.get_latent_representation()
    cut = cells[:, ["DAPI", "ER"]].copy()
    cut.obsm[IMAGE_KEY] = cells.obsm[IMAGE_KEY][:, 2:]
    np.testing.assert_allclose(model.get_latent_representation(cut), expected, atol=1e-5)
    model.adata = cut
    assert model.summary_stats["n_channels"] == 2
    moved = cells[:, ["ER", "DAPI", "cell", "nucleus"]].copy()
    with pytest.raises(ValueError, match="ER, DAPI, cell, nucleus"):
        model.get_latent_representation(moved)
    one = cells[:, ["DAPI"]].copy()
    one.obsm[IMAGE_KEY] = cells.obsm[IMAGE_KEY][:, 2:3]
    with pytest.raises(KeyError, match="no 'ER'"):
        model.get_latent_representation(one)


def test_input_location_channels_of_features_raises():
    with pytest.raises(ValueError, match="channels"):
        InputLocation.found(make_wells(), channels=["a"])


def test_input_location_missing_layer_raises_with_keys_without_x():
    """From version 0.13 on, anndata lists X among the layers."""
    wells = make_wells()
    wells.layers["scaled"] = wells.X
    with pytest.raises(KeyError, match=r"layers has no 'scales' \(its keys: scaled\)"):
        InputLocation(layer="scales").array(wells)


@pytest.mark.parametrize("resize", [True, False])
def test_check_images_match_registered_other_size_raises(resize):
    def images(height: int, width: int) -> ImageSource:
        return image_source(make_cells(8, shape=(2, height, width)), IMAGE_KEY)

    state = register(make_cells(shape=(2, 16, 24)))
    check_images_match_registered(images(16, 24), state, IMAGE_KEY, resize)
    if resize:
        check_images_match_registered(images(32, 48), state, IMAGE_KEY, resize)
    else:
        with pytest.raises(ValueError, match="32 × 48"):
            check_images_match_registered(images(32, 48), state, IMAGE_KEY, resize)
    with pytest.raises(ValueError, match="32 × 32"):
        check_images_match_registered(images(32, 32), state, IMAGE_KEY, resize)
    # resize is not given: the size is not checked
    check_images_match_registered(images(32, 32), state, IMAGE_KEY)
