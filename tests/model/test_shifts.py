"""Tables whose environments are shifted as a whole, told of before training."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd import SCBDModel
from scbd.baselines import standardize_by_environment


def plates(shift: float, seed: int = 0) -> AnnData:
    """12 compounds in each of 6 plates, with a direction a compound and one a plate."""
    rng = np.random.default_rng(seed)
    compound, plate = np.repeat(np.arange(12), 6), np.tile(np.arange(6), 12)
    features = rng.normal(size=(72, 12)) + rng.normal(size=(12, 12))[compound]
    features += shift * rng.normal(size=(6, 12))[plate]
    obs = pd.DataFrame({"compound": compound, "plate": plate, "run": plate % 2}).astype(str)
    return AnnData(features.astype(np.float32), obs=obs.set_index(obs.index.astype(str)))


@pytest.mark.parametrize(
    ("e_key", "where", "given"),
    [
        ("plate", {}, r"layers\['standardized'\] = .*\(adata.X, adata.obs\['plate'\]\).* layer='standardized'"),
        ("plate", {"layer": "raw"}, r"layers\['standardized'\] = .*\(adata.layers\['raw'\], adata.obs"),
        ("plate", {"obsm_key": "dino"}, r"obsm\['standardized'\] = .*\(adata.obsm\['dino'\], .* obsm_key='stand"),
        (["plate", "run"], {"e_columns": "crossed"}, r"\(adata.X, adata.obs\[\['plate', 'run'\]\].astype"),
    ],
    ids=["X", "layer", "obsm", "two columns"],
)
def test_shifted_plates_are_told_of_with_the_lines_that_mend_it(e_key, where, given):
    table = plates(shift=2)
    table.layers["raw"] = table.obsm["dino"] = table.X
    with pytest.warns(UserWarning, match=rf"Environments \(plate.* explain [5-9]\d% of the variance .*{given}"):
        SCBDModel.setup_anndata(table, "compound", e_key, **where)


def test_environments_of_a_few_rows_are_not_to_be_standardised():
    """Their mean and variance are those of what was done in them."""
    table = plates(shift=2)
    table = table[np.isin(table.obs["compound"], ["0", "1", "2"])].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCBDModel.setup_anndata(table, "compound", "plate")


@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_shifted_is_not_told_of(seed):
    shifted = plates(2, seed)
    shifted.layers["standardized"] = standardize_by_environment(shifted.X, shifted.obs["plate"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCBDModel.setup_anndata(plates(0.2, seed), "compound", "plate")
        SCBDModel.setup_anndata(shifted, "compound", "plate", layer="standardized")
