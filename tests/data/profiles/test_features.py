from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data.profiles._features import is_about, odd_names, profiles_of


@pytest.mark.parametrize(
    "column",
    [
        *("Metadata_Plate", "Metadata_hours", "Image_Metadata_Well", "Image_FileName_DNA", "Image_Count_Cells"),
        *("ImageNumber", "ObjectNumber", "Metadata_ImageNumber", "TableNumber", "Nuclei_ObjectNumber"),
        *("Location_Center_X", "Nuclei_Location_Center_Y", "Cells_Location_MaxIntensity_X_DNA"),
        *("Nuclei_Number_Object_Number", "Number_Object_Number", "Cytoplasm_Parent_Cells", "Parent_Nuclei"),
        *("Cells_AreaShape_Center_X", "AreaShape_BoundingBoxMinimum_Y", "Cells_AreaShape_BoundingBoxMaximum_Y"),
        *("Cells_Neighbors_FirstClosestObjectNumber_Adjacent", "plate", "Well", "x", "Unnamed: 0"),
    ],
)
def test_columns_that_are_no_measurements(column):
    assert is_about(column)


@pytest.mark.parametrize(
    "column",
    [
        *("Cells_AreaShape_Area", "Nuclei_AreaShape_BoundingBoxArea", "Cells_Children_Spots_Count", "feature_0"),
        *("Cells_RadialDistribution_FracAtD_DNA_1of4", "Nuclei_Texture_Correlation_DNA_3_00_256", "0", "actin.s.area"),
        *("Cells_Neighbors_NumberOfNeighbors_5", "Nuclei_Intensity_MassDisplacement_DNA"),
    ],
)
def test_columns_that_are(column):
    assert not is_about(column)


def table() -> pd.DataFrame:
    values = np.arange(80.0).reshape(40, 2)
    return pd.DataFrame(values, columns=["a", "b"]).assign(Metadata_Plate=["P1", "P2"] * 20, dose=7, text=["x", 1] * 20)


def test_numbers_are_features_and_the_rest_is_said_of_rows(tmp_path):
    cells = profiles_of(table(), ["dose"], "drop", "t")
    assert cells.var_names.tolist() == ["a", "b"] and cells.X.dtype == np.float32
    assert list(cells.obs) == ["Metadata_Plate", "dose", "text"]
    assert cells.obs["text"].cat.categories.tolist() == ["1", "x"]
    cells.write_h5ad(tmp_path / "c.h5ad")


def test_what_is_missing_is_counted():
    broken = table().assign(c=1.0)
    broken.loc[:1, "c"] = np.nan  # in as many rows as a feature may lack
    broken.loc[3, "a"] = np.inf
    broken.loc[:2, "b"] = np.nan
    message = (
        r"t: 1 of 4 features are missing in more than 5% of the rows, and are left out \(b\); 3 of 40 rows have "
        r"missing or infinite values, and are left out \(0, 1, 3\); missing='median' keeps them\.$"
    )
    with pytest.warns(UserWarning, match=message):
        cells = profiles_of(broken, (), "drop", "t")
    assert cells.shape == (37, 3) and cells.obs_names[:2].tolist() == ["2", "4"]
    with pytest.warns(UserWarning, match="3 missing values in 3 rows are replaced by the feature's median"):
        cells = profiles_of(broken, (), "median", "t")
    assert cells.shape == (40, 3) and cells[3, "a"].X == np.nanmedian(broken["a"].replace(np.inf, np.nan))
    cells = profiles_of(broken, (), "keep", "t")
    assert np.isnan(cells.X).sum() == 6 and cells.shape == (40, 4)


