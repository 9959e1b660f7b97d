"""What is recorded of features, and how they are found again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from anndata import AnnData
from conftest import make_wells
from hypothesis import given
from hypothesis import strategies as st

from scbd.data import FEATURES, ArraySource, FeatureField, Inputs, ZarrSource, known_features

X = Inputs(layer="X")


def registered(adata: AnnData, inputs: Inputs = X) -> dict:
    field = FeatureField("features", inputs)
    field.validate_field(adata)
    return field.register_field(adata)


def test_names_and_dtype_are_recorded():
    state = registered(make_wells(n_features=3))
    assert state["features"] == state["columns"] == ["feature_0", "feature_1", "feature_2"]
    assert (state["dtype"], state["n_rows"]) == ("float32", 72)
    field = FeatureField("features", X)
    assert field.get_summary_stats(state) == {"n_features": 3}
    shown = field.view_state_registry(state)
    assert shown is not None and shown.row_count == 1


@pytest.mark.parametrize(
    "inputs", [X, Inputs(layer="raw"), Inputs(obsm_key="dino"), Inputs(obsm_key="frame")], ids=lambda i: i.where
)
def test_features_are_read_wherever_they_are(inputs):
    wells = make_wells(n_features=4)
    wells.layers["raw"] = wells.X.astype(np.float64)
    wells.obsm["dino"] = wells.X.astype(np.float16)
    wells.obsm["frame"] = pd.DataFrame(wells.X, columns=list("abcd"), index=wells.obs_names)
    state = registered(wells, inputs)
    source = known_features(wells, inputs, state)
    rows = np.array([5, 0, 5])
    np.testing.assert_array_equal(source.read(rows), np.asarray(inputs.array(wells))[rows])
    assert source.dtype.name == state["dtype"]


@given(order=st.permutations(range(6)), extra=st.integers(0, 3))
def test_features_are_found_by_name(order, extra):
    wells = make_wells(n_features=6, n_compounds=3, n_plates=2, n_controls=2)
    state = registered(wells)
    more = AnnData(
        X=np.concatenate([wells.X[:, order], np.ones((len(wells), extra), np.float32)], axis=1),
        obs=wells.obs,
        var=pd.DataFrame(index=[*wells.var_names[order], *(f"new_{i}" for i in range(extra))]),
    )
    source = known_features(more, X, state)
    np.testing.assert_array_equal(source.read(slice(None)), wells.X)
    np.testing.assert_array_equal(source.read(np.array([3, 1])), wells.X[[3, 1]])
    out = np.empty((2, 6), np.float32)
    assert source.read(slice(2, 4), out=out) is out
    np.testing.assert_array_equal(out, wells.X[2:4])


def test_a_missing_feature_is_named():
    wells = make_wells(n_features=6)
    state = registered(wells)
    with pytest.raises(ValueError, match=r"X lacks 2 of the 6 features .*\(feature_1, feature_4\)"):
        known_features(wells[:, [0, 2, 3, 5]].copy(), X, state)


def test_features_without_names_go_by_their_place():
    wells, dino = make_wells(n_features=6), Inputs(obsm_key="dino")
    wells.obsm["dino"] = wells.X.copy()
    wells.obsm["dino"][:, 2] = 1
    with pytest.warns(UserWarning, match=r"1 of 6 features of obsm\['dino'\] have one value .* left out: 2"):
        state = registered(wells, dino)
    assert state["features"] == ["0", "1", "3", "4", "5"]
    np.testing.assert_array_equal(known_features(wells, dino, state).read(slice(None)), wells.X[:, [0, 1, 3, 4, 5]])
    wells.obsm["dino"] = wells.X[:, :5]
    with pytest.raises(ValueError, match="has 5 features, the model was set up with 6. Features without names"):
        known_features(wells, dino, state)


def test_a_table_without_names_is_read_in_the_order_of_one_with_names():
    wells, dino = make_wells(n_features=3), Inputs(obsm_key="dino")
    wells.obsm["dino"] = pd.DataFrame(wells.X, columns=list("abc"), index=wells.obs_names)
    state = registered(wells, dino)
    wells.obsm["dino"] = wells.X
    with pytest.warns(UserWarning, match=r"have \(a, b, c\): they are taken to be in that order"):
        np.testing.assert_array_equal(known_features(wells, dino, state).read(slice(None)), wells.X)


def test_numbers_are_names():
    """AnnData calls features 0, 1, … where nobody names them."""
    values = np.random.default_rng(0).normal(size=(5, 20)).astype(np.float32)
    table = AnnData(values)
    state = registered(table[:, :10].copy())
    np.testing.assert_array_equal(known_features(table[:, ::-1].copy(), X, state).read(slice(None)), values[:, :10])
    with pytest.raises(ValueError, match=r"X lacks 10 of the 10 features .*\(0, 1, 2"):
        known_features(table[:, 10:].copy(), X, state)


def test_missing_values_are_named_with_features_and_rows():
    wells = make_wells(n_features=5)
    wells.X[[3, 7], 1] = np.nan
    wells.X[7, 4] = np.inf
    wells.X[:, 2] = np.nan
    with pytest.raises(ValueError, match=r"in 3 features \(1 of them in every row: feature_2\).*rows 0, 1, 2, 3, 4, …"):
        registered(wells)


def test_all_rows_in_memory_are_looked_at_and_a_sample_elsewhere(tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(10_000, 3)).astype(np.float32)
    features[9_999, 1] = np.nan
    wells = AnnData(X=features)
    with pytest.raises(ValueError, match="1 features, first of all 1, and in 1 of 10,000 cells"):
        registered(wells)
    stored = zarr.create_array(tmp_path / "x.zarr", data=features, chunks=(1000, 3))
    stored[:, 1] = np.nan
    wells.obsm["stored"] = stored
    with pytest.raises(ValueError, match="of 4,096 cells looked at"):
        registered(wells, Inputs(obsm_key="stored"))


@pytest.mark.parametrize(
    ("error", "message", "spoil"),
    [
        (TypeError, "X is sparse .*make it dense", lambda a: setattr(a, "X", scipy.sparse.csr_matrix(a.X))),
        (TypeError, "has dtype int64: cast it to one of float16", lambda a: setattr(a, "X", a.X.astype(int))),
        (ValueError, "one value in all cells: there is nothing", lambda a: setattr(a, "X", np.ones_like(a.X))),
        (
            ValueError,
            r"2 names of features are there twice \(feature_0, feature_0\)",
            lambda a: setattr(a, "var_names", ["feature_0"] * 3 + list("defghij")),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_what_cannot_be_read_is_said(error, message, spoil):
    wells = make_wells()
    spoil(wells)
    with pytest.raises(error, match=message):
        registered(wells)


def test_text_among_features_is_said():
    wells, frame = make_wells(n_features=3), Inputs(obsm_key="frame")
    wells.obsm["frame"] = pd.DataFrame({"a": wells.X[:, 0], "b": wells.obs["plate"].astype(str)}, index=wells.obs_names)
    with pytest.raises(
        TypeError, match=r"obsm\['frame'\] has columns that hold no numbers \(b\): leave columns of text"
    ):
        registered(wells, frame)


@pytest.mark.parametrize(
    "dtypes", [["Float64", "Float32"], ["float64[pyarrow]", "int64[pyarrow]"], ["float32", "bool"]]
)
def test_numbers_of_a_frame_are_features_however_they_are_stored(dtypes):
    """They were told to be objects, and text to be left out that was not there."""
    wells, inputs = make_wells(n_features=2), Inputs(obsm_key="frame")
    frame = pd.DataFrame((wells.X > 0).astype(int), index=wells.obs_names, columns=["a", "b"])
    wells.obsm["frame"] = frame.astype(dict(zip(frame, dtypes, strict=True)))
    np.testing.assert_array_equal(inputs.source(wells).read(slice(None)), frame)
    assert registered(wells, inputs)["features"] == ["a", "b"]


def test_a_missing_value_of_a_frame_is_named():
    wells = make_wells(n_features=3)
    frame = pd.DataFrame(wells.X, index=wells.obs_names).add_prefix("f").convert_dtypes()
    frame.iloc[3, 1] = pd.NA
    wells.obsm["frame"] = frame
    with pytest.raises(ValueError, match=r"in 1 features, first of all f1, and in 1 of .*rows 3"):
        registered(wells, Inputs(obsm_key="frame"))


def test_a_zarr_array_is_read_by_whole_rows(tmp_path):
    features = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    whole = zarr.create_array(tmp_path / "whole.zarr", data=features, chunks=(7, 6))
    np.testing.assert_array_equal(ZarrSource(whole, "X", FEATURES).read(np.array([49, 3])), features[[49, 3]])
    cut = zarr.create_array(tmp_path / "cut.zarr", data=features, chunks=(7, 3))
    with pytest.raises(ValueError, match="hold whole rows of it .*write it again with chunks"):
        ZarrSource(cut, "X", FEATURES)
    with pytest.raises(ValueError, match=r"has shape \(50,\), features must be 2-D"):
        ArraySource(features[:, 0], "X", FEATURES)
