from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import IMAGE_KEY, make_cells, make_wells
from hypothesis import given
from hypothesis import strategies as st

from scbd import SCBDModel
from scbd.data import ArraySource, ImageField, read_crops, write_screen
from scbd.data._channels import channel_names, check_channel_names, chosen_channels
from scbd.data.sources import columns_of


def field() -> ImageField:
    return ImageField("image", IMAGE_KEY)


def named(names: list[str], column: bool = True) -> AnnData:
    """Cells whose channels have names and hold their own number."""
    cells = make_cells(shape=(len(names), 8, 8))
    cells.var_names = names
    if column:
        cells.var["channels"] = names
    cells.obsm[IMAGE_KEY][:, :, 0, 0] = np.arange(len(names))
    return cells


def test_names_are_those_of_the_column_else_of_var_else_numbers():
    var = pd.DataFrame({"channels": ["DAPI", "actin"]}, index=["a", "b"])
    assert channel_names(var, 2, IMAGE_KEY) == ["DAPI", "actin"]
    assert channel_names(var[[]], 2, IMAGE_KEY) == ["a", "b"]
    assert channel_names(pd.DataFrame(), 2, IMAGE_KEY) == ["channel_0", "channel_1"]


def test_genes_beside_the_images_are_no_channels():
    cells = AnnData(np.ones((96, 300), dtype="float32"), obs=make_cells().obs, obsm=dict(make_cells().obsm))
    assert field().register_field(cells)["channels"] == ["channel_0", "channel_1"]
    without = AnnData(obs=make_cells().obs, obsm=dict(make_cells().obsm))
    assert field().register_field(without)["channels"] == ["channel_0", "channel_1"]


def test_names_that_were_cut_without_the_images():
    """`adata[:, names]` cuts var alone, and images would go on under numbers, all of them."""
    cells = named(["a", "b", "c"])
    with pytest.raises(ValueError, match=r"var\['channels'\] names 2 channels \(a, c\), .* has 3: .* and no image"):
        field().register_field(cells[:, ["a", "c"]].copy())
    # without the column, too, unless a user says that var is of something else
    cut = named(["a", "b", "c"], column=False)[:, ["a", "c"]].copy()
    with pytest.raises(ValueError, match=r"var has 2 names \(a, c\), .* has 3 channels: .* and no image") as caught:
        field().register_field(cut)
    by_number = eval(str(caught.value).split("by number, channels=")[1].removesuffix("."))
    assert ImageField("image", IMAGE_KEY, by_number).register_field(cut)["channels"] == [
        "channel_0",
        "channel_1",
        "channel_2",
    ]


def test_what_the_message_says_is_what_helps():
    cells = named(["a", "b", "c"])
    with pytest.raises(ValueError, match="Begin with all channels") as caught:
        field().register_field(cells[:, ["a"]].copy())
    remedy = str(caught.value).split("cut both: ")[1].removesuffix(" for the first two.")
    names = {"adata": cells}
    exec(remedy.replace(", then ", "; "), names)
    assert field().register_field(names["adata"])["channels"] == ["a", "b"]
    assert names["adata"].obsm[IMAGE_KEY][0, :, 0, 0].tolist() == [0, 1]


def test_the_same_channels_in_another_order_are_refused_with_the_way_back():
    known = field().register_field(named(["a", "b", "c"]))
    cells = named(["c", "a", "b"])
    check_channel_names(named(["a", "b", "c"]).var, 3, known, IMAGE_KEY)
    with pytest.raises(ValueError, match="channels c, a, b, .* with a, b, c: the same in another order") as caught:
        check_channel_names(cells.var, 3, known, IMAGE_KEY)
    names = {"adata": cells}
    exec(str(caught.value).split("in that order: ")[1].split("; or")[0].replace(", then ", "; "), names)
    check_channel_names(names["adata"].var, 3, known, IMAGE_KEY)
    assert names["adata"].obsm[IMAGE_KEY][0, :, 0, 0].tolist() == [1, 2, 0]


