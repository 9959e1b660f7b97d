"""A copy of a table reads the same images."""

from __future__ import annotations

import pickle
from typing import Any

import anndata
import numpy as np
import pytest
import zarr
from anndata import AnnData
from conftest import IMAGE_KEY, make_cells, make_wells
from scipy import sparse

from scbd.data import open_screen, write_screen

PLACES: list[dict[str, str]] = [{}, {"layer": "X"}, {"layer": "scaled"}, {"obsm_key": "dino"}]


@pytest.fixture(params=PLACES, ids=lambda where: next(iter(where.values()), "images"))
def opened(request, tmp_path):
    """A table with something in every part, and its inputs."""
    where = request.param
    path = tmp_path / "s.zarr"
    if where:
        wells = make_wells()
        wells.layers["scaled"], wells.obsm["dino"] = 2 * wells.X, 3 * wells.X
        group = zarr.open_group(path, mode="w", zarr_format=3)
        for name in ("X", "obs", "var", "obsm", "layers"):
            value = getattr(wells, name)
            # of the layers those with a name: to anndata 0.13 X is one of them
            value = {key: value[key] for key in value if key} if name in ("obsm", "layers") else value
            anndata.io.write_elem(group, name, value)
    else:
        write_screen(path, make_cells(24), y_key="gene")
    table = open_screen(path, **where)
    table.uns["settings"] = {"steps": [1, 2]}
    table.obsm["X_scbd_c"] = np.zeros((table.n_obs, 3))
    table.varm["loadings"] = np.zeros((table.n_vars, 2))
    table.obsp["near"] = sparse.eye(table.n_obs, format="csr")
    table.raw = AnnData(np.ones((table.n_obs, 5)), obs=table.obs)
    return table, where


def inputs(table: AnnData, where: dict[str, str]) -> Any:
    """What lies in Zarr."""
    if where.get("layer") == "X":
        return table.X
    return table.layers[where["layer"]] if "layer" in where else table.obsm[where.get("obsm_key", IMAGE_KEY)]


pytestmark = pytest.mark.filterwarnings("ignore:.*zarr v3", "ignore:.* stay on disk")


@pytest.mark.parametrize("how", ["copy", "copy of a copy", "unpickled"])
def test_a_copy_reads_the_same_inputs_and_owns_all_else(opened, how):
    table, where = opened
    copied = (pickle.loads(pickle.dumps(table)) if how == "unpickled" else table).copy()
    if how == "copy of a copy":
        copied = copied.copy()
    assert type(copied) is AnnData and isinstance(inputs(copied, where), zarr.Array)
    np.testing.assert_array_equal(inputs(copied, where)[:], inputs(table, where)[:])
    assert copied.obs.equals(table.obs) and copied.var.equals(table.var) and copied.raw.shape == table.raw.shape
    for slot in ("layers", "obsm", "varm", "obsp"):
        assert set(getattr(copied, slot)) == set(getattr(table, slot))
    copied.obs["more"] = 1
    copied.uns["settings"]["steps"].append(3)
    copied.obsm["X_scbd_c"][:] = 1
    copied.obsp["near"].data[:] = 2
    del copied.varm["loadings"]
    assert "more" not in table.obs and table.uns["settings"]["steps"] == [1, 2] and "loadings" in table.varm
    assert not table.obsm["X_scbd_c"].any() and (table.obsp["near"].data == 1).all()


def test_a_copy_of_rows_holds_their_inputs(opened):
    table, where = opened
    rows = np.array([3, 1, 5])
    part = table.copy()[rows].copy()
    assert isinstance(inputs(part, where), np.ndarray)
    np.testing.assert_array_equal(inputs(part, where), inputs(table, where)[:][rows])


def test_what_may_change_is_not_shared(opened):
    table, _ = opened
    table.obsm["own"] = zarr.create_array({}, data=np.zeros((table.n_obs, 2)))
    with pytest.raises((AttributeError, NotImplementedError), match="copy|Copy is not implemented"):
        table.copy()
