"""Tests of crops of fields: their pixels, and errors for fields and cells that do not match."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import IMAGE_KEY
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scbd.data import _crop_cells, crop_cells, write_screen

RNG = np.random.default_rng(0)


def crop_naively(image: np.ndarray, y: float, x: float, size: int, edge: str = "zeros") -> np.ndarray:
    """Crop in the naive way: pad the whole field by the size of a crop, and slice."""
    row, column = (int(np.floor(value + 0.5)) for value in (y, x))
    mode: dict[str, Any] = {"mode": "constant"} if edge == "zeros" else {"mode": "reflect"}
    padded = np.pad(image, ((0, 0), (size, size), (size, size)), **mode)
    top, left = row + size - size // 2, column + size - size // 2
    return padded[:, top : top + size, left : left + size]


def read_pixels(crops: Any) -> np.ndarray:
    return crops.images.read(slice(None))


def cells_at(*places: tuple[float, float], **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"y": [y for y, _ in places], "x": [x for _, x in places]} | columns)


@pytest.fixture
def field() -> np.ndarray:
    return RNG.integers(1, 60_000, (3, 40, 50)).astype("uint16")


@pytest.fixture
def labels() -> np.ndarray:
    found = np.zeros((40, 50), np.int32)
    found[10:15, 20:29], found[16:20, 20:25], found[30:31, 2:4] = 7, 3, 900
    return found


@pytest.mark.filterwarnings("ignore:.*repeats? the cell of an earlier row")  # positions may be equal
@given(data=st.data(), edge=st.sampled_from(["zeros", "reflect"]), size=st.integers(1, 24))
def test_crop_cells_any_position_is_equal_to_naive(data, edge, size):
    """Centroids lie anywhere, in fields larger and smaller than the crop."""
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(2, 40), st.integers(2, 40)))
    image = data.draw(hnp.arrays("uint8", shape))
    places = data.draw(
        st.lists(st.tuples(*(st.floats(-0.5, n - 0.5, exclude_max=True) for n in shape[1:])), min_size=1, max_size=8)
    )
    found = read_pixels(crop_cells(image, np.array(places), size=size, edge=edge))
    np.testing.assert_array_equal(found, [crop_naively(image, y, x, size, edge) for y, x in places])


@pytest.mark.parametrize("kind", ["numpy", "zarr", "h5py", "dask"])
@pytest.mark.parametrize("flat", [False, True])
def test_crop_cells_any_array_library_is_equal_to_naive(field, kind, flat, tmp_path):
    field = field[0] if flat else field
    image: Any = field
    if kind == "zarr":
        image = zarr.create_array(tmp_path / "image.zarr", data=field, chunks=(*[1] * (not flat), 16, 16))
    elif kind == "h5py":
        image = h5py.File(tmp_path / "image.h5", "w").create_dataset("image", data=field, chunks=True)
    elif kind == "dask":
        image = pytest.importorskip("dask.array", reason="dask is not installed").from_array(field, chunks=16)
    found = crop_cells(image, np.array([(3.2, 4.8), (20, 20), (39, 49)]), size=12)
    whole = field[None] if flat else field
    expected = [crop_naively(whole, y, x, 12) for y, x in found.obs[["y", "x"]].to_numpy()]
    np.testing.assert_array_equal(read_pixels(found), expected)
    assert found.images.dtype == "uint16" and found.channels == [f"channel_{i}" for i in range(len(whole))]


def test_crop_cells_big_field_is_read_in_sorted_tiles(field, monkeypatch):
    """Cells are sorted by the tile of the field in which they lie."""
    monkeypatch.setattr(_crop_cells, "_TILE_SIDE", 16)
    found = crop_cells(field, RNG.uniform(0, 39, (60, 2)), size=7)
    places = found.obs[["y", "x"]].to_numpy()
    tiles = (places + 0.5).astype(int) // 16
    assert (np.diff(tiles @ [4, 1]) >= 0).all() and len(np.unique(tiles, axis=0)) > 4
    naive = [crop_naively(field, y, x, 7) for y, x in places]
    np.testing.assert_array_equal(read_pixels(found), naive)
    rows = RNG.permutation(60)[:17]
    np.testing.assert_array_equal(found.images.read(rows), np.array(naive)[rows])


class Counted:
    """An array that counts how often it is read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, 0

    def __getitem__(self, part: Any) -> np.ndarray:
        self.reads += 1
        return self.array[part]