def test_the_way_back_leads_to_any_order_of_the_model():
    known = field().register_field(named(["c", "a", "b"]))
    names = {"adata": named(["b", "c", "a"])}
    with pytest.raises(ValueError, match="the same in another order") as caught:
        check_channel_names(names["adata"].var, 3, known, IMAGE_KEY)
    exec(str(caught.value).split("in that order: ")[1].split("; or")[0].replace(", then ", "; "), names)
    check_channel_names(names["adata"].var, 3, known, IMAGE_KEY)
    assert names["adata"].obsm[IMAGE_KEY][0, :, 0, 0].tolist() == [1, 2, 0]


def test_other_names_warn_and_no_names_do_not():
    known = field().register_field(named(["a", "b"]))
    with pytest.warns(UserWarning, match="channels a, d, the model was set up with a, b: other names"):
        check_channel_names(named(["a", "d"]).var, 2, known, IMAGE_KEY)
    check_channel_names(pd.DataFrame(), 2, known, IMAGE_KEY)
    check_channel_names(pd.DataFrame(index=["0", "1"]), 2, known, IMAGE_KEY)
    unnamed = known | dict.fromkeys(["channels", "stored"], ["channel_0", "channel_1"])
    check_channel_names(named(["a", "b"]).var, 2, unnamed, IMAGE_KEY)


def portrait() -> AnnData:
    """As scPortrait writes them: masks first, in the same array."""
    cells = named(["nucleus", "cell", "DAPI", "ER"])
    cells.var["channel_mapping"] = ["mask", "mask", "image_channel", "image_channel"]
    cells.obsm[IMAGE_KEY][:, :, 1, 1] = np.arange(96)[:, None]  # no channel is constant
    return cells


def numbers(images: np.ndarray) -> list[int]:
    return images[0, :, 0, 0].tolist()


def test_masks_are_left_out_with_a_line(tmp_path, caplog):
    cells = portrait()
    said = "nucleus, cell are masks (var['channel_mapping']), and are left out; channels="
    state = field().register_field(cells)
    assert state["channels"] == ["DAPI", "ER"] and state["image_shape"] == (2, 8, 8)
    assert caplog.text.count(said) == 1
    cells.write_h5ad(tmp_path / "cells.h5sc", compression="gzip")
    assert read_crops(tmp_path / "cells.h5sc").channels == ["DAPI", "ER"]
    screen = write_screen(tmp_path / "screen.h5ad", [tmp_path / "cells.h5sc", cells], y_key="gene")
    assert screen.var["channels"].tolist() == ["DAPI", "ER"] and numbers(screen.obsm[IMAGE_KEY]) == [2, 3]
    assert caplog.text.count(said) == 4
    everything = read_crops(tmp_path / "cells.h5sc", channels=["nucleus", "cell", "DAPI", "ER"])
    assert everything.images.shape[1] == 4 and caplog.text.count(said) == 4
    cells.var["channel_mapping"] = "mask"
    assert field().register_field(cells)["channels"] == ["nucleus", "cell", "DAPI", "ER"]


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
def test_channels_can_be_chosen_wherever_cells_are_read(tmp_path, channels, places, names):
    cells = portrait()
    cells.write_h5ad(tmp_path / "cells.h5ad")
    cells.write_h5ad(tmp_path / "chunked.h5ad", compression="gzip")
    for number, plate in enumerate([cells, tmp_path / "cells.h5ad", tmp_path / "chunked.h5ad"]):
        screen = write_screen(tmp_path / f"{number}.zarr", plate, y_key="gene", channels=channels)
        assert numbers(np.asarray(screen.obsm[IMAGE_KEY][:])) == places
        assert screen.var["channels"].tolist() == names
    crops = read_crops(tmp_path / "cells.h5ad", channels=channels)
    assert crops.channels == names and numbers(crops.images.read(slice(0, 1))) == places
    again = write_screen(tmp_path / "again.zarr", crops, y_key="gene", channels=names[::-1])
    assert numbers(np.asarray(again.obsm[IMAGE_KEY][:])) == places[::-1]
    chosen = ImageField("image", IMAGE_KEY, channels).register_field(cells)
    assert chosen["channels"] == names and chosen["image_shape"][0] == len(places)


