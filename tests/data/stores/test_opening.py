from __future__ import annotations

from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import make_cells, make_wells
from scipy import sparse

from scbd.data import memory_map_h5ad, open_embedding, open_screen, read_crops, write_screen

KEY = "obsm/single_cell_images"


def test_open_screen_maps_images_and_loads_the_rest(tmp_path):
    cells = make_cells(12)
    cells.obsm["X_pca"] = np.arange(24.0).reshape(12, 2)
    cells.uns["note"] = "kept"
    cells.write_h5ad(tmp_path / "cells.h5ad")
    opened = open_screen(tmp_path / "cells.h5ad")
    assert isinstance(opened.obsm["single_cell_images"].base, np.memmap)
    np.testing.assert_array_equal(opened.obsm["single_cell_images"], cells.obsm["single_cell_images"])
    np.testing.assert_array_equal(opened.obsm["X_pca"], cells.obsm["X_pca"])
    assert opened.obs.equals(cells.obs)
    assert opened.uns["note"] == "kept"
    assert list(opened.var_names) == list(cells.var_names)


def test_open_screen_loads_compressed_images(tmp_path):
    cells = make_cells(12)
    cells.write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    images = open_screen(tmp_path / "cells.h5ad").obsm["single_cell_images"]
    assert type(images) is np.ndarray
    np.testing.assert_array_equal(images, cells.obsm["single_cell_images"])


def test_files_that_cannot_be_opened(tmp_path):
    cells = make_cells(50)
    path = tmp_path / "cells.h5ad"
    with pytest.raises(FileNotFoundError, match="There is no file"):
        open_screen(path)
    cells.write_h5ad(path)
    with pytest.raises(KeyError, match="holds no array 'obsm/images'; beside it lie: single_cell_images"):
        memory_map_h5ad(path, "obsm/images")
    with pytest.raises(KeyError, match=r"no images at obsm\['images'\]; its obsm keys are: single_cell_images"):
        open_screen(path, image_key="images")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or of another kind"):
        open_screen(path)
    path.write_text("not a table")
    with pytest.raises(ValueError, match="truncated or of another kind"):
        open_screen(path)
    cells.write_h5ad(path, compression="gzip")
    with pytest.raises(ValueError, match="compressed or chunked.*write the file without compression"):
        memory_map_h5ad(path, KEY)


def test_backed_reading_is_what_the_map_replaces(tmp_path):
    """AnnData itself gives the same rows: our reader changes where bytes come from, not which."""
    cells = make_cells(9)
    cells.write_h5ad(tmp_path / "c.h5ad")
    theirs = anndata.read_h5ad(tmp_path / "c.h5ad").obsm["single_cell_images"]
    np.testing.assert_array_equal(memory_map_h5ad(tmp_path / "c.h5ad", KEY), theirs)


@pytest.mark.parametrize("place", [KEY, "obs/x", "uns/x", "obsm/x", "layers/x"])
@pytest.mark.parametrize("how", ["external link", "soft link", "external bytes", "virtual"])
def test_a_file_cannot_name_other_files_of_this_machine(tmp_path, how, place):
    """A link to another file, or bytes taken from one, would end up with whoever gets the embedding or the screen."""
    cells = make_cells(6)
    images = cells.obsm["single_cell_images"]
    values = images if place == KEY else np.arange(6)
    with h5py.File(tmp_path / "secret.h5", "w") as secret:
        secret["values"] = values
    (tmp_path / "secret.bin").write_bytes(values.tobytes())
    cells.write_h5ad(tmp_path / "c.h5ad")
    with h5py.File(tmp_path / "c.h5ad", "r+") as file:
        if place == KEY:
            del file[KEY]
        if how.endswith("link"):
            link = h5py.ExternalLink(str(tmp_path / "secret.h5"), "values")
            file[place if how == "external link" else "elsewhere"] = link
            if how == "soft link":
                file[place] = h5py.SoftLink("/elsewhere")
        elif how == "external bytes":
            bytes_of = [(str(tmp_path / "secret.bin"), 0, values.nbytes)]
            file.create_dataset(place, values.shape, values.dtype, external=bytes_of)
        else:
            layout = h5py.VirtualLayout(values.shape, values.dtype)
            layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "values", shape=values.shape)
            file.create_virtual_dataset(place, layout)
    for opened in (open_screen, open_embedding, read_crops, lambda path: memory_map_h5ad(path, KEY)):
        with pytest.raises(ValueError, match="lies in another file, which is not followed"):
            opened(tmp_path / "c.h5ad")