def test_write_screen_crops_of_fields_keep_pixels_and_labels(tmp_path):
    """Each cell keeps its pixels and labels, and a field is read a few times, not once per cell."""
    fields = {f"f{i}": Counted(RNG.integers(0, 250, (2, 64, 64)).astype("uint8")) for i in range(30)}
    n = 3000
    cells = cells_at(*RNG.uniform(16, 47, (n, 2)), field=RNG.choice(list(fields), n), gene=RNG.choice(list("abc"), n))
    crops = crop_cells(fields, cells, size=32)
    assert crops.obs["field"].map(list(fields).index).is_monotonic_increasing
    screen = write_screen(tmp_path / "screen.zarr", crops, y_key="gene")
    assert screen.n_obs == n and screen.obs["gene"].is_monotonic_increasing
    for row in range(0, n, 37):
        cell = screen.obs.iloc[row]
        naive = crop_naively(fields[cell["field"]].array, cell["y"], cell["x"], 32)
        np.testing.assert_array_equal(screen.obsm[IMAGE_KEY][row], naive)
    assert sum(field.reads for field in fields.values()) < n / 4


def test_crop_cells_channels_given_are_selected_and_named(field):
    cells = cells_at((20, 20), (20, 22), gene=["a", "b"])
    adata = crop_cells(field, cells, size=8, channels={"DNA": 2, "actin": 0}).to_memory()
    assert adata.var_names.tolist() == ["DNA", "actin"] and adata.obs["gene"].tolist() == ["a", "b"]
    np.testing.assert_array_equal(adata.obsm[IMAGE_KEY][0], field[[2, 0], 16:24, 16:24])
    assert crop_cells(field, cells, size=8, channels=["DNA", "ER", "actin"]).channels == ["DNA", "ER", "actin"]


def test_crop_cells_labels_given_crops_at_their_centroids(field, labels):
    found = crop_cells({"A": field}, labels={"A": labels}, size=9)
    assert found.obs.index.tolist() == ["A_3", "A_7", "A_900"] and found.obs["label"].tolist() == [3, 7, 900]
    assert found.obs[["y", "x", "area"]].to_numpy().tolist() == [[17.5, 22, 20], [12, 24, 45], [30, 2.5, 2]]
    cells = pd.DataFrame({"field": ["A", "A"], "label": [900, 3], "gene": ["x", "y"]}, index=["c1", "c2"])
    chosen = crop_cells({"A": field}, cells, labels={"A": labels[None]}, size=9)
    np.testing.assert_array_equal(read_pixels(chosen), read_pixels(found)[[2, 0]])
    assert chosen.obs["gene"].tolist() == ["x", "y"] and chosen.obs["area"].tolist() == [2, 20]
    moved = crop_cells({"A": field}, cells.assign(y=[9, 9], x=[9, 9]), labels={"A": labels}, size=9)
    assert moved.obs["y"].tolist() == [9, 9]  # positions given in the table are kept


@pytest.mark.parametrize("edge", ["zeros", "reflect"])
@pytest.mark.parametrize("mask", ["neighbours", "background"])
def test_crop_cells_mask_given_other_pixels_are_zero(field, labels, mask, edge):
    found = crop_cells(field, labels=labels, size=15, mask=mask, edge=edge)
    for crop, label, y, x in zip(read_pixels(found), *(found.obs[key] for key in ("label", "y", "x")), strict=True):
        own = crop_naively(labels[None], y, x, 15, edge)
        keep = (own == label) | ((own == 0) & (mask == "neighbours"))
        np.testing.assert_array_equal(crop, crop_naively(field, y, x, 15, edge) * keep)


@pytest.mark.parametrize("with_labels", [False, True])
def test_crop_cells_cell_in_two_rows_warns(field, labels, with_labels):
    cells = cells_at((12, 24), (18, 22), (12, 24), label=[7, 3, 7])
    how: dict[str, Any] = {"labels": {"1": labels, "2": labels}} if with_labels else {}
    fields = {"1": field, "2": field}
    crop_cells(fields, cells.assign(field=[1, 1, 2]), size=8, **how)
    with pytest.warns(UserWarning, match="1 row .*the first is row 2."):
        crop_cells(fields, cells.assign(field=["1", "1", 1]), size=8, **how)


