from __future__ import annotations

from pathlib import Path

import anndata
import h5py
import lmdb
import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import make_cells
from PIL import Image

from scbd.data import Crops, read_crops, write_screen

KEY = "single_cell_images"


def check(crops: Crops, images: np.ndarray, **columns) -> None:
    assert crops.images.shape == images.shape and crops.images.dtype == images.dtype
    rows = np.array([5, 0, 5, 3])
    np.testing.assert_array_equal(crops.images.read(rows), images[rows])
    np.testing.assert_array_equal(crops.images.read(slice(None)), images)
    for column, values in columns.items():
        assert list(crops.obs[column].astype(str)) == list(map(str, values))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_anndata_files(tmp_path, compression):
    cells = make_cells(12)
    cells.write_h5ad(tmp_path / "c.h5ad", compression=compression)
    crops = read_crops(tmp_path / "c.h5ad")
    check(crops, cells.obsm[KEY], gene=cells.obs["gene"])
    assert crops.channels == ["channel_0", "channel_1"] and crops.name == str(tmp_path / "c.h5ad")
    write_screen(tmp_path / "c.zarr", crops, y_key="gene")
    again = read_crops(tmp_path / "c.zarr", channels=["dna", "actin"])
    assert again.channels == ["dna", "actin"] and len(again.obs) == 12
    with pytest.raises(KeyError, match="has no 'a' .its keys: channel_0, channel_1"):
        read_crops(tmp_path / "c.zarr", channels=["a", "b", "c"])


def test_scportrait(tmp_path):
    """Its layout: an AnnData in HDF5 by another name, images chunked, channels in var."""
    cells = make_cells(12)
    cells.var["channels"] = ["dna", "actin"]
    cells.write_h5ad(tmp_path / "single_cells.h5ad")
    (tmp_path / "single_cells.h5ad").rename(tmp_path / "single_cells.h5sc")
    with h5py.File(tmp_path / "single_cells.h5sc", "r+") as file:
        images = file["obsm"][KEY][...]
        del file["obsm"][KEY]
        stored = file["obsm"].create_dataset(KEY, data=images, chunks=(1, 1, 16, 16), compression="lzf")
        stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    crops = read_crops(tmp_path / "single_cells.h5sc")
    check(crops, images, well=cells.obs["well"])
    assert crops.channels == ["dna", "actin"]


def test_arrays(tmp_path):
    images = make_cells(12).obsm[KEY]
    np.savez(tmp_path / "a.npz", X=images, gene=list("abcabcabcabc"), channels=["x", "y"], note=np.zeros(3))
    crops = read_crops(tmp_path / "a.npz")
    check(crops, images, gene="abcabcabcabc")
    assert crops.channels == ["x", "y"] and list(crops.obs) == ["gene"]
    np.save(tmp_path / "b.npy", images)
    table = pd.DataFrame({"gene": list("abcabcabcabc")})
    table.to_csv(tmp_path / "t.csv", index=False)
    check(read_crops(tmp_path / "b.npy", table=tmp_path / "t.csv"), images, gene="abcabcabcabc")
    check(read_crops(tmp_path / "b.npy", table=table), images, gene="abcabcabcabc")


