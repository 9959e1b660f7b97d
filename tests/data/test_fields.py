"""What is registered of images, features and labels, and how new cells are held to it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from anndata import AnnData
from conftest import IMAGE_KEY, make_cells, make_wells
from hypothesis import given
from hypothesis import strategies as st

from scbd._shared.labels import CROSS_SEPARATOR
from scbd.data import ArraySource, open_screen
from scbd.data._fields import FeatureField, ImageField, LabelField, match_features
from scbd.data._input_location import InputLocation

X = InputLocation(layer="X")


@pytest.mark.parametrize(
    ("field", "stats"),
    [
        (ImageField("image", IMAGE_KEY), {"n_channels": 2, "height": 16, "width": 16}),
        (FeatureField("features", InputLocation(obsm_key="dino")), {"n_features": 5}),
        (LabelField("e", ["plate", "well"]), {"n_e": 3}),
    ],
)
def test_field_registered_cells_returns_summary_and_table(cells, field, stats):
    cells.obsm["dino"] = np.random.default_rng(0).normal(size=(96, 5)).astype(np.float32)
    field.validate_field(cells)
    state = field.register_field(cells)
    assert field.get_summary_stats(state) == stats
    shown = field.view_state_registry(state)
    assert shown is not None and shown.row_count == 1
    assert field.transfer_field(state, cells) == state


# images


def test_image_field_register_returns_shape_dtype_and_channels(cells):
    state = ImageField("image", IMAGE_KEY).register_field(cells)
    assert (state["image_shape"], state["dtype"]) == ((2, 16, 16), "uint8")
    assert state["channels"] == state["var_names"] == ["channel_0", "channel_1"]


@pytest.mark.parametrize(
    ("other", "said"), [({"shape": (3, 16, 16)}, "3 channels of uint8"), ({"dtype": "uint16"}, "2 channels of uint16")]
)
def test_image_field_transfer_other_channels_or_dtype_raises(cells, other, said):
    field = ImageField("image", IMAGE_KEY)
    state = field.register_field(cells)
    with pytest.raises(ValueError, match=said):
        field.transfer_field(state, make_cells(8, **other))
    assert field.transfer_field(state, make_cells(8, shape=(2, 20, 20))) == state


def test_image_field_missing_key_raises(cells):
    with pytest.raises(KeyError, match="no 'single_cell_image'"):
        ImageField("image", "single_cell_image").register_field(cells)


@pytest.fixture
def read(monkeypatch):
    """Return a list to which the number of each row that is read is appended."""
    rows: list[int] = []
    original = ArraySource.read

    def recorded(self, wanted, out=None):
        rows.extend(np.arange(self.shape[0])[wanted].tolist())
        return original(self, wanted, out)

    monkeypatch.setattr(ArraySource, "read", recorded)
    return rows


def mapped(cells: AnnData, tmp_path) -> AnnData:
    cells.write_h5ad(tmp_path / "cells.h5ad")
    cells.obsm[IMAGE_KEY] = open_screen(tmp_path / "cells.h5ad").obsm[IMAGE_KEY]
    return cells


def test_image_field_images_on_disk_reads_64_cells(tmp_path, read):
    """Regression: every pixel of float images was read, and twice if a model was loaded with them."""
    cells, field = mapped(make_cells(300, dtype="float32"), tmp_path), ImageField("image", IMAGE_KEY)
    state = field.register_field(cells)
    assert len(read) == len(set(read)) == 64
    field.transfer_field(state, cells)
    field.validate_field(cells)
    assert len(read) == 128


def test_image_field_images_in_memory_reads_each_cell_once(read):
    ImageField("image", IMAGE_KEY).register_field(make_cells(300, dtype="float32"))
    assert np.bincount(read, minlength=300).min() == 1 and len(read) == 300 + 64


@pytest.mark.parametrize(
    ("on_disk", "said"),
    [(False, r"in 150 of 300 cells \(rows 0, 2, 4"), (True, r"in \d+ of 64 cells .*\(rows (\d*[02468], ){5}…\)")],
)
def test_image_field_non_finite_pixels_raises_with_rows(tmp_path, on_disk, said):
    cells = make_cells(300, dtype="float32")
    cells.obsm[IMAGE_KEY][::2, 1, 2, 2] = np.nan
    with pytest.raises(ValueError, match=said):
        ImageField("image", IMAGE_KEY).register_field(mapped(cells, tmp_path) if on_disk else cells)


@pytest.mark.parametrize("on_disk", [False, True])
def test_image_field_constant_channel_warns(tmp_path, on_disk):
    """Such as the transparency of PNG files. A single cell is too few to tell."""
    cells = make_cells(shape=(3, 8, 8))
    cells.obsm[IMAGE_KEY][:, 1] = 255
    with pytest.warns(UserWarning, match=r"channel_1 \(255\)"):
        ImageField("image", IMAGE_KEY).register_field(mapped(cells, tmp_path) if on_disk else cells)
    ImageField("image", IMAGE_KEY).register_field(cells[:1].copy())


# features


def registered(adata: AnnData, inputs: InputLocation = X) -> dict:
    return FeatureField("features", inputs).register_field(adata)


@pytest.mark.parametrize(
    "inputs",
    [X, InputLocation(layer="raw"), InputLocation(obsm_key="dino"), InputLocation(obsm_key="frame")],
    ids=lambda i: i.where,
)
def test_match_features_any_location_returns_stored_values(inputs):
    wells = make_wells(n_features=4)
    wells.layers["raw"] = wells.X.astype(np.float64)
    wells.obsm["dino"] = wells.X.astype(np.float16)
    wells.obsm["frame"] = pd.DataFrame(wells.X, columns=list("abcd"), index=wells.obs_names)
    state = registered(wells, inputs)
    assert state["features"] == state["columns"] and state["n_rows"] == 72
    source = match_features(wells, inputs, state)
    rows = np.array([5, 0, 5])
    np.testing.assert_array_equal(source.read(rows), np.asarray(inputs.array(wells))[rows])
    assert source.dtype.name == state["dtype"]


@given(order=st.permutations(range(6)), extra=st.integers(0, 3))
def test_match_features_reordered_features_are_matched_by_name(order, extra):
    wells = make_wells(n_features=6, n_compounds=3, n_plates=2, n_controls=2)
    state = registered(wells)
    more = AnnData(
        X=np.concatenate([wells.X[:, order], np.ones((len(wells), extra), np.float32)], axis=1),
        obs=wells.obs,
        var=pd.DataFrame(index=[*wells.var_names[order], *(f"new_{i}" for i in range(extra))]),
    )
    source = match_features(more, X, state)
    np.testing.assert_array_equal(source.read(slice(None)), wells.X)
    out = np.empty((2, 6), np.float32)
    assert source.read(slice(2, 4), out=out) is out
    np.testing.assert_array_equal(out, wells.X[2:4])


def test_match_features_numbered_names_are_matched_and_missing_raises():
    """AnnData names features 0, 1, … by default."""
    values = np.random.default_rng(0).normal(size=(5, 20)).astype(np.float32)
    table = AnnData(values)
    state = registered(table[:, :10].copy())
    np.testing.assert_array_equal(match_features(table[:, ::-1].copy(), X, state).read(slice(None)), values[:, :10])
    with pytest.raises(ValueError, match=r"lacks 2 of the 10 features .*\(0, 1\)"):
        match_features(table[:, 2:].copy(), X, state)


def test_match_features_without_names_are_matched_by_position():
    wells, dino = make_wells(n_features=6), InputLocation(obsm_key="dino")
    wells.obsm["dino"] = wells.X.copy()
    wells.obsm["dino"][:, 2] = 1
    with pytest.warns(UserWarning, match="1 of 6 features .*: 2"):
        state = registered(wells, dino)
    np.testing.assert_array_equal(match_features(wells, dino, state).read(slice(None)), wells.X[:, [0, 1, 3, 4, 5]])
    wells.obsm["dino"] = wells.X[:, :5]
    with pytest.raises(ValueError, match="5 features, the model was set up with 6"):
        match_features(wells, dino, state)


def test_match_features_names_missing_in_new_cells_warns():
    wells, dino = make_wells(n_features=3), InputLocation(obsm_key="dino")
    wells.obsm["dino"] = pd.DataFrame(wells.X, columns=list("abc"), index=wells.obs_names)
    state = registered(wells, dino)
    wells.obsm["dino"] = wells.X
    with pytest.warns(UserWarning, match="a, b, c"):
        np.testing.assert_array_equal(match_features(wells, dino, state).read(slice(None)), wells.X)


def test_feature_field_non_finite_values_raises_with_features_and_rows(tmp_path):
    wells = make_wells(n_features=5)
    wells.X[[3, 7], 1] = np.nan
    wells.X[7, 4] = np.inf
    with pytest.raises(ValueError, match=r"in 2 features \(feature_1, feature_4\), and in 2 of 72 cells.*rows 3, 7"):
        registered(wells)
    stored = zarr.create_array(tmp_path / "x.zarr", data=np.full((10_000, 3), np.nan, np.float32), chunks=(1000, 3))
    many = AnnData(obs=pd.DataFrame(index=np.arange(10_000).astype(str)), obsm={"stored": stored})
    with pytest.raises(ValueError, match="of 4,096 cells that were checked"):
        registered(many, InputLocation(obsm_key="stored"))


@pytest.mark.parametrize(
    ("error", "message", "spoil"),
    [
        (TypeError, "X is sparse", lambda a: setattr(a, "X", scipy.sparse.csr_matrix(a.X))),
        (TypeError, "int64", lambda a: setattr(a, "X", a.X.astype(int))),
        (ValueError, "one value in all cells", lambda a: setattr(a, "X", np.ones_like(a.X))),
        (ValueError, "feature_0", lambda a: setattr(a, "var_names", ["feature_0"] * 3 + list("defghij"))),
    ],
)
@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_feature_field_invalid_features_raises(error, message, spoil):
    wells = make_wells()
    spoil(wells)
    with pytest.raises(error, match=message):
        registered(wells)


@pytest.mark.parametrize(
    "dtypes", [["Float64", "Float32"], ["float64[pyarrow]", "int64[pyarrow]"], ["float32", "bool"]]
)
def test_feature_field_frame_of_any_number_dtype_is_read(dtypes):
    wells, inputs = make_wells(n_features=2), InputLocation(obsm_key="frame")
    frame = pd.DataFrame((wells.X > 0).astype(int), index=wells.obs_names, columns=["a", "b"])
    wells.obsm["frame"] = frame.astype(dict(zip(frame, dtypes, strict=True)))
    np.testing.assert_array_equal(inputs.source(wells).read(slice(None)), frame)
    assert registered(wells, inputs)["features"] == ["a", "b"]


def test_feature_field_frame_with_text_or_missing_values_raises():
    wells, inputs = make_wells(n_features=3), InputLocation(obsm_key="frame")
    frame = pd.DataFrame(wells.X, index=wells.obs_names).add_prefix("f").convert_dtypes()
    wells.obsm["frame"] = frame.assign(plate=wells.obs["plate"].astype(str))
    with pytest.raises(TypeError, match=r"\(plate in 72 of 72 rows"):
        registered(wells, inputs)
    frame.iloc[3, 1] = pd.NA
    wells.obsm["frame"] = frame
    with pytest.raises(ValueError, match=r"\(f1\).*rows 3"):
        registered(wells, inputs)


# labels


def labels_of(field: LabelField, cells: AnnData, categories: list) -> list:
    codes, unknown = field.codes(cells, categories)
    assert unknown == []
    return [categories[code] for code in codes]


def test_label_field_reordered_categories_returns_equal_labels(cells):
    field = LabelField("y", "gene")
    categories = field.register_field(cells)["categories"]
    assert categories == [f"gene_{i}" for i in range(4)]
    assert labels_of(field, cells, categories) == cells.obs["gene"].tolist()
    cells.obs["gene"] = cells.obs["gene"].cat.reorder_categories(categories[::-1])
    assert labels_of(field, cells, categories) == cells.obs["gene"].tolist()


def test_label_field_several_columns_are_crossed(cells):
    field = LabelField("e", ["plate", "well"])
    expected = (cells.obs["plate"].astype(str) + CROSS_SEPARATOR + cells.obs["well"].astype(str)).tolist()
    assert labels_of(field, cells, field.register_field(cells)["categories"]) == expected
    assert field.get_field_data(cells).tolist() == expected
    assert len(cells.obs.columns) == 3  # nothing was added


def test_label_field_unused_categories_are_not_registered(cells):
    kept = cells[cells.obs["gene"] != "gene_2"].copy()
    assert LabelField("y", "gene").register_field(kept)["categories"] == ["gene_0", "gene_1", "gene_3"]
    kept.obs["dose"] = np.arange(kept.n_obs) % 3
    assert LabelField("y", "dose").register_field(kept)["categories"] == [0, 1, 2]


def test_label_field_unseen_labels_are_appended(cells):
    field = LabelField("e", "well")
    state = field.register_field(cells)
    new = make_cells(10)
    new.obs["well"] = ["well_9"] * 4 + ["well_1"] * 4 + [None] * 2
    assert field.transfer_field(state, new)["categories"] == ["well_0", "well_1", "well_2", "well_9"]
    _, unknown = field.codes(new[:8], state["categories"])
    assert unknown == ["well_9"] and "'well_9'" in field.unknown(unknown)


def test_label_field_single_value_raises(cells):
    cells.obs["one"] = "same"
    with pytest.raises(ValueError, match=r"obs\['one'\] \('same'\)"):
        LabelField("y", "one").register_field(cells)