def test_crop_cells_edge_drop_excludes_cells_at_edges(field):
    cells = cells_at((20, 20), (4, 20), (36, 20), (20, 4), (20, 46))
    kept = [crop_cells(field, cells, size=size, edge="drop").obs.index.tolist() for size in (8, 9, 10)]
    assert kept == [list("01234"), list("013"), list("0")]
    with pytest.raises(ValueError, match="all 5 cells"):
        crop_cells(field, cells, size=60, edge="drop")


ONE = np.ones((2, 40, 50), "uint8")
FIELDS = {"a": ONE, "b": ONE}
CELLS = cells_at((20, 20), (10, 10), field=["a", "b"])
MASK = np.ones((40, 50), int)


@pytest.mark.parametrize(
    ("images", "cells", "how", "message"),
    [
        (FIELDS, CELLS.assign(y=[20, 39.6]), {}, "1 of 2 cells have no position .* row 1"),
        (FIELDS, CELLS.assign(x=[np.nan, 1]), {}, "1 of 2 cells have no position .* row 0"),
        (FIELDS, CELLS.assign(x=[1, 1e300]), {}, "1 of 2 cells have no position"),
        (FIELDS, CELLS.assign(field=["a", "c"]), {}, r"1 of 2 cells lie in fields that are not given .*'a', 'b'"),
        (FIELDS, CELLS.drop(columns="field"), {}, "no 'field'"),
        (FIELDS, CELLS.drop(columns="y"), {}, "no 'y'"),
        (FIELDS, CELLS[:0], {}, "no cells"),
        (FIELDS, np.ones((40, 50), int), {}, r"cells has shape \(40, 50\)"),
        (FIELDS, None, {}, "labels"),
        (FIELDS, CELLS, {"size": 0}, "size=0"),
        (FIELDS, CELLS, {"edge": "mirror"}, "edge='mirror'"),
        (FIELDS, CELLS, {"mask": "own", "labels": FIELDS}, "mask='own'"),
        (FIELDS, CELLS, {"mask": "neighbours"}, "labels"),
        (FIELDS, CELLS, {"channels": []}, r"channels=\[\]"),
        (FIELDS, CELLS, {"channels": [3]}, "no 3"),
        ({"a": ONE, "b": ONE[:1]}, CELLS, {}, "b has 1 channels"),
        ({"a": ONE, "b": ONE * 1.0}, CELLS, {}, "channels of float64"),
        ({"a": ONE.astype(int)}, CELLS[:1], {}, "int64"),
        ({"a": np.ones((3, 2, 40, 50))}, CELLS[:1], {}, r"shape \(3, 2, 40, 50\)"),
        ({"a": np.ones((40, 50, 3))}, CELLS[:1], {}, r"shape \(40, 50, 3\)"),
        ({"a": np.ones((3, 0, 5))}, CELLS[:1], {}, r"shape \(3, 0, 5\)"),
        ({"a": "image.tif"}, CELLS[:1], {}, "'a' is str"),
        ({}, CELLS[:1], {}, "no fields"),
        (FIELDS, None, {"labels": {"c": MASK}}, "1 of 1 fields has no image .c"),
        (FIELDS, CELLS.assign(label=1), {"labels": {"a": MASK}}, "1 of 2 fields has no labels .b"),
        (FIELDS, None, {"labels": {"a": MASK[1:]}}, r"shape \(39, 50\)"),
        (FIELDS, None, {"labels": {"a": MASK * 1.0}}, "float64"),
        (FIELDS, None, {"labels": {"a": MASK > 0}}, "bool"),
        (FIELDS, None, {"labels": {"a": MASK - 2}}, "are -1: .*positive"),
        (ONE, pd.DataFrame({"label": [1]}), {"labels": np.where(np.eye(40, 50), -7, MASK)}, "are -7, 1: .*positive"),
        (FIELDS, None, {"labels": {"a": (MASK * 255).astype("uint8")}}, "are 255: .*measure.label"),
        (FIELDS, None, {"labels": {"a": "mask.png"}}, "label mask of field 'a' is str"),
        (FIELDS, None, {"labels": {"a": np.stack([MASK, MASK])}}, r"several planes .*\(2, 40, 50\)"),
        (FIELDS, None, {"labels": {"a": np.ones((1, 5, 40, 50), int)}}, r"several planes .*\(1, 5, 40, 50\)"),
        (FIELDS, None, {"labels": {"a": np.stack([MASK, MASK], axis=-1)}}, r"shape \(40, 50, 2\)"),
        (ONE, pd.DataFrame({"label": ["1", "x"]}), {"labels": MASK}, "1 of 2 cells have no whole number.* row 1"),
        ({"01": ONE, "02": ONE}, CELLS.assign(field=[1, 2]), {}, "column 'field' has 1, 2; .*'01', '02'.*text"),
        ({1: ONE, "1": ONE}, CELLS.assign(field=[1, 1]), {}, "1, '1' are the same text"),
        (FIELDS, CELLS.assign(field=["a", None]), {}, "1 of 2 cells lie in fields that are not given"),
        (FIELDS, CELLS.assign(y=["1", "?"]), {}, "1 of 2 cells have no position .* row 1"),
        (FIELDS, None, {"labels": {"a": MASK * 0}}, "no cells"),
        (FIELDS, CELLS, {"labels": {"a": MASK, "b": MASK}}, "no 'label'"),
        (ONE, pd.DataFrame({"label": [1, 2]}), {"labels": MASK}, "1 of 2 cells have a label without pixels.* row 1"),
    ],
)
def test_crop_cells_invalid_input_raises(images, cells, how, message):
    with pytest.raises((ValueError, KeyError, TypeError), match=message):
        crop_cells(images, cells, **{"size": 8} | how)


