"""Tables of features: which columns are features, what is missing, and what else is known of rows."""

from __future__ import annotations

import warnings
from decimal import Decimal
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from anndata.io import write_elem
from conftest import make_wells
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paper.loaders import breinig2015
from scbd import SCBDModel
from scbd._shared.numeric_tables import check_dense
from scbd.data import read_profiles
from scbd.data._profiles import Missing
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
        (plan.head(3), ValueError, "3 of 6 rows .*P2 A01"),
        (plan.drop(columns="Metadata_Plate"), ValueError, "B01"),
        (plan[["compound"]], KeyError, "share no column of plates.*compound"),
        (plan.assign(dose=5), ValueError, "different values of dose"),
    ):
        with pytest.raises(error, match=said):
            read_profiles(paths, table=other)


def periscope(guides: list[str], rng: np.random.Generator) -> pd.DataFrame:
    """A table of guides as the Cell Painting Gallery has it for each plate (cpg0021): nothing names the plate."""
    genes = ["nontargeting" if guide.startswith("N") else f"GENE{guide[0]}" for guide in guides]
    names = ["Cells_AreaShape_Area", "Cytoplasm_Intensity_MeanIntensity_ConA", "Nuclei_Texture_Contrast_DAPI_Painting"]
    about = {"Metadata_Foci_Barcode_MatchedTo_GeneCode": genes, "Metadata_Foci_Barcode_MatchedTo_Barcode": guides}
    return pd.DataFrame(about | {name: rng.normal(size=len(guides)) for name in names})


def test_plates_of_a_pooled_screen_are_told_by_their_files(tmp_path):
    rng, guides = np.random.default_rng(0), [f"{kind}ACGT{number}" for kind in "ACGN" for number in range(4)]
    stems = [f"20200805_A549_WG_Screen_guide_normalized_ALLBATCHES___CP186{plate}___ALLWELLS" for plate in "AB"]
    paths = [tmp_path / f"{stem}.csv.gz" for stem in stems]
    for path in paths:
        periscope(guides, rng).to_csv(path, index=False)
    for files in (tmp_path, paths):
        found = read_profiles(files)
        assert found.shape == (32, 3) and found.obs["source"].tolist() == np.repeat(stems, 16).tolist()
    media = pd.DataFrame({"source": stems, "medium": ["DMEM", "HPLM"]})
    assert read_profiles(paths, table=media, on="source").obs["medium"].tolist() == ["DMEM"] * 16 + ["HPLM"] * 16
    assert "source" not in read_profiles(paths[0]).obs
    gene = "Metadata_Foci_Barcode_MatchedTo_GeneCode"
    SCBDModel.setup_anndata(found, y_key=gene, e_key="source", control="nontargeting", layer="X")
    # merged over plates as its authors do, with numbers of rows
    pd.concat([periscope(guides, rng)] * 2).to_csv(tmp_path / "merged.csv.gz")
    assert list(read_profiles(tmp_path / "merged.csv.gz").obs) == [gene, "Metadata_Foci_Barcode_MatchedTo_Barcode"]


def test_cells_of_a_pooled_screen_know_their_plate_and_well(tmp_path):
    """Columns of single cells as its recipe writes them: those of places and numbers of objects measure nothing."""
    rng, paths = np.random.default_rng(0), []
    for plate in ("CP186A", "CP186B"):
        cells = periscope(["AACGT0", "NACGT1"] * 8, rng)
        about = {"plate": plate, "well": ["Well1", "Well2"] * 8, "site": [f"{plate}-Well1-{n}" for n in range(16)]}
        cells = cells.assign(**{f"Metadata_Foci_{name}": values for name, values in about.items()})
        cells = cells.assign(Metadata_Cells_ObjectNumber=range(16), Metadata_Foci_Barcode_MatchedTo_Score_mean=1.0)
        cells = cells.assign(Cells_AreaShape_Center_X=rng.uniform(0, 900, 16), Align_Xshift_ConA=0.0)
        if plate == "CP186B":  # what a plate lacks is no feature
            cells["Cells_AreaShape_Area"] = np.nan
        paths.append(tmp_path / f"{plate}_single_cell_profiles.csv.gz")
        cells.to_csv(paths[-1], index=False)
    plan = pd.DataFrame({"plate": ["CP186A", "CP186B"], "medium": ["DMEM", "HPLM"]})
    with pytest.warns(UserWarning, match=r"Cells_AreaShape_Center_X.*1 of 3 features is missing"):
        found = read_profiles(paths, table=plan)
    assert found.var_names.tolist() == [
        "Cytoplasm_Intensity_MeanIntensity_ConA",
        "Nuclei_Texture_Contrast_DAPI_Painting",
    ]
    assert found.n_obs == 32 and "source" not in found.obs
    assert found.obs.groupby("Metadata_Foci_plate", observed=True)["medium"].first().tolist() == ["DMEM", "HPLM"]


