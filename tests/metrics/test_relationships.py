from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from reference import relationships as naive
from sklearn.metrics import average_precision_score
from small_tables import funk_profiles

from scbd.datasets import gene_sets
from scbd.metrics import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_recall,
)
from scbd.metrics._relationships import PERCENTILES


def profiles(x: np.ndarray, genes: list[str] | None = None) -> AnnData:
    genes = [f"G{i}" for i in range(len(x))] if genes is None else genes
    return AnnData(X=np.asarray(x), obs=pd.DataFrame(index=genes))


def small(seed: int, n: int = 12) -> tuple[np.ndarray, list[str], pd.DataFrame]:
    rng = np.random.default_rng(seed)
    genes = [f"G{i}" for i in range(n)]
    rows = [(f"c{k}", g) for k in range(4) for g in rng.choice([*genes, "absent"], rng.integers(1, 5), replace=False)]
    return rng.normal(size=(n, 3)), genes, pd.DataFrame(rows, columns=["source", "target"])


@given(st.integers(0, 500))
def test_all_scores_equal_the_loops(seed):
    x, genes, net = small(seed)
    try:
        relations = Relations(profiles(x), net)
    except ValueError as error:
        assert "known partner" in str(error)
        assert not naive.pairs(x, genes, net)[0].size
        return
    square, cosine, truth = naive.pairs(x, genes, net)
    np.testing.assert_allclose(relations.cosine, square, atol=1e-9)
    expected = naive.curve(relations.unit, list(relations.genes), net, list(PERCENTILES))
    ours = relationship_curve(relations)
    np.testing.assert_allclose(ours[["precision", "recall"]], expected, atol=1e-9)
    assert relationship_average_precision(relations) == pytest.approx(average_precision_score(truth, cosine))
    low, high = np.percentile(cosine, [5, 95])
    assert relationship_recall(relations) == pytest.approx(np.mean((cosine[truth] > high) | (cosine[truth] < low)))


KNOWN = [
    # columns, area, average precision, tail recall: the real mcVAE profiles of Funk et al.
    (range(64), 0.05006, 0.19726, 0.37653),
    (range(32), 0.04985, 0.19577, 0.37238),
    (range(32, 64), 0.03439, 0.13330, 0.28258),
]


@pytest.mark.parametrize(("columns", "area", "average_precision", "recall"), KNOWN)
def test_known_answers(shared, columns, area, average_precision, recall):
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    relations = Relations(funk_profiles(shared, columns), net)
    assert len(relations.genes) == 1195
    assert relations.related.sum() == 2 * 19053
    assert round(float(relations.pairs()[1].mean()), 5) == 0.02671
    assert round(relationship_area(relationship_curve(relations)), 5) == area
    assert round(relationship_average_precision(relations), 5) == average_precision
    assert round(relationship_recall(relations, tail=0.05), 5) == recall


def test_known_answers_without_large_complexes(shared):
    """Of more than 30 genes among the profiles; by all their genes, as in the network, five more would be left out."""
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    relations = Relations(funk_profiles(shared, range(64)), net, max_set_size=30)
    assert len(relations.genes) == 1082
    assert relations.related.sum() == 2 * 6433
    assert round(relationship_area(relationship_curve(relations)), 5) == 0.01627
    assert round(relationship_average_precision(relations), 5) == 0.10455
    assert round(relationship_recall(relations, tail=0.05), 5) == 0.33779


def test_known_answers_over_all_profiles(shared):
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    all_genes = funk_profiles(shared, range(64), drop_control=True)
    assert round(relationship_average_precision(all_genes, net, universe="profiles"), 5) == 0.06259
    assert round(relationship_recall(all_genes, net, universe="profiles"), 5) == 0.45006


def test_profiles_without_information_score_at_chance():
    rng = np.random.default_rng(0)
    genes = [f"G{i}" for i in range(600)]
    net = pd.DataFrame({"source": [f"c{i // 6}" for i in range(600)], "target": genes})
    relations = Relations(profiles(rng.normal(size=(600, 64))), net)
    prevalence = relations.pairs()[1].mean()
    assert abs(relationship_average_precision(relations) - prevalence) < 0.3 * prevalence
    assert abs(relationship_recall(relations) - 0.10) < 0.03
    curve = relationship_curve(relations, diagonal=False)
    np.testing.assert_allclose(curve["recall"], 2 * (100 - curve["percentile"]) / 100, atol=0.04)


