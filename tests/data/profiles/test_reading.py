from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from conftest import make_wells

import scbd
from scbd.data import read_profiles
from scbd.datasets import breinig2015, cpjump1


def wells(plate: str) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    about = {"Metadata_Plate": plate, "Metadata_Well": ["A01", "A02", "B01"]}
    features = {"Cells_AreaShape_Area": rng.normal(size=3), "Nuclei_Texture_Contrast_DNA": rng.normal(size=3)}
    return pd.DataFrame(about | features)


@pytest.mark.parametrize("name", ["p.csv", "p.CSV", "p.csv.gz", "p.tsv", "p.tsv.gz", "p.parquet"])
def test_every_kind_of_table(tmp_path, name):
    path, frame = tmp_path / name, wells("P1")
    if name.endswith("parquet"):
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    found = read_profiles(path)
    np.testing.assert_allclose(found.X, frame.iloc[:, 2:], rtol=1e-6)
    assert found.obs["Metadata_Well"].tolist() == ["A01", "A02", "B01"] and found.var_names[0] == "Cells_AreaShape_Area"


def test_plates_and_their_maps(tmp_path):
    paths = [tmp_path / f"{plate}.parquet" for plate in ("P1", "P2")]
    for path in paths:
        wells(path.stem).to_parquet(path)
    plan = pd.DataFrame({"Metadata_Plate": ["P1"] * 3 + ["P2"] * 3, "Metadata_Well": ["B01", "A02", "A01"] * 2})
    plan.assign(compound=list("abcdef")).to_csv(tmp_path / "map.csv", index=False)
    found = read_profiles(paths, table=tmp_path / "map.csv")
    assert found.obs["compound"].tolist() == list("cbafed") and found.obs_names.tolist() == list("012345")

    plan = plan.assign(compound=list("abcdef"))
    with pytest.raises(ValueError, match=r"3 rows of .*P1.parquet and 1 others are not in the table .*P2 A01"):
        read_profiles(paths, table=plan.head(3))
    with pytest.raises(ValueError, match=r"several rows for one Metadata_Well .such as B01."):
        read_profiles(paths, table=plan.drop(columns="Metadata_Plate"))
    with pytest.raises(KeyError, match="share no column .compound.: name them alike"):
        read_profiles(paths, table=plan[["compound"]])
    with pytest.raises(ValueError, match="There is no file to read"):
        read_profiles([])


def test_a_plate_without_a_feature(tmp_path):
    """What another plate lacks is missing there."""
    wells("P1").to_csv(tmp_path / "1.csv", index=False)
    wells("P2").iloc[:, :3].to_csv(tmp_path / "2.csv", index=False)
    with pytest.warns(UserWarning, match=r"1 of 2 features .* are left out .Nuclei_Texture_Contrast_DNA"):
        assert read_profiles([tmp_path / "1.csv", tmp_path / "2.csv"]).shape == (6, 1)


@pytest.mark.filterwarnings("ignore:Environments \\(")
def test_what_is_read_can_be_learned_from(tmp_path, hasty):
    cells = make_wells()
    cells.obs.add_prefix("Metadata_").join(cells.to_df()).to_csv(tmp_path / "wells.csv")
    found = read_profiles(tmp_path / "wells.csv")
    assert found.var_names.tolist() == cells.var_names.tolist()
    scbd.SCBDModel.setup_anndata(found, y_key="Metadata_compound", e_key="Metadata_plate", layer="X")
    assert scbd.SCBDModel(found).summary_stats["n_features"] == 10


def test_real_profiles(shared):
    """What the readers of the two data sets, which know their columns, call features."""
    path = shared / "profiles" / "cpjump1_cellprofiler_wells.parquet"
    known, found = cpjump1(path), read_profiles(path)
    places = ["Cells_AreaShape_BoundingBoxMaximum_Y", "Cells_Parent_Nuclei", "Nuclei_AreaShape_BoundingBoxMinimum_X"]
    assert set(known.var_names) - set(found.var_names) == set(places) and len(found.obs) == 1920
    np.testing.assert_array_equal(found.X, known[:, found.var_names].X)
    assert found.obs["Metadata_moa"].astype(str).tolist() == known.obs["Metadata_moa"].astype(str).tolist()
    path = shared / "profiles" / "breinig2015_single_cells.parquet"
    known, found = breinig2015(path), read_profiles(path)
    np.testing.assert_array_equal(found.X, known.X)
    assert set(found.obs) == set(known.obs)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.tif", b"II", ValueError, "a.tif is an image: cut crops of its cells with scbd.data.crop_cells"),
        ("a.xlsx", b"PK", ValueError, "a.xlsx is of no known kind: give .h5ad, .*a table"),
        (
            "Nuclei.csv",
            b"ImageNumber,ObjectNumber\n1,1\n",
            ValueError,
            "is one of CellProfiler's tables: give the folder",
        ),
        ("a.csv", b"", ValueError, "a.csv cannot be read as a table, is empty, or truncated"),
        ("a.parquet", b"PAR1", ValueError, "a.parquet cannot be read as a table"),
        ("a.csv.gz", b"\x1f\x8b\x08", ValueError, "a.csv.gz cannot be read as a table"),
    ],
)
def test_other_files_are_named(tmp_path, name, content, error, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_profiles(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="There is nothing at"):
        read_profiles(tmp_path / "none.csv")
