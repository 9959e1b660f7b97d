from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import IMAGE_KEY, make_cells

from scbd.data import ImageField, read_crops, write_screen
from scbd.data._channels import channel_names, check_channel_names, warn_of_channels


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
    # without the column var may be of anything
    with pytest.warns(UserWarning, match=r"var has 2 names \(a, c\), .* has 3 channels, which are called by numbers"):
        field().register_field(named(["a", "b", "c"], column=False)[:, ["a", "c"]].copy())


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
    check_channel_names(named(["a", "b", "c"]).var, known, IMAGE_KEY)
    with pytest.raises(ValueError, match="channels c, a, b, .* with a, b, c: the same in another order") as caught:
        check_channel_names(cells.var, known, IMAGE_KEY)
    names = {"adata": cells}
    exec(str(caught.value).split("in that order: ")[1].split("; or")[0].replace(", then ", "; "), names)
    check_channel_names(names["adata"].var, known, IMAGE_KEY)
    assert names["adata"].obsm[IMAGE_KEY][0, :, 0, 0].tolist() == [1, 2, 0]


def test_the_way_back_leads_to_any_order_of_the_model():
    known = field().register_field(named(["c", "a", "b"]))
    names = {"adata": named(["b", "c", "a"])}
    with pytest.raises(ValueError, match="the same in another order") as caught:
        check_channel_names(names["adata"].var, known, IMAGE_KEY)
    exec(str(caught.value).split("in that order: ")[1].split("; or")[0].replace(", then ", "; "), names)
    check_channel_names(names["adata"].var, known, IMAGE_KEY)
    assert names["adata"].obsm[IMAGE_KEY][0, :, 0, 0].tolist() == [1, 2, 0]


def test_other_names_warn_and_no_names_do_not():
    known = field().register_field(named(["a", "b"]))
    with pytest.warns(UserWarning, match="channels a, d, the model was set up with a, b: other names"):
        check_channel_names(named(["a", "d"]).var, known, IMAGE_KEY)
    check_channel_names(pd.DataFrame(), known, IMAGE_KEY)
    check_channel_names(pd.DataFrame(index=["0", "1"]), known, IMAGE_KEY)
    unnamed = known | {"channels": ["channel_0", "channel_1"]}
    check_channel_names(named(["a", "b"]).var, unnamed, IMAGE_KEY)


def test_masks_among_the_channels_are_named(tmp_path):
    """As scPortrait writes them: masks first, in the same array."""
    cells = named(["nucleus", "cell", "DAPI", "ER"])
    cells.var["channel_mapping"] = ["mask", "mask", "image_channel", "image_channel"]
    said = r"nucleus, cell are masks .* are taken as channels.*leave them out: adata = adata\[:, \[2, 3\]\]"
    with pytest.warns(UserWarning, match=said):
        field().register_field(cells)
    cells.write_h5ad(tmp_path / "cells.h5sc", compression="gzip")
    with pytest.warns(UserWarning, match=said):
        read_crops(tmp_path / "cells.h5sc")
    with pytest.warns(UserWarning, match=said):
        write_screen(tmp_path / "screen.h5ad", cells, y_key="gene")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_channels(cells.var.iloc[2:], 2, IMAGE_KEY)


def test_names_cut_in_a_file_are_refused_when_it_is_converted(tmp_path):
    cells = named(["a", "b", "c"])[:, ["a", "b"]].copy()
    cells.write_h5ad(tmp_path / "mapped.h5ad")
    cells.write_h5ad(tmp_path / "chunked.h5ad", compression="gzip")
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=r"names 2 channels \(a, b\), .* has 3"):
            read_crops(path)
