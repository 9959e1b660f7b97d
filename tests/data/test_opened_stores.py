"""A table is not written to the store of its images; copies and files elsewhere have the same images."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import zarr
from anndata import AnnData
from anndata.io import write_elem, write_zarr
from conftest import make_cells

from scbd import SCBDModel, run
from scbd.data import open_screen, write_screen
from scbd.data._input_location import image_source

IMAGES = "single_cell_images"
# of AnnData, on its plans, and of Zarr, on metadata that AnnData writes
pytestmark = pytest.mark.filterwarnings("ignore:.*zarr v[23]:UserWarning", "ignore:Consolidated metadata:UserWarning")
WRITERS = {
    "method": AnnData.write_zarr,
    "method, by text": lambda table, path: table.write_zarr(str(path)),
    "method, trailing slash": lambda table, path: table.write_zarr(f"{path}/"),
    "method, relative path": lambda table, path: table.write_zarr(os.path.relpath(path)),
    "method, link": lambda table, path: table.write_zarr(linked(path)),
    "method, address": lambda table, path: table.write_zarr(f"file://{path}"),
    "method, store": lambda table, path: table.write_zarr(zarr.storage.LocalStore(path)),
    "function": lambda table, path: write_zarr(path, table),
    "element": lambda table, path: write_elem(zarr.open_group(path, mode="w"), "/", table),
    "element, kept group": lambda table, path: write_elem(zarr.open_group(path, mode="r+"), "/", table),
    "element, obsm": lambda table, path: write_elem(zarr.open_group(path, mode="r+"), "obsm", dict(table.obsm)),
    "element, images": lambda table, path: write_elem(
        zarr.open_group(path, mode="r+", use_consolidated=False)["obsm"], IMAGES, table.obsm[IMAGES]
    ),
    "write": AnnData.write,
    "write_screen": lambda table, path: write_screen(path, table, y_key="gene"),
    "remove": lambda _, path: shutil.rmtree(path),
}
TABLES = {
    "itself": lambda table: table,
    "view": lambda table: table[:5],
    "copy": lambda table: table.copy(),
    "copy of a copy": lambda table: table.copy().copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda table: pickle.loads(pickle.dumps(table)),
    "concat": lambda table: anndata.concat([table, table], index_unique="-"),
}


def linked(path: Path) -> Path:
    link = path.with_name("link.zarr")
    link.symlink_to(path)
    return link


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def images_of(table: AnnData) -> np.ndarray:
    return image_source(table, IMAGES).read(slice(None))


@pytest.fixture
def path(tmp_path):
    write_screen(tmp_path / "s.zarr", make_cells(40), y_key="gene")
    gc.collect()
    return tmp_path / "s.zarr"


@pytest.mark.parametrize(
    ("writer", "table"), [(writer, "itself") for writer in WRITERS] + [("method", table) for table in list(TABLES)[1:]]
)
def test_opened_screen_written_to_its_own_path_raises_and_loses_nothing(path, writer, table):
    before, screen = contents(path), open_screen(path)
    images = images_of(screen)
    written = TABLES[table](screen)
    with pytest.raises((OSError, ValueError)):
        WRITERS[writer](written, path)
    assert contents(path) == before
    np.testing.assert_array_equal(images_of(open_screen(path)), images)


@pytest.mark.parametrize("address", [str, "file://{}".format, zarr.storage.LocalStore], ids=["path", "url", "store"])
def test_screen_opened_by_any_address_is_protected(path, address):
    before, screen = contents(path), open_screen(address(path))
    with pytest.raises(PermissionError, match="another path"):
        screen.write_zarr(path)
    assert contents(path) == before


@pytest.mark.parametrize("place", [{"layer": "X"}, {"layer": "counts"}, {"obsm_key": "dino"}], ids=str)
def test_opened_features_written_to_their_own_path_raise_and_are_copied(tmp_path, place):
    values = np.arange(80, dtype="float32").reshape(20, 4)
    with anndata.settings.override(zarr_write_format=3):
        AnnData(values, layers={"counts": values}, obsm={"dino": values}).write_zarr(tmp_path / "f.zarr")
    before, opened = contents(tmp_path / "f.zarr"), open_screen(tmp_path / "f.zarr", **place)
    copied = opened.copy()
    for table in (opened, copied):
        with pytest.raises(PermissionError, match="another path"):
            table.write_zarr(tmp_path / "f.zarr")
    assert contents(tmp_path / "f.zarr") == before
    held = {"X": copied.X, "counts": copied.layers.get("counts"), None: copied.obsm.get("dino")}[place.get("layer")]
    np.testing.assert_array_equal(held[:], values)


def test_opened_h5ad_written_to_its_own_path_raises(tmp_path):
    make_cells(8).write_h5ad(tmp_path / "s.h5ad")
    before, screen = (tmp_path / "s.h5ad").read_bytes(), open_screen(tmp_path / "s.h5ad")
    for table in (screen, screen[:5], screen.copy()):
        with pytest.raises(OSError):  # noqa: PT011  # the sentence is HDF5's
            table.write_h5ad(tmp_path / "s.h5ad")
    assert (tmp_path / "s.h5ad").read_bytes() == before


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("suffix", ["zarr", "h5ad"])
def test_opened_screen_written_elsewhere_has_the_same_images(path, tmp_path, table, suffix):
    screen = open_screen(path)
    written = TABLES[table](screen)
    with anndata.settings.override(zarr_write_format=3):
        getattr(written, f"write_{suffix}")(tmp_path / f"t.{suffix}")
    rows = screen.obs_names.get_indexer(written.obs_names.str.removesuffix("-0").str.removesuffix("-1"))
    np.testing.assert_array_equal(images_of(open_screen(tmp_path / f"t.{suffix}")), images_of(screen)[rows])


def test_copy_of_opened_screen_has_tables_of_its_own(path):
    screen = open_screen(path)
    copied = screen.copy()
    copied.obs["gene"], copied.uns["note"], copied.obsm["z"] = "changed", "new", np.zeros((40, 2))
    assert (screen.obs["gene"] != "changed").all() and "note" not in screen.uns and "z" not in screen.obsm
    np.testing.assert_array_equal(images_of(copied), images_of(screen))


def test_store_is_removed_when_no_table_is_open_and_with_a_folder_above(path):
    screen = open_screen(path)
    shutil.rmtree(path / "obs")  # no part of the images
    del screen
    shutil.rmtree(path)
    write_screen(path, make_cells(10), y_key="gene")
    screen = open_screen(path)
    shutil.rmtree(path.parent)
    assert screen.n_obs == 10


def test_screen_in_a_store_in_memory_keeps_its_images_when_it_is_written_there(path):
    store = zarr.storage.MemoryStore()
    with anndata.settings.override(zarr_write_format=3):
        open_screen(path).to_memory().write_zarr(store)
        screen = open_screen(store)
        screen.write_zarr(store)
    np.testing.assert_array_equal(images_of(open_screen(store)), images_of(open_screen(path)))


@pytest.mark.filterwarnings("ignore")  # the model is hardly trained
@pytest.mark.parametrize("inside", ["", "results"])
def test_results_are_not_written_into_an_opened_screen(path, inside):
    before, screen, out = contents(path), open_screen(path), path / inside
    SCBDModel.setup_anndata(screen, y_key="gene", e_key="well")
    model = SCBDModel(screen, encoder="small", n_latent=4)
    training: dict[str, Any] = {"max_steps": 1, "enable_progress_bar": False}
    writers = [
        lambda: run(screen, y_key="gene", e_key="well", out=out, train_kwargs=training),
        lambda: model.train(**training, checkpoint_dir=out),
        lambda: model.train(**training) or model.save(str(out), overwrite=True, save_anndata=True),
    ]
    for write in writers:
        with pytest.raises(FileExistsError, match="Zarr store"):
            write()
    assert contents(path) == before


def test_opened_screen_saved_with_its_model_keeps_its_images(path, tmp_path):
    screen = open_screen(path)
    images = images_of(screen)
    SCBDModel.setup_anndata(screen, y_key="gene", e_key="well")
    model = SCBDModel(screen, encoder="small", n_latent=4)
    for _ in range(2):  # the second time over the cells that the first one has written
        model.save(str(tmp_path / "model"), save_anndata=True, overwrite=True)
        model.adata = open_screen(tmp_path / "model" / "adata.h5ad")
        np.testing.assert_array_equal(images_of(model.adata), images)
