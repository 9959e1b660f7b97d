from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scbd.data import read_cellprofiler, read_profiles

N = 6  # cells in two images


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """What ExportToSpreadsheet writes of nuclei, cells around them, and what lies between."""
    rng = np.random.default_rng(seed)
    number = pd.DataFrame({"ImageNumber": [1, 1, 1, 2, 2, 2], "ObjectNumber": [1, 2, 3] * 2})
    image = pd.DataFrame(
        {
            **{
                "Count_Nuclei": [3.0, 3.0],
                "ImageNumber": [1, 2],
                "Metadata_Well": ["A01", "A02"],
                "Metadata_Site": [1, 1],
            },
            **{"FileName_DNA": ["1_d.tif", "2_d.tif"], "PathName_DNA": ["/old/data/plate_1"] * 2},
            **{"FileName_Actin": ["1_a.tif", "2_a.tif"], "PathName_Actin": ["C:\\old\\data\\plate_1"] * 2},
        }
    )

    def objects(**parents: list[int]) -> pd.DataFrame:
        measured = {"AreaShape_Area": rng.normal(300, 20, N), "Intensity_MeanIntensity_DNA": rng.random(N)}
        places = {"Location_Center_X": rng.random(N) * 100, "Location_Center_Y": rng.random(N) * 100}
        return number.assign(**measured, **places, Number_Object_Number=number["ObjectNumber"], **parents)

    straight = [1, 2, 3, 1, 2, 3]
    return {
        "Image": image,
        "Nuclei": objects(),
        "Cells": objects(Parent_Nuclei=[2, 1, 3, 1, 2, 3]),  # in another order
        "Cytoplasm": objects(Parent_Nuclei=straight, Parent_Cells=[2, 1, 3, 1, 2, 3]),
    }


def write_folder(folder: Path, written: dict[str, pd.DataFrame], prefix: str = "MyExpt_") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in written.items():
        table.to_csv(folder / f"{prefix}{name}.csv", index=False)
    (folder / f"{prefix}Experiment.csv").write_text("Key,Value\nCellProfiler_Version,4.2\n")
    return folder


def write_database(path: Path, written: dict[str, pd.DataFrame], start: str, number: str) -> Path:
    """ExportToDatabase calls columns by their objects."""
    with closing(sqlite3.connect(path)) as database:
        for name, table in written.items():
            own = {"ObjectNumber": number.format(name)} if name != "Image" else {}
            kept = ("ImageNumber", "TableNumber")
            named = {c: own.get(c, f"{name}_{c}") for c in table if c not in kept and c != "Number_Object_Number"}
            table.drop(columns="Number_Object_Number", errors="ignore").rename(columns=named).to_sql(
                f"{start}{name}", database, index=False
            )
        pd.DataFrame({"Key": ["a"]}).to_sql("Experiment", database, index=False)
    return path


def check(path: Path, written: dict[str, pd.DataFrame]) -> None:
    cells = read_cellprofiler(path)
    nuclei, around = written["Nuclei"], written["Cells"]
    np.testing.assert_allclose(cells[:, "Nuclei_AreaShape_Area"].X[:, 0], nuclei["AreaShape_Area"], rtol=1e-6)
    np.testing.assert_allclose(
        cells[:, "Cells_AreaShape_Area"].X[:, 0], around["AreaShape_Area"].to_numpy()[[1, 0, 2, 3, 4, 5]], rtol=1e-6
    )
    assert cells.n_vars == 6
    np.testing.assert_allclose(cells.obs["x"], nuclei["Location_Center_X"])
    np.testing.assert_allclose(cells.obs["y"], nuclei["Location_Center_Y"])
    assert cells.obs["Metadata_Well"].tolist() == ["A01"] * 3 + ["A02"] * 3
    assert cells.obs["path_DNA"].tolist()[::3] == ["/old/data/plate_1/1_d.tif", "/old/data/plate_1/2_d.tif"]
    assert cells.obs["field"].tolist() == ["1"] * 3 + ["2"] * 3 and cells.obs_names.is_unique
    assert (read_profiles(path).X == cells.X).all()


@pytest.mark.parametrize("prefix", ["MyExpt_", ""])
def test_spreadsheets(tmp_path, prefix):
    check(write_folder(tmp_path / "out", tables(), prefix), tables())


@pytest.mark.parametrize(
    ("start", "number"),
    [
        ("MyExpt_Per_", "{}_Number_Object_Number"),
        ("Per_", "ObjectNumber"),
        ("", "ObjectNumber"),
        ("", "{}_ObjectNumber"),
    ],
)
def test_databases(tmp_path, start, number):
    check(write_database(tmp_path / "out.sqlite", tables(), start, number), tables())


