from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pandas as pd
import pytest
from conftest import make_cells
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from scbd.data import ArraySource, Crops, read_crops, write_screen
from scbd.data._lmdb import LMDBSource, parse_keys, read_lmdb_keys
from scbd.data._readers import _match_rows

KEY = "single_cell_images"
N = 12


def check(crops: Crops, images: np.ndarray, **columns) -> None:
    assert crops.images.shape == images.shape and crops.images.dtype == images.dtype
    rows = np.array([5, 0, 5, 3])
    np.testing.assert_array_equal(crops.images.read(rows), images[rows])
    np.testing.assert_array_equal(crops.images.read(slice(None)), images)
    for column, values in columns.items():
        assert list(crops.obs[column].astype(str)) == list(map(str, values))


def test_crops_say_what_does_not_fit():
    images = ArraySource(np.zeros((3, 2, 4, 4), "uint8"))
    with pytest.raises(ValueError, match="well A1: the table has 2 rows, there are 3 images"):
        Crops(images, pd.DataFrame(index=["a", "b"]), ["x", "y"], "well A1")
    with pytest.raises(ValueError, match="1 names for 2 channels .x."):
        Crops(images, pd.DataFrame(index=["a", "b", "c"]), ["x"])


@pytest.mark.parametrize("how", ["mapped", "gzip", "scportrait", "screen"])
def test_anndata(tmp_path, how):
    cells, path = make_cells(N), tmp_path / "c.h5ad"
    cells.var["channels"] = ["dna", "actin"]
    cells.write_h5ad(path, compression="gzip" if how == "gzip" else None)
    if how == "scportrait":  # an AnnData in HDF5 by another name, images chunked, channels in var
        path = path.rename(tmp_path / "single_cells.h5sc")
        with h5py.File(path, "r+") as file:
            del file["obsm"][KEY]
            stored = file["obsm"].create_dataset(KEY, data=cells.obsm[KEY], chunks=(1, 1, 16, 16), compression="lzf")
            stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    if how == "screen":
        path = tmp_path / "c.zarr"
        cells = cells[write_screen(path, cells, y_key="gene").obs_names].copy()
    crops = read_crops(path)
    check(crops, cells.obsm[KEY], gene=cells.obs["gene"])
    assert crops.channels == ["dna", "actin"] and crops.name == str(path)
    check(read_crops(path, channels=["actin"]), cells.obsm[KEY][:, [1]])
    with pytest.raises(KeyError, match="has no 'a' .its keys: dna, actin"):
        read_crops(path, channels=["a", "b", "c"])


def test_arrays(tmp_path):
    images = make_cells(N).obsm[KEY]
    np.savez(tmp_path / "a.npz", X=images, gene=list("abcabcabcabc"), channels=["x", "y"], note=np.zeros(3))
    crops = read_crops(tmp_path / "a.npz")
    check(crops, images, gene="abcabcabcabc")
    assert crops.channels == ["x", "y"] and list(crops.obs) == ["gene"]
    np.save(tmp_path / "b.npy", images)
    table = pd.DataFrame({"gene": list("abcabcabcabc")}, index=[f"cell {i}" for i in range(N)][::-1])
    table.to_csv(tmp_path / "t.csv")
    for rows in (table, tmp_path / "t.csv"):  # arrays have no names: rows are in their order, whatever their numbers
        with pytest.warns(UserWarning, match="numbered cell 11, cell 10"):
            found = read_crops(tmp_path / "b.npy", table=rows)
        check(found, images, gene="abcabcabcabc")
        assert list(found.obs.index) == list(table.index) and list(found.obs) == ["gene"]
    unnamed = read_crops(tmp_path / "b.npy", table=table.reset_index(drop=True)).to_memory()
    assert list(unnamed.obs_names) == [str(i) for i in range(N)]


def test_read_crops_npz_arrays_of_one_value_per_image_become_columns(tmp_path, caplog):
    images = make_cells(N).obsm[KEY]
    genes, codes = np.array(list("abcabcabcabc")), np.arange(N)
    columns: dict[str, Any] = {"labels": codes[:, None], "y": genes[None], "bytes": genes.astype("S1")}
    columns["well"] = codes % 2
    others: dict[str, Any] = {"one_hot": np.eye(N), "train_labels": codes[:5, None], "plate": np.array("P1")}
    others["masks"] = images[:, 0] > 9
    np.savez(tmp_path / "a.npz", images=images, channels=["x", "y", "z"], **columns, **others)
    crops = read_crops(tmp_path / "a.npz")
    check(crops, images, labels=codes, y=genes, bytes=genes, well=codes % 2)
    assert list(crops.obs) == list(columns)
    assert all(f"'{name}' " in caplog.text for name in ("channels", *others)) and "'well'" not in caplog.text
    caplog.clear()
    np.savez(tmp_path / "b.npz", images=images, channels=["x", "y"], **columns)
    assert read_crops(tmp_path / "b.npz").channels == ["x", "y"] and not caplog.text


