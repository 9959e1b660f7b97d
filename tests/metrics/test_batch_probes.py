from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from blobs import blobs

from scbd.metrics import batch_probe, batch_probe_table, label_probe


def test_batch_probe_reads_a_table_and_crosses_columns():
    z, wells = blobs()
    adata = AnnData(obs=pd.DataFrame({"well": wells, "plate": ["a", "b"] * 300}, index=[str(i) for i in range(600)]))
    adata.obsm["Z"] = z
    assert batch_probe(adata, "Z", "well") == label_probe(z, wells)
    assert batch_probe(adata, "Z", ["plate", "well"])["f1"] < 0.7
    assert batch_probe(adata, "Z", "well", group_key="plate")["accuracy"] > 0.99
    with pytest.raises(KeyError, match=r"obsm has no 'X_scbd_c' \(its keys: Z\)"):
        batch_probe(adata, "X_scbd_c", "well")
    with pytest.raises(KeyError, match=r"obs has no 'plates' \(its keys: well, plate\)"):
        batch_probe(adata, "Z", "plates")
    adata.obs.loc["5", "well"] = None
    with pytest.raises(ValueError, match=r"obs\['well'\] has no value for 1 of 600 cells \(rows 5\)"):
        batch_probe(adata, "Z", "well")


def test_all_probes_side_by_side():
    rng = np.random.default_rng(0)
    _, wells = blobs()
    adata = AnnData(obs=pd.DataFrame({"well": wells}, index=[str(i) for i in range(600)]))
    spread = np.array([int(well[1]) for well in wells]) + 1
    adata.obsm["Z"], adata.obsm["N"] = rng.normal(size=(600, 8)) * spread[:, None], rng.normal(size=(600, 8))
    table = batch_probe_table(adata, {"spread": "Z", "noise": "N"}, "well")
    assert table.columns.to_list() == ["representation", "kind", "f1", "auroc", "accuracy", "chance_f1"]
    assert table["kind"].to_list() == 2 * ["linear", "quadratic", "neighbours"]
    scores = table.set_index(["representation", "kind"])["accuracy"]
    assert scores["spread", "quadratic"] > 0.5 > 0.35 > scores["spread", "linear"]
    assert scores["noise"].max() < 0.35
    single = batch_probe(adata, "Z", "well", kind="quadratic", train_fraction=0.5, seed=3)
    row = batch_probe_table(adata, ["Z"], "well", kinds=["quadratic"], train_fraction=0.5, seed=3)
    assert row.drop(columns=["representation", "kind"]).iloc[0].to_dict() == single
    with pytest.raises(KeyError, match="obsm has no 'X'"):
        batch_probe_table(adata, ["Z", "X"], "well")
