"""Crops of fields: which pixels they have, and what is said of fields and tables that do not fit."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scbd.data import crop_cells, open_screen, write_screen
from scbd.data.fields import _source

RNG = np.random.default_rng(0)


def padded_and_sliced(image: np.ndarray, y: float, x: float, size: int, edge: str) -> np.ndarray:
    """The naive form: pad the whole field by a crop, and cut."""
    row, column = (int(np.floor(value + 0.5)) for value in (y, x))
    mode: dict[str, Any] = {"mode": "constant"} if edge == "zeros" else {"mode": "reflect"}
    padded = np.pad(image, ((0, 0), (size, size), (size, size)), **mode)
    top, left = row + size - size // 2, column + size - size // 2
    return padded[:, top : top + size, left : left + size]


def quietly(*arguments: Any, **how: Any) -> Any:
    """Edges are reached in most of these tests, and said so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*reach over the edge", UserWarning)
        return crop_cells(*arguments, **how)


def pixels(crops: Any) -> np.ndarray:
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


@given(data=st.data(), edge=st.sampled_from(["zeros", "reflect"]), size=st.integers(1, 24))
def test_any_crop_is_that_of_a_padded_field(data, edge, size):
    """Wherever its centroid lies, in fields larger and smaller than the crop."""
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(2, 40), st.integers(2, 40)))
    image = data.draw(hnp.arrays("uint8", shape))
    places = data.draw(
        st.lists(st.tuples(*(st.floats(-0.5, n - 0.5, exclude_max=True) for n in shape[1:])), min_size=1, max_size=8)
    )
    found = pixels(quietly(image, cells_at(*places), size=size, edge=edge))
    naive = [padded_and_sliced(image, y, x, size, edge) for y, x in places]
    np.testing.assert_array_equal(found, naive)


