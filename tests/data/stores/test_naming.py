from __future__ import annotations

import lmdb
import numpy as np
import pandas as pd
import pytest
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from scbd.data import read_crops
from scbd.data.stores._naming import in_order_of

N = 12


@pytest.fixture(params=["anndata", "folder", "lmdb"])
def images(request, tmp_path):
    """Images with names, and what each is called in their own order."""
    if request.param == "anndata":
        make_cells(N).write_h5ad(tmp_path / "c.h5ad")
        return tmp_path / "c.h5ad", [f"cell_{i}" for i in range(N)]
    if request.param == "folder":
        (tmp_path / "crops").mkdir()
        for i in range(N):
            Image.fromarray(np.full((4, 4), i, "uint8")).save(tmp_path / "crops" / f"{i}.png")
        return tmp_path / "crops", sorted(f"{i}.png" for i in range(N))  # 0, 1, 10, 11, 2, …
    with lmdb.open(str(tmp_path / "ops"), map_size=2**22) as database, database.begin(write=True) as transaction:
        for i in range(N):
            transaction.put(f"{i + 70}_2020_A_B0_7_G_{i}".encode(), bytes(2 * 4 * 100 * 100))
    return tmp_path / "ops", sorted(str(i + 70) for i in range(N))


@pytest.mark.parametrize("place", ["index", "column", "file"])
def test_rows_are_found_by_name(images, tmp_path, place):
    path, names = images
    table = pd.DataFrame({"well": [f"A{i}" for i in range(N)], "gene": [f"g of {name}" for name in names]}, index=names)
    other = table.iloc[np.random.default_rng(0).permutation(N)]
    given = other if place == "index" else other.rename_axis("what").reset_index()
    if place == "file":
        given.to_csv(tmp_path / "t.csv", index=False)
    crops = read_crops(path, table=tmp_path / "t.csv" if place == "file" else given)
    assert crops.obs.index.tolist() == names and crops.obs["gene"].tolist() == table["gene"].tolist()


def test_without_names_only_an_anndata_has_an_order(images, capsys):
    path, names = images
    table = pd.DataFrame({"gene": [f"g{i}" for i in range(N)]})
    if path.suffix == ".h5ad":
        assert read_crops(path, table=table).obs["gene"].tolist() == table["gene"].tolist()
        assert "the table names no cell (cell_0, cell_1, cell_2, …), and so is taken to have" in capsys.readouterr().err
        table.index = [f"other_{i}" for i in range(N)]
    with pytest.raises(ValueError, match=rf"does not say which row is which .*12 of 12 names, such as {names[0]}, are"):
        read_crops(path, table=table)


@given(st.permutations(range(N)), st.permutations(range(N)))
def test_any_order_of_either(mine, theirs):
    names = pd.Index([f"c{i}" for i in mine])
    table = pd.DataFrame({"gene": theirs}, index=[f"c{i}" for i in theirs])
    found = in_order_of(names, table, "c.h5ad", ordered=True)
    assert found.index.equals(names) and found["gene"].tolist() == list(mine)


def test_names_that_do_not_tell():
    names = pd.Index(list("abc"))
    with pytest.raises(ValueError, match="the index and column 'next' of the table have the names in x in different"):
        in_order_of(names, pd.DataFrame({"next": list("bca")}, index=list("acb")), "x", ordered=True)
    with pytest.raises(ValueError, match="1 of 3 names, such as c, are in none of its columns"):
        in_order_of(names, pd.DataFrame({"cell": list("abd"), "well": list("bbb")}), "x", ordered=False)
    with pytest.raises(ValueError, match="does not say which row is which"):  # of two rows neither is the one
        in_order_of(pd.Index(list("aab")), pd.DataFrame(index=list("aba")), "x", ordered=True)
    numbered = pd.DataFrame({"uid": list("102"), "gene": list("xyz")})
    assert in_order_of(pd.Index(list("210")), numbered, "x", ordered=False)["gene"].tolist() == list("zxy")
    repeated = pd.DataFrame({"gene": [1, 2, 3]}, index=list("aab"))
    assert in_order_of(repeated.index, repeated, "x", ordered=True) is repeated


def test_arrays_have_no_names(tmp_path):
    np.save(tmp_path / "b.npy", make_cells(N).obsm["single_cell_images"])
    table = pd.DataFrame({"gene": range(N)}, index=np.arange(N)[::-1])
    assert read_crops(tmp_path / "b.npy", table=table).obs["gene"].tolist() == list(range(N))
