"""Tables of features: which columns are features, what is missing, and what else is known of rows."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import make_wells
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paper.loaders import breinig2015
from scbd import SCBDModel
from scbd.data import read_profiles
from scbd.datasets import cpjump1


def wells(plate: str = "P1") -> pd.DataFrame:
    rng = np.random.default_rng(0)
    about = {"Metadata_Plate": plate, "Metadata_Well": ["A01", "A02", "B01"], "dose": [1, 10, 100]}
    features = {"Cells_AreaShape_Area": rng.normal(size=3), "Nuclei_Texture_Contrast_DNA": rng.normal(size=3)}
    return pd.DataFrame(about | features)


@pytest.mark.filterwarnings("ignore:Writing zarr v2")  # anndata of itself
@pytest.mark.parametrize("name", ["p.csv", "p.CSV", "p.csv.gz", "p.tsv", "p.tsv.gz", "p.parquet", "p.h5ad", "p.zarr"])
def test_every_kind_of_table(tmp_path, name):
    path, frame = tmp_path / name, wells()
    if name.endswith("parquet"):
        frame.to_parquet(path)
    elif name.endswith(("sv", "CSV", "gz")):
        frame.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    else:
        frame.to_csv(tmp_path / "first.csv", index=False)
        cells = read_profiles(tmp_path / "first.csv")
        cells.var_names = ["a", "b"]  # of an AnnData, X are the features, whatever they are called
        (cells.write_h5ad if name.endswith("h5ad") else cells.write_zarr)(path)
    found = read_profiles(path)
    np.testing.assert_allclose(found.X, frame.iloc[:, 3:], rtol=1e-6)
    assert found.X.dtype == np.float32 and list(found.obs) == ["Metadata_Plate", "Metadata_Well", "dose"]
    assert found.obs["Metadata_Well"].tolist() == ["A01", "A02", "B01"]
    found.write_h5ad(tmp_path / "again.h5ad")


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("Nuclei_", ["Nuclei_Texture_Contrast_DNA"]),
        (["Cells_AreaShape_", "dose"], ["dose", "Cells_AreaShape_Area"]),
        (["Cells_AreaShape_Area"], ["Cells_AreaShape_Area"]),
    ],
)
def test_features_are_what_begins_as_it_was_said(tmp_path, features, names):
    wells().to_csv(tmp_path / "1.csv", index=False)
    found = read_profiles(tmp_path / "1.csv", features=features)
    assert found.var_names.tolist() == names and len(found.obs.columns) == 5 - len(names)


def test_plates_and_their_maps(tmp_path):
    paths = [tmp_path / f"{plate}.parquet" for plate in ("P1", "P2")]
    for path in paths:
        wells(path.stem).to_parquet(path)
    plan = pd.DataFrame({"Metadata_Plate": ["P1"] * 3 + ["P2"] * 3, "Metadata_Well": ["B01", "A02", "A01"] * 2})
    plan = plan.assign(compound=list("abcdef"), Cells_per_well=range(6))
    plan.to_csv(tmp_path / "map.csv", index=False)
    for table in (plan, tmp_path / "map.csv"):
        found = read_profiles(paths, table=table)
        assert found.obs["compound"].tolist() == list("cbafed") and found.obs_names.tolist() == list("012345")
        assert found.n_vars == 2 and found.obs["Cells_per_well"].tolist() == [2, 1, 0, 5, 4, 3]
    for other, error, said in (
        (plan.head(3), ValueError, "3 rows of .*P2 A01"),
        (plan.drop(columns="Metadata_Plate"), ValueError, "B01"),
        (plan[["compound"]], KeyError, "share no column"),
    ):
        with pytest.raises(error, match=said):
            read_profiles(paths, table=other)


def test_levels_of_an_index_are_columns(tmp_path):
    levels = wells().set_index(["Metadata_Plate", "Metadata_Well", "dose"])
    levels.rename_axis([None, "Metadata_Well", "dose"]).to_parquet(tmp_path / "1.parquet")
    found = read_profiles(tmp_path / "1.parquet")
    assert list(found.obs) == ["level_0", "Metadata_Well", "dose"] and found.n_vars == 2
    wells().set_axis(["a", "b", "c"]).to_parquet(tmp_path / "2.parquet")
    assert read_profiles(tmp_path / "2.parquet").obs_names.tolist() == ["a", "b", "c"]


def broken(n: int = 40, **holes: list[int]) -> pd.DataFrame:
    table = pd.DataFrame(np.arange(3.0 * n).reshape(n, 3), columns=["Cells_a", "Cells_b", "Cells_c"])
    for name, rows in holes.items():
        table.loc[rows, f"Cells_{name}"] = np.nan
    return table


def test_what_is_missing_is_counted(tmp_path):
    """In c in as many rows as a feature may lack, in b in more."""
    table = broken(b=[0, 1, 2], c=[0, 1])
    table.loc[3, "Cells_a"] = np.inf
    table.to_parquet(tmp_path / "t.parquet")
    with pytest.warns(UserWarning, match=r"1 of 3 features .*\(Cells_b\); 3 of 40 rows"):
        cells = read_profiles(tmp_path / "t.parquet")
    assert cells.shape == (37, 2) and cells.obs_names[:2].tolist() == ["2", "4"]
    with pytest.warns(UserWarning, match="3 missing values in 3 rows .* median"):
        cells = read_profiles(tmp_path / "t.parquet", missing="median")
    assert cells.shape == (40, 2) and cells[3, "Cells_a"].X == np.nanmedian(table["Cells_a"].replace(np.inf, np.nan))
    cells = read_profiles(tmp_path / "t.parquet", missing="keep")
    assert np.isnan(cells.X).sum() == 6 and cells.shape == (40, 3)


@pytest.mark.parametrize("missing", ["drop", "median"])
def test_what_a_whole_file_lacks_costs_a_feature_not_the_file(tmp_path, missing):
    broken(388).to_parquet(tmp_path / "1.parquet")
    broken(12).drop(columns="Cells_b").to_parquet(tmp_path / "2.parquet")
    paths = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    with pytest.warns(UserWarning, match=r"1 of 3 features .*\(Cells_b\)"):
        assert read_profiles(paths, missing=missing).shape == (400, 2)
    assert read_profiles(paths, missing="keep").shape == (400, 3)


def test_plates_and_files_that_are_lost_are_named(tmp_path):
    table = broken(80, a=[38], b=[39]).assign(Metadata_Plate=np.repeat(["P1", "P2", "P3"], [38, 2, 40]))
    paths = [tmp_path / f"{plate}.parquet" for plate in ("P1", "P2", "P3")]
    for path in paths:
        table[table["Metadata_Plate"] == path.stem].reset_index(drop=True).to_parquet(path)
    with pytest.warns(UserWarning, match=r"2 of 80 rows .*Metadata_Plate P2 and of file .*P2.parquet"):
        assert read_profiles(paths).n_obs == 78


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.2), st.sampled_from(["drop", "median"]))
def test_no_value_is_missing_and_none_is_changed(tmp_path, seed, share, missing):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(30, 4)).astype(np.float32)
    values[:, 1:][rng.random((30, 3)) < share] = np.nan
    frame = pd.DataFrame(values, columns=list("abcd"))
    frame.to_parquet(tmp_path / "t.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = read_profiles(tmp_path / "t.parquet", features=list("abcd"), missing=missing)
    was = frame.loc[cells.obs_names.astype(int), cells.var_names].to_numpy()
    assert np.isfinite(cells.X).all()
    np.testing.assert_array_equal(cells.X[~np.isnan(was)], was[~np.isnan(was)])
    if missing == "drop":
        assert not np.isnan(was).any() and cells.n_obs == frame[cells.var_names].notna().all(axis=1).sum()


def write(path: Path, content: bytes | pd.DataFrame | dict) -> Path:
    if isinstance(content, pd.DataFrame):
        content.to_parquet(path) if path.suffix == ".parquet" else content.to_csv(path, index=False)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "how", "error", "message"),
    [
        ("a.tif", b"II", {}, ValueError, "a.tif"),
        ("a.csv", b"", {}, ValueError, "a.csv"),
        ("a.parquet", b"PAR1", {}, ValueError, "a.parquet"),
        ("a.csv.gz", b"\x1f\x8b\x08", {}, ValueError, "a.csv.gz"),
        ("a.csv", wells()[:0], {}, ValueError, "no row"),
        ("a.csv", wells()[["dose"]], {}, ValueError, r"begins with Cells_ or Cytoplasm_.*dose.*features="),
        ("a.csv", wells(), {"features": ["Metadata_", "Cells_"]}, TypeError, "Metadata_Plate, Metadata_Well"),
        ("a.csv", wells(), {"missing": "zero"}, ValueError, "missing='zero'"),
        ("a.csv", wells().assign(Cells_AreaShape_Area=np.nan), {"features": "Cells_"}, ValueError, "Nothing is left"),
        ("a.parquet", wells().set_index("dose").assign(dose=1), {}, ValueError, "dose"),
        ("a.npz", {"features": np.ones((4, 6)), "locations": np.zeros((3, 2))}, {}, ValueError, r"\(4, 6\).*\(3, 2\)"),
        ("a.npz", {"features": np.array([None]), "locations": np.zeros((1, 2))}, {}, ValueError, "a.npz"),
        ("Nuclei.csv", b"ImageNumber,ObjectNumber\n1,1\n", {}, ValueError, "Nuclei.csv"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, how, error, message):
    with pytest.raises(error, match=message):
        read_profiles(write(tmp_path / name, content), **how)


def test_nothing_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.csv"):
        read_profiles(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="no file"):
        read_profiles([])
    with pytest.raises(ValueError, match="no known kind"):
        read_profiles(tmp_path)
    write_field(tmp_path / "a.npz", 0)
    with pytest.raises(ValueError, match="none of 1 files"):
        read_profiles(tmp_path)


def write_field(path: Path, n: int, seed: int = 0) -> np.ndarray:
    """As DeepProfiler does: metadata are a pickled dictionary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = np.random.default_rng(seed).normal(size=(n, 6)).astype("float32")
    locations = np.arange(2.0 * n).reshape(n, 2)
    np.savez_compressed(path, features=features, metadata=np.array({"Metadata_Plate": "P"}), locations=locations)
    return features


