"""What is open is not written over; what is written elsewhere is right."""

from __future__ import annotations

import gc
import os
import pickle
import shutil

import anndata
import h5py
import numpy as np
import pytest
import zarr
from anndata import AnnData
from conftest import contents, make_cells

from scbd import SCBDModel
from scbd.data import memory_map_h5ad, open_embedding, open_screen, write_screen
from scbd.data._inputs import image_source

IMAGES = "single_cell_images"
pytestmark = pytest.mark.filterwarnings("ignore:.*([zZ]arr v[23]|Zarr format 3)")  # AnnData on its plans
KINDS = ["s.h5ad", "s.zarr"]
WRITERS = {
    "write_h5ad": AnnData.write_h5ad,
    "write_zarr": AnnData.write_zarr,
    "io.write_zarr": lambda adata, path: anndata.io.write_zarr(path, adata),
    "a view": lambda adata, path: adata[:5].write_h5ad(path) if path.suffix == ".h5ad" else adata[:5].write_zarr(path),
    "a copy": lambda adata, path: (
        adata.copy().write_h5ad(path) if path.suffix == ".h5ad" else adata.copy().write_zarr(path)
    ),
}


@pytest.fixture(params=KINDS)
def path(request, tmp_path):
    path = tmp_path / request.param
    write_screen(path, make_cells(40), y_key="gene", block_size=16)
    gc.collect()  # AnnData refers to itself
    return path


@pytest.mark.parametrize("writer", WRITERS)
def test_a_screen_is_not_written_over_itself(path, writer):
    if (path.suffix, writer) == (".zarr", "write_h5ad"):
        pytest.skip("h5py does not write to a folder")
    before = contents(path)
    screen = open_screen(path)
    screen.obsm["X_scbd_c"] = np.zeros((40, 3))
    with pytest.raises(OSError, match="already open|images that are open, and would be lost|File exists"):
        WRITERS[writer](screen, path)
    assert contents(path) == before


def test_an_embedding_is_not_written_over_itself(tmp_path):
    path = tmp_path / "z.h5ad"
    AnnData(obs=make_cells(8).obs, obsm={"X_scbd_c": np.ones((8, 2), "float32")}).write_h5ad(path)
    embedded = open_embedding(path)
    before = path.read_bytes()
    with pytest.raises(OSError, match="already open"):
        embedded.write_h5ad(path)
    assert path.read_bytes() == before
    # as long as any view of it lives, whoever opens and closes the file meanwhile
    part = embedded.obsm["X_scbd_c"][2:5]
    del embedded
    gc.collect()
    with h5py.File(path, "r"):
        pass
    with pytest.raises(OSError, match="already open"):
        h5py.File(path, "w")
    del part
    gc.collect()
    h5py.File(path, "w").close()


def test_a_file_that_was_replaced_or_removed_is_no_concern(tmp_path):
    path = tmp_path / "s.h5ad"
    cells = make_cells(8)
    cells.write_h5ad(path)
    mapped = memory_map_h5ad(path, f"obsm/{IMAGES}")
    make_cells(9).write_h5ad(tmp_path / "other.h5ad")
    os.replace(tmp_path / "other.h5ad", path)
    np.testing.assert_array_equal(mapped, cells.obsm[IMAGES])
    assert open_screen(path).n_obs == 9
    path.unlink()
    make_cells(7).write_h5ad(path)
    assert open_screen(path).n_obs == 7


@pytest.mark.parametrize("how", ["write_h5ad", "write_zarr", "copy", "part", "concat", "pickle"])
def test_written_elsewhere_the_images_are_right(path, tmp_path, how):
    screen = open_screen(path)
    right = image_source(screen, IMAGES).read(slice(None))
    screen.obs["more"] = np.arange(40)
    rows = np.arange(40)
    with anndata.settings.override(zarr_write_format=3):
        if how == "write_zarr":
            screen.write_zarr(tmp_path / "t.zarr")
            written = anndata.read_zarr(tmp_path / "t.zarr")
        else:
            if how == "part":
                rows = np.array([3, 30, 7])
                screen = screen[rows]
            elif how == "concat":
                rows = np.concatenate([rows, rows])
                screen = anndata.concat([screen, screen], index_unique="-")
            elif how == "pickle":
                screen = pickle.loads(pickle.dumps(screen)).copy()
            (screen.copy() if how == "copy" else screen).write_h5ad(tmp_path / "t.h5ad")
            written = anndata.read_h5ad(tmp_path / "t.h5ad")
    np.testing.assert_array_equal(written.obsm[IMAGES], right[rows])
    np.testing.assert_array_equal(written.obs["more"], rows)


@pytest.mark.filterwarnings("ignore")  # the model is not trained
def test_a_model_keeps_an_opened_screen(path, tmp_path):
    screen = open_screen(path)
    SCBDModel.setup_anndata(screen, y_key="gene", e_key="well")
    model = SCBDModel(screen, encoder="small", n_latent=4)
    for _ in range(2):  # the second time over the screen that the first one has opened
        model.save(str(tmp_path / "model"), save_anndata=True, overwrite=True)
        saved = open_screen(tmp_path / "model" / "adata.h5ad")
        np.testing.assert_array_equal(saved.obsm[IMAGES], image_source(screen, IMAGES).read(slice(None)))
        model.adata = saved


def test_only_what_holds_open_images_is_kept(tmp_path):
    path = tmp_path / "folder" / "s.zarr"
    write_screen(path, make_cells(10), y_key="gene")
    screen = open_screen(path)
    zarr.open_group(path, mode="r+").create_array("obsm/X", shape=(10, 2), dtype="f4")
    shutil.rmtree(path / "obsm" / "X")  # no part of the images
    for part in (path, path / "obsm", path / "obsm" / IMAGES / "c"):
        with pytest.raises(PermissionError, match="images that are open, and would be lost"):
            shutil.rmtree(part)
    del screen
    shutil.rmtree(path)
    write_screen(path, make_cells(10), y_key="gene")
    screen = open_screen(path)
    shutil.rmtree(path.parent)  # whoever removes a folder above means it
    assert screen.n_obs == 10