def test_read_crops_npz_array_of_objects_raises_with_its_name(tmp_path):
    np.savez(tmp_path / "a.npz", images=make_cells(N).obsm[KEY], gene=np.array(["a", "b"] * (N // 2), dtype=object))
    with pytest.raises(ValueError, match=r"'gene': .*astype\(str\)"):
        read_crops(tmp_path / "a.npz")


def test_read_crops_npz_structured_array_is_not_read(tmp_path, caplog):
    pairs = np.zeros(N, dtype=[("x", "f4"), ("well", "U2")])
    np.savez(tmp_path / "a.npz", images=make_cells(N).obsm[KEY], gene=np.arange(N), pairs=pairs)
    assert list(read_crops(tmp_path / "a.npz").obs) == ["gene"] and "'pairs'" in caplog.text


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
@pytest.mark.parametrize("n", [N, 2])
def test_read_crops_npz_channels_of_any_shape_name_channels(tmp_path, shape, n):
    names = np.array(["dna", "actin"]).reshape(shape)
    np.savez(tmp_path / "a.npz", images=make_cells(N).obsm[KEY][:n], channels=names)
    crops = read_crops(tmp_path / "a.npz")
    assert crops.channels == ["dna", "actin"] and not list(crops.obs)


@pytest.mark.parametrize("name", ["a.npy", "A.NPY", "a.npz", "A.NPZ"])
def test_read_crops_array_ending_in_any_case_is_read(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        (np.save if name.lower().endswith("y") else np.savez)(file, make_cells(N).obsm[KEY])
    check(read_crops(tmp_path / name, image_key="arr_0"), make_cells(N).obsm[KEY])


def test_real_arrays(shared):
    real = read_crops(shared / "cells" / "submorph_crops_3x64x64.npz")
    assert real.images.shape == (668, 3, 64, 64) and real.obs["sirna"].nunique() == 4 and len(set(real.channels)) == 3


def test_image_files_and_their_table(tmp_path):
    images = make_cells(8, shape=(3, 6, 5), dtype="uint16").obsm[KEY] * np.uint16(200)
    (tmp_path / "crops").mkdir()
    rows = []
    for row, image in enumerate(images):
        pages = [Image.fromarray(channel) for channel in image]
        pages[0].save(tmp_path / "crops" / f"{row}.tif", save_all=True, append_images=pages[1:])
        for name, page in zip("abc", pages, strict=True):
            page.save(tmp_path / "crops" / f"{row}_{name}.png")
        small = (image // 200).astype(np.uint8)
        Image.fromarray(np.moveaxis(small, 0, -1)).save(tmp_path / "crops" / f"{row}_rgb.png")
        paths = {name: f"crops/{row}_{name}.png" for name in "abc"}
        rows.append({"gene": f"g{row % 2}", "path": f"crops/{row}.tif", "rgb": f"crops/{row}_rgb.png"} | paths)
    table = pd.DataFrame(rows)
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    table.to_parquet(tmp_path / "t.parquet")
    check(read_crops(tmp_path / "t.csv"), images, gene=table["gene"])
    several = read_crops(tmp_path / "t.parquet", file_columns=["a", "b", "c"])
    check(several, images, gene=table["gene"])
    assert several.channels == ["a", "b", "c"] and "a" not in several.obs
    check(read_crops(tmp_path / "t.tsv", file_columns="rgb"), (images // 200).astype(np.uint8))
    (tmp_path / "meta").mkdir()
    table.to_csv(tmp_path / "meta" / "t.csv")
    check(read_crops(tmp_path / "meta" / "t.csv", root=tmp_path), images, gene=table["gene"])
    with pytest.raises(KeyError, match=r"no column 'file' .*file_columns=\['path', 'rgb', 'a', 'b', 'c'\]"):
        read_crops(tmp_path / "t.csv", file_columns="file")
    table.assign(path=[*table["path"][:5], None, None, ""]).to_csv(tmp_path / "gaps.csv")
    with pytest.raises(ValueError, match=r"no file in 3 of 8 rows .the first is row 5."):
        read_crops(tmp_path / "gaps.csv")
    table.head(0).to_csv(tmp_path / "empty.csv")
    with pytest.raises(ValueError, match="names no file"):
        read_crops(tmp_path / "empty.csv")


def write_images(folder: Path, shape: tuple[int, int] = (6, 6), n: int = 3, seed: int = 0) -> np.ndarray:
    folder.mkdir(parents=True)
    images = np.random.default_rng(seed).integers(0, 255, (n, *shape), dtype="uint8")
    for row, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{row}.png")
    return images


def test_files_that_a_table_names_twice_are_told(tmp_path):
    write_images(tmp_path / "c")
    table = pd.DataFrame({"a": ["0.png", "1.png", "0.png", "0.png"], "b": ["1.png", "1.png", "2.png", "1.png"]})
    table.to_csv(tmp_path / "c" / "t.csv")
    with pytest.warns(UserWarning, match=r"1 row of .*t.csv .*the first is row 3.") as w:
        read_crops(tmp_path / "c" / "t.csv", file_columns=["a", "b"])
    assert w[0].filename == __file__


@pytest.mark.parametrize("spelled", ["./{}", "../c/{}", "x//../{}", "x\\..\\{}", "{folder}/{}", "link/{}"])
def test_read_crops_path_spelled_in_two_ways_warns(tmp_path, spelled):
    write_images(tmp_path / "c")
    (tmp_path / "c" / "x").mkdir()
    (tmp_path / "c" / "link").symlink_to(".", target_is_directory=True)
    again = spelled.format("1.png", folder=tmp_path / "c")
    pd.DataFrame({"path": ["0.png", "1.png", again, "2.png"]}).to_csv(tmp_path / "c" / "t.csv", index=False)
    with pytest.warns(UserWarning, match="1 row .*the first is row 2."):
        read_crops(tmp_path / "c" / "t.csv")


@pytest.mark.parametrize("second", ["t.tsv", "other.csv", "all", "channels of W1"])
def test_write_screen_files_of_two_plates_raise(tmp_path, second):
    write_images(tmp_path / "all" / "W1" / "a")
    write_images(tmp_path / "all" / "W2" / "a")
    table = pd.DataFrame({"label": "a", "path": [f"all/W1/a/{row}.png" for row in range(3)]})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    pd.DataFrame({"label": ["a"], "path": ["./all/W1/a/2.png"]}).to_csv(tmp_path / "other.csv", index=False)
    plates: list[Any] = [tmp_path / ("all/W1" if second == "all" else "t.csv"), tmp_path / second]
    if second == "channels of W1":
        plates = [read_crops(tmp_path / "all" / where, channels={"x": 0}) for where in ("", "W1")]
    with pytest.raises(ValueError, match="both name"):
        write_screen(tmp_path / "s.zarr", plates, y_key="label")
    distinct = [tmp_path / "all" / "W1", tmp_path / "all" / "W2"]
    assert write_screen(tmp_path / "s.zarr", distinct, y_key="label").n_obs == 6


def test_folders_of_images(tmp_path):
    a, b = write_images(tmp_path / "one" / "a"), write_images(tmp_path / "one" / "b", seed=1)
    (tmp_path / "one" / "a" / ".0.png").write_bytes(b"left by a system")
    (tmp_path / "one" / "notes.txt").write_text("")
    crops = read_crops(tmp_path / "one")
    check(crops, np.concatenate([a, b])[:, None], label="aaabbb")
    assert crops.obs.index.tolist()[:2] == ["a/0.png", "a/1.png"] and crops.channels == ["channel_0"]
    assert sorted(write_screen(tmp_path / "s.zarr", crops, y_key="label").obs["label"]) == list("aaabbb")
    for number, (plate, gene) in enumerate([("p1", "x"), ("p1", "y"), ("p2", "x")]):
        write_images(tmp_path / "two" / plate / gene, seed=number)
    deep = read_crops(tmp_path / "two").obs
    assert deep["folder_1"].tolist() == ["p1"] * 6 + ["p2"] * 3 and deep["label"].tolist() == list("xxxyyyxxx")
    named = pd.DataFrame({"gene": list("aab")}, index=["0.png", "1.png", "2.png"])
    flat = read_crops(tmp_path / "two" / "p1" / "x", table=named, channels=["DNA"])
    assert flat.obs["gene"].tolist() == list("aab") and flat.channels == ["DNA"]
    assert not list(read_crops(tmp_path / "two" / "p1" / "x").obs)
    write_images(tmp_path / "one" / "a" / "deeper")
    with pytest.raises(ValueError, match="folders of different depth, such as a/0.png, a/deeper"):
        read_crops(tmp_path / "one")


def write_named(folder: Path, *names: str | bytes) -> Path:
    """Write an image of random pixels to each path, relative to a folder; paths may be bytes that are not UTF-8."""
    for name in names:
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 6), "uint8")).save(file, "PNG")
    return folder


@pytest.mark.parametrize(
    "mask",
    ["a/0_mask.png", "a/0_cp_masks.png", "a/0_seg.png", "a/0.label.tif", "a/0_overlay.png", "a/0-outlines.png"]
    + ["a/mask_0.png", "a/cellMask0.png", "a/masks/0.png", "masks/0.png", "nuclei_masks/0.png", "labels/a/0.png"]
    + ["a/0.tif", "a/0.PNG", "a/0 masked.png", "a/0_nucmask.png"],
)
def test_read_crops_folder_with_masks_raises(tmp_path, mask):
    with pytest.raises(ValueError, match=r"each would become a cell"):
        read_crops(write_named(tmp_path, "a/0.png", "a/1.png", "b/0.png", mask))


@pytest.mark.parametrize(
    "addition",
    [
        "_binary",
        "_bw",
        "_roi",
        "_gt",
        "_prob",
        "_thumb",
        " preview",
        " copy",
        " (1)",
        "(1)",
        " - Copy (2)",
        ".ome",
        "-é",
    ],
)
def test_read_crops_folder_with_derived_images_raises_or_warns(tmp_path, addition):
    crops = ["a/0.png", "a/1.png", "a/1_1.png", "b/2.png"]
    derived = [name.replace(".png", f"{addition}.png") for name in crops]
    write_named(tmp_path, *crops, *derived[:1])
    with pytest.warns(UserWarning, match="1 images among 5"):
        assert len(read_crops(tmp_path).obs) == 5
    write_named(tmp_path, *derived[1:3])
    with pytest.raises(ValueError, match="each would become a cell"):
        read_crops(tmp_path)


@pytest.mark.parametrize(
    "names",
    [("SEG1/0.png", "nt/0.png"), ("Maskin/0.png", "nt/0.png"), ("unlabelled/0.png", "other/0.png")]
    + [("a/cell_label_1.png", "b/cell_label_2.png"), ("a/0.1.png", "a/0.2.png"), ("a/0.png", "b/0.png")]
    + [("a/0.png", "a/0_1.png", "a/0_1-2.png"), ("a/P1 2.png", "a/P1.png"), ("a/cell.png", "a/cells_x.png")]
    + [("a/0.png", "b/0_x.png")],
)
def test_read_crops_folder_without_masks_is_read(tmp_path, names):
    assert read_crops(write_named(tmp_path, *names)).obs.index.tolist() == sorted(names)


@pytest.mark.parametrize("name", [b"a/z\xe9ro.png", b"g\xe8ne/0.png"])
def test_read_crops_folder_with_names_not_utf8_raises_with_name(tmp_path, name):
    try:
        write_named(tmp_path, "a/0.png", "b/0.png", name)
    except OSError:
        pytest.skip("this file system accepts only UTF-8")
    with pytest.raises(ValueError, match=r"not UTF-8 .*(ro.png|ne/0.png)"):
        read_crops(tmp_path)


@pytest.mark.parametrize(("fit", "size"), [("pad", (9, 9)), ("crop", (4, 4)), (5, (5, 5)), ((3, 8), (3, 8))])
def test_crops_of_different_sizes_and_of_any_proportions(tmp_path, fit, size):
    write_images(tmp_path / "c" / "a", (6, 9))
    write_images(tmp_path / "c" / "b", (4, 7))
    with pytest.raises(ValueError, match=r"b.0.png and the first .* fit='pad'"):
        read_crops(tmp_path / "c").images.read(slice(None))
    crops = read_crops(tmp_path / "c", fit=fit)
    assert crops.images.shape == (6, 1, *size)
    middle = np.asarray(Image.open(tmp_path / "c" / "b" / "1.png"))[4 // 2, 7 // 2]
    assert crops.images.read(np.array([4]))[0, 0, size[0] // 2, size[1] // 2] == middle
    # of arrays, whose images are of one size but not square
    cells = make_cells(8, shape=(2, 6, 9))
    cells.write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    whole = {"pad": 9, "crop": 6}.get(fit, 0)
    expected = (whole, whole) if whole else size
    plate = read_crops(tmp_path / "cells.h5ad", fit=fit, channels=["channel_1"])
    assert plate.images.shape == (8, 1, *expected)
    screen = write_screen(tmp_path / "s.zarr", plate, y_key="gene")
    found = np.asarray(screen.obsm[KEY][:])[:, 0, expected[0] // 2, expected[1] // 2]
    assert sorted(found.tolist()) == sorted(cells.obsm[KEY][:, 1, 3, 4].tolist())


@pytest.mark.parametrize("fit", ["squash", 0, (3,), 2.5])
def test_how_images_cannot_be_fitted(tmp_path, fit):
    write_images(tmp_path / "c")
    with pytest.raises(ValueError, match="fit="):
        read_crops(tmp_path / "c", fit=fit)


def test_what_is_wrong_is_said(tmp_path):
    images = make_cells(4).obsm[KEY]
    np.savez(tmp_path / "two.npz", a=images, b=images)
    np.savez(tmp_path / "pickled.npz", a=np.array([{"harm": 1}], dtype=object))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "two.npz").read_bytes()[:500])
    np.save(tmp_path / "b.npy", images)
    (tmp_path / "cells.txt").write_text("")
    (tmp_path / "cells.parquet").write_bytes(b"PAR1")
    for error, message, name, kwargs in [
        (FileNotFoundError, "none.h5ad", "none.h5ad", {}),
        (ValueError, "cells.txt is of no known kind", "cells.txt", {}),
        (KeyError, "no array 'single_cell_images' .it has: a, b.", "two.npz", {}),
        (ValueError, "pickled.npz cannot be read", "pickled.npz", {}),
        (ValueError, "cut.npz cannot be read", "cut.npz", {}),
        (ValueError, "the table has 2 rows, there are 4 images", "b.npy", {"table": pd.DataFrame({"a": [1, 2]})}),
        (ValueError, "cells.txt is no table", "b.npy", {"table": tmp_path / "cells.txt"}),
        (FileNotFoundError, "none.csv", "b.npy", {"table": tmp_path / "none.csv"}),
        (ValueError, "cells.parquet is not a complete Parquet file", "cells.parquet", {}),
    ]:
        with pytest.raises(error, match=message):
            read_crops(tmp_path / name, **kwargs)
    assert read_crops(tmp_path / "two.npz", image_key="b").images.shape == images.shape


def key_of(number: int) -> bytes:
    return f"{number + 70}_2020_A_B{number % 2}_7_G{number % 3}_{number}".encode()


def write_lmdb(path: Path, images: Iterable[np.ndarray]) -> None:
    with lmdb.open(str(path), map_size=2**25) as database, database.begin(write=True) as transaction:
        for number, image in enumerate(images):
            transaction.put(key_of(number), image.tobytes())


def test_the_published_lmdb(tmp_path):
    crops = np.arange(6 * 4 * 100 * 100, dtype="uint16").reshape(6, 4, 100, 100)
    write_lmdb(tmp_path / "ops", crops)
    found = read_crops(tmp_path / "ops")
    check(found, crops, gene=[f"G{i % 3}" for i in range(6)], well=["2020_A_B0", "2020_A_B1"] * 3)
    assert found.obs.index.tolist() == [str(i + 70) for i in range(6)]


def test_keys_and_values_of_an_lmdb(tmp_path):
    crops = np.arange(5 * 4 * 100 * 100, dtype="uint16").reshape(5, 4, 100, 100)
    images = [*crops, crops[0, :2]]
    write_lmdb(tmp_path, images)
    keys = read_lmdb_keys(tmp_path)
    source = LMDBSource(tmp_path, [*keys, b"other"])
    np.testing.assert_array_equal(source.read(np.array([4, 0, 4])), crops[[4, 0, 4]])
    with pytest.raises(KeyError, match="has no key b'other'"):
        source.read(np.array([6]))
    with pytest.raises(ValueError, match=r"is no crop of 4 × 100 × 100 uint16 \(40000 bytes\)"):
        source.read(np.array([5]))


def test_labels_are_sorted_and_belong_to_their_keys():
    obs = parse_keys([b"u1_P_2_B1_7_ZW10_0", b"u2_P_1_A1_7_AURKB_1", b"u3_P_2_B1_8_AURKB_2", b"u4_P_2_B1_9_KIF11_3"])
    assert list(obs.index) == ["u1", "u2", "u3", "u4"]
    wanted = {
        "plate": ["P_2", "P_1", "P_2", "P_2"],
        "well": ["P_2_B1", "P_1_A1", "P_2_B1", "P_2_B1"],
        "tile": ["7", "7", "8", "9"],
        "gene": ["ZW10", "AURKB", "AURKB", "KIF11"],  # three, which come in an order that is not turned by turning
    }
    pd.testing.assert_frame_equal(obs, pd.DataFrame(wanted, index=obs.index).astype("category"))
    with pytest.raises(ValueError, match="b'u1_P_7' is neither UID_plate"):
        parse_keys([b"u1_P_7"])


@pytest.fixture(params=["anndata", "folder", "lmdb"])
def images(request, tmp_path):
    """Images with names, and what each is called in their own order."""
    if request.param == "anndata":
        make_cells(N).write_h5ad(tmp_path / "c.h5ad")
        return tmp_path / "c.h5ad", [f"cell_{i}" for i in range(N)]
    if request.param == "folder":
        write_images(tmp_path / "crops", n=N)
        return tmp_path / "crops", sorted(f"{i}.png" for i in range(N))  # 0, 1, 10, 11, 2, …
    write_lmdb(tmp_path / "ops", np.zeros((N, 4, 100, 100), "uint16"))
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
    path, _ = images
    table = pd.DataFrame({"gene": [f"g{i}" for i in range(N)]})
    if path.suffix == ".h5ad":
        assert read_crops(path, table=table).obs["gene"].tolist() == table["gene"].tolist()
        assert "c.h5ad" in capsys.readouterr().err
        table.index = [f"other_{i}" for i in range(N)]
    with pytest.raises(ValueError, match="does not say which row"):
        read_crops(path, table=table)


@given(st.permutations(range(N)), st.permutations(range(N)))
def test_any_order_of_either(mine, theirs):
    names = pd.Index([f"c{i}" for i in mine])
    table = pd.DataFrame({"gene": theirs}, index=[f"c{i}" for i in theirs])
    found = _match_rows(names, table, "c.h5ad", ordered=True)
    assert found.index.equals(names) and found["gene"].tolist() == list(mine)


def test_names_that_do_not_tell():
    names = pd.Index(list("abc"))
    with pytest.raises(ValueError, match="the index and column 'next' .* in different orders"):
        _match_rows(names, pd.DataFrame({"next": list("bca")}, index=list("acb")), "x", ordered=True)
    with pytest.raises(ValueError, match="does not say which row"):
        _match_rows(names, pd.DataFrame({"cell": list("abd"), "well": list("bbb")}), "x", ordered=False)
    with pytest.raises(ValueError, match="does not say which row"):  # of two rows neither is the one
        _match_rows(pd.Index(list("aab")), pd.DataFrame(index=list("aba")), "x", ordered=True)
    numbered = pd.DataFrame({"uid": list("102"), "gene": list("xyz")})
    assert _match_rows(pd.Index(list("210")), numbered, "x", ordered=False)["gene"].tolist() == list("zxy")
    repeated = pd.DataFrame({"gene": [1, 2, 3]}, index=list("aab"))
    assert _match_rows(repeated.index, repeated, "x", ordered=True) is repeated


def test_read_crops_table_that_was_filtered_and_concatenated_is_in_order(tmp_path):
    np.save(tmp_path / "i.npy", np.ones((4, 1, 8, 8), "uint8"))
    table = pd.DataFrame({"gene": list("abc")})
    parts = pd.concat([table.iloc[[0, 2]], table.iloc[[1, 2]]])
    assert list(read_crops(tmp_path / "i.npy", table=parts).obs["gene"]) == list("acbc")
    shuffled = pd.concat([pd.DataFrame({"gene": list("ab") * 20})] * 2).sample(frac=1, random_state=0)
    np.save(tmp_path / "i.npy", np.ones((80, 1, 8, 8), "uint8"))
    with pytest.raises(ValueError, match="are numbered"):
        read_crops(tmp_path / "i.npy", table=shuffled)


def test_read_crops_table_with_several_levels_of_names_is_read(tmp_path):
    np.save(tmp_path / "i.npy", np.ones((2, 1, 8, 8), "uint8"))
    table = pd.DataFrame({"plate": ["P1", "P2"], "well": ["A1", "A1"], "gene": ["a", "b"]}).set_index(["plate", "well"])
    assert list(read_crops(tmp_path / "i.npy", table=table).obs) == ["plate", "well", "gene"]