def test_a_zarr_store_cannot_name_other_files_either(tmp_path):
    path = tmp_path / "c.zarr"
    write_screen(path, make_cells(6), y_key="gene")
    (path / "obs" / "inside").symlink_to(path / "obs" / "gene")
    open_screen(path)
    (tmp_path / "secret").write_text("secret")
    (path / "obs" / "outside").symlink_to(tmp_path / "secret")
    for opened in (open_screen, read_crops):
        with pytest.raises(ValueError, match="outside is a link to another place, which is not followed"):
            opened(path)
    for named in (f"file://{path}", zarr.storage.LocalStore(path)):  # however the folder is named
        with pytest.raises(ValueError, match="outside is a link to another place, which is not followed"):
            open_screen(named)


def test_what_stays_on_disk_is_named(tmp_path):
    cells = make_cells(12)
    cells.write_h5ad(tmp_path / "c.h5ad")
    open_screen(tmp_path / "c.h5ad")
    cells.X = np.ones((12, 2), "float32")
    cells.layers["raw"] = cells.X
    cells.obsp["near"] = sparse.csr_matrix(np.eye(12))
    cells.write_h5ad(tmp_path / "x.h5ad")
    for opened in (open_screen, open_embedding):
        with pytest.warns(UserWarning, match="^X, layers, obsp of .*x.h5ad stay on disk"):
            opened(tmp_path / "x.h5ad")


def test_what_would_not_fit_in_memory_is_not_loaded(tmp_path, monkeypatch):
    make_cells(50).write_h5ad(tmp_path / "c.h5ad", compression="gzip")
    with h5py.File(tmp_path / "c.h5ad", "r+") as file:  # says that it holds 800 GiB, and holds nothing
        del file[KEY]
        images = file.create_dataset(KEY, (50, 2, 92_681, 92_681), "uint8", chunks=(1, 1, 512, 512), compression="gzip")
        images.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    with pytest.raises(ValueError, match="would take 800.0 of .* GiB of free memory: write it once"):
        open_screen(tmp_path / "c.h5ad")


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
def test_chunks_of_parts_of_images_are_told_of(tmp_path):
    cells = make_cells(12)
    images = cells.obsm["single_cell_images"]
    group = zarr.open_group(tmp_path / "c.zarr", mode="w")
    for name, table in {"obs": cells.obs, "var": cells.var, "obsm": {}}.items():
        anndata.io.write_elem(group, name, table)
    group.create_array(KEY, data=images, chunks=(12, 1, 16, 16))
    with pytest.warns(UserWarning, match="Chunks of .12, 1, 16, 16. in .* hold parts of images.*write_screen"):
        open_screen(tmp_path / "c.zarr")
    assert read_crops(tmp_path / "c.zarr").images.shape == images.shape


def test_a_zarr_store_is_opened_where_it_is(tmp_path):
    cells = make_cells(12)
    cells.uns["note"] = "not of the screen"
    written = write_screen(tmp_path / "c.zarr", cells, y_key="gene")
    opened = open_screen(tmp_path / "c.zarr")
    assert isinstance(opened.obsm["single_cell_images"], zarr.Array)
    assert opened.obs.equals(written.obs) and opened.obs["gene"].dtype == "category"
    with pytest.raises(KeyError, match=r"no images at obsm\['x'\]; its obsm keys are: single_cell_images"):
        open_screen(tmp_path / "c.zarr", image_key="x")


