from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import make_cells, make_wells

from scbd.workflows import open_cells


def test_screens_are_opened_where_they_lie(tmp_path):
    cells = make_cells()
    cells.obsm["other"] = cells.obsm.pop("single_cell_images")
    cells.obsm["X_dino"] = np.ones((cells.n_obs, 3), "float32")
    cells.write_h5ad(tmp_path / "cells.h5ad")
    found, where = open_cells(tmp_path / "cells.h5ad", image_key="other")
    assert where == {"image_key": "other"} and "other" in found.obsm
    found, where = open_cells(tmp_path / "cells.h5ad", obsm_key="X_dino")
    assert where == {"obsm_key": "X_dino"} and found.obsm["X_dino"].shape == (cells.n_obs, 3)


@pytest.mark.parametrize("layer", [None, "X"])
@pytest.mark.parametrize(("ending", "write"), [("csv", "to_csv"), ("parquet", "to_parquet")])
@pytest.mark.filterwarnings("ignore:Transforming to str index")
def test_tables_of_features_are_read(ending, write, layer, tmp_path):
    wells = make_wells()
    getattr(wells.to_df().join(wells.obs).reset_index(drop=True), write)(tmp_path / f"wells.{ending}", index=False)
    found, where = open_cells(tmp_path / f"wells.{ending}", layer=layer)
    assert where == {"layer": "X"}
    np.testing.assert_allclose(found.X, wells.X, rtol=1e-6)
    assert found.obs["compound"].tolist() == wells.obs["compound"].tolist()


def test_labels_that_are_numbers_are_no_features(tmp_path):
    wells = make_wells()
    table = wells.to_df().join(wells.obs).assign(donor=np.arange(wells.n_obs) % 3, dose=1.5)
    table.to_csv(tmp_path / "wells.csv", index=False)
    found, _ = open_cells(tmp_path / "wells.csv", labels=["donor", "plate", "nowhere"], obs_columns="dose")
    assert found.var_names.tolist() == wells.var_names.tolist()
    assert found.obs["donor"].tolist() == table["donor"].tolist() and set(found.obs["dose"]) == {1.5}
    with pytest.raises(KeyError, match="has no 'dosis'"):
        open_cells(tmp_path / "wells.csv", obs_columns=["dosis"])
    wells.write_h5ad(tmp_path / "wells.h5ad")
    with pytest.raises(ValueError, match="wells.h5ad is no table of features, .*: leave obs_columns out"):
        open_cells(tmp_path / "wells.h5ad", layer="X", obs_columns=["donor"])


def test_what_a_table_does_not_have_is_said(tmp_path):
    make_wells().to_df().to_csv(tmp_path / "wells.csv")
    places: list[dict[str, Any]] = [{"layer": "scaled"}, {"obsm_key": "X_dino"}]
    for asked in places:
        with pytest.raises(ValueError, match=f"is a table of features, which has no {next(iter(asked))}: leave that"):
            open_cells(tmp_path / "wells.csv", **asked)
    with pytest.raises(FileNotFoundError):
        open_cells(tmp_path / "no.csv")


def test_images_are_to_be_converted_first(tmp_path):
    (tmp_path / "crops" / "a").mkdir(parents=True)
    (tmp_path / "crops" / "a" / "0.png").write_bytes(b"")
    (tmp_path / "crops.csv").write_text("gene,dna,actin\na,0_dna.tif,0_actin.tif\n")
    np.save(tmp_path / "crops.npy", make_cells().obsm["single_cell_images"])
    commands = {
        "crops.csv": "--file-columns dna actin --y-key …",
        "crops": "--y-key label",
        "crops.npy": "--table … --y-key …",
    }
    for name, options in commands.items():
        with pytest.raises(ValueError, match="make a screen of it first") as raised:
            open_cells(tmp_path / name)
        assert f"(scbd convert {tmp_path / name} {options} --out screen.h5ad)" in str(raised.value)
