"""Every flipped bit that changes what is read is found, wherever it is."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from anndata import AnnData
from conftest import make_cells

from scbd.data import open_embedding, open_screen, verify_screen, write_screen
from scbd.data._inputs import image_source
from scbd.data.stores._block_file import BlockFile
from scbd.data.stores._tables import TABLES_KEY, storable

IMAGES = "single_cell_images"


def cells() -> AnnData:
    found = make_cells(30)
    found.obs["day"] = np.arange(30)
    found.obs["dose"] = np.linspace(0, 1, 30)
    found.obs["seen"] = np.arange(30) % 3 == 0
    found.obs["count"] = pd.array([None, *range(29)], dtype="Int64")
    return found


def write(path) -> None:
    """A screen, or an embedding."""
    if path.stem == "z":
        rng = np.random.default_rng(0)
        file = BlockFile(path, AnnData(obs=cells().obs), {"X": ((30, 2), np.dtype("f4"))}, 30, {"digest": "x"})
        file.begin()
        file.write(0, {"X": rng.random((30, 2), dtype=np.float32)})
        assert file.finish()
    else:
        write_screen(path, cells(), y_key="gene", dtype="uint16", intensity_range=(0, 300), block_size=16)


def what_is_read(path):
    """All that opening gives, as text."""
    adata = open_embedding(path) if path.stem == "z" else open_screen(path)
    key = "X" if path.stem == "z" else IMAGES
    values = image_source(adata, key).read(slice(None)) if path.stem != "z" else adata.obsm[key]
    said = repr(sorted((key, str(value)) for key, value in adata.uns["scbd_store"].items()))
    tables = [repr([*map(repr, frame.to_numpy().tolist()), frame.index.tolist()]) for frame in (adata.obs, adata.var)]
    return [
        *tables,
        repr(adata.obs.dtypes.to_dict()),
        said,
        values.dtype.str,
        values.tobytes(),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr", "z.h5ad"])
def test_flips_that_change_what_is_read_are_found(tmp_path, name):
    whole, copy = tmp_path / "whole" / name, tmp_path / name
    whole.parent.mkdir()
    write(whole)
    verify_screen(whole)
    right = what_is_read(whole)
    rng = np.random.default_rng(0)
    # most bytes are images, which have a test of their own
    files = [file for file in (whole, *whole.rglob("*")) if file.is_file() and IMAGES not in str(file)]
    found = 0
    for _ in range(25):
        shutil.copytree(whole, copy) if whole.is_dir() else shutil.copy(whole, copy)
        file = files[rng.integers(len(files))]
        data = bytearray(file.read_bytes())
        at = rng.integers(len(data)) if whole.is_dir() else rng.choice(tables_of(whole))
        data[at] ^= 1 << int(rng.integers(8))
        (copy / file.relative_to(whole) if whole.is_dir() else copy).write_bytes(data)
        try:
            verify_screen(copy)
        except (KeyError, OSError, RuntimeError, TypeError, ValueError):
            found += 1
        else:
            assert what_is_read(copy) == right
        gc.collect()  # what an error still holds is open, and removing it would be refused
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    assert found > 5


def tables_of(path) -> np.ndarray:
    """Where values of tables lie in a file."""
    places: list[np.ndarray] = []

    def note(name, node):
        if isinstance(node, h5py.Dataset) and not name.startswith("obsm") and node.id.get_offset() and node.size:
            places.append(node.id.get_offset() + np.arange(node.id.get_storage_size()))

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return np.concatenate(places)


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
def test_a_changed_label_is_named(tmp_path, name):
    path = tmp_path / name
    write(path)
    store: Any = h5py.File(path, "r+") if path.is_file() else zarr.open_group(path, mode="r+")
    codes = store["obs/gene/codes"]
    codes[3] = (codes[3] + 1) % 4
    store.attrs["more"] = 1
    if path.is_file():
        store.close()
    with pytest.raises(ValueError, match="is damaged, or was changed since it was written, in .*obs.*"):
        verify_screen(path)


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
def test_of_an_older_store_blocks_alone_are_verified(tmp_path, name):
    path = tmp_path / name
    write(path)
    store: Any = h5py.File(path, "r+") if path.is_file() else zarr.open_group(path, mode="r+")
    del store[f"uns/scbd_store/{TABLES_KEY}"]
    if path.is_file():
        store.close()
    with pytest.warns(UserWarning, match="older scbd, without checksums of its tables: blocks alone were verified"):
        verify_screen(path)


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
def test_names_and_text_that_no_store_holds(tmp_path, name):
    cases: dict[str, dict[str, Any]] = {
        "obs has a column 'a/b', of which a store makes a path: rename it.*'a_b'": {"a/b": 1},
        "obs has a column '..', of which": {"..": 1},
        "obs has a column '_index', which a store keeps for itself: rename it.*'index'": {"_index": 1},
        "obs has text with a NUL character in 'note'": {"note": ["a\0b"] * 8},
        "obs has text with half of a character .'.udcff'. in 'note'": {"note": ["a\udcff"] * 8},
        r"obs\['pixels'\] holds values of the type ndarray, which cannot be stored and for which no": {
            "pixels": [np.zeros(3)] * 8
        },
        r"obs\['what'\] holds values of the type object, which": {"what": [object()] * 8},
        r"obs\['what'\] holds values of the type dict, which": {"what": [["a"]] * 7 + [{}]},
    }
    for message, columns in cases.items():
        cells = make_cells(8)
        cells.obs = cells.obs.assign(**columns)
        with pytest.raises(ValueError, match=message):
            write_screen(tmp_path / name, cells, y_key="gene")
    cells = make_cells(8)
    cells.obs_names = [f"cell\0{i}" for i in range(8)]
    with pytest.raises(ValueError, match="obs has text with a NUL character in 'index'"):
        write_screen(tmp_path / name, cells, y_key="gene")
    assert not list(tmp_path.iterdir())


def objects(*values: Any) -> np.ndarray:
    """Whatever they are, each in a place of its own."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


