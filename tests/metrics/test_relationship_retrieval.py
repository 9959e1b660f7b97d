from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from reference import relationships as naive
from small_tables import funk_profiles, map_of_complexes

from scbd.datasets import gene_sets
from scbd.metrics import (
    Relations,
    complex_table,
    relationship_average_precision,
    relationship_retrieval,
)


def small(seed: int, n: int = 12) -> tuple[AnnData, pd.DataFrame]:
    """Sets that overlap, that hold one gene, and genes of none."""
    rng = np.random.default_rng(seed)
    genes = [f"G{i}" for i in range(n)]
    rows = [(f"c{k}", g) for k in range(4) for g in rng.choice([*genes, "absent"], rng.integers(2, 6), replace=False)]
    x = rng.normal(size=(n, 3))
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), pd.DataFrame(rows, columns=["source", "target"])


@given(st.integers(0, 300))
def test_scores_are_those_of_loops(seed):
    profiles, net = small(seed)
    expected = naive.of_genes(profiles.X, list(profiles.obs_names), net)
    found = relationship_retrieval(profiles, net, universe="profiles", n_permutations=10)
    assert found.table.index.to_list() == list(expected)
    np.testing.assert_allclose(found.table["average_precision"], list(expected.values()), rtol=1e-12)
    assert set(found.left_out) == set(profiles.obs_names) - set(expected)
    annotated = Relations(profiles, net)
    among = naive.of_genes(annotated.unit, list(annotated.genes), net)
    if among:
        found = relationship_retrieval(annotated, n_permutations=10)
        np.testing.assert_allclose(found.table["average_precision"], list(among.values()), rtol=1e-12)


@given(st.integers(0, 300))
def test_complexes_are_scored_as_by_loops(seed):
    profiles, net = small(seed)
    expected = naive.of_sets(profiles.X, list(profiles.obs_names), net)
    found = complex_table(profiles, net, n_permutations=10)["average_precision"].dropna()
    assert set(found.index) == set(expected)
    np.testing.assert_allclose(found, [expected[name] for name in found.index], rtol=1e-12)


def test_genes_that_find_their_partners_are_called():
    profiles, net = map_of_complexes(n_sets=30, found=10)
    found = relationship_retrieval(profiles, net, n_permutations=1_000)
    is_found = found.table.index.isin([f"G{i}" for i in range(40)])
    assert found.table.loc[is_found, "average_precision"].mean() > 0.7 > 0.2 > found.table["chance"].mean()
    assert (
        (found.table["q_value"] < 0.05)[is_found].mean() > 0.8 > 0.1 > (found.table["q_value"] < 0.05)[~is_found].mean()
    )
    assert set(found.table["n_positives"]) == {3} and set(found.table["n_negatives"]) == {116}
    assert repr(found).startswith("Retrieval of 120 genes: average precision 0.")
    without = relationship_retrieval(*map_of_complexes(n_sets=30, found=0), n_permutations=1_000)
    assert without.mean_average_precision == pytest.approx(without.chance, abs=0.02)
    assert 0.4 < without.table["p_value"].mean() < 0.6 and without.n_called == 0


def test_a_gene_counts_as_much_as_another_and_a_large_complex_not_more():
    """One large complex that is found, and many small ones that are not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 16))
    x[:30] += 3 * rng.normal(size=16)
    genes = [f"G{i}" for i in range(90)]
    net = pd.DataFrame({"source": ["large"] * 30 + [f"c{i // 2}" for i in range(60)], "target": genes})
    profiles = AnnData(X=x, obs=pd.DataFrame(index=genes))
    found = relationship_retrieval(profiles, net, n_permutations=100)
    assert relationship_average_precision(profiles, net) > 0.8 > 0.45 > found.mean_average_precision
    without = relationship_retrieval(profiles, net, max_set_size=29, n_permutations=100)
    assert len(without.table) == 60 and without.mean_average_precision < 0.2


@pytest.mark.parametrize("universe", ["annotated", "profiles"])
def test_a_point_scores_chance(universe):
    profiles, net = small(1)
    profiles.X = np.ones_like(profiles.X)
    found = relationship_retrieval(profiles, net, universe=universe, n_permutations=10)
    np.testing.assert_allclose(found.table["average_precision"], found.table["chance"], rtol=1e-12)
    assert found.n_called == 0
    table = complex_table(profiles, net, n_permutations=10)
    np.testing.assert_allclose(table["average_precision"], table["chance"], rtol=1e-12)


def test_where_everything_is_related_there_is_nothing_to_find():
    profiles, net = map_of_complexes(n_sets=1, size=5)
    with pytest.raises(ValueError, match="Every gene is related to every other.* Give universe='profiles'"):
        relationship_retrieval(profiles, net)
    table = complex_table(profiles, net, n_permutations=20)
    assert table[["average_precision", "chance"]].isna().all(axis=None)


def test_bad_input_gets_a_sentence():
    profiles, net = map_of_complexes()
    with pytest.raises(ValueError, match="n_permutations=0: give"):
        relationship_retrieval(profiles, net, n_permutations=0)
    with pytest.raises(ValueError, match="net is missing"):
        relationship_retrieval(profiles)
    with pytest.raises(ValueError, match="net and max_set_size cannot be given beside Relations"):
        relationship_retrieval(Relations(profiles, net), net, max_set_size=30)
    with pytest.raises(ValueError, match="max_set_size=30 is of sets of genes, and net holds pairs"):
        relationship_retrieval(profiles, pd.DataFrame({"source": ["G0"], "target": ["G1"]}), max_set_size=30)


KNOWN: list[tuple[dict[str, Any], int, float]] = [
    ({}, 1195, 0.18548),
    ({"universe": "profiles"}, 1195, 0.13415),
    ({"max_set_size": 30}, 1082, 0.14758),
]


@pytest.mark.parametrize(("how", "n", "expected"), KNOWN)
def test_known_answers(shared, how, n, expected):
    """Of CORUM and the profiles of Funk et al.; scikit-learn's for each gene, its mean by hand."""
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    found = relationship_retrieval(funk_profiles(shared), net, **how, n_permutations=1)
    assert len(found.table) == n
    assert round(found.mean_average_precision, 5) == expected


def test_the_same_as_a_peer_on_real_profiles(shared):
    """Of genes with one complex each: with several, the peer scores each complex apart."""
    copairs = pytest.importorskip("copairs.map")
    profiles = funk_profiles(shared)
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    net = net[net["target"].isin(profiles.obs_names)].drop_duplicates()
    net = net[~net["target"].duplicated(keep=False)]
    relations = Relations(profiles, net)
    found = relationship_retrieval(relations, n_permutations=10)
    assert (len(found.table), round(found.mean_average_precision, 5)) == (223, 0.28543)
    complexes = net.set_index("target")["source"].loc[relations.genes]
    meta = pd.DataFrame({"gene": relations.genes, "complex": complexes.to_numpy()})
    sameby: dict[str, list[str]] = {"pos_sameby": ["complex"], "pos_diffby": [], "neg_sameby": []}
    peer = copairs.average_precision(meta, relations.unit.astype(float), **sameby, neg_diffby=["complex"])
    expected = peer.set_index("gene")["average_precision"].loc[found.table.index]
    np.testing.assert_allclose(found.table["average_precision"], expected, rtol=0, atol=1e-6)
