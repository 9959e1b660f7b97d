from __future__ import annotations

import shlex
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from anndata import read_h5ad
from conftest import make_cells, make_wells
from PIL import Image
from plates import make_plate

from scbd.cli import main
from scbd.data import read_crops, write_screen
from scbd.workflows import inspect

KEY = "single_cell_images"
# of few cells
pytestmark = pytest.mark.filterwarnings("ignore:Scores are flattering")


def write_pictures(folder: Path, n: int = 8) -> list[str]:
    names = [f"{row % 2}/{row}.png" for row in range(n)]
    for row, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(row).integers(1, 200, (6, 6, 4), dtype="uint8")
        pixels[..., 3] = 255
        Image.fromarray(pixels, "RGBA").save(folder / name)
    return names


def write_table(path: Path) -> None:
    names = write_pictures(path.parent)
    pd.DataFrame({"gene": list("aabb") * 2, "well": list("xy") * 4, "file": names}).to_csv(path, index=False)


def write_portrait(path: Path) -> None:
    cells = make_cells()
    cells.var["channels"], cells.var["channel_mapping"] = ["nucleus", "DAPI"], ["mask", "image_channel"]
    cells.write_h5ad(path, compression="gzip")


def write_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        image = pd.DataFrame({"ImageNumber": [1, 2], "Image_Metadata_Well": ["A", "B"]})
        image.to_sql("Per_Image", database, index=False)
        cells = pd.DataFrame({"ImageNumber": [1, 1, 2, 2], "ObjectNumber": [1, 2, 1, 2], "Cells_Area": [1.0, 2, 3, 4]})
        cells.to_sql("Per_Cells", database, index=False)