DAYS = ["2024-05-02 00:00:00", None, "2024-05-01 00:00:00"]
# as they are given, and as they come back; None is a missing value
NO_TYPES_OF_A_STORE: dict[str, tuple[Any, list[Any]]] = {
    "dates": (
        pd.Timestamp("2024-05-01") + pd.to_timedelta([0, 1, 2], "D"),
        [f"2024-05-0{i} 00:00:00" for i in (1, 2, 3)],
    ),
    "dates, missing": (pd.to_datetime(["2024-05-02", None, "2024-05-01"]), DAYS),
    "categories of dates": (pd.Categorical(pd.to_datetime(["2024-05-02", None, "2024-05-01"])), DAYS),
    "durations": (pd.to_timedelta([1, 0, 1], "D"), ["1 days 00:00:00", "0 days 00:00:00", "1 days 00:00:00"]),
    "periods": (pd.period_range("2024-01", periods=3, freq="M"), ["2024-01", "2024-02", "2024-03"]),
    "intervals": (pd.cut([1, 5, 10], [0, 2, 10]), ["(0, 2]", "(2, 10]", "(2, 10]"]),
    "numbers and text": (objects(1, "A", None), ["1", "A", None]),
    "one name twice": (objects(1, "1", 1.0), ["1", "1", "1"]),
    "categories of numbers and text": (pd.Categorical([1, "1", "A"]), ["1", "1", "A"]),
    "paths": (objects(Path("a/b"), Path("c"), None), ["a/b", "c", None]),
    "lists": (objects([1, 2], [], ["a"]), ["[1, 2]", "[]", "[a]"]),
    "large numbers": (objects(2**70, 1, 2), [str(2**70), "1", "2"]),
    "truth values, missing": (objects(True, None, False), [True, None, False]),
    "numbers, missing": (objects(1, None, 2), [1, None, 2]),
    "text, missing": (objects("a", None, "c"), ["a", None, "c"]),
    "nothing": (objects(None, None, None), [None, None, None]),
    "text of pandas": (pd.array(["a", None, "c"], dtype="string"), ["a", None, "c"]),
    "floats with a mask": (pd.array([0.5, None, 1], dtype="Float64"), [0.5, None, 1]),
    "sparse": (pd.arrays.SparseArray([0, 1, 0]), [0, 1, 0]),
}