@pytest.mark.parametrize("name", ["{}/{}/{}.npz", "{}/{}_{}.npz"])
def test_fields_of_deepprofiler_by_plate_well_and_site(tmp_path, name):
    fields = [("P1", "A01", "1"), ("P1", "A01", "2"), ("P2", "B02", "1")]
    written = [write_field(tmp_path / name.format(*field), 3, seed) for seed, field in enumerate(fields)]
    index = pd.DataFrame(fields, columns=["Metadata_Plate", "Metadata_Well", "Metadata_Site"])
    cells = read_profiles(tmp_path, table=index.assign(Treatment=["a", "a", "b"]))
    np.testing.assert_array_equal(cells.X, np.concatenate(written))
    assert cells.obs["Treatment"].tolist() == list("aaaaaabbb") and cells.obs["Metadata_Site"].tolist()[3] == "2"
    np.testing.assert_array_equal(cells.obs[["Location_Center_X", "Location_Center_Y"]].iloc[4], [2, 3])
    one = read_profiles(tmp_path / name.format(*fields[0]))
    np.testing.assert_array_equal(one.X, written[0])


def test_what_is_read_can_be_learned_from(tmp_path, hasty):
    cells = make_wells()
    cells.obs.add_prefix("Metadata_").join(cells.to_df()).to_csv(tmp_path / "wells.csv")
    found = read_profiles(tmp_path / "wells.csv")
    assert found.var_names.tolist() == cells.var_names.tolist()
    SCBDModel.setup_anndata(found, y_key="Metadata_compound", e_key="Metadata_plate", layer="X")
    assert SCBDModel(found).summary_stats["n_features"] == 10


def test_real_profiles(shared):
    """What the readers of the two data sets, which know their columns, call features."""
    path = shared / "profiles" / "cpjump1_cellprofiler_wells.parquet"
    known, found = cpjump1(path), read_profiles(path)
    assert found.var_names.tolist() == known.var_names.tolist() and found.n_obs == 1920
    np.testing.assert_array_equal(found.X, known.X)
    assert found.obs["Metadata_moa"].astype(str).tolist() == known.obs["Metadata_moa"].astype(str).tolist()
    path = shared / "profiles" / "breinig2015_single_cells.parquet"
    known = breinig2015(path)
    found = read_profiles(path, features=known.var_names)
    np.testing.assert_array_equal(found[:, known.var_names].X, known.X)
    assert set(found.obs) == set(known.obs)
