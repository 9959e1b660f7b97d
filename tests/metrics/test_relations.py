from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.datasets import known_pairs, simulated_screen
from scbd.metrics import (
    Relations,
    relationship_average_precision,
    relationship_curve,
    relationship_interval,
    relationship_recall,
)


def profiles(n: int = 10, seed: int = 0) -> AnnData:
    x = np.random.default_rng(seed).normal(size=(n, 4))
    return AnnData(X=x, obs=pd.DataFrame(index=[f"G{i}" for i in range(n)]))


@pytest.mark.parametrize("name", ["corum", "humap", "reactome", "signor", "stringdb"])
def test_parts_of_the_real_pairs_are_pairs(shared, name):
    """More than half of such parts were once read as sets of other genes."""
    net = known_pairs(name, shared / "corum")
    symbols = np.unique(net)
    rng = np.random.default_rng(0)
    for n in (50, 300) * 4:
        genes = rng.choice(symbols, n, replace=False)
        part = net[net["source"].isin(genes) & net["target"].isin(genes)]
        if not part.empty:
            adata = AnnData(X=rng.normal(size=(n, 3)), obs=pd.DataFrame(index=genes))
            for frame in (part, pd.DataFrame(part.to_dict("list"))):  # the second says nothing of itself
                relations = Relations(adata, frame)
                assert relations.net_kind == "pairs"
                assert relations.related.sum() == 2 * len(part)


def test_what_a_network_is_stays_with_its_parts():
    net = simulated_screen(300, n_complexes=4, genes_per_complex=3, guides_per_gene=1, image_size=16).uns["truth"][
        "network"
    ]
    parts = net[net["source"] != "complex_1"], net.drop_duplicates(), pd.concat([net, net]), net.rename(columns=str)
    for part in parts:
        assert part.attrs["kind"] == "sets"


def test_each_score_reads_the_net_as_said():
    adata, regulons = profiles(), pd.DataFrame({"source": list("AAABBB"), "target": [f"G{i}" for i in range(6)]})
    regulons["source"] = regulons["source"].replace({"A": "G8", "B": "G9"})
    for kind in ("pairs", "sets"):
        relations = Relations(adata, regulons, net_kind=kind)
        assert f"(net of {kind})" in repr(relations)
        for score in (relationship_average_precision, relationship_recall, relationship_interval):
            assert score(adata, regulons, net_kind=kind) == score(relations)
        pd.testing.assert_frame_equal(relationship_curve(adata, regulons, net_kind=kind), relationship_curve(relations))
    assert "8 genes" in repr(Relations(adata, regulons)) and "net of pairs" in repr(Relations(adata, regulons))