def test_whole_plates_that_are_lost_are_named():
    whole = pd.DataFrame(np.arange(240.0).reshape(80, 3), columns=["a", "b", "c"])
    whole["Metadata_Plate"] = np.repeat(["P1", "P2", "P3"], [38, 2, 40])
    files = np.repeat(["1.csv", "2.csv", "3.csv"], [38, 2, 40])
    broken = whole.copy()
    broken.loc[[38, 39, 50], "a"] = np.nan
    with pytest.warns(
        UserWarning, match=r"3 of 80 rows .*left out \(38, 39, 50\), among them all rows of Metadata_Plate P2; missing"
    ):
        assert profiles_of(broken, (), "drop", "t").n_obs == 77
    broken = whole.copy()  # each row of a file lacks another feature
    broken.loc[38, "a"] = broken.loc[39, "b"] = np.nan
    with pytest.warns(UserWarning, match="among them all rows of Metadata_Plate P2 and of file 2.csv; missing"):
        assert profiles_of(broken, (), "drop", "t", files).shape == (78, 3)
    broken.loc[39, "b"], broken.loc[40, "b"] = 1.0, np.nan
    with pytest.warns(UserWarning, match=r"2 of 80 rows .*are left out \(38, 40\); missing"):
        profiles_of(broken, (), "drop", "t", files)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ([*range(3, 9)], r"7, …\), above all of Metadata_Plate P1 \(6 of 20\); missing"),
        ([*range(5), 30, *range(60, 67)], r"…\), above all of Metadata_Plate P4 \(7 of 20\), P1 \(5 of 20\); missing"),
        (
            [*range(20), *range(30, 34)],
            r"rows of Metadata_Plate P1, above all of Metadata_Plate P2 \(4 of 20\)",
        ),
        ([0, 20, 40, 990, 991], r"\(0, 20, 40, 990, 991\); missing"),
        ([0, 1, 60], r"\(0, 1, 60\); missing"),
    ],
)
def test_plates_that_have_lost_more_than_others_are_named(lost, said):
    broken = pd.DataFrame(np.arange(2000.0).reshape(1000, 2), columns=["a", "b"])
    broken["Metadata_Plate"] = np.minimum(np.arange(1000) // 20, 4) + 1
    broken["Metadata_Plate"] = "P" + broken["Metadata_Plate"].astype(str)
    broken.loc[lost, "a"] = np.nan
    with pytest.warns(UserWarning, match=said):
        assert profiles_of(broken, (), "drop", "t").n_obs == 1000 - len(lost)


@pytest.mark.parametrize("missing", ["drop", "median"])
def test_what_a_whole_file_lacks_costs_a_feature_not_the_file(missing):
    broken = pd.DataFrame(np.arange(800.0).reshape(400, 2), columns=["a", "b"])
    files = np.repeat(["1.csv", "2.csv"], [388, 12])
    broken.loc[388:, "b"] = np.nan
    said = r"t: 1 of 2 features have no value in a whole file, and are left out \(b in 2.csv\).$"
    with pytest.warns(UserWarning, match=said):
        cells = profiles_of(broken, (), missing, "t", files)
    assert cells.shape == (400, 1)
    assert profiles_of(broken, (), "keep", "t", files).shape == (400, 2)


@pytest.mark.parametrize(
    ("features", "odd"),
    [
        (
            ["Cells_AreaShape_Area", "Mito_Texture_Contrast_DNA", "Nuclei_Math_Ratio", "dose_um", "moa_id"],
            "dose_um moa_id",
        ),
        (["f1", "f2", "f30", "cell_count"], "cell_count"),
        (["0", "1", "2", "donor"], "donor"),
        (["dino_0_1", "dino_0_2", "dino_1_1"], ""),
        (["area", "perimeter", "concentration", "compound_id", "timepoint"], "concentration compound_id timepoint"),
        (["actin.s.area", "actin.b.q05", "DNA.m.cx", "dist.10.nn", "nuclear.displacement"], ""),
        (["a"], ""),
        ([], ""),
    ],
)
def test_names_that_may_be_of_no_measurement(features, odd):
    assert odd_names(features) == odd.split()


@given(st.integers(0, 2**32 - 1), st.floats(0, 0.2), st.sampled_from(["drop", "median"]))
def test_no_value_is_missing_and_none_is_changed(seed, share, missing):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(30, 4)).astype(np.float32)
    values[:, 1:][rng.random((30, 3)) < share] = np.nan
    frame = pd.DataFrame(values, columns=list("abcd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = profiles_of(frame, (), missing, "t")
    was = frame.loc[cells.obs_names.astype(int), cells.var_names].to_numpy()
    assert np.isfinite(cells.X).all()
    np.testing.assert_array_equal(cells.X[~np.isnan(was)], was[~np.isnan(was)])
    if missing == "drop":
        assert not np.isnan(was).any()
        kept = frame[cells.var_names]
        assert cells.n_obs == kept.notna().all(axis=1).sum()


@pytest.mark.parametrize(
    ("frame", "how", "error", "message"),
    [
        (table().head(0), {}, ValueError, "t has no row"),
        (
            table()[["text", "Metadata_Plate"]],
            {},
            ValueError,
            "no column of numbers that is a feature; it has: text, Me",
        ),
        (pd.concat([table(), table()], axis=1), {}, ValueError, "5 columns whose name is there twice .a, b"),
        (
            table(),
            {"obs_columns": ["dosis"]},
            KeyError,
            "has no 'dosis'.*Did you mean 'dose'.*Name it with obs_columns",
        ),
        (
            table().join(pd.DataFrame(1.0, index=range(40), columns=[f"f_{i}" for i in range(50)]))[::-1],
            {"obs_columns": ["Metadata_Plat"]},
            KeyError,
            "its keys: Metadata_Plate, .*Did you mean 'Metadata_Plate'",
        ),
        (table(), {"missing": "zero"}, ValueError, "missing='zero' is not known: use 'drop', 'median', 'keep'"),
        (table()[["a"]] * np.nan, {}, ValueError, "1 of 1 features are missing .*Nothing is left"),
    ],
)
def test_what_is_wrong_is_said(frame, how, error, message):
    with pytest.raises(error, match=message):
        profiles_of(frame, **{"obs_columns": (), "missing": "drop", "where": "t"} | how)