def test_zarr_of_an_older_format_is_not_opened(tmp_path):
    """Its filters may be Python's pickle, which runs code when it is read."""
    zarr.create_group(tmp_path / "old.zarr", zarr_format=2)
    told = "of format 2, which AnnData before 0.13 writes.*zarr_write_format = 3"
    with pytest.raises(ValueError, match=told) as of_images:
        open_screen(tmp_path / "old.zarr")
    assert "write_screen(" in str(of_images.value)
    for where in ({"layer": "X"}, {"obsm_key": "dino"}):  # write_screen writes images alone
        with pytest.raises(ValueError, match=told) as of_features:
            open_screen(tmp_path / "old.zarr", **where)
        assert "write_zarr(" in str(of_features.value) and "write_screen" not in str(of_features.value)
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(ValueError, match="is no Zarr store of format 3"):
        open_screen(tmp_path / "empty.zarr")


@pytest.mark.filterwarnings("ignore:(X|layers).* stay on disk", "ignore:.*zarr v3", "ignore:Consolidated metadata")
@pytest.mark.parametrize("where", [{"layer": "X"}, {"layer": "scaled"}, {"obsm_key": "dino"}])
@pytest.mark.parametrize("how", ["mapped", "compressed", "zarr"])
def test_features_are_opened_where_they_are(tmp_path, where, how):
    wells = make_wells()
    wells.layers["scaled"], wells.obsm["dino"] = 2 * wells.X, 3 * wells.X
    expected = wells.X * {"X": 1, "scaled": 2, "dino": 3}[next(iter(where.values()))]
    path = tmp_path / "wells"
    if how == "zarr":
        with anndata.settings.override(zarr_write_format=3):
            wells.write_zarr(path)
    else:
        wells.write_h5ad(path, compression="gzip" if how == "compressed" else None)
    opened = open_screen(path, **where)
    found: Any = opened.obsm["dino"] if "obsm_key" in where else opened.layers.get("scaled", opened.X)
    kind = {"mapped": np.memmap, "compressed": np.ndarray, "zarr": zarr.Array}[how]
    assert isinstance(found.base if how == "mapped" else found, kind)
    np.testing.assert_array_equal(found[:], expected)
    assert opened.obs.equals(wells.obs) and list(opened.var_names) == list(wells.var_names)
    # nothing of the others is read
    assert (opened.X is None) == (where != {"layer": "X"})
    assert set(opened.layers) <= {"scaled", None}  # None is X, since anndata 0.13


def test_features_that_cannot_be_opened(tmp_path):
    wells = make_wells()
    wells.layers["sparse"] = sparse.csr_matrix(wells.X)
    wells.write_h5ad(tmp_path / "wells.h5ad")
    with pytest.raises(
        ValueError, match=r"layers/sparse of .*wells.h5ad is no dense array \(csr_matrix\): make it dense"
    ):
        open_screen(tmp_path / "wells.h5ad", layer="sparse")
    with pytest.raises(KeyError, match=r"wells.h5ad has no obsm/dino \(its parts: X, layers/sparse\)"):
        open_screen(tmp_path / "wells.h5ad", obsm_key="dino")


@pytest.mark.filterwarnings("ignore:X of .* stay on disk")
def test_features_of_a_table_in_obsm_keep_their_names(tmp_path):
    wells = make_wells()
    wells.obsm["dino"] = pd.DataFrame(wells.X[:, :3], index=wells.obs_names, columns=list("abc"))
    wells.write_h5ad(tmp_path / "wells.h5ad")
    opened = open_screen(tmp_path / "wells.h5ad", obsm_key="dino")
    pd.testing.assert_frame_equal(opened.obsm["dino"], wells.obsm["dino"])


def test_a_file_of_embeddings_is_sent_to_what_it_was_made_from(tmp_path):
    cells = make_cells()
    cells.obsm["X_scbd_c"] = np.ones((cells.n_obs, 3), "float32")
    cells.obsm["crops"] = cells.obsm.pop("single_cell_images")
    cells.write_h5ad(tmp_path / "cells.h5ad")
    with pytest.raises(KeyError, match="They may be at image_key='crops'") as raised:
        open_screen(tmp_path / "cells.h5ad")
    assert "embeddings alone" not in str(raised.value)
    del cells.obsm["crops"]
    cells.write_h5ad(tmp_path / "results.h5ad")
    with pytest.raises(KeyError, match="It has embeddings alone, .*: give the file that was given to these"):
        open_screen(tmp_path / "results.h5ad")