def test_one_table_of_all_objects(tmp_path):
    nuclei = tables()["Nuclei"]
    together = nuclei.rename(columns={c: f"Nuclei_{c}" for c in nuclei if c not in ("ImageNumber", "ObjectNumber")})
    with closing(sqlite3.connect(tmp_path / "o.db")) as database:
        tables()["Image"].add_prefix("Image_").rename(columns={"Image_ImageNumber": "ImageNumber"}).to_sql(
            "Per_Image", database, index=False
        )
        together.assign(Cells_AreaShape_Area=np.arange(6.0)).to_sql("Per_Object", database, index=False)
    cells = read_cellprofiler(tmp_path / "o.db")
    assert "Cells_AreaShape_Area" in cells.var_names and cells.n_vars == 3
    np.testing.assert_allclose(cells.obs["x"], nuclei["Location_Center_X"])


def test_exports_of_many_runs_number_their_tables(tmp_path):
    """cytominer-database puts folders into one file, each of which begins with image 1."""
    one, two = ({name: t.assign(TableNumber=n) for name, t in tables(n).items()} for n in (7, 8))
    two["Image"]["Metadata_Well"] = ["B01", "B02"]
    write_database(tmp_path / "o.sqlite", {n: pd.concat([one[n], two[n]]) for n in one}, "", "ObjectNumber")
    cells = read_cellprofiler(tmp_path / "o.sqlite")
    assert cells.obs["Metadata_Well"].tolist() == [w for w in ("A01", "A02", "B01", "B02") for _ in range(3)]
    assert cells.obs["field"].tolist()[::3] == ["7_1", "7_2", "8_1", "8_2"]
    np.testing.assert_allclose(cells[6:, "Nuclei_AreaShape_Area"].X[:, 0], two["Nuclei"]["AreaShape_Area"], rtol=1e-6)


def test_a_folder_for_each_site(tmp_path):
    for number, site in enumerate(("P1-A01-1", "P1-A01-2")):
        write_folder(tmp_path / "analysis" / site, tables(number), "")
    cells = read_cellprofiler(tmp_path / "analysis")
    assert cells.obs["field"].unique().tolist() == ["P1-A01-1/1", "P1-A01-1/2", "P1-A01-2/1", "P1-A01-2/2"]
    expected = pd.concat([tables(0)["Nuclei"], tables(1)["Nuclei"]])["AreaShape_Area"]
    np.testing.assert_allclose(cells[:, "Nuclei_AreaShape_Area"].X[:, 0], expected, rtol=1e-6)


def test_images_that_were_moved(tmp_path):
    write_folder(tmp_path / "out", tables())
    (tmp_path / "disk" / "plate_1").mkdir(parents=True)
    cells = read_cellprofiler(tmp_path / "out", root=tmp_path / "disk")
    assert cells.obs["path_DNA"].iloc[0] == str(tmp_path / "disk" / "plate_1" / "1_d.tif")
    assert cells.obs["path_Actin"].iloc[0] == str(tmp_path / "disk" / "plate_1" / "1_a.tif")
    flat = read_cellprofiler(tmp_path / "out", root=tmp_path / "elsewhere")
    assert flat.obs["path_DNA"].iloc[0] == str(tmp_path / "elsewhere" / "1_d.tif")


def test_objects_can_be_chosen(tmp_path):
    write_folder(tmp_path, tables())
    cells = read_cellprofiler(tmp_path, objects=["Cells", "Nuclei"])
    np.testing.assert_allclose(cells.obs["x"], tables()["Cells"]["Location_Center_X"])
    expected = tables()["Nuclei"]["AreaShape_Area"].to_numpy()[[1, 0, 2, 3, 4, 5]]
    np.testing.assert_allclose(cells[:, "Nuclei_AreaShape_Area"].X[:, 0], expected, rtol=1e-6)
    assert cells.n_vars == 4 and read_cellprofiler(tmp_path, objects="Cytoplasm").n_vars == 2
    with pytest.raises(KeyError, match="has no 'Nucleus'.*Did you mean 'Nuclei'.*Name it with objects"):
        read_cellprofiler(tmp_path, objects="Nucleus")