def test_perfect_profiles():
    net = pd.DataFrame({"source": list("aaabbb"), "target": [f"G{i}" for i in range(6)]})
    x = np.repeat(np.eye(2), 3, axis=0)
    assert relationship_average_precision(profiles(x), net) == pytest.approx(1)


def test_a_map_of_one_point_knows_nothing():
    """All pairs tie: none is in a tail, and none is predicted twice where the thresholds meet."""
    net = pd.DataFrame({"source": list("aaabbb"), "target": [f"G{i}" for i in range(6)]})
    relations = Relations(profiles(np.repeat(np.eye(3)[:1], 6, axis=0)), net)
    assert relationship_recall(relations) == 0
    for diagonal in (True, False):
        curve = relationship_curve(relations, diagonal=diagonal)
        assert (curve["recall"] == 1).all()  # every pair is predicted, once
        np.testing.assert_allclose(curve["precision"], relations.pairs()[1].mean())


def test_ties_count_for_neither_tail():
    """A quarter of the pairs are equally alike, and as many equally opposite: more than a tail holds."""
    angles = np.array([0, 0, 0, 0.5, 0.5, 0.5]) * np.pi
    net = pd.DataFrame({"source": list("aaabbb"), "target": [f"G{i}" for i in range(6)]})
    relations = Relations(profiles(np.stack([np.cos(angles).round(), np.sin(angles).round()], 1)), net)
    # six of fifteen pairs have a cosine of 1: their best places are .64 to 1, and the worst of them is no tail's
    assert relationship_recall(relations, tail=0.3) == 0
    assert relationship_recall(relations, tail=0.45) == 1


def test_pairs_and_sets_that_say_the_same_score_the_same():
    x, genes, _ = small(1)
    pairs = pd.DataFrame({"source": ["G0", "G1", "G2", "G3"], "target": ["G1", "G2", "G0", "G4"]})
    sets = pd.DataFrame({"source": list("aaabb"), "target": ["G0", "G1", "G2", "G3", "G4"]})
    one, two = (Relations(profiles(x), net) for net in (pairs, sets))
    assert (one.net_kind, two.net_kind) == ("pairs", "sets")
    np.testing.assert_array_equal(one.related, two.related)
    assert relationship_average_precision(one) == relationship_average_precision(two)


def test_gene_key_and_repeated_rows_of_the_net():
    x, genes, net = small(3)
    adata = profiles(x)
    expected = relationship_average_precision(adata, net)
    adata.obs["symbol"] = genes
    adata.obs_names = [f"row{i}" for i in range(len(x))]
    twice = pd.concat([net, net])
    assert relationship_average_precision(adata, twice, gene_key="symbol") == expected


def test_a_profile_of_zeros_is_similar_to_nothing():
    x = np.random.default_rng(0).normal(size=(4, 3))
    x[1] = 0
    relations = Relations(profiles(x), pd.DataFrame({"source": list("aaaa"), "target": [f"G{i}" for i in range(4)]}))
    assert (relations.cosine[1] == 0).all()
    assert np.isfinite(relationship_average_precision(relations))


def test_bad_input_gets_a_sentence():
    x, genes, net = small(0)
    repeated = profiles(x)
    repeated.obs["symbol"] = ["G0", "G0", *genes[2:]]
    with pytest.raises(ValueError, match="1 genes have several profiles .G0."):
        Relations(repeated, net, gene_key="symbol")
    with pytest.raises(KeyError, match="net lacks source"):
        Relations(profiles(x), net.rename(columns={"source": "complex"}))
    with pytest.raises(KeyError, match="obs of the profiles has no 'symbol'"):
        Relations(profiles(x), net, gene_key="symbol")
    with pytest.raises(ValueError, match="universe='all' is not known"):
        Relations(profiles(x), net, universe="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tail=0.5 must lie between"):
        relationship_recall(profiles(x), net, tail=0.5)
    with pytest.raises(ValueError, match="net is missing"):
        relationship_curve(profiles(x))
    with pytest.raises(ValueError, match="at least two points"):
        relationship_area(pd.DataFrame({"percentile": [80], "precision": [0.1], "recall": [0.2]}))
    with pytest.raises(ValueError, match="each is alone in its set"):
        Relations(profiles(x), pd.DataFrame({"source": ["a", "b"], "target": ["G0", "G1"]}))
    x[4] = np.nan
    with pytest.raises(ValueError, match="1 profiles hold NaN or infinity .G4."):
        Relations(profiles(x), net)