@given(st.permutations(range(4)), st.integers(1, 4), st.lists(st.integers(0, 95), max_size=5))
def test_chosen_channels_are_those_of_the_array(order, k, rows):
    images = make_cells(shape=(4, 3, 3)).obsm[IMAGE_KEY]
    names = ["a", "b", "c", "d"]
    places, called = chosen_channels(names, [names[place] for place in order[:k]], "images")
    source = columns_of(ArraySource(images), places)
    expected = images[np.array(rows, int)][:, order[:k]]
    np.testing.assert_array_equal(source.read(np.array(rows, int)), expected)
    assert called == [names[place] for place in order[:k]] and source.shape == (96, k, 3, 3)


def test_channels_without_names_get_them():
    assert chosen_channels(["channel_0", "channel_1"], ["dna", "actin"], "x") == ([0, 1], ["dna", "actin"])
    assert chosen_channels(["channel_0", "channel_1"], ["channel_1"], "x") == ([1], ["channel_1"])


@pytest.mark.parametrize(
    ("channels", "error", "message"),
    [
        ([], ValueError, "name at least one of a, b, b"),
        (["c"], KeyError, "images .channels. has no 'c' .its keys: a, b, b.*Name it with channels"),
        ([3], ValueError, "images has 3 channels, of the numbers 0 to 2: there is no 3"),
        ([-1], ValueError, "there is no -1"),
        (["b"], ValueError, "images has 2 channels of the name 'b' .numbers 1, 2.: choose by number"),
        (["a", 0], ValueError, "names one channel twice"),
    ],
)
def test_channels_that_cannot_be_chosen(channels, error, message):
    with pytest.raises(error, match=message):
        chosen_channels(["a", "b", "b"], channels, "images")


@pytest.mark.filterwarnings("ignore:z_c has collapsed")  # two steps do not train a model
def test_a_model_knows_its_channels_in_other_cells(hasty):
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
    with pytest.raises(
        ValueError, match="ER, DAPI, cell, nucleus, the model was set up with nucleus, cell, DAPI, ER: the"
    ):
        model.get_latent_representation(moved)
    one = cells[:, ["DAPI"]].copy()
    one.obsm[IMAGE_KEY] = cells.obsm[IMAGE_KEY][:, 2:3]
    with pytest.raises(KeyError, match="has no 'ER'"):
        model.get_latent_representation(one)


def test_models_of_images_without_masks():
    """Set up by default, and given cells without the masks."""
    cells = portrait()
    SCBDModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = SCBDModel(cells, encoder="small")
    cut = cells[:, ["ER", "DAPI"]].copy()
    cut.obsm[IMAGE_KEY] = cells.obsm[IMAGE_KEY][:, [3, 2]]
    with pytest.raises(ValueError, match=r"channels ER, DAPI, .* same in another order.*adata\[:, \[1, 0\]\]"):
        model.adata = cut
    with pytest.raises(ValueError, match=r"channels=\['a'\] are those of images, and there are none"):
        SCBDModel.setup_anndata(make_wells(), y_key="compound", e_key="plate", channels=["a"])


@pytest.mark.parametrize("column", [True, False])
def test_names_cut_in_a_file_are_refused_when_it_is_converted(tmp_path, column):
    cells = named(["a", "b", "c"], column)[:, ["a", "b"]].copy()
    cells.write_h5ad(tmp_path / "mapped.h5ad")
    cells.write_h5ad(tmp_path / "chunked.h5ad", compression="gzip")
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=r" 2 (channels|names) \(a, b\), .* has 3"):
            read_crops(path)