def test_nuclei_without_a_cell_are_counted(tmp_path):
    written = tables()
    written["Cells"] = written["Cells"].drop(index=4)
    write_folder(tmp_path, written)
    with pytest.warns(UserWarning, match=r"2 of 6 features are missing .*left out .Cells_AreaShape_Area"):
        assert read_cellprofiler(tmp_path).n_obs == 6
    cells = read_cellprofiler(tmp_path, missing="keep")
    assert np.isnan(cells[:, "Cells_AreaShape_Area"].X[:, 0]).tolist() == [False] * 4 + [True, False]


def test_objects_of_which_a_cell_has_several(tmp_path):
    written = tables() | {"Spots": tables(3)["Nuclei"].assign(Parent_Nuclei=[1, 1, 2, 1, 2, 2])}
    write_folder(tmp_path, written)
    with pytest.warns(UserWarning, match="Spots are left out: there are several of one of Nuclei"):
        assert read_cellprofiler(tmp_path).n_vars == 6
    with pytest.raises(ValueError, match="Spots are left out"):
        read_cellprofiler(tmp_path, objects=["Nuclei", "Spots"])
    write_folder(tmp_path, {"Spots": tables(3)["Nuclei"]})
    with pytest.warns(UserWarning, match="neither has a column that links them .Nuclei_Parent_Spots or Spots_Parent"):
        assert read_cellprofiler(tmp_path).n_vars == 6


@pytest.mark.parametrize(
    ("stacked", "said"),
    [
        (("Image", "Nuclei", "Cells", "Cytoplasm"), r"The export has several images of one number \(ImageNumber 1\): "),
        (("Image", "Nuclei"), r"several images of one number \(ImageNumber 1\).*Read the folder of each run by itself"),
        (("Nuclei",), r"several Nuclei of one number \(ImageNumber 1, ObjectNumber 1\)"),
    ],
)
def test_runs_that_were_stacked_are_not_crossed(tmp_path, stacked, said):
    """Each counts its images from 1: a cell would lie in those of both plates."""
    one, two = tables(), tables(1)
    two["Image"]["Metadata_Well"] = ["B01", "B02"]
    both = {name: pd.concat([one[name], two[name]]) if name in stacked else one[name] for name in one}
    with pytest.raises(ValueError, match=said):
        read_cellprofiler(write_folder(tmp_path / "both", both))
    if len(stacked) == 4:  # what is said, done
        write_folder(tmp_path / "runs" / "1", one)
        write_folder(tmp_path / "runs" / "2", two)
        assert read_cellprofiler(tmp_path / "runs").obs["Metadata_Well"].nunique() == 4
        numbered = {n: pd.concat([one[n].assign(TableNumber=1), two[n].assign(TableNumber=2)]) for n in one}
        found = read_cellprofiler(write_folder(tmp_path / "numbered", numbered))
        assert found.n_obs == 12 and found.obs["Metadata_Well"].tolist()[::3] == ["A01", "A02", "B01", "B02"]


def test_what_is_wrong_is_said(tmp_path):
    written = tables()
    write_folder(tmp_path / "lost", written | {"Image": written["Image"].head(1)})
    with pytest.raises(ValueError, match=r"3 of 6 Nuclei lie in images that the image table does not have .*Number 2"):
        read_cellprofiler(tmp_path / "lost")
    write_folder(tmp_path / "no_image", {"Nuclei": written["Nuclei"]})
    with pytest.raises(FileNotFoundError, match="has no image table .such as MyExpt_Image.csv."):
        read_cellprofiler(tmp_path / "no_image")
    write_folder(tmp_path / "other", {"Image": written["Image"], "Worms": written["Nuclei"]})
    with pytest.raises(ValueError, match="the objects Worms, and nothing says which are the cells: name them with obj"):
        read_cellprofiler(tmp_path / "other")
    (tmp_path / "broken.sqlite").write_bytes(b"no database at all")
    with pytest.raises(ValueError, match="is no SQLite file of CellProfiler, or is damaged"):
        read_cellprofiler(tmp_path / "broken.sqlite")
    write_database(tmp_path / "empty.sqlite", {}, "", "")
    with pytest.raises(FileNotFoundError, match=r"has no table of images that ends in 'Image' .its tables: Experiment"):
        read_cellprofiler(tmp_path / "empty.sqlite")
    with pytest.raises(FileNotFoundError, match="There is nothing at"):
        read_cellprofiler(tmp_path / "none")
    with pytest.raises(
        ValueError, match="is one of CellProfiler's tables: give the folder of all of them to scbd.data"
    ):
        read_cellprofiler(tmp_path / "lost" / "MyExpt_Nuclei.csv")
