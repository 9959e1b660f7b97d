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
    raw = np.sqrt(6 / 2)
    assert np.sqrt(np.mean(np.square(distances))) < 0.8 * raw


def test_where_all_are_alike_none_is_odd():
    adata = make_table()
    adata.obsm["X"] = np.ones((adata.n_obs, 3))
    found = odd_environments(adata, "X", e_key="well")
    assert (found[["distance", "score"]] == 0).all(axis=None)


def test_bad_input_gets_a_sentence():
    adata = make_table(n_wells=3)
    with pytest.raises(ValueError, match="3 environments have two cells to look at"):
        odd_environments(adata, "X", e_key="well")
    with pytest.raises(ValueError, match="y_key and control go together"):
        odd_environments(adata, "X", e_key="well", control="DMSO")
    with pytest.raises(KeyError, match="obs has no 'wel'"):
        odd_environments(adata, "X", e_key="wel")