def test_levels_of_an_index_are_columns(tmp_path):
    levels = wells().set_index(["Metadata_Plate", "Metadata_Well", "dose"])
    levels.rename_axis([None, "Metadata_Well", "dose"]).to_parquet(tmp_path / "1.parquet")
    found = read_profiles(tmp_path / "1.parquet")
    assert list(found.obs) == ["level_0", "Metadata_Well", "dose"] and found.n_vars == 2
    wells().set_axis(["a", "b", "c"]).to_parquet(tmp_path / "2.parquet")
    assert read_profiles(tmp_path / "2.parquet").obs_names.tolist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"Metadata_Well": ["A1", "B1"]}, {"well_position": ["B01", "A01"]}),
        (
            {"Metadata_Plate": [24277, 24278], "Well": ["A01", "A01"]},
            {"plate": [24278.0, 24277.0], "well": ["A1", "A1"]},
        ),
        ({"Image_Metadata_Plate": ["24277", "24278"]}, {"Assay_Plate_Barcode": [24278, 24277]}),
        ({"Metadata_Well": ["A01", "B01"], "Metadata_Site": [1, 2]}, {"Well ID": ["b1", "a1"]}),
    ],
)
def test_maps_are_joined_by_what_columns_mean(tmp_path, ours, theirs):
    """Never by the numbers that pandas saved, nor by another column that both happen to have."""
    pd.DataFrame({**ours, "Cells_a": [0.0, 1.0], "note": "x"}).to_csv(tmp_path / "wells.csv")
    plan = pd.DataFrame({**theirs, "gene": ["second", "first"], "note": "x"})
    plan.to_csv(tmp_path / "map.csv")
    for table in (plan, tmp_path / "map.csv"):
        found = read_profiles(tmp_path / "wells.csv", table=table)
        assert found.obs["gene"].tolist() == ["first", "second"]
        assert not any(name.startswith("Unnamed") for name in found.obs)


def test_maps_are_joined_by_columns_that_are_named(tmp_path):
    table = pd.DataFrame({"batch": ["b1", "b2"], "Metadata_Well": "A01", "Cells_a": [0.0, 1.0]})
    table.to_csv(tmp_path / "wells.csv", index=False)
    plan = pd.DataFrame({"batch": ["b2", "b1"], "gene": ["second", "first"]})
    with pytest.raises(KeyError, match="on="):
        read_profiles(tmp_path / "wells.csv", table=plan)
    found = read_profiles(tmp_path / "wells.csv", table=plan, on="batch")
    assert found.obs["gene"].tolist() == ["first", "second"]
    with pytest.raises(KeyError, match="share no Metadata_Well"):
        read_profiles(tmp_path / "wells.csv", table=plan, on=["batch", "Metadata_Well"])


@pytest.mark.parametrize("empty", ["0 bytes", "no row"])
def test_an_empty_file_costs_no_other(tmp_path, empty):
    paths = [tmp_path / f"{plate}.csv" for plate in ("P1", "P2", "P3")]
    for path in paths:
        wells(path.stem).to_csv(path, index=False)
    paths[1].write_bytes(b"") if empty == "0 bytes" else wells()[:0].to_csv(paths[1], index=False)
    with pytest.warns(UserWarning, match=r"1 of 3 files has no row .*P2.csv"):
        assert read_profiles(paths).obs["Metadata_Plate"].tolist() == ["P1"] * 3 + ["P3"] * 3
    with pytest.raises(FileNotFoundError, match=r"2 of 4 files .*P8.csv, .*P9.csv"):
        read_profiles([*paths[:2], tmp_path / "P8.csv", tmp_path / "P9.csv"])
    with pytest.raises(ValueError, match="twice"):
        read_profiles([paths[0], paths[2], paths[0]])


