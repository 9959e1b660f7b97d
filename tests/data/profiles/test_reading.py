from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from conftest import make_wells

import scbd
from scbd.data import read_profiles
from scbd.data.profiles import read_features
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
    """What another plate lacks is no feature, however few of all rows that plate has: it would be lost."""
    wells("P1").to_csv(tmp_path / "1.csv", index=False)
    wells("P2").iloc[:, :3].to_csv(tmp_path / "2.csv", index=False)
    said = r"1 of 2 features have no value in a whole file, and are left out \(Nuclei_Texture_Contrast_DNA in .*2.csv\)"
    paths = [tmp_path / "1.csv", tmp_path / "2.csv"]
    with pytest.warns(UserWarning, match=said):
        assert read_profiles(paths).shape == (6, 1)
    pd.concat([wells("P1")] * 30).to_csv(tmp_path / "1.csv", index=False)
    with pytest.warns(UserWarning, match=said):
        found = read_profiles(paths)
    assert found.shape == (93, 1) and set(found.obs["Metadata_Plate"]) == {"P1", "P2"}


def test_what_a_plate_map_says_is_no_feature(tmp_path):
    plan = pd.DataFrame({"Metadata_Well": ["A01", "A02", "B01"], "position": [1, 2, 3], "dose_um": [0.1, 1, 10]})
    wells("P1").assign(position=[1, 2, 3]).to_csv(tmp_path / "1.csv", index=False)
    plan.to_csv(tmp_path / "map.csv", index=False)
    for known in (plan, tmp_path / "map.csv"):
        found = read_profiles(tmp_path / "1.csv", table=known)
        assert found.var_names.tolist() == ["Cells_AreaShape_Area", "Nuclei_Texture_Contrast_DNA"]
        assert found.obs["dose_um"].tolist() == [0.1, 1, 10] and found.obs["position"].tolist() == [1, 2, 3]


def test_numbers_that_may_be_no_measurements_are_named(tmp_path):
    wells("P1").assign(donor=[1, 2, 3], Metadata_dose=[1, 2, 3]).to_csv(tmp_path / "1.csv", index=False)
    said = r"1.csv: 1 of 3 features may be no measurements, .*\(donor\).*: leave them out with obs_columns=\['donor'\]"
    with pytest.warns(UserWarning, match=said):
        assert "donor" in read_profiles(tmp_path / "1.csv").var_names
    for named in ("donor", ["donor"], ("donor",)):
        found = read_profiles(tmp_path / "1.csv", obs_columns=named)
        assert found.n_vars == 2 and found.obs["donor"].tolist() == [1, 2, 3] and "Metadata_dose" in found.obs
    many = [f"Cells_Texture_{number}" for number in range(20)]
    odd = ["".join(letters) for letters in zip("abcdefghijkl", "abcdefghijkl", strict=True)]
    wells("P1").join(pd.DataFrame(0.5, index=range(3), columns=many + odd)).to_csv(tmp_path / "2.csv", index=False)
    with pytest.warns(UserWarning, match=r"12 of 34 features .*aa, .*jj, ….*leave them out with obs_columns=…\.$"):
        read_profiles(tmp_path / "2.csv")


def test_levels_of_an_index_are_no_features(tmp_path):
    levels = wells("P1").assign(site=[1, 2, 3]).set_index(["Metadata_Plate", "Metadata_Well", "site"])
    levels.to_parquet(tmp_path / "1.parquet")
    found = read_profiles(tmp_path / "1.parquet")
    assert list(found.obs) == ["Metadata_Plate", "Metadata_Well", "site"] and found.n_vars == 2
    assert found.obs["site"].tolist() == [1, 2, 3]
    levels.rename_axis([None, None, "number"]).to_parquet(tmp_path / "2.parquet")
    found = read_profiles(tmp_path / "2.parquet")
    assert list(found.obs) == ["level_0", "level_1", "number"] and found.n_vars == 2
    levels.assign(site=[1, 2, 3]).to_parquet(tmp_path / "3.parquet")
    with pytest.raises(ValueError, match="1 columns whose name is there twice .site"):
        read_profiles(tmp_path / "3.parquet")


def test_what_rows_are_called_is_kept_of_several_files(tmp_path):
    for plate in ("P1", "P2"):
        wells(plate).set_index("Metadata_Well").to_parquet(tmp_path / f"{plate}.parquet")
    assert read_profiles(tmp_path / "P1.parquet").obs_names.tolist() == ["A01", "A02", "B01"]
    found = read_profiles([tmp_path / "P1.parquet", tmp_path / "P2.parquet"])
    assert found.obs["Metadata_Well"].tolist() == ["A01", "A02", "B01"] * 2


@pytest.mark.parametrize(("name", "mark"), [("w.csv", ";"), ("w.csv.gz", "\t"), ("w.tsv", ",")])
def test_other_separators_are_named(tmp_path, name, mark):
    wells("P1").to_csv(tmp_path / name, index=False, sep=mark)
    with pytest.raises(ValueError, match="has one column, and its separator looks like") as raised:
        read_profiles(tmp_path / name)
    code = re.search(r"pandas(.*?\)\.to_parquet\(.*?\))", str(raised.value))
    assert code is not None
    exec(f"pd{code[1]}", {"pd": pd})  # what is said is done
    assert read_profiles(tmp_path / "w.parquet").shape == (3, 2)
    wells("P1").to_csv(tmp_path / "wells.csv", index=False)
    with pytest.raises(ValueError, match="its separator looks like"):
        read_profiles(tmp_path / "wells.csv", table=tmp_path / name)


def test_features_whose_labels_are_known(tmp_path):
    wells("P1").assign(donor=[1, 2, 3], dose=[1, 2, 3]).to_csv(tmp_path / "1.csv", index=False)
    found = read_features(tmp_path / "1.csv", obs_columns="dose", labels=["donor", "Metadata_Plate", "nowhere"])
    assert found.n_vars == 2 and found.obs["donor"].tolist() == [1, 2, 3]
    with pytest.raises(KeyError, match="has no 'nowhere'"):
        read_features(tmp_path / "1.csv", obs_columns=["nowhere"])


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
