"""Every flipped bit that changes what is read is found, wherever it is."""

from __future__ import annotations

import gc
import shutil
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
from scbd.data.stores._tables import TABLES_KEY

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
        "obs has text with a NUL character in 'note'": {"note": ["a\0b"] * 8},
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