@pytest.mark.parametrize(
    "layout",
    ["{0}.parquet", "{0}/profiles.parquet", "t.parquet/Metadata_Plate={0}/0.parquet", "a/Metadata_Plate={0}/0.parquet"],
)
def test_a_folder_of_tables(tmp_path, layout):
    """A file for each plate, or the parts of one table, whose plates only their folders tell."""
    for plate in ("P1", "P2"):
        path = tmp_path / "profiles" / layout.format(plate)
        path.parent.mkdir(parents=True, exist_ok=True)
        wells(plate).drop(columns=["Metadata_Plate"] if "=" in layout else []).to_parquet(path)
    folder = tmp_path / "profiles" / layout.partition("/")[0] if "=" in layout else tmp_path / "profiles"
    found = read_profiles(folder)
    assert sorted(found.obs["Metadata_Plate"]) == ["P1"] * 3 + ["P2"] * 3 and found.n_vars == 2


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda table, path: table.to_csv(path, index=False, encoding="cp1252"), ValueError, "encoding"),
        (lambda table, path: path.write_text("version https://git-lfs.github.com/spec/v1\noid"), ValueError, "git lfs"),
        (lambda table, path: table.groupby("dose").agg(["min", "max"]).to_csv(path), ValueError, "two rows"),
        (lambda table, path: pd.concat({"Cells": table}, axis=1).to_csv(path, index=False), ValueError, "two rows"),
    ],
)  # fmt: skip
def test_sound_files_are_not_called_damaged(tmp_path, write, error, message):
    table = (
        wells().drop(columns="Metadata_Plate").assign(unit="µM")
        if "encoding" in message
        else wells()[["dose", *wells().columns[3:], "Metadata_Well"]]
    )
    write(table, tmp_path / "t.csv")
    with pytest.raises(error, match=message):
        read_profiles(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("Metadata_Well;Cells_a;Cells_b\nA01;1,5;2\nA02;2,5;3\n", TypeError, "Cells_a.*line 2.*commas are decimal"),
        ('Metadata_Well,Cells_a\nA01,"1,5"\nA02,"2,5"\n', TypeError, "Cells_a.*commas are decimal"),
        ("Metadata_Well,Cells_a\nA01,1.5 %\nA02,2%\n", TypeError, "Cells_a.*percent signs"),
    ],
)
def test_how_numbers_and_columns_are_written_is_told(tmp_path, text, error, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(error, match=message):
        read_profiles(tmp_path / "t.csv")


def test_an_empty_field_of_deepprofiler_costs_no_other(tmp_path):
    write_field(tmp_path / "P1" / "A01_1.npz", 3)
    (tmp_path / "P1" / "A01_2.npz").write_bytes(b"")
    with pytest.warns(UserWarning, match="1 of 2 files is empty"):
        assert read_profiles(tmp_path).shape == (3, 6)


def test_addresses_are_called_so_and_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    wells().to_csv(tmp_path / "t.csv", index=False)
    wells()[["Metadata_Well"]].assign(gene=list("abc")).to_csv(tmp_path / "map.csv", index=False)
    assert read_profiles("~/t.csv", table="~/map.csv").obs["gene"].tolist() == list("abc")
    for address in ("s3://bucket/t.parquet", "https://example.org/t.csv.gz"):
        with pytest.raises(ValueError, match=f"{address} is an address"):
            read_profiles(address)


@pytest.mark.parametrize("word", ["None", "NA", "null", "nan", "N/A"])
def test_words_are_labels_where_others_are(tmp_path, word):
    """pandas takes them for missing; an empty field is."""
    table = wells().assign(compound=[word, "a", ""], all=word, Cells_AreaShape_Area=["1", word, "3"])
    table.to_csv(tmp_path / "t.csv", index=False)
    found = read_profiles(tmp_path / "t.csv", missing="keep")
    assert found.obs["compound"].tolist()[:2] == [word, "a"] and found.obs["compound"].isna().sum() == 1
    assert found.obs["all"].tolist() == [word] * 3
    assert np.isnan(found.X[:, 0]).tolist() == [False, True, False]


def test_positions_and_numbers_of_objects_are_no_features(tmp_path):
    """Those of CellProfiler and of tables of optical pooled screens; what is measured stays."""
    about = ["cell_0", "nucleus_i", "nucleus_j_0", "cell_bounds_1", "cell_barcode_count_0", "nucleus_fov_distance_0"]
    about += [
        "cell_Location_Center_X",
        "cell_AreaShape_BoundingBoxMaximum_X",
        "cell_Parent_Nuclei",
        "cell_object_number",
    ]
    about += ["cell_Children_Spots_Count", "nucleus_Number_Object_Number", "nucleus_Q_y", "Q_min_0"]
    measured = ["nucleus_DAPI_mean", "cell_zernike_0", "cell_haralick_5_1", "cell_AreaShape_BoundingBoxArea"]
    measured += ["cell_Neighbors_NumberOfNeighbors", "cell_Texture_Contrast_Y_3_00_256"]
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(9, len(about + measured))), columns=about + measured).assign(well="A1")
    table.to_parquet(tmp_path / "t.parquet")
    with pytest.warns(UserWarning, match=f"{len(about)} columns named like positions.*cell_bounds_1"):
        found = read_profiles(tmp_path / "t.parquet", features=["cell_", "nucleus_", "Q_"])
    assert set(found.var_names) == {*measured, *about}  # what users name are features
    table.drop(columns="well").add_prefix("Cells_").to_parquet(tmp_path / "default.parquet")
    with pytest.warns(UserWarning, match=r"columns named like positions.* go to obs"):
        found = read_profiles(tmp_path / "default.parquet")
    assert set(found.var_names) - {"Cells_cell_0", "Cells_Q_min_0"} == {f"Cells_{name}" for name in measured}
    assert read_profiles(tmp_path / "t.parquet", features=["cell_bounds_1"]).n_vars == 1  # whoever names it wants it
    with pytest.raises(ValueError, match=r"features=.'cell_zernike_0:cell"):
        read_profiles(tmp_path / "t.parquet")