@given(y=st.floats(0, 39.49), x=st.floats(0, 49.49), size=st.integers(1, 31))
def test_the_pixel_of_the_centroid_is_the_centre(y, x, size):
    image = np.zeros((1, 40, 50), "uint8")
    image[0, int(np.floor(y + 0.5)), int(np.floor(x + 0.5))] = 255
    crop = pixels(quietly(image, cells_at((y, x)), size=size))[0, 0]
    assert np.argwhere(crop).tolist() == [[size // 2, size // 2]]


@pytest.mark.parametrize("kind", ["numpy", "zarr", "npy", "stack"])
def test_fields_of_any_kind_are_the_same(field, kind, tmp_path):
    image: Any = field
    if kind == "zarr":
        image = zarr.create_array(tmp_path / "image.zarr", data=field, chunks=(1, 16, 16))
    elif kind == "npy":
        np.save(tmp_path / "image.npy", field)
        image = tmp_path / "image.npy"
    elif kind == "stack":
        np.save(tmp_path / "0.npy", field[0])
        image = [str(tmp_path / "0.npy"), field[1:]]
    places = [(3.2, 4.8), (20, 20), (39, 49)]
    image = {"A1": image}
    found = quietly(image, cells_at(*places), size=12)
    np.testing.assert_array_equal(pixels(found), [padded_and_sliced(field, y, x, 12, "zeros") for y, x in places])


def test_dask(field):
    dask = pytest.importorskip("dask.array", reason="dask is not installed")
    image = dask.from_array(field, chunks=(1, 16, 16))
    found = crop_cells(image, cells_at((20, 20)), size=12)
    np.testing.assert_array_equal(pixels(found)[0], padded_and_sliced(field, 20, 20, 12, "zeros"))


def test_big_fields_are_read_in_parts(field, monkeypatch):
    """And cells are sorted by them."""
    monkeypatch.setattr(_source, "_AT_ONCE", field.nbytes // 9 + 1)
    places = RNG.uniform(0, 39, (60, 2)).tolist()
    found = quietly(field, cells_at(*places), size=7)
    parts = (found.obs[["y", "x"]].to_numpy() + 0.5).astype(int) * 3 // (40, 50)
    assert (np.diff(parts @ [3, 1]) >= 0).all() and len(np.unique(parts, axis=0)) > 4
    assert found.images.chunk_rows == -(-60 // len(np.unique(parts, axis=0)))
    naive = [padded_and_sliced(field, y, x, 7, "zeros") for y, x in found.obs[["y", "x"]].to_numpy()]
    np.testing.assert_array_equal(pixels(found), naive)
    rows = RNG.permutation(60)[:17]
    np.testing.assert_array_equal(found.images.read(rows), np.array(naive)[rows])


class Counted:
    """An array that counts how often it is read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, 0

    def __getitem__(self, part: Any) -> np.ndarray:
        self.reads += 1
        return self.array[part]


def test_into_a_screen(tmp_path):
    """Every cell with its own pixels and labels, each field read once and for a few glances."""
    fields = [Counted(RNG.integers(0, 250, (2, 64, 64)).astype("uint8")) for _ in range(300)]
    n = 3000
    cells = pd.DataFrame({"field": RNG.integers(300, size=n), "y": RNG.uniform(16, 47, n), "x": RNG.uniform(16, 47, n)})
    cells["gene"] = RNG.choice(["a", "b", "c"], n)
    table = pd.DataFrame({"image": fields, "well": [f"A{i // 4}" for i in range(300)]})
    crops = crop_cells(table, cells, size=32)
    screen = write_screen(tmp_path / "screen.zarr", crops, y_key="gene", n_workers=3)
    again = open_screen(tmp_path / "screen.zarr")
    assert again.n_obs == n and screen.obs["gene"].is_monotonic_increasing
    for row in range(0, n, 37):
        cell = again.obs.iloc[row]
        assert cell["well"] == f"A{int(cell['field']) // 4}"
        naive = padded_and_sliced(fields[int(cell["field"])].array, cell["y"], cell["x"], 32, "zeros")
        np.testing.assert_array_equal(again.obsm["single_cell_images"][row], naive)
    # one to look whether it can be decoded, 64 for the digest, once each, and where a stretch ends inside of one
    assert sum(field.reads for field in fields) <= 1 + 2 * 64 + 300 + 20


def test_a_screen_that_was_begun_from_other_fields_is_not_gone_on_with(tmp_path, field):
    from scbd.data.stores._conversion import conversion
    from scbd.data.stores._plan import screen_plan

    cells = cells_at((20, 20), (20, 22), gene=["a", "b"])
    plans = []
    for image in (field, field, field + np.uint16(1)):
        crops = [crop_cells(image, cells, size=8)]
        plans.append(screen_plan(crops, "gene", conversion(crops, None, None, None, 0), None, 0).settings())
    assert plans[0] == plans[1] != plans[2]


def test_to_memory(field):
    cells = cells_at((20, 20), (20, 22), gene=["a", "b"])
    adata = crop_cells(field, cells, size=8, channels={"DNA": 2, "actin": 0}).to_memory()
    assert adata.var_names.tolist() == ["DNA", "actin"] and adata.obs["gene"].tolist() == ["a", "b"]
    np.testing.assert_array_equal(adata.obsm["single_cell_images"][0], field[[2, 0], 16:24, 16:24])


def test_cells_are_at_the_centroids_of_their_labels(field, labels):
    found = quietly({"A": field}, labels={"A": labels}, size=9)
    assert found.obs.index.tolist() == ["A_3", "A_7", "A_900"]
    assert found.obs[["y", "x"]].to_numpy().tolist() == [[17.5, 22], [12, 24], [30, 2.5]]
    cells = pd.DataFrame({"field": ["A", "A"], "label": [900, 3], "gene": ["x", "y"]}, index=["c1", "c2"])
    chosen = quietly({"A": field}, cells, labels={"A": labels}, size=9)
    np.testing.assert_array_equal(pixels(chosen), pixels(found)[[2, 0]])
    assert chosen.obs["gene"].tolist() == ["x", "y"] and chosen.obs.index.tolist() == ["c1", "c2"]


def test_centroids_of_large_masks_are_those_of_their_bands(field, labels, monkeypatch):
    from scbd.data.fields import _labels

    whole = quietly(field, labels=labels, size=9).obs
    monkeypatch.setattr(_labels, "_AT_ONCE", 150)
    pd.testing.assert_frame_equal(quietly(field, labels=labels, size=9).obs, whole)


@pytest.mark.parametrize("edge", ["zeros", "reflect"])
@pytest.mark.parametrize("mask", ["neighbours", "background"])
def test_masks(field, labels, mask, edge):
    found = quietly(field, labels=labels, size=15, mask=mask, edge=edge)
    for crop, label, y, x in zip(pixels(found), *(found.obs[key] for key in ("label", "y", "x")), strict=True):
        own = padded_and_sliced(labels[None], y, x, 15, edge)
        keep = (own == label) | ((own == 0) & (mask == "neighbours"))
        np.testing.assert_array_equal(crop, padded_and_sliced(field, y, x, 15, edge) * keep)


def test_edges_are_left_out_or_counted(field):
    cells = cells_at((20, 20), (4, 20), (36, 20), (20, 4), (20, 46))
    crop_cells(field, cells, size=8)  # says nothing
    with pytest.warns(UserWarning, match="2 of 5 crops reach over the edge of their field: zeros are there"):
        crop_cells(field, cells, size=9)
    with pytest.warns(UserWarning, match="4 of 5 .* these cells are left out"):
        kept = crop_cells(field, cells, size=10, edge="drop")
    assert kept.obs.index.tolist() == ["0"]
    with pytest.raises(ValueError, match="all 5 cells reach over the edge"):
        crop_cells(field, cells, size=60, edge="drop")


def test_physical_positions_and_pixel_sizes(field):
    micrometres = cells_at((20 * 0.5, 22 * 0.25))
    table = pd.DataFrame({"image": [field], "pixel_size": [(0.5, 0.25)]})
    for found in (
        crop_cells(table, micrometres, size=8, physical=True),
        crop_cells(field, cells_at((10, 11)), size=8, physical=True, pixel_size=0.5),
    ):
        np.testing.assert_array_equal(pixels(found)[0], field[:, 16:24, 18:26])


def test_fields_are_resampled_to_one_pixel_size():
    """A spot of 4 × 4 µm is as large, and in the middle, whatever the pixels."""
    images, cells = {}, []
    for name, pixel in (("fine", 0.5), ("coarse", 1.0)):
        side = int(100 / pixel)
        centre = (np.arange(side) * pixel)[:, None]
        images[name] = ((abs(centre - 40) <= 2) & (abs(centre.T - 60) <= 2)).astype("uint8")[None] * 200
        cells.append({"field": name, "y": 40.0, "x": 60.0})
    table = pd.DataFrame({"image": list(images.values()), "pixel_size": [0.5, 1.0]}, index=list(images))
    found = crop_cells(table, pd.DataFrame(cells), size=33, physical=True, resample_to=1.0)
    for crop in pixels(found)[:, 0].astype(float):
        y, x = (np.average(np.arange(33), weights=crop.sum(axis)) for axis in (1, 0))
        assert abs(y - 16) < 0.5 and abs(x - 16) < 0.5
        assert 20 < crop.sum() / 200 < 30
    assert found.images.dtype == np.uint8
    fine = crop_cells(table, pd.DataFrame(cells)[:1], size=33, physical=True, resample_to=0.5)
    np.testing.assert_array_equal(pixels(fine)[0], images["fine"][:, 64:97, 104:137])


def test_channels_by_name_whatever_their_order(field):
    """Of plates whose files name them."""
    from scbd.data.fields._field import ArrayField

    one, other = (ArrayField(field, "A", channels=names) for names in (["DNA", "actin", "ER"], ["ER", "RNA", "DNA"]))
    cells = cells_at((20, 20), (20, 20), field=["a", "b"])
    images = {"a": one, "b": other}
    with pytest.raises(ValueError, match=r"Field 'b' has 3 channels \(ER, RNA, DNA\), field 'a' .*channels="):
        crop_cells(images, cells, size=8)
    found = crop_cells(images, cells, size=8, channels=["ER", "DNA"])
    assert found.channels == ["ER", "DNA"]
    np.testing.assert_array_equal(pixels(found)[:, :, 4, 4], [field[[2, 0], 20, 20], field[[0, 2], 20, 20]])
    with pytest.raises(KeyError, match=r"Field 'b' \(channels\) has no 'actin' \(its keys: ER, RNA, DNA\)"):
        crop_cells(images, cells, size=8, channels=["actin"])
    with pytest.raises(ValueError, match="Field 'a' has 3 channels, of the numbers 0 to 2: there is no 3"):
        crop_cells(images, cells, size=8, channels=[3])


FIELDS = {"a": np.ones((2, 40, 50), "uint8"), "b": np.ones((2, 40, 50), "uint8")}
CELLS = cells_at((20, 20), (10, 10), field=["a", "b"])


@pytest.mark.parametrize(
    ("images", "cells", "how", "message"),
    [
        (
            FIELDS,
            CELLS.assign(y=[20, 39.6]),
            {},
            r"1 of 2 cells have a centroid outside .* 1 in field 'b', at y=39.6",
        ),
        (FIELDS, CELLS.assign(x=[np.nan, 1]), {}, "1 of 2 cells have a centroid outside"),
        (FIELDS, CELLS.assign(x=[1, 1e300]), {}, "1 of 2 cells have a centroid outside"),
        (FIELDS, CELLS.assign(field=["a", "c"]), {}, "1 of 2 cells lie in fields that are not given: c. Fields are: a"),
        (FIELDS, CELLS.drop(columns="field"), {}, "no 'field' .* There are 2 fields: a, b"),
        (FIELDS, CELLS.drop(columns="y"), {}, "no 'y' .*Name it with yx_keys"),
        (FIELDS, CELLS.assign(y="20"), {}, "positions and labels are numbers"),
        (FIELDS, CELLS[:0], {}, "is empty"),
        (FIELDS, np.ones((40, 50), int), {}, "label masks are given as labels"),
        (FIELDS, None, {}, "Give cells, .* or labels"),
        (FIELDS, CELLS, {"size": 0}, "size=0"),
        (FIELDS, CELLS, {"edge": "mirror"}, "edge='mirror' is not known: use 'zeros', 'reflect', 'drop'"),
        (FIELDS, CELLS, {"mask": "neighbours"}, "needs labels"),
        (FIELDS, CELLS, {"physical": True}, r"not known of 2 of 2 fields \(a, b\): give pixel_size"),
        (FIELDS, CELLS, {"pixel_size": -1}, "Pixel sizes are positive: that of field 'a'"),
        (FIELDS, CELLS, {"pixel_size": 1, "resample_to": 0}, "Pixel sizes are positive: resample_to is 0"),
        (FIELDS, CELLS, {"channels": []}, r"channels=\[\]: name at least one of channel_0, channel_1"),
        ({"a": FIELDS["a"], "b": FIELDS["b"][:1]}, CELLS, {}, r"Field 'b' has 1 channels .* field 'a' has 2"),
        ({"a": FIELDS["a"], "b": FIELDS["b"] * 1.0}, CELLS, {}, "pixels must be of one dtype"),
        ({"a": FIELDS["a"].astype(int)}, CELLS[:1], {}, "cast it to one of uint8"),
        (
            {"a": np.ones((3, 2, 40, 50))},
            CELLS[:1],
            {},
            r"cannot be read \(a\); .* has shape \(3, 2, 40, 50\), a field",
        ),
        ({"a": np.ones((40, 50, 3))}, CELLS[:1], {}, "looks like .height, width, channels"),
        ({"a": np.ones((3, 0, 5))}, CELLS[:1], {}, "is empty"),
        ({"a": 3}, CELLS[:1], {}, "image of field 'a' is int: give an array"),
        ({"a": "image.jpg"}, CELLS[:1], {}, r"There is nothing at image.jpg"),
        ({1: FIELDS["a"], "1": FIELDS["a"]}, CELLS[:1], {}, "names of their own"),
        (pd.DataFrame({"image": [1, 2]}, index=["a", "a"]), CELLS[:1], {}, "names of their own: a stand"),
        (pd.DataFrame({"path": [1]}), CELLS[:1], {}, "no 'image'"),
        ({}, CELLS[:1], {}, "There are no fields"),
        (FIELDS, None, {"labels": {"c": np.ones((40, 50), int)}}, "1 of 1 fields have no images: c"),
        (FIELDS, CELLS, {"labels": {"a": np.ones((40, 50), int)}}, "1 of 2 fields have no labels: b"),
        (FIELDS, None, {"labels": {"a": np.ones((40, 51), int)}}, "they must have the same pixels"),
        (FIELDS, None, {"labels": {"a": np.ones((40, 50))}}, "one plane of whole numbers"),
        (FIELDS, None, {"labels": {"a": np.ones((40, 50), bool)}}, "scipy.ndimage.label"),
        (FIELDS, None, {"labels": {"a": np.zeros((40, 50), int)}}, "No field has a label"),
        (
            {"a": FIELDS["a"]},
            pd.DataFrame({"label": [1, 2]}),
            {"labels": {"a": np.ones((40, 50), int)}},
            "1 of 2 cells have a label without pixels; the first is 1 in field 'a', label 2",
        ),
        (
            pd.DataFrame({"image": list(FIELDS.values()), "pixel_size": [0.65, 0.325]}, index=["a", "b"]),
            CELLS,
            {},
            "Pixels of field 'b' are 0.325 .* those of 'a' 0.65: .*resample_to=0.65",
        ),
        (
            pd.DataFrame({"image": list(FIELDS.values()), "well": ["A1", "A2"]}, index=["a", "b"]),
            CELLS.assign(well=["A1", "B2"]),
            {},
            "both have 'well', and differ",
        ),
    ],
)
def test_what_does_not_fit_is_said(images, cells, how, message):
    with pytest.raises((ValueError, KeyError, TypeError), match=message):
        quietly(images, cells, **{"size": 8} | how)


def test_what_cannot_be_cropped_is_left_out_and_counted(tmp_path, labels):
    """On request: centroids outside, labels without pixels, fields that are broken."""
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    images = {"a": FIELDS["a"], "b": tmp_path / "broken.npy", "c": tmp_path / "none.zarr"}
    cells = cells_at((20, 20), (10, 10), (70, 0), (1, 1), field=["a", "b", "a", "c"])
    with pytest.raises(ValueError, match=r"2 of 3 fields cannot be read \(b, c\); the first: .*broken.npy"):
        crop_cells(images, cells, size=8)
    with pytest.warns(UserWarning) as said:
        found = crop_cells(images, cells, size=8, invalid="drop")
    assert found.obs["field"].tolist() == ["a"]
    first, second = (str(one.message) for one in said)
    assert "2 of 3 fields cannot be read (b, c)" in first and "1 of 2 cells have a centroid outside" in second
    table = pd.DataFrame({"label": [7, 8]})
    with pytest.warns(UserWarning, match="1 of 2 cells have a label without pixels"):
        assert len(crop_cells(FIELDS["a"], table, labels=labels, size=8, invalid="drop").obs) == 1
    with pytest.raises(ValueError, match="none is left"):
        crop_cells(FIELDS["a"], table[1:], labels=labels, size=8, invalid="drop")


def test_a_field_that_breaks_later_is_named(tmp_path, field):
    zarr.create_array(tmp_path / "image.zarr", data=field, chunks=(3, 20, 25))
    crops = crop_cells({"well A1": tmp_path / "image.zarr"}, cells_at((10, 10), (32, 40)), size=8)
    (tmp_path / "image.zarr" / "c" / "0" / "1" / "1").write_bytes(b"damaged")
    assert crops.images.read(slice(0, 1)).any()
    with pytest.raises(ValueError, match="Field 'well A1' cannot be read"):
        pixels(crops)