@pytest.mark.parametrize("name", NO_TYPES_OF_A_STORE)
def test_columns_that_no_store_has_become_text(tmp_path, name):
    values, expected = NO_TYPES_OF_A_STORE[name]
    cells = make_cells(3)
    cells.obs["column"] = values
    given = cells.obs.copy()
    for path in (tmp_path / "s.h5ad", tmp_path / "s.zarr"):
        screen = write_screen(path, cells, y_key="gene")
        verify_screen(path)
        found = screen.obs["column"].reindex(cells.obs_names)
        assert [None if pd.isna(value) else value for value in found] == expected
        assert screen.obs["gene"].equals(cells.obs["gene"].reindex(screen.obs_names))
    pd.testing.assert_frame_equal(cells.obs, given)


def test_intervals_keep_their_order():
    table = pd.DataFrame({"dose": pd.cut([1, 30, 200], [0, 2, 10, 100, 1000])})
    found = storable(table)["dose"].cat
    assert found.ordered and list(found.categories) == ["(0, 2]", "(2, 10]", "(10, 100]", "(100, 1000]"]


def test_a_table_that_a_store_has_stays_as_it_is():
    table = cells().obs.assign(text="a", day=pd.Categorical(["b"] * 30), number=1j)
    assert storable(table) is table


def test_names_that_stand_for_two_columns():
    table = pd.DataFrame([[1, 2]], columns=["day", "day"], index=["a"])
    with pytest.raises(ValueError, match="obs has several columns of the name 'day': rename or drop all but one"):
        storable(table)
    table = pd.DataFrame({"day": [1]}, index=pd.Index(["a"], name="day"))
    with pytest.raises(ValueError, match="The index of var has the name 'day', and so has a column with other values"):
        storable(table, "var")
    assert storable(table.assign(day="a")).index.name == "day"


def test_rows_of_one_name_keep_their_values():
    table = pd.DataFrame({"day": pd.to_datetime(["2024-05-02", "2024-05-01"])}, index=["a", "a"])
    assert list(storable(table)["day"]) == ["2024-05-02 00:00:00", "2024-05-01 00:00:00"]


def test_text_on_one_plate_and_numbers_on_another(tmp_path):
    """Rows of a plate may be 1 here and A there; perturbations too, and these are sorted."""
    plates = [make_cells(12), make_cells(12, seed=1)]
    for plate, row in zip(plates, (1, "A"), strict=True):
        plate.obs["row"] = row
    plates[0].obs["guide"] = np.arange(12) % 3
    plates[1].obs["guide"] = [str(number % 3) for number in range(12)]
    screen = write_screen(tmp_path / "s.h5ad", plates, y_key="guide")
    assert set(screen.obs["row"]) == {"1", "A"} and set(screen.obs["guide"]) == {"0", "1", "2"}
    assert screen.obs["guide"].astype(str).is_monotonic_increasing


@pytest.mark.parametrize("name", ["s.h5ad", "s.zarr"])
def test_nothing_is_left_of_tables_that_could_not_be_written(tmp_path, monkeypatch, name):
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    for module in ("_block_file", "_containers"):
        monkeypatch.setattr(f"scbd.data.stores.{module}.tables_checksums", fails)
    with pytest.raises(OSError, match="No space left"):
        write_screen(tmp_path / name, make_cells(8), y_key="gene")
    assert not list(tmp_path.iterdir())