def test_most_numbers_left_over_are_told_of(tmp_path):
    table = wells().assign(**{f"Actin area {number}": number * np.ones(3) for number in range(4)})
    table.to_parquet(tmp_path / "t.parquet")
    with pytest.warns(UserWarning, match=r"only 2 of 7 columns of numbers .*Cells_AreaShape_Area.*Actin area 0"):
        read_profiles(tmp_path / "t.parquet")


def test_lists_are_no_labels(tmp_path):
    table = wells().assign(embedding=[[1.0, 2.0]] * 3)
    table.to_parquet(tmp_path / "t.parquet")
    with pytest.warns(UserWarning, match="'embedding' holds a list"):
        assert "embedding" not in read_profiles(tmp_path / "t.parquet").obs
    with pytest.raises(ValueError, match="'embedding' holds a list"):
        read_profiles(tmp_path / "t.parquet", features="none")
    with pytest.raises(TypeError, match="'embedding' holds a list"):
        read_profiles(tmp_path / "t.parquet", features="embedding")


def broken(n: int = 40, **holes: list[int]) -> pd.DataFrame:
    table = pd.DataFrame(np.arange(3.0 * n).reshape(n, 3), columns=["Cells_a", "Cells_b", "Cells_c"])
    for name, rows in holes.items():
        table.loc[rows, f"Cells_{name}"] = np.nan
    return table


def test_what_is_missing_is_counted(tmp_path):
    """Of b more than half is missing."""
    table = broken(b=list(range(21)), c=[30, 31]).assign(Cells_d=1.0)
    table.loc[33, "Cells_a"] = np.inf
    table.to_parquet(tmp_path / "t.parquet")
    with pytest.warns(UserWarning, match=r"1 of 4 features .*\(Cells_b\); 3 of 40 rows"):
        cells = read_profiles(tmp_path / "t.parquet", missing="drop")
    assert cells.shape == (37, 3) and cells.obs_names[29:32].tolist() == ["29", "32", "34"]
    with pytest.warns(UserWarning, match="3 missing values in 3 rows .* median"):
        cells = read_profiles(tmp_path / "t.parquet")
    assert cells.shape == (40, 3) and np.nanmedian(table["Cells_a"].replace(np.inf, np.nan)) == cells[33, "Cells_a"].X
    cells = read_profiles(tmp_path / "t.parquet", missing="keep")
    assert np.isnan(cells.X).sum() == 24 and cells.shape == (40, 4)


def test_what_was_measured_of_an_object_that_is_not_there_is_not_made_up(tmp_path):
    """Nuclei without a cell: few or many, they are left out, and all features stay."""
    table = pd.DataFrame(np.arange(80.0).reshape(20, 4), columns=["Nuclei_a", "Nuclei_b", "Cells_a", "Cells_b"])
    table.loc[[2, 5, *range(9, 18)], ["Cells_a", "Cells_b"]] = np.nan
    table.loc[0, "Cells_a"] = np.nan
    table.to_parquet(tmp_path / "t.parquet")
    ways: dict[Missing, int] = {"median": 9, "drop": 8}
    for missing, n in ways.items():
        with pytest.warns(UserWarning, match="11 of 20 rows have no value of Cells_"):
            cells = read_profiles(tmp_path / "t.parquet", missing=missing)
        assert cells.shape == (n, 4) and np.isfinite(cells.X).all()


