from __future__ import annotations

import tracemalloc

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.datasets import known_pairs, simulated_screen
from scbd.metrics import (
    Relations,
    complex_table,
    relationship_average_precision,
    relationship_curve,
    relationship_interval,
    relationship_recall,
)
from scbd.metrics import _relations as module


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


NET = pd.DataFrame({"source": list("aaabbb"), "target": [f"G{i}" for i in range(6)]})
SCORES = relationship_curve, relationship_recall, relationship_average_precision, relationship_interval


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "beside", [{"net": NET}, {"net_kind": "sets"}, {"gene_key": "symbol"}, {"universe": "profiles"}], ids=str
)
def test_what_relations_have_already_cannot_be_given_beside_them(score, beside):
    """It was taken and not heeded: the score of another network was that of the first."""
    with pytest.raises(ValueError, match=f"{next(iter(beside))} cannot be given beside Relations"):
        score(Relations(profiles(), NET), **beside)


def test_a_table_of_complexes_takes_a_net_beside_relations_and_nothing_else_of_them():
    relations = Relations(profiles(), NET)
    assert set(complex_table(relations, NET, n_permutations=20).index) == {"a", "b"}
    with pytest.raises(ValueError, match="gene_key and universe and max_set_size cannot be given beside Relations"):
        complex_table(relations, NET, gene_key="symbol", universe="profiles", max_set_size=3)


def test_relations_without_large_sets():
    """A gene of a large set stays if it has a small one, too; what is left of the large one is no complex."""
    large = pd.DataFrame({"source": "large", "target": [f"G{i}" for i in (0, 1, 3, 9)]})
    net = pd.concat([NET, large])
    without = Relations(profiles(), net, max_set_size=3)
    expected = Relations(profiles(), NET)
    assert repr(without) == "Relations of 6 genes: 6 of 15 pairs are known (net of sets of up to 3 genes)"
    np.testing.assert_array_equal(without.genes, expected.genes)
    np.testing.assert_array_equal(without.related, expected.related)
    assert relationship_average_precision(without) == relationship_average_precision(expected)
    assert len(Relations(profiles(), net, max_set_size=4).genes) == 7
    for table in (
        complex_table(profiles(), net, max_set_size=3, n_permutations=20),
        complex_table(without, net, n_permutations=20),
    ):
        assert set(table.index) == {"a", "b"}
    assert set(complex_table(Relations(profiles(), net), net, n_permutations=20).index) == {"a", "b", "large"}


@pytest.mark.parametrize("block", [1, 25, 1 << 24])
def test_pairs_are_the_upper_triangle_however_they_are_made(monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    relations = Relations(profiles(), NET, universe="profiles")
    upper = np.triu_indices(10, k=1)
    cosine, related = relations.pairs()
    np.testing.assert_allclose(cosine, (relations.unit @ relations.unit.T)[upper], atol=1e-15)
    np.testing.assert_array_equal(cosine, relations.cosine[upper])
    np.testing.assert_array_equal(relations.cosine, relations.cosine.T)
    np.testing.assert_allclose(np.diag(relations.cosine), 1)
    np.testing.assert_array_equal(related, relations.related[upper])
    ordered, known = relations.ranked
    np.testing.assert_array_equal(ordered, np.sort(cosine))
    np.testing.assert_array_equal(known, np.sort(cosine[related]))


def test_scores_hold_the_pairs_once(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 1 << 16)
    n = 1_500
    x = np.random.default_rng(0).normal(size=(n, 8)).astype(np.float32)
    adata = AnnData(X=x, obs=pd.DataFrame(index=[f"G{i}" for i in range(n)]))
    net = pd.DataFrame({"source": [f"c{i // 5}" for i in range(n)], "target": adata.obs_names})
    tracemalloc.start()
    try:
        relations = Relations(adata, net)
        relationship_curve(relations)
        relationship_recall(relations)
        relationship_average_precision(relations)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 4 * n * (n - 1) / 2