def test_names_of_cells_that_to_csv_writes(tmp_path):
    cells = make_cells(12)
    np.save(tmp_path / "b.npy", cells.obsm[KEY])
    cells.obs.to_csv(tmp_path / "t.csv")
    crops = read_crops(tmp_path / "b.npy", table=tmp_path / "t.csv")
    assert list(crops.obs.index) == list(cells.obs_names) and list(crops.obs) == list(cells.obs)


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
    table.to_parquet(tmp_path / "t.parquet")
    check(read_crops(tmp_path / "t.csv"), images, gene=table["gene"])
    several = read_crops(tmp_path / "t.parquet", file_columns=["a", "b", "c"])
    check(several, images, gene=table["gene"])
    assert several.channels == ["a", "b", "c"] and "a" not in several.obs
    check(read_crops(tmp_path / "t.csv", file_columns="rgb"), (images // 200).astype(np.uint8))

    with pytest.raises(
        KeyError, match=r"has no column 'file' .it has: gene, path.*file_columns=\['path', 'rgb', 'a', 'b', 'c'\]"
    ):
        read_crops(tmp_path / "t.csv", file_columns="file")
    table.assign(path=["crops/0.tif", *["../secret.tif"] * 7]).to_csv(tmp_path / "escape.csv")
    with pytest.raises(ValueError, match="Row 1 of the table names '../secret.tif', which is outside of"):
        read_crops(tmp_path / "escape.csv")
    (tmp_path / "meta").mkdir()
    table.to_csv(tmp_path / "meta" / "t.csv")
    check(read_crops(tmp_path / "meta" / "t.csv", root=tmp_path), images, gene=table["gene"])
    table.assign(path=[str(tmp_path / path) for path in table["path"]]).to_csv(tmp_path / "meta" / "absolute.csv")
    check(read_crops(tmp_path / "meta" / "absolute.csv", root="/"), images, gene=table["gene"])
    with pytest.raises(ValueError, match=r"outside of .*meta: give the folder that holds all files as root"):
        read_crops(tmp_path / "meta" / "absolute.csv")
    table.assign(path=[*table["path"][:5], None, None, ""]).to_csv(tmp_path / "gaps.csv")
    with pytest.raises(ValueError, match=r"names no file in 3 of 8 rows .the first is row 5.: drop them"):
        read_crops(tmp_path / "gaps.csv")
    table.head(0).to_csv(tmp_path / "empty.csv")
    with pytest.raises(ValueError, match="names no file"):
        read_crops(tmp_path / "empty.csv")
    source = read_crops(tmp_path / "t.csv").images
    (tmp_path / "crops" / "3.tif").write_bytes(b"no image at all")
    with pytest.raises(ValueError, match="3.tif is no TIFF or PNG, or is truncated"):
        source.read(np.array([3]))
    Image.fromarray(images[3, 0]).save(tmp_path / "crops" / "3.tif")
    with pytest.raises(ValueError, match="3.tif is 1 × 6 × 5 of uint16, the first is 3 × 6 × 5 of uint16: all must be"):
        source.read(np.array([2, 3]))
    Image.new("CMYK", (5, 6)).save(tmp_path / "crops" / "3.tif")
    with pytest.raises(ValueError, match="3.tif holds pixels of mode 'CMYK'"):
        source.read(np.array([3]))
    sizes = [Image.fromarray(images[3, 0]), Image.fromarray(images[3, 0, :3])]
    sizes[0].save(tmp_path / "crops" / "3.tif", save_all=True, append_images=sizes[1:])
    with pytest.raises(ValueError, match="3.tif has pages of different sizes"):
        source.read(np.array([3]))
    (tmp_path / "crops" / "3.tif").unlink()
    with pytest.raises(FileNotFoundError, match="There is no file .*3.tif"):
        source.read(np.array([3]))


def test_files_that_a_table_names_twice_are_told(tmp_path):
    write_images(tmp_path / "c", n=3)
    table = pd.DataFrame({"a": ["0.png", "1.png", "0.png", "0.png"], "b": ["1.png", "1.png", "2.png", "1.png"]})
    table.to_csv(tmp_path / "c" / "t.csv")
    with pytest.warns(
        UserWarning, match=r"t.csv names the files of 1 rows again .the first is row 3.: these cells"
    ) as w:
        read_crops(tmp_path / "c" / "t.csv", file_columns=["a", "b"])
    assert w[0].filename == __file__


@pytest.mark.parametrize("ending", ["tsv", "csv.gz", "parquet"])
def test_tables_of_every_kind_name_image_files(tmp_path, ending):
    images = make_cells(8).obsm[KEY][:, :1]
    for row, image in enumerate(images):
        Image.fromarray(image[0]).save(tmp_path / f"{row}.png")
    table = pd.DataFrame({"gene": list("abababab"), "path": [f"{row}.png" for row in range(8)]})
    if ending == "parquet":
        table.to_parquet(tmp_path / "t.parquet")
    else:
        table.to_csv(tmp_path / f"t.{ending}", index=False, sep="\t" if ending == "tsv" else ",")
    check(read_crops(tmp_path / f"t.{ending}"), images, gene="abababab")


def write_images(folder: Path, shape: tuple[int, int] = (6, 6), n: int = 3, seed: int = 0) -> np.ndarray:
    folder.mkdir(parents=True)
    images = np.random.default_rng(seed).integers(0, 255, (n, *shape), dtype="uint8")
    for row, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{row}.png")
    return images


def test_folders_of_images(tmp_path):
    a, b = write_images(tmp_path / "one" / "a"), write_images(tmp_path / "one" / "b", seed=1)
    (tmp_path / "one" / "a" / ".0.png").write_bytes(b"left by a system")
    (tmp_path / "one" / "notes.txt").write_text("")
    crops = read_crops(tmp_path / "one")
    check(crops, np.concatenate([a, b])[:, None], label="aaabbb")
    assert crops.obs.index.tolist()[:2] == ["a/0.png", "a/1.png"] and crops.channels == ["channel_0"]
    screen = write_screen(tmp_path / "s.h5ad", crops, y_key="label")
    assert sorted(screen.obs["label"]) == list("aaabbb")
    for number, (plate, gene) in enumerate([("p1", "x"), ("p1", "y"), ("p2", "x")]):
        write_images(tmp_path / "two" / plate / gene, seed=number)
    deep = read_crops(tmp_path / "two").obs
    assert deep["folder_1"].tolist() == ["p1"] * 6 + ["p2"] * 3 and deep["label"].tolist() == list("xxxyyyxxx")
    named = pd.DataFrame({"gene": list("aab")}, index=["0.png", "1.png", "2.png"])
    flat = read_crops(tmp_path / "two" / "p1" / "x", table=named, channels=["DNA"])
    assert flat.obs["gene"].tolist() == list("aab") and flat.channels == ["DNA"]
    assert not list(read_crops(tmp_path / "two" / "p1" / "x").obs)
    write_images(tmp_path / "one" / "a" / "deeper")
    with pytest.raises(ValueError, match="has images in folders of different depth, such as a/0.png, a/deeper"):
        read_crops(tmp_path / "one")


def test_classes_that_are_links_and_folders_that_are_none(tmp_path):
    images = write_images(tmp_path / "disk" / "a")
    (tmp_path / "crops").mkdir()
    (tmp_path / "crops" / "gene").symlink_to(tmp_path / "disk" / "a")
    for name in (".ipynb_checkpoints", "__MACOSX"):
        write_images(tmp_path / "crops" / name, seed=1)
    crops = read_crops(tmp_path / "crops")
    assert crops.obs["label"].tolist() == ["gene"] * 3
    np.testing.assert_array_equal(crops.images.read(slice(None))[:, 0], images)


@pytest.mark.parametrize(("fit", "size"), [("pad", (9, 9)), ("crop", (4, 4)), (5, (5, 5)), ((3, 8), (3, 8))])
def test_crops_of_different_sizes_and_of_any_proportions(tmp_path, fit, size):
    write_images(tmp_path / "c" / "a", (6, 9))
    write_images(tmp_path / "c" / "b", (4, 7))
    with pytest.raises(ValueError, match=r"b.0.png is 1 × 4 × 7 .*: all must be alike, use fit='pad' or fit='crop'"):
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
    with pytest.raises(ValueError, match="is not known: use 'pad', 'crop', a number of pixels, or"):
        read_crops(tmp_path / "c", fit=fit)


def test_the_published_lmdb(tmp_path):
    crops = np.arange(6 * 4 * 100 * 100, dtype="uint16").reshape(6, 4, 100, 100)
    with lmdb.open(str(tmp_path / "ops"), map_size=2**25) as database, database.begin(write=True) as transaction:
        for i, crop in enumerate(crops):
            transaction.put(f"{i}_2020_A_B{i % 2}_7_G{i % 3}_{i}".encode(), crop.tobytes())
    check(
        read_crops(tmp_path / "ops"), crops, gene=[f"G{i % 3}" for i in range(6)], well=["2020_A_B0", "2020_A_B1"] * 3
    )


def test_what_is_wrong_is_said(tmp_path):
    images = make_cells(4).obsm[KEY]
    np.savez(tmp_path / "two.npz", a=images, b=images)
    np.savez(tmp_path / "pickled.npz", a=np.array([{"harm": 1}], dtype=object))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "two.npz").read_bytes()[:500])
    np.save(tmp_path / "b.npy", images)
    (tmp_path / "cells.txt").write_text("")
    (tmp_path / "cells.parquet").write_bytes(b"PAR1")
    for error, message, name, kwargs in [
        (FileNotFoundError, "There is nothing at", "none.h5ad", {}),
        (ValueError, "is of no known kind: give .h5ad", "cells.txt", {}),
        (KeyError, "has no array 'single_cell_images' .it has: a, b.: name the images with image_key", "two.npz", {}),
        (ValueError, "cannot be read as numpy arrays .*holds Python objects", "pickled.npz", {}),
        (ValueError, "cannot be read as numpy arrays", "cut.npz", {}),
        (ValueError, "the table has 2 rows, there are 4 images", "b.npy", {"table": pd.DataFrame({"a": [1, 2]})}),
        (ValueError, "cells.txt is no table: give one of .csv", "b.npy", {"table": tmp_path / "cells.txt"}),
        (FileNotFoundError, "There is no file", "b.npy", {"table": tmp_path / "none.csv"}),
        (ValueError, "cannot be read as a table, is empty, or truncated", "cells.parquet", {}),
    ]:
        with pytest.raises(error, match=message):
            read_crops(tmp_path / name, **kwargs)
    assert read_crops(tmp_path / "two.npz", image_key="b").images.shape == images.shape


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
def test_a_zarr_store_of_any_layout_can_be_converted(tmp_path):
    cells = make_cells(12)
    group = zarr.open_group(tmp_path / "c.zarr", mode="w")
    for name, table in (("obs", cells.obs), ("var", cells.var), ("obsm", {})):
        anndata.io.write_elem(group, name, table)
    images = group.create_array(f"obsm/{KEY}", shape=(12, 2, 16, 16), dtype="uint8", chunks=(5, 1, 7, 16))
    images.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    images[:] = cells.obsm[KEY]
    check(read_crops(tmp_path / "c.zarr"), cells.obsm[KEY], gene=cells.obs["gene"])
    assert write_screen(tmp_path / "d.zarr", tmp_path / "c.zarr", y_key="gene").n_obs == 12