@pytest.mark.parametrize("word", ["1.#INF", "#DIV/0!", "-", "n.d.", "nan", "NULL", "inf", "1,5"])
@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_text_among_numbers_makes_no_label_of_a_feature(tmp_path, word, kind):
    table = broken().astype({"Cells_b": object})
    table.loc[5, "Cells_b"] = word
    if kind == "frame":  # in obsm nothing is filled in: it is refused by name, or missing
        cells = AnnData(
            obs=pd.DataFrame({"y": ["a", "b"] * 20, "e": ["c"] * 20 + ["d"] * 20}).set_axis(map(str, range(40)))
        )
        cells.obsm["features"] = table.set_axis(cells.obs_names)
        with pytest.raises((TypeError, ValueError), match=r"Cells_b in 1 of 40 rows.*row 5|Cells_b.*rows 5"):
            SCBDModel.setup_anndata(cells, y_key="y", e_key="e", obsm_key="features")
        return
    path = tmp_path / f"t.{kind}"
    table.to_csv(path, index=False) if kind == "csv" else table.astype({"Cells_b": str}).to_parquet(path)
    with pytest.warns(UserWarning, match="1 missing value in 1 row "):
        cells = read_profiles(path)
    assert cells.shape == (40, 3) and np.float32(np.median(np.delete(broken()["Cells_b"], 5))) == cells[5, "Cells_b"].X


def test_numbers_of_other_types_are_numbers(tmp_path):
    table = broken().assign(Cells_b=[Decimal(number) for number in range(40)]).astype({"Cells_c": "Float64"})
    table["Cells_a"] = table["Cells_a"].astype(object)
    table.to_parquet(tmp_path / "t.parquet")
    found = read_profiles(tmp_path / "t.parquet")
    np.testing.assert_array_equal(found.X[:, 1], np.arange(40))
    np.testing.assert_array_equal(check_dense(table, "features"), table.astype(float))


@pytest.mark.parametrize("missing", ["drop", "median"])
def test_what_a_whole_file_lacks_costs_a_feature_not_the_file(tmp_path, missing):
    broken(388).to_parquet(tmp_path / "1.parquet")
    broken(12).drop(columns="Cells_b").to_parquet(tmp_path / "2.parquet")
    paths = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    with pytest.warns(UserWarning, match=r"1 of 3 features .*\(Cells_b\)"):
        assert read_profiles(paths, missing=missing).shape == (400, 2)
    assert read_profiles(paths, missing="keep").shape == (400, 3)


def test_plates_and_files_that_are_lost_are_named(tmp_path):
    table = broken(80, a=[38, 79], b=[39]).assign(Metadata_Plate=np.repeat(["P1", "P2", "P3"], [38, 2, 40]))
    paths = [tmp_path / f"{plate}.parquet" for plate in ("P1", "P2", "P3")]
    for path in paths:
        table[table["Metadata_Plate"] == path.stem].reset_index(drop=True).to_parquet(path)
    with pytest.warns(UserWarning, match=r"3 of 80 rows .*Metadata_Plate P2 and of file .*P2.parquet"):
        assert read_profiles(paths, missing="drop").n_obs == 77


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
        ("a.csv", wells(), {"features": ["Metadata_", "Cells_"]}, TypeError, "Metadata_Plate in 3 rows.*Metadata_Well"),
        ("a.csv", wells(), {"missing": "zero"}, ValueError, "missing='zero'"),
        ("a.csv", wells().assign(Cells_AreaShape_Area=np.nan), {"features": "Cells_"}, ValueError, "No row or feature"),
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
    known = cpjump1(path)
    with pytest.warns(UserWarning, match="3 columns named like positions"):
        found = read_profiles(path)
    places = ["Cells_AreaShape_BoundingBoxMaximum_Y", "Cells_Parent_Nuclei", "Nuclei_AreaShape_BoundingBoxMinimum_X"]
    assert set(known.var_names) - set(found.var_names) == set(places) <= set(found.obs) and found.n_obs == 1920
    np.testing.assert_array_equal(found.X, known[:, found.var_names].X)
    assert found.obs["Metadata_moa"].astype(str).tolist() == known.obs["Metadata_moa"].astype(str).tolist()
    path = shared / "profiles" / "breinig2015_single_cells.parquet"
    known = breinig2015(path)
    found = read_profiles(path, features=known.var_names)
    np.testing.assert_array_equal(found[:, known.var_names].X, known.X)
    assert set(found.obs) == set(known.obs)


