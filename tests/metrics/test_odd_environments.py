from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import odd_environments


def make_table(n_wells: int = 12, n_cells: int = 40, seed: int = 0) -> AnnData:
    rng = np.random.default_rng(seed)
    wells = np.repeat([f"W{i:02}" for i in range(n_wells)], n_cells)
    of_well = 0.5 * rng.normal(size=(n_wells, 6))
    z = of_well[np.repeat(np.arange(n_wells), n_cells)] + rng.normal(size=(len(wells), 6))
    gene = np.where(np.arange(len(wells)) % 4, "g", "DMSO")
    obs = pd.DataFrame({"well": wells, "gene": gene}, index=[f"c{i}" for i in range(len(wells))])
    return AnnData(obs=obs, obsm={"X": z})


def test_the_well_that_stands_apart_is_the_first():
    adata = make_table()
    adata.obsm["X"][adata.obs["well"] == "W07"] += 5
    found = odd_environments(adata, "X", e_key="well")
    assert found.index[0] == "W07" and found["score"].iloc[0] > 5 > found["score"].iloc[1]
    assert found["distance"].iloc[0] == pytest.approx(5 * np.sqrt(6), rel=0.2)
    assert (found["n_cells"] == 40).all() and len(found) == 12


def test_what_was_done_to_cells_does_not_make_a_well_odd():
    adata = make_table()
    treated = (adata.obs["gene"] == "g").to_numpy()
    adata.obsm["X"][treated & (adata.obs["well"] == "W03").to_numpy()] += 9
    adata.obsm["X"][adata.obs["well"] == "W05"] += 4
    assert odd_environments(adata, "X", e_key="well").index[0] == "W03"
    assert odd_environments(adata, "X", e_key="well", y_key="gene", control="DMSO").index[0] == "W05"


def test_few_cells_are_not_odd_for_being_few():
    """Without wells that differ, a well of two cells is away from the others by chance alone."""
    distances = []
    for seed in range(20):
        adata = make_table(seed=seed)
        adata.obsm["X"] = np.random.default_rng(seed).normal(size=(adata.n_obs, 6))
        few = np.flatnonzero(adata.obs["well"] == "W00")[2:]
        left = adata[np.setdiff1d(np.arange(adata.n_obs), few)]
        distances.append(odd_environments(left, "X", e_key="well").loc["W00", "distance"])
    squares = np.sign(distances) * np.square(distances)  # without subtraction, of 6 components / 2 cells
    assert abs(np.mean(squares)) < 0.5 * 6 / 2


@pytest.mark.parametrize("seed", range(3))
def test_the_plate_that_stands_apart_is_the_first_where_no_other_plates_differ(seed):
    """Half of the others are nearer than chance puts them, and scatter all the same."""
    rng = np.random.default_rng(seed)
    plates = np.repeat([f"p{i:03}" for i in range(100)], 16)
    x = rng.normal(size=(1600, 10))
    x[plates == "p050"] += 5
    adata = AnnData(obs=pd.DataFrame({"plate": plates}, index=[f"c{i}" for i in range(1600)]))
    found = odd_environments(adata, x, e_key="plate")
    assert found.index[0] == "p050" and found["score"].iloc[0] > 15
    assert found["score"].iloc[1:].abs().max() < 5 and abs(found["score"].median()) < 1e-9
    assert found["distance"].is_monotonic_decreasing and 0.25 < (found["distance"] < 0).mean() < 0.75
    # the unit of the embedding does not matter
    np.testing.assert_allclose(odd_environments(adata, 1e-6 * x, e_key="plate")["score"], found["score"], rtol=1e-6)


def test_one_plate_beside_others_that_are_the_same():
    adata = make_table()
    adata.obsm["X"] = np.where(adata.obs[["well"]] == "W07", 1.0, 0.1) * np.ones((1, 3))
    found = odd_environments(adata, "X", e_key="well")
    assert found.index[0] == "W07" and found["score"].iloc[0] > 1e6 and (found["score"].iloc[1:] == 0).all()


def test_plates_without_controls_are_told(caplog):
    adata = make_table()
    well = adata.obs["well"]
    adata.obs.loc[well.isin(["W02", "W05"]), "gene"] = "g"
    adata.obs.loc[adata.obs_names[well == "W05"][0], "gene"] = "DMSO"
    found = odd_environments(adata, "X", e_key="well", y_key="gene", control="DMSO")
    assert sorted(found.index) == sorted(well.unique()) and found.index[-2:].to_list() == ["W02", "W05"]
    assert found["n_cells"].to_list() == [10] * 10 + [0, 1]
    assert found[["distance", "score"]].isna().all(axis=1).to_list() == [False] * 10 + [True] * 2
    assert "2 of 12 environments have fewer than two cells to look at: their score is NaN" in caplog.text


@pytest.mark.parametrize("value", [1.0, 0.1])
def test_where_all_are_alike_none_is_odd(value):
    adata = make_table()
    adata.obsm["X"] = np.full((adata.n_obs, 3), value)
    found = odd_environments(adata[7:], "X", e_key="well")
    assert (found["distance"].abs() < 1e-12).all() and (found["score"] == 0).all()


def test_bad_input_gets_a_sentence():
    adata = make_table(n_wells=3)
    with pytest.raises(ValueError, match="3 environments have two cells to look at"):
        odd_environments(adata, "X", e_key="well")
    with pytest.raises(ValueError, match="y_key and control go together"):
        odd_environments(adata, "X", e_key="well", control="DMSO")
    with pytest.raises(KeyError, match="obs has no 'wel'"):
        odd_environments(adata, "X", e_key="wel")