def write_broken(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n and no more")


@pytest.mark.parametrize(
    ("name", "write", "lines", "command"),
    [
        (
            "screen.h5ad",
            lambda path: make_cells().write_h5ad(path),
            ["is an AnnData", "96 cells of 2 × 16 × 16 uint8", "channel channel_0: ", "column gene: 4 values (gene_"],
            "scbd run {} --y-key gene --e-key well --out results",
        ),
        (
            "wells.h5ad",
            lambda path: make_wells().write_h5ad(path),
            ["72 cells or wells of 10 features", "column plate: 4 values"],
            "scbd run {} --layer X --y-key gene --e-key well --out results",
        ),
        (
            "cells.h5sc",
            write_portrait,
            ["96 cells of 1 × 16 × 16", "channel DAPI"],
            "scbd convert {} --y-key gene --out",
        ),
        (
            "cells.csv",
            write_table,
            ["names image files", "channel channel_3: 255 in every pixel: leave it out"],
            "columns",
        ),
        (
            "pictures",
            write_pictures,
            ["a folder of images", "8 cells of 4 × 6 × 6", "column label: 2"],
            "scbd convert {} --y-key label --out screen.h5ad",
        ),
        (
            "crops.npy",
            lambda path: np.save(path, make_cells().obsm[KEY]),
            ["No column has values"],
            "scbd convert {} --table …",
        ),
        (
            "wells.parquet",
            lambda path: make_wells().to_df().assign(feature_10=1.0, gene="a").to_parquet(path),
            ["72 cells or wells of 11 features", "  features: feature_0, feature_1, ", "of one value: 1 (feature_10)"],
            "scbd run {} --y-key gene --e-key well --out results",
        ),
        (
            "out.sqlite",
            write_database,
            ["4 cells or wells of 1 features", "column Metadata_Well: 2"],
            "scbd run {} --y-key gene --e-key well --out results",
        ),
        (
            "plate.zarr",
            make_plate,
            ["is an OME-Zarr plate", "wells (A1", "The first:", "  channel "],
            "scbd.data.read_plate",
        ),
        (
            "field.tif",
            lambda path: Image.new("L", (9, 9)).save(path),
            ["is an image", "1 channels of 9 × 9 uint8", "0 in every pixel"],
            "scbd.data.crop_cells",
        ),
        ("notes.txt", lambda path: path.write_text("hello"), ["of no known kind"], "give .h5ad"),
    ],
)
@pytest.mark.filterwarnings("ignore:Transforming to str index")
def test_ten_odd_files(tmp_path, name, write, lines, command):
    write(tmp_path / name)
    keys: dict[str, Any] = {"y_key": "gene", "e_key": "well"} if name == "screen.h5ad" else {}
    said = inspect(tmp_path / name, **keys)
    assert all(line in said for line in lines), said
    wanted = (
        command.format(tmp_path / name) if keys else command.format(tmp_path / name).replace("gene --e-key well", "…")
    )
    assert wanted.split(" --y-key")[0] in said.splitlines()[-1]
    if keys:
        assert "% of what well can differ in is seen at equal gene" in said and said.endswith(wanted)


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(")
def test_numbers_that_may_be_labels_are_shown_and_kept_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wells = make_wells()
    table = wells.to_df().join(wells.obs).assign(compound=np.arange(72) % 18, donor=np.arange(72) // 18, dose=0.5)
    table.rename(columns={"dose": "dose uM"}).to_csv("wells.csv", index=False)
    with pytest.warns(UserWarning, match=r"2 of 12 features .*obs_columns=\['donor', 'dose uM'\]"):
        said = inspect("wells.csv", y_key="compound", e_key="plate").splitlines()
    assert "  perhaps no measurements: 2 (donor, dose uM)" in said
    assert said[-1].endswith("--y-key compound --e-key plate --obs-columns donor 'dose uM' --out results")
    typed = shlex.split(said[-1].removeprefix("Next: scbd "))
    assert main([*typed, "--max-steps", "3", "--accelerator", "cpu"]) == 0
    assert read_h5ad("results/cells.h5ad").var_names.tolist() == wells.var_names.tolist()


@pytest.mark.filterwarnings("ignore:Transforming to str index")
def test_what_inspect_warns_of_names_options(tmp_path, capsys, monkeypatch):
    """Those of the command that it says to type next."""
    make_wells().to_df().assign(donor=1.0).to_csv(tmp_path / "wells.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *w: print(warnings.formatwarning(*w[:4])))
        assert main(["inspect", str(tmp_path / "wells.csv")]) == 0
    assert "leave them out with --obs-columns donor." in capsys.readouterr().out


def test_a_key_that_a_table_does_not_have_is_an_error(tmp_path):
    make_wells().obs.assign(f=1.0).to_csv(tmp_path / "wells.csv")
    with pytest.raises(KeyError, match="Did you mean 'plate'"):
        inspect(tmp_path / "wells.csv", y_key="compound", e_key="plat")


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Transforming to str index")
@pytest.mark.filterwarnings("ignore:Environments \\(")
def test_a_table_of_features_is_trained_on_as_it_lies(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wells = make_wells()
    wells.to_df().join(wells.obs).to_csv("wells.csv", index=False)
    said = inspect("wells.csv", y_key="compound", e_key="plate").splitlines()[-1]
    typed = shlex.split(said.removeprefix("Next: scbd "))
    assert main([*typed, "--max-steps", "3", "--accelerator", "cpu"]) == 0
    assert "features, standardised by plate" in capsys.readouterr().out and Path("results/metrics.csv").is_file()


def test_what_is_said_next_can_be_typed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table(Path("cells.csv"))
    said = inspect("cells.csv", y_key=["gene"]).splitlines()[-1]
    assert main(shlex.split(said.removeprefix("Next: scbd "))) == 0
    assert "8 cells of 4 × 6 × 6 uint8: screen.h5ad" in capsys.readouterr().out


def test_names_with_spaces_can_be_typed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("my plates")
    folder.mkdir()
    write_table(folder / "cells.csv")
    table = pd.read_csv(folder / "cells.csv").rename(columns={"gene": "gene name", "file": "image file"})
    table.to_csv(folder / "cells.csv", index=False)
    said = inspect(folder / "cells.csv", y_key="gene name").splitlines()[-1]
    assert main(shlex.split(said.removeprefix("Next: scbd "))) == 0
    assert "8 cells of 4 × 6 × 6 uint8: screen.h5ad" in capsys.readouterr().out
    Path("screen.h5ad").rename(folder / "s.h5ad")
    typed = shlex.split(inspect(folder / "s.h5ad", y_key="gene name", e_key=["well", "gene name"]).splitlines()[-1])
    assert typed[1:8] == ["scbd", "run", "my plates/s.h5ad", "--y-key", "gene name", "--e-key", "well"]
    assert typed[8:] == ["gene name", "--out", "results"]


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(")
def test_a_screen_in_zarr_needs_no_conversion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_screen("screen.zarr", make_cells(), y_key="gene", compression="zstd")
    said = inspect("screen.zarr", y_key="gene", e_key="well").splitlines()[-1]
    assert said == "Next: scbd run screen.zarr --y-key gene --e-key well --out results"
    typed = shlex.split(said.removeprefix("Next: scbd "))
    assert main([*typed, "--max-steps", "3", "--accelerator", "cpu"]) == 0


def test_a_store_in_zarr_whose_chunks_hold_parts_of_images_is_converted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = make_cells()
    write_screen("screen.zarr", cells, y_key="gene")
    images = zarr.open_group("screen.zarr")["obsm"]
    assert isinstance(images, zarr.Group)
    images.create_array(KEY, data=cells.obsm[KEY], chunks=(12, 1, 16, 16), overwrite=True)
    said = inspect("screen.zarr", y_key="gene", e_key="well").splitlines()[-1]
    assert said == "Next: scbd convert screen.zarr --y-key gene --out screen.h5ad"


def test_a_sheet_on_the_command_line(tmp_path, capsys):
    make_cells().write_h5ad(tmp_path / "c.h5ad")
    assert main(["inspect", str(tmp_path / "c.h5ad"), "--sheet", str(tmp_path / "s.png"), "--y-key", "gene"]) == 0
    assert "Ten of them: " in capsys.readouterr().out and np.asarray(Image.open(tmp_path / "s.png")).std() > 30


def test_what_is_wrong_is_said(tmp_path, capsys):
    write_broken(tmp_path / "cut.h5ad")
    assert "It cannot be read as it is: " in inspect(tmp_path / "cut.h5ad")
    assert main(["inspect", str(tmp_path / "cut.h5ad")]) == 2
    assert "It cannot be read as it is: " in capsys.readouterr().out
    (tmp_path / "cut.tif").write_bytes(b"II*\0 and no more")
    assert "cut.tif is an image.\nIt cannot be read as it is: " in inspect(tmp_path / "cut.tif")
    for side in (6, 7):
        Image.new("L", (side, 6)).save(tmp_path / f"{side}.png")
    pictures = pd.DataFrame({"file": ["6.png", "7.png"], "gene": ["a", "b"]})
    pictures.to_csv(tmp_path / "unequal.csv", index=False)
    said = inspect(tmp_path / "unequal.csv")
    assert "names image files" in said and "It cannot be read as it is: " in said and "fit='pad'" in said
    with pytest.raises(ValueError, match="no cells in it yet to draw"):
        inspect(tmp_path / "cut.tif", sheet=tmp_path / "s.png")
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["inspect", str(tmp_path / "notes.txt")]) == 2
    assert "of no known kind.\nIt cannot be read as it is: give .h5ad, " in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "There is nothing at" in capsys.readouterr().err
    make_wells().write_h5ad(tmp_path / "w.h5ad")
    with pytest.raises(ValueError, match="There are no images to draw"):
        inspect(tmp_path / "w.h5ad", sheet=tmp_path / "s.png")
    with pytest.raises(KeyError, match="Did you mean 'plate'"):
        inspect(tmp_path / "w.h5ad", y_key="compound", e_key="plat")


@pytest.mark.parametrize("classes", ["flat", "in plates"])
def test_the_label_of_a_folder_of_folders_is_said(tmp_path, classes):
    write_pictures(tmp_path if classes == "flat" else tmp_path / "plate")
    assert inspect(tmp_path).endswith(f"scbd convert {tmp_path} --y-key label --out screen.h5ad")
    assert "--y-key folder_1 --out" in inspect(tmp_path, y_key="folder_1")


def test_what_has_no_known_label_leaves_it_to_the_user(tmp_path):
    Image.new("L", (6, 6)).save(tmp_path / "0.png")
    assert "--table … --y-key …" in inspect(tmp_path)


def test_several_columns_of_the_perturbation_are_typed_one_after_the_other(tmp_path):
    make_cells().write_h5ad(tmp_path / "cells.h5ad")
    said = inspect(tmp_path / "cells.h5ad", y_key=["gene", "well"], e_key="well").splitlines()[-1]
    assert said.endswith("cells.h5ad --y-key gene well --e-key well --out results")


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(", "ignore:zarr v3 autosharding")
@pytest.mark.parametrize("name", ["cells.h5ad", "cells.zarr"])
def test_images_under_another_key_are_found_and_named_in_the_command(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    cells = make_cells()
    cells.obsm["crops"], cells.obsm["X_pca"] = cells.obsm.pop(KEY), np.ones((cells.n_obs, 3), "float32")
    cells.X = np.ones((cells.n_obs, 2), "float32")  # images go before features, as they do under their usual key
    cells.write_h5ad("one.h5ad")
    crops = read_crops("one.h5ad", image_key="crops")
    write_screen(name, crops, y_key="gene", image_key="crops")
    said = inspect(name, y_key="gene", e_key="well").splitlines()
    assert said[1] == "Its images are at obsm['crops']." and "96 cells of 2 × 16 × 16 uint8" in said
    assert said[-1] == f"Next: scbd run {name} --image-key crops --y-key gene --e-key well --out results"
    typed = shlex.split(said[-1].removeprefix("Next: scbd "))
    assert main([*typed, "--max-steps", "3", "--accelerator", "cpu"]) == 0


def test_of_several_images_one_is_chosen_by_its_key(tmp_path, capsys):
    cells = make_cells()
    cells.obsm["crops"] = cells.obsm.pop(KEY)
    cells.obsm["masks"] = cells.obsm["crops"][:, :1].copy()
    cells.X = np.ones((cells.n_obs, 2), "float32")
    cells.write_h5ad(tmp_path / "cells.h5ad")
    said = inspect(tmp_path / "cells.h5ad").splitlines()
    assert said[1] == "Its images are at obsm['crops'] (others may be at masks)."
    said = inspect(tmp_path / "cells.h5ad", image_key="masks").splitlines()
    assert said[1] == "96 cells of 1 × 16 × 16 uint8" and "--image-key masks --y-key" in said[-1]
    assert main(["inspect", str(tmp_path / "cells.h5ad"), "--image-key", "mask"]) == 2
    assert "They may be at --image-key crops or --image-key masks." in capsys.readouterr().out
    np.savez(tmp_path / "cells.npz", crops=cells.obsm["crops"], masks=cells.obsm["masks"])
    assert main(["inspect", str(tmp_path / "cells.npz"), "--image-key", "masks"]) == 0
    assert f"scbd convert {tmp_path / 'cells.npz'} --image-key masks --table" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:z_c has", "ignore:Environments \\(", "ignore:.* replaced by the feature's median")
def test_rows_with_missing_values_are_kept_on_request(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wells = make_wells()
    table = wells.to_df().join(wells.obs)
    table.iloc[7, 2] = np.nan
    table.to_csv("wells.csv", index=False)
    with pytest.warns(UserWarning, match=r"1 of 72 rows have .* left out \(7\); missing='median' keeps them"):
        assert "71 cells or wells of 10 features" in inspect("wells.csv")
    said = inspect("wells.csv", y_key="compound", e_key="plate", missing="median").splitlines()
    assert said[1] == "72 cells or wells of 10 features"
    assert said[-1].endswith("--y-key compound --e-key plate --missing median --out results")
    typed = shlex.split(said[-1].removeprefix("Next: scbd "))
    assert main([*typed, "--max-steps", "3", "--accelerator", "cpu"]) == 0
    assert read_h5ad("results/cells.h5ad").n_obs == 72
    wells.write_h5ad("wells.h5ad")
    typed = ["run", "wells.h5ad", "--layer", "X", *typed[2:-1], "again"]
    assert main(typed) == 2
    assert "is no table of features, and is read as it is: leave --missing median out" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Transforming to str index")
def test_features_that_are_set_aside_are_told(tmp_path):
    wells = make_wells()
    table = wells.to_df().join(wells.obs).assign(ImageNumber=1, Metadata_Site=np.arange(72) % 3, empty=np.nan)
    table.to_csv(tmp_path / "wells.csv", index=False)
    with pytest.warns(UserWarning, match=r"1 of 11 features are missing .* left out \(empty\)"):
        said = inspect(tmp_path / "wells.csv")
    assert "  numbers that are no features, by their names: 2 (ImageNumber, Metadata_Site)\n" in said
    wells.X[:, 4], wells.X[:, 6], wells.X[3, 2] = 1, np.nan, np.inf  # what training says of a file that is no table
    wells.obs["Metadata_Site"] = 1
    wells.write_h5ad(tmp_path / "wells.h5ad")
    said = inspect(tmp_path / "wells.h5ad")
    assert "  left out in training, of one value: 1 (feature_4)\n" in said and "by their names" not in said
    assert "  refused, with missing or infinite values in 72 rows: 2 (feature_2, feature_6)\n" in said