def test_read_profiles_plate_named_in_two_cases_in_two_files_raises(tmp_path):
    for name, plate in (("Metadata_Plate", "P1"), ("metadata_plate", "P2")):
        table = pd.DataFrame({name: plate, "Metadata_Well": ["A01", "A02"], "Cells_a": [0.5, 1.5]})
        table.to_csv(tmp_path / f"{plate}.csv", index=False)
    with pytest.raises(ValueError, match=r"Metadata_Plate, metadata_plate"):
        read_profiles(tmp_path)
    both = pd.DataFrame({"Plate": ["1", "2"], "plate": ["a", "b"], "Cells_a": [0.5, 1.5]})
    both.to_csv(tmp_path / "one.csv", index=False)
    assert list(read_profiles(tmp_path / "one.csv").obs) == ["Plate", "plate"]


def scaled(table: pd.DataFrame) -> pd.DataFrame:
    features = [name for name in table if name.startswith(("Cells_", "Nuclei_"))]
    return table.assign(**{name: (table[name] - table[name].mean()) / table[name].std() for name in features})


def without_plate() -> pd.DataFrame:
    return wells().drop(columns="Metadata_Plate")


@pytest.mark.parametrize(
    "files",
    [
        {"raw.csv": wells(), "normalised.csv": scaled(wells()), "consensus.csv": scaled(without_plate())},
        {
            name: table.rename(columns={"Metadata_Plate": "PlateID"})
            for name, table in (("raw.csv", wells()), ("z.csv", scaled(wells())))
        },
        {"raw.csv": wells(), "normalised.csv": scaled(wells()).rename(columns={"Metadata_Well": "well_position"})},
        {"raw.csv": wells().assign(dose="1e-04"), "normalised.csv": scaled(wells()).assign(dose=1e-4)},
        {"P1.csv": without_plate(), "P1.parquet": without_plate()},
        {"wells.csv": wells(), "cells.parquet": pd.concat([wells()] * 10)},
    ],
    ids=["next to a table without plates", "PlateID", "other names", "doses in two spellings", "no plate", "cells"],
)
def test_read_profiles_two_files_of_the_same_wells_raise(tmp_path, files):
    for name, table in files.items():
        table.to_parquet(tmp_path / name) if name.endswith("parquet") else table.to_csv(tmp_path / name, index=False)
    with pytest.raises(ValueError, match="hold the same"):
        read_profiles(tmp_path)


def test_read_profiles_numbers_of_wells_as_categories_raise_only_if_repeated(tmp_path):
    numbers = {"a": ("Metadata_Well", [1, 2, 3]), "b": ("Metadata_Well", [4, 5, 6]), "c": ("well_position", [4, 5, 6])}
    for name, (column, of_wells) in numbers.items():
        obs = pd.DataFrame({"Metadata_Plate": "P1", column: pd.Categorical(of_wells)})
        obs.index = pd.Index([f"{name}{row}" for row in range(3)])
        cells = AnnData(np.random.default_rng(0).normal(size=(3, 1)).astype("float32"), obs)
        cells.var_names = ["Cells_a"]
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
    for other in ("b", "c"):
        assert read_profiles([tmp_path / "a.h5ad", tmp_path / f"{other}.h5ad"]).n_obs == 6
    with pytest.raises(ValueError, match="hold the same"):
        read_profiles([tmp_path / "b.h5ad", tmp_path / "c.h5ad"])


def test_read_profiles_other_wells_or_times_are_no_repetition(tmp_path):
    wells().assign(time="24 h").to_csv(tmp_path / "a.csv", index=False)
    scaled(wells()).assign(time="48 h").to_csv(tmp_path / "b.csv", index=False)
    scaled(wells()).assign(time="48 h", Metadata_Well=["C01", "C02", "C03"]).to_csv(tmp_path / "c.csv", index=False)
    assert read_profiles(tmp_path).n_obs == 9


def test_read_profiles_plate_of_two_names_in_two_files_raises(tmp_path):
    wells().to_csv(tmp_path / "a.csv", index=False)
    wells("P2").rename(columns={"Metadata_Plate": "plate_id"}).to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(ValueError, match="Metadata_Plate, plate_id"):
        read_profiles(tmp_path)


@pytest.mark.parametrize("name", ["Metadata_Plate", "plate_id", "Assay_Plate_Barcode"])
def test_read_profiles_feature_without_value_in_a_plate_is_excluded_whatever_the_name_of_the_column(tmp_path, name):
    table = pd.concat([wells(plate) for plate in ("P1", "P2", "P3")]).rename(columns={"Metadata_Plate": name})
    table["Cells_Lost"] = np.where(table[name] == "P2", np.nan, 1.5)
    table.to_csv(tmp_path / "p.csv", index=False)
    with pytest.warns(UserWarning, match="P2"):
        assert "Cells_Lost" not in read_profiles(tmp_path / "p.csv").var_names


