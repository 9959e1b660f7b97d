from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.data.profiles._features import is_about, profiles_of


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
        r"missing or infinite values, and are left out"
    )
    with pytest.warns(UserWarning, match=message):
        cells = profiles_of(broken, (), "drop", "t")
    assert cells.shape == (37, 3) and cells.obs_names[:2].tolist() == ["2", "4"]
    with pytest.warns(UserWarning, match="3 missing values in 3 rows are replaced by the feature's median"):
        cells = profiles_of(broken, (), "median", "t")
    assert cells.shape == (40, 3) and cells[3, "a"].X == np.nanmedian(broken["a"].replace(np.inf, np.nan))
    cells = profiles_of(broken, (), "keep", "t")
    assert np.isnan(cells.X).sum() == 6 and cells.shape == (40, 4)


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
        (table(), {"missing": "zero"}, ValueError, "missing='zero' is not known: use 'drop', 'median', 'keep'"),
        (table()[["a"]] * np.nan, {}, ValueError, "1 of 1 features are missing .*Nothing is left"),
    ],
)
def test_what_is_wrong_is_said(frame, how, error, message):
    with pytest.raises(error, match=message):
        profiles_of(frame, **{"obs_columns": (), "missing": "drop", "where": "t"} | how)