@pytest.mark.parametrize("names", [[1, 1, 10], [1.0, 1.0, 10.0], ["1", "1", "10"], np.array([1, 1, 10], "uint8")])
@pytest.mark.parametrize("dtype", [None, "category"])
@pytest.mark.parametrize("convert", [str, int, np.int64])
def test_crop_cells_fields_named_by_number_or_text_are_matched(field, labels, names, dtype, convert):
    """Files give names of fields as text, tables often as numbers; labels in a table may be text, too."""
    fields = {"1": field, "10": field[:, ::-1]}
    masks = {convert(1): labels, convert(10): labels[::-1][None, None]}
    cells = pd.DataFrame({"field": pd.Series(names, dtype=dtype), "label": ["900", "3", "7"]})
    found = crop_cells(fields, cells, labels=masks, size=9, mask="background")
    expected = crop_cells(fields, labels={"1": labels, "10": labels[::-1]}, size=9, mask="background")
    assert expected.obs.index.tolist() == ["1_3", "1_7", "1_900", "10_3", "10_7", "10_900"]
    np.testing.assert_array_equal(read_pixels(found), read_pixels(expected)[[2, 0, 4]])
    assert found.obs["field"].tolist() == list(names) and found.obs["area"].tolist() == [2, 20, 45]


def test_crop_cells_field_damaged_later_raises_with_its_name(tmp_path, field):
    image = zarr.create_array(tmp_path / "image.zarr", data=field, chunks=(3, 20, 25))
    crops = crop_cells({"well A1": image}, cells_at((10, 10), (32, 40)), size=8)
    (tmp_path / "image.zarr" / "c" / "0" / "1" / "1").write_bytes(b"damaged")
    assert crops.images.read(slice(0, 1)).any()
    with pytest.raises(ValueError, match="well A1"):
        read_pixels(crops)


def test_crop_cells_field_without_labels_warns():
    with pytest.warns(UserWarning, match="1 of 2 fields has no labels.*b"):
        assert set(crop_cells(FIELDS, labels={"a": MASK}, size=9).obs["field"]) == {"a"}


def test_crop_cells_only_cell_of_a_field_may_have_the_label_255():
    labels = np.zeros((64, 64), dtype="int32")
    labels[20:26, 20:26] = 255  # numbered over all fields
    cells = crop_cells({"a": np.ones((1, 64, 64), dtype="uint16")}, labels={"a": labels}, size=16)
    assert cells.obs["label"].tolist() == [255]