def test_read_profiles_rows_of_a_map_without_key_label_no_well(tmp_path):
    table = wells()
    table.to_csv(tmp_path / "p.csv", index=False)
    rows = pd.DataFrame({"Metadata_Well": ["A01", "A02", "B01", None], "gene": ["a", "b", "c", "wrong"]})
    assert read_profiles(tmp_path / "p.csv", table=rows).obs["gene"].tolist() == ["a", "b", "c"]
    table.assign(Metadata_Well=["A01", None, "B01"]).to_csv(tmp_path / "p.csv", index=False)
    with pytest.raises(ValueError, match="1 of 3 rows"):
        read_profiles(tmp_path / "p.csv", table=rows)


def test_read_profiles_only_wells_have_several_spellings_as_keys(tmp_path):
    table = wells().assign(gene=["p53", "A1", "A01"])
    table.to_csv(tmp_path / "p.csv", index=False)
    rows = pd.DataFrame({"gene": ["P53", "p53", "A01", "A1"], "kind": ["no", "gene", "long", "short"]})
    found = read_profiles(tmp_path / "p.csv", table=rows, on="gene")
    assert found.obs["kind"].tolist() == ["gene", "short", "long"]


def test_read_profiles_features_without_a_column_warn(tmp_path):
    wells().to_parquet(tmp_path / "p.parquet")
    with pytest.warns(UserWarning, match="Nuclie_"):
        assert read_profiles(tmp_path / "p.parquet", features=["Cells_", "Nuclie_"]).n_vars == 1
    cells = AnnData(np.eye(3, dtype="float32"), pd.DataFrame({"plate": list("aab")}, ["x", "y", "z"]))
    cells.var_names = ["0", "1", "Cells_a"]
    cells.write_h5ad(tmp_path / "p.h5ad")
    assert list(read_profiles(tmp_path / "p.h5ad").var_names) == ["0", "1", "Cells_a"]
    found = read_profiles(tmp_path / "p.h5ad", features=range(2))  # type: ignore[arg-type]
    assert list(found.var_names) == ["0", "1"] and list(found.obs) == ["plate", "Cells_a"]


def test_read_profiles_whole_numbers_of_two_files_are_equal_labels(tmp_path):
    wells().assign(Metadata_Plate=24277).to_csv(tmp_path / "a.csv", index=False)
    other = scaled(wells()).assign(Metadata_Plate=[24277.0, 24277.0, np.nan], Metadata_Well=["C01", "C02", "C03"])
    other.to_parquet(tmp_path / "b.parquet")
    with pytest.warns(UserWarning, match="1 row has no Metadata_Plate"):
        assert list(read_profiles(tmp_path).obs["Metadata_Plate"].cat.categories) == ["24277"]


def test_read_profiles_names_of_rows_in_several_files_are_kept(tmp_path):
    for number, plate in enumerate(("P1", "P2")):
        wells(plate).set_axis([f"cell {number}{row}" for row in range(3)]).to_csv(tmp_path / f"{plate}.csv")
    assert list(read_profiles(tmp_path).obs_names) == [f"cell {number}{row}" for number in range(2) for row in range(3)]
    wells().set_axis(["DMSO", "DMSO", "a"]).to_csv(tmp_path / "labels.csv")
    found = read_profiles(tmp_path / "labels.csv").obs
    assert found["row_name"].tolist() == ["DMSO", "DMSO", "a"] and list(found.index) == ["0", "1", "2"]


def test_read_profiles_folder_with_files_of_other_kinds_warns(tmp_path):
    wells().to_csv(tmp_path / "P1.csv", index=False)
    for name in ("P2.h5ad", "P3.xlsx", "notes.md"):
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=r"2 files .*P2.h5ad, P3.xlsx"):
        read_profiles(tmp_path)


def test_read_profiles_large_whole_numbers_that_one_file_lacks_stay_different(tmp_path):
    barcodes = [20231115000000001, 20231115000000002, 20231115000000003]
    wells().assign(barcode=barcodes).to_parquet(tmp_path / "a.parquet")
    wells("P2").to_parquet(tmp_path / "b.parquet")
    assert read_profiles(tmp_path).obs["barcode"].dropna().tolist() == barcodes


def test_read_profiles_dates_can_be_written(tmp_path):
    wells().assign(imaged=pd.Timestamp("2024-05-06")).to_parquet(tmp_path / "p.parquet")
    found = read_profiles(tmp_path / "p.parquet")
    found.write_h5ad(tmp_path / "p.h5ad")
    assert found.obs["imaged"].astype(str).str.startswith("2024-05-06").all()


@pytest.mark.parametrize("path", [3, wells()], ids=["number", "table"])
def test_read_profiles_path_of_another_type_raises(path):
    with pytest.raises(TypeError, match="name of a file"):
        read_profiles(path)


def test_read_profiles_hdf5_without_anndata_raises(tmp_path):
    with h5py.File(tmp_path / "p.h5ad", "w") as file:
        write_elem(file, "features", np.eye(3))
    with pytest.raises(ValueError, match=r"p.h5ad is not an AnnData"):
        read_profiles(tmp_path / "p.h5ad")


def cells_of_wells(n: int, wells_of_plate: int = 48) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    names = [f"{row}{column:02d}" for row in "ABCDEFGH" for column in range(1, 13)][:wells_of_plate]
    table = pd.DataFrame({"Metadata_Plate": "P1", "Metadata_Well": names * n})
    return table.assign(Cells_a=rng.normal(size=len(table)), Cells_b=rng.normal(size=len(table)))


@pytest.mark.parametrize(("n_cells", "n_parts"), [(10, 10), (4, 2), (4, 4), (30, 10), (2, 2)])
@pytest.mark.parametrize("columns", [["Metadata_Plate", "Metadata_Well"], ["Metadata_Plate"]])
def test_read_profiles_parts_of_a_table_of_cells_are_read(tmp_path, n_cells, n_parts, columns):
    table = cells_of_wells(n_cells).sample(frac=1, random_state=1)[[*columns, "Cells_a", "Cells_b"]]
    for number, rows in enumerate(np.array_split(np.arange(len(table)), n_parts)):
        table.iloc[rows].to_csv(tmp_path / f"part-{number}.csv", index=False)
    assert read_profiles(tmp_path).n_obs == len(table)


def test_read_profiles_raw_and_normalised_cells_raise(tmp_path):
    table = cells_of_wells(10).sample(frac=0.7, random_state=1)
    table.to_csv(tmp_path / "raw.csv", index=False)
    scaled(table).sample(frac=1, random_state=2).to_csv(tmp_path / "normalised.csv", index=False)
    with pytest.raises(ValueError, match="hold the same"):
        read_profiles(tmp_path)


def test_read_profiles_fractional_times_distinguish_files(tmp_path):
    for hours in (0.5, 1.5):
        scaled(wells()).assign(time=hours, Cells_a=hours).to_csv(tmp_path / f"{hours}.csv", index=False)
    assert read_profiles(tmp_path).n_obs == 6


@pytest.mark.parametrize("name", ["well_position", "Assay_Well"])
def test_read_profiles_any_column_of_wells_has_several_spellings(tmp_path, name):
    wells().assign(**{name: ["A01", "A02", "B01"]}).to_csv(tmp_path / "p.csv", index=False)
    rows = pd.DataFrame({name: ["B1", "A1", "A2"], "gene": ["c", "a", "b"]})
    assert read_profiles(tmp_path / "p.csv", table=rows, on=name).obs["gene"].tolist() == ["a", "b", "c"]


def test_read_profiles_map_with_an_empty_column_is_joined_by_the_others(tmp_path):
    wells().to_csv(tmp_path / "p.csv", index=False)
    rows = pd.DataFrame({"Plate": None, "Well": ["A01", "A02", "B01"], "gene": ["a", "b", "c"]})
    assert read_profiles(tmp_path / "p.csv", table=rows).obs["gene"].tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="no row with a value"):
        read_profiles(tmp_path / "p.csv", table=rows.assign(dose=np.nan), on="dose")


def test_read_profiles_map_that_repeats_a_column_with_missing_values_is_joined(tmp_path):
    table = wells().assign(gene=[None, "x", "y"])
    table.to_csv(tmp_path / "p.csv", index=False)
    table[["Metadata_Well", "gene"]].assign(moa="m").to_parquet(tmp_path / "m.parquet")
    assert list(read_profiles(tmp_path / "p.csv", table=tmp_path / "m.parquet").obs["moa"]) == ["m"] * 3


def test_read_profiles_empty_column_of_one_file_keeps_the_type_of_others(tmp_path):
    wells().assign(n=None).to_parquet(tmp_path / "a.parquet")
    wells("P2").assign(n=[1, 2, 3]).to_parquet(tmp_path / "b.parquet")
    assert read_profiles(tmp_path).obs["n"].dropna().tolist() == [1, 2, 3]
