from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from helpers.small_tables import funk_profiles, map_of_complexes
from hypothesis import given
from hypothesis import strategies as st
from reference import relationships as naive
from sklearn.metrics import average_precision_score

from scbd.datasets import gene_pairs, gene_sets
from scbd.metrics import (
    Relations,
    aggregate,
    complex_table,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_interval,
    relationship_recall,
)
from scbd.metrics import _relationships as module
from scbd.metrics._relationships import PERCENTILES, expected_relationship_scores, partner_average_precision

# from cells to genes

KEYS: dict[str, Any] = {"gene_key": "gene", "guide_key": "sgRNA"}


def cells(n: int = 400, seed: int = 0) -> AnnData:
    rng = np.random.default_rng(seed)
    gene = rng.choice(["A", "B", "C", "nontargeting"], size=n, p=[0.4, 0.3, 0.2, 0.1])
    guide = np.array([f"{g}_{i}" for g, i in zip(gene, rng.integers(3, size=n), strict=True)])
    z = rng.normal(size=(n, 5)) + (gene == "B")[:, None]
    obs = pd.DataFrame({"gene": gene, "sgRNA": guide}, index=[str(i) for i in range(n)])
    return AnnData(obs=obs, obsm={"Z": z.astype(np.float32)})


def means_of_genes(adata: AnnData, guide_key: str | None = "sgRNA", average: str = "mean") -> pd.DataFrame:
    frame = pd.DataFrame(np.asarray(adata.obsm["Z"], dtype=float))
    guides = adata.obs[guide_key or "gene"].to_numpy()
    return frame.groupby([adata.obs["gene"].to_numpy(), guides]).agg(average).groupby(level=0).mean()


@pytest.mark.parametrize("average", ["mean", "median"])
@pytest.mark.parametrize("guide_key", ["sgRNA", None])
def test_guides_count_equally_and_the_control_is_subtracted(average, guide_key):
    adata = cells()
    ours = aggregate(adata, "Z", gene_key="gene", guide_key=guide_key, average=average, standardize=None)
    means = means_of_genes(adata, guide_key, average)
    assert list(ours.obs_names) == ["A", "B", "C"]
    np.testing.assert_allclose(ours.X, (means - means.loc["nontargeting"]).drop("nontargeting"), rtol=1e-5, atol=1e-6)
    counts = adata.obs["gene"].value_counts()
    assert ours.obs["n_cells"].to_dict() == {gene: counts[gene] for gene in "ABC"}
    assert (ours.obs["n_guides"] == (3 if guide_key else 1)).all()


@pytest.mark.parametrize("standardize", ["with_control", "genes"])
@pytest.mark.parametrize("control", ["nontargeting", None])
def test_components_are_standardised_over_genes(standardize, control, tmp_path):
    adata = cells()
    means = means_of_genes(adata)
    reference = means.drop("nontargeting") if control and standardize == "genes" else means
    expected = (means - reference.mean()) / reference.std(ddof=1)
    ours = aggregate(adata, "Z", **KEYS, standardize=standardize, control=control)
    np.testing.assert_allclose(ours.X, expected.drop("nontargeting") if control else expected, rtol=1e-4, atol=1e-5)
    ours.write_h5ad(tmp_path / "profiles.h5ad")


def test_embeddings_on_disk_are_read_in_blocks(tmp_path, monkeypatch):
    adata = cells()
    expected = aggregate(adata, "Z", **KEYS).X
    np.save(tmp_path / "z.npy", adata.obsm["Z"])
    adata.obsm["Z"] = np.load(tmp_path / "z.npy", mmap_mode="r")
    monkeypatch.setattr("scbd.metrics._profiles._CELLS_PER_BLOCK", 37)
    np.testing.assert_allclose(aggregate(adata, "Z", **KEYS).X, expected, rtol=1e-5)


def test_too_few_cells_are_dropped_and_said(caplog):
    adata = cells()
    adata.obs.iloc[0] = ["A", "A_rare"]
    adata.obs.iloc[1] = ["D", "D_0"]
    with caplog.at_level(logging.WARNING, logger="scbd"):
        ours = aggregate(adata, "Z", **KEYS, min_cells=2, min_guides=2)
    assert ours.uns["aggregate"]["dropped"] == {"guides": ["A_rare", "D_0"], "genes": ["D"]}
    assert "2 guides and 1 genes" in caplog.text
    assert ours.obs["n_guides"].to_dict() == {"A": 3, "B": 3, "C": 3}
    # the control needs no number of guides; a single cell, and a single guide, unless more are asked for
    adata.obs.loc[adata.obs["gene"] == "nontargeting", "sgRNA"] = "pool"
    assert list(aggregate(adata, "Z", **KEYS, min_guides=2).obs_names) == ["A", "B", "C"]
    assert list(aggregate(adata, "Z", **KEYS).obs_names) == ["A", "B", "C", "D"]


@pytest.mark.parametrize("guide_key", ["sgRNA", None])
@pytest.mark.parametrize("control", [["nontargeting", "B"], ["B", "nontargeting"]])
def test_several_controls_are_one(guide_key, control):
    adata, renamed = cells(), cells()
    renamed.obs.loc[(adata.obs["gene"] == "B").to_numpy(), "gene"] = "nontargeting"
    ours = aggregate(adata, "Z", gene_key="gene", guide_key=guide_key, control=control)
    expected = aggregate(renamed, "Z", gene_key="gene", guide_key=guide_key)
    assert list(ours.obs_names) == list(expected.obs_names) == ["A", "C"]
    np.testing.assert_allclose(ours.X, expected.X, rtol=1e-5, atol=1e-6)
    assert ours.uns["aggregate"]["dropped"] == {"guides": [], "genes": []}


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"control": "NTC"}, ValueError, "NTC"),
        ({"control": ["nontargeting", "DMSO"]}, ValueError, "DMSO"),
        ({"guide_key": None, "min_guides": 2}, ValueError, "min_guides=2.*guide_key"),
        ({"guide_key": "guide"}, KeyError, "guide"),
        ({"average": "mode"}, ValueError, "average='mode'"),
        ({"standardize": "all"}, ValueError, "standardize='all'"),
        ({"min_cells": 10_000}, ValueError, "min_cells=10000"),
        ({"min_cells": 10_000, "control": None}, ValueError, "min_cells=10000"),
    ],
)
def test_what_cannot_be_aggregated(given, error, named):
    with pytest.raises(error, match=named):
        aggregate(cells(), "Z", **KEYS | given)


def test_cells_that_cannot_be_aggregated():
    adata = cells()
    adata.obsm["Z"][7] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        aggregate(adata, "Z", **KEYS)
    with pytest.raises(KeyError, match="'X'"):
        aggregate(adata, "X", **KEYS)


# what a network says of genes


def profiles(x: np.ndarray | int = 10, genes: list[str] | None = None) -> AnnData:
    x = np.random.default_rng(0).normal(size=(x, 4)) if isinstance(x, int) else np.asarray(x)
    genes = [f"G{i}" for i in range(len(x))] if genes is None else genes
    return AnnData(X=x, obs=pd.DataFrame(index=genes))


def net_of(rows: list[tuple[str, str]], kind: str | None = None) -> pd.DataFrame:
    net = pd.DataFrame(rows, columns=["source", "target"])
    if kind is not None:
        net.attrs["kind"] = kind
    return net


def related(genes: list[str], net: pd.DataFrame, **how: Any) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(len(genes), 3))
    return Relations(profiles(x, genes), net, universe="profiles", **how).known.toarray()


SETS = net_of([*(("a", f"G{i}") for i in range(3)), *(("b", f"G{i}") for i in range(3, 6))])


def test_sets_and_pairs_relate_the_genes_that_are_there():
    genes = ["G0", "G1", "G2", "G3"]
    expected = np.zeros((4, 4), dtype=bool)
    expected[[0, 2, 2, 3], [2, 0, 3, 2]] = True
    sets = net_of([("a", "G0"), ("a", "G2"), ("b", "G2"), ("b", "G3"), ("b", "absent")])
    pairs = net_of([("G0", "G2"), ("G3", "G2"), ("G2", "G3"), ("G2", "absent")])
    for net in (sets, pairs):
        np.testing.assert_array_equal(related(genes, net), expected)
        np.testing.assert_array_equal(related(genes, pd.concat([net, net])), expected)


@given(st.integers(0, 10_000), st.booleans())
def test_a_part_of_pairs_stays_pairs(seed, says):
    rng = np.random.default_rng(seed)
    genes = np.array([f"G{i}" for i in range(12)])
    one, two = np.triu_indices(12, k=1)
    chosen = rng.choice(len(one), rng.integers(1, 9), replace=False)
    net = net_of(list(zip(genes[one[chosen]], genes[two[chosen]], strict=True)), "pairs" if says else None)
    expected = np.zeros((12, 12), dtype=bool)
    expected[one[chosen], two[chosen]] = True
    np.testing.assert_array_equal(related(genes.tolist(), net), expected | expected.T)


def test_regulons_may_be_read_either_way_and_are_read_as_said():
    rows = [("TP53", "A"), ("TP53", "B"), ("MYC", "B"), ("MYC", "C"), ("A", "TP53"), ("A", "MYC")]
    genes = ["A", "B", "C", "TP53", "MYC"]
    pairs, sets = (related(genes, net_of(rows, kind)) for kind in ("pairs", "sets"))
    assert pairs[3, 0] and not pairs[1, 2]
    assert sets[1, 2] and not sets[3, 0]
    # the argument rules over what the frame says
    np.testing.assert_array_equal(related(genes, net_of(rows, "pairs"), net_kind="sets"), sets)
    assert "net of pairs" in repr(Relations(profiles(), net_of([("G0", "G1")])))


def test_a_name_or_two_of_a_complex_may_be_genes():
    net = net_of([(name, f"G{i + j}") for i, name in enumerate(["G7", *"abcdefghijklmnopqrst"]) for j in (0, 1)])
    assert Relations(profiles(30), net).net_kind == "sets"


def test_rows_without_a_name_say_nothing():
    net = pd.DataFrame({"source": ["a", "a", None, None], "target": ["G0", "G1", "G1", "G2"]})
    assert related(["G0", "G1", "G2"], net).sum() == 2
    with pytest.raises(ValueError, match="no rows"):
        related(["G0", "G1"], net.iloc[2:])


@given(st.integers(0, 1_000), st.integers(2, 6))
def test_large_sets_are_left_out_by_what_is_profiled_of_them(seed, most):
    rng = np.random.default_rng(seed)
    genes = np.array([f"G{i}" for i in range(9)])
    sets = [rng.choice([*genes, "absent", "away"], rng.integers(1, 9), replace=False) for _ in range(4)]
    net = net_of([(f"c{k}", gene) for k, one in enumerate(sets) for gene in one])
    expected = np.zeros((9, 9), dtype=bool)
    for one in sets:
        inside = np.isin(genes, one)
        if inside.sum() <= most:
            expected |= np.outer(inside, inside)
    np.fill_diagonal(expected, False)
    if expected.any():
        np.testing.assert_array_equal(related(genes.tolist(), net, max_set_size=most), expected)
    else:
        with pytest.raises(ValueError, match=f"max_set_size={most}|No two"):
            related(genes.tolist(), net, max_set_size=most)


def test_relations_without_large_sets():
    """A gene of a large set stays if it has a small one, too; what is left of the large one is no complex."""
    net = pd.concat([SETS, net_of([("large", f"G{i}") for i in (0, 1, 3, 9)])])
    without, expected = Relations(profiles(), net, max_set_size=3), Relations(profiles(), SETS)
    assert repr(without) == "Relations of 6 genes: 6 of 15 pairs are known (net of sets of up to 3 genes)"
    np.testing.assert_array_equal(without.genes, expected.genes)
    assert relationship_average_precision(without) == relationship_average_precision(expected)
    assert len(Relations(profiles(), net, max_set_size=4).genes) == 7
    for table in (
        complex_table(profiles(), net, max_set_size=3, n_permutations=20),
        complex_table(without, net, n_permutations=20),
    ):
        assert set(table.index) == {"a", "b"}


@pytest.mark.parametrize(
    ("net", "how", "error", "named"),
    [
        (SETS.rename(columns={"source": "complex"}), {}, KeyError, "source"),
        (SETS, {"gene_key": "symbol"}, KeyError, "symbol"),
        (SETS, {"universe": "all"}, ValueError, "universe='all'"),
        (SETS, {"net_kind": "pair"}, ValueError, "net_kind='pair'"),
        (net_of([("G0", "G1")], "complexes"), {}, ValueError, "kind.*'complexes'"),
        (
            net_of([("G0", "G1"), ("G2", "G3"), ("c", "G4"), ("c", "G5")]),
            {},
            ValueError,
            "2 of its 3 sources.*net_kind",
        ),
        (net_of([("one", "G0"), ("two", "G1")]), {}, ValueError, "No two of the 10"),
        (net_of([("a", "g0"), ("a", "g1")]), {}, ValueError, "G0, G1.*g0, g1.*gene_key"),
        (net_of([("G0", "G1")]), {"max_set_size": 30}, ValueError, "max_set_size=30"),
        (SETS, {"max_set_size": 2}, ValueError, "max_set_size=2"),
        *((SETS, {"max_set_size": size}, ValueError, f"max_set_size={size!r}") for size in (1, 2.5, True, "30")),
    ],
)
def test_networks_that_relate_nothing(net, how, error, named):
    with pytest.raises(error, match=named):
        Relations(profiles(), net, **how)


def test_profiles_that_cannot_be_compared():
    repeated = profiles()
    repeated.obs["symbol"] = ["G0", "G0", *repeated.obs_names[2:]]
    with pytest.raises(ValueError, match=r"several profiles \(G0\)"):
        Relations(repeated, SETS, gene_key="symbol")
    repeated.X[4] = np.nan
    with pytest.raises(ValueError, match=r"NaN.*\(G4\)"):
        Relations(repeated, SETS)
    with pytest.raises(ValueError, match="net is missing"):
        relationship_curve(profiles())


SCORES = relationship_curve, relationship_recall, relationship_average_precision, relationship_interval


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "beside", [{"net": SETS}, {"net_kind": "sets"}, {"gene_key": "symbol"}, {"universe": "profiles"}], ids=str
)
def test_what_relations_have_already_cannot_be_given_beside_them(score, beside):
    with pytest.raises(ValueError, match=f"{next(iter(beside))} cannot be given together with Relations"):
        score(Relations(profiles(), SETS), **beside)


def test_each_score_reads_the_net_as_said():
    regulons = net_of([*(("G8", f"G{i}") for i in range(3)), *(("G9", f"G{i}") for i in range(3, 6))])
    adata = profiles()
    for kind in ("pairs", "sets"):
        relations = Relations(adata, regulons, net_kind=kind)
        for score in SCORES:
            assert np.array_equal(score(adata, regulons, net_kind=kind), score(relations))


@pytest.mark.parametrize("block", [1, 25, 1 << 24])
def test_pairs_are_the_upper_triangle_however_they_are_made(monkeypatch, block):
    monkeypatch.setattr(module, "_MAX_COSINES_IN_MEMORY", block)
    relations = Relations(profiles(), SETS, universe="profiles")
    upper = np.triu_indices(10, k=1)
    cosine, known = relations.pairs()
    np.testing.assert_allclose(cosine, (relations.unit @ relations.unit.T)[upper], atol=1e-15)
    np.testing.assert_array_equal(known, relations.known.toarray()[upper])
    ordered, of_known = relations.ranked
    np.testing.assert_array_equal(ordered, np.sort(cosine))
    np.testing.assert_array_equal(of_known, np.sort(cosine[known]))


# scores over pairs


def small(seed: int, n: int = 12) -> tuple[np.ndarray, list[str], pd.DataFrame]:
    """Sets that overlap, that hold one gene, and genes of none."""
    rng = np.random.default_rng(seed)
    genes = [f"G{i}" for i in range(n)]
    rows = [(f"c{k}", g) for k in range(4) for g in rng.choice([*genes, "absent"], rng.integers(1, 6), replace=False)]
    return rng.normal(size=(n, 3)), genes, net_of(rows)


@given(st.integers(0, 500))
def test_all_scores_equal_the_loops(seed):
    x, genes, net = small(seed)
    square, cosine, truth = naive.pairs(x, genes, net)
    if not len(square):
        with pytest.raises(ValueError, match="No two"):
            Relations(profiles(x), net)
        return
    relations = Relations(profiles(x), net)
    np.testing.assert_allclose(relations.unit @ relations.unit.T, square, atol=1e-9)
    expected = naive.curve(relations.unit, list(relations.genes), net, list(PERCENTILES))
    np.testing.assert_allclose(relationship_curve(relations)[["precision", "recall"]], expected, atol=1e-9)
    assert relationship_average_precision(relations) == pytest.approx(average_precision_score(truth, cosine))
    low, high = np.percentile(cosine, [5, 95])
    assert relationship_recall(relations) == pytest.approx(np.mean((cosine[truth] > high) | (cosine[truth] < low)))


def scores(relations: Relations, tail: float = 0.05) -> dict[str, float]:
    return {
        "area": relationship_area(relationship_curve(relations)),
        "recall": relationship_recall(relations, tail=tail),
        "average_precision": relationship_average_precision(relations),
    }


KNOWN: list[tuple[Any, dict[str, Any], int, int, float, float, float]] = [
    # columns, how, genes, related pairs, area, recall, average precision: the real profiles of Funk et al.
    (range(64), {}, 1195, 19053, 0.05006, 0.37653, 0.19726),
    (range(32), {}, 1195, 19053, 0.04985, 0.37238, 0.19577),
    (range(32, 64), {}, 1195, 19053, 0.03439, 0.28258, 0.13330),
    # by all their genes, as in the network, five more sets would be left out
    (range(64), {"max_set_size": 30}, 1082, 6433, 0.01627, 0.33779, 0.10455),
]


@pytest.mark.parametrize(("columns", "how", "n_genes", "n_known", "area", "recall", "average_precision"), KNOWN)
def test_known_answers(shared, columns, how, n_genes, n_known, area, recall, average_precision):
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    relations = Relations(funk_profiles(shared, columns), net, **how)
    assert (len(relations.genes), relations.known.nnz) == (n_genes, 2 * n_known)
    found = {name: round(score, 5) for name, score in scores(relations).items()}
    assert found == {"area": area, "recall": recall, "average_precision": average_precision}


def test_known_answers_over_all_profiles(shared):
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    relations = Relations(funk_profiles(shared, drop_control=True), net, universe="profiles")
    found = relationship_recall(relations), relationship_average_precision(relations)
    assert tuple(round(score, 5) for score in found) == (0.45006, 0.06259)


@pytest.mark.parametrize("name", ["CORUM", "StringDB"])
def test_parts_of_the_real_pairs_are_pairs(shared, name):
    net = gene_pairs(shared / "corum" / f"{name}.txt")
    rng = np.random.default_rng(0)
    for n in (50, 300) * 4:
        genes = rng.choice(np.unique(net), n, replace=False).tolist()
        part = net[net["source"].isin(genes) & net["target"].isin(genes)]
        for frame in (part, net_of(part.to_numpy().tolist())) if len(part) else ():  # the second says nothing of itself
            relations = Relations(profiles(rng.normal(size=(n, 3)), genes), frame)
            assert (relations.net_kind, relations.known.nnz) == ("pairs", 2 * len(part))


def test_a_map_of_one_point_knows_nothing():
    """All pairs tie: none is in a tail, and none is predicted twice where the thresholds meet."""
    relations = Relations(profiles(np.repeat(np.eye(3)[:1], 6, axis=0)), SETS)
    assert relationship_recall(relations) == 0
    for diagonal in (True, False):
        curve = relationship_curve(relations, diagonal=diagonal)
        assert (curve["recall"] == 1).all()  # every pair is predicted, once
        np.testing.assert_allclose(curve["precision"], relations.pairs()[1].mean())


def test_ties_count_for_neither_tail():
    """Six of fifteen pairs have a cosine of 1: their best places are .64 to 1, and the worst of them is no tail's."""
    relations = Relations(profiles(np.repeat(np.eye(2), 3, axis=0)), SETS)
    assert relationship_recall(relations, tail=0.3) == 0
    assert relationship_recall(relations, tail=0.45) == 1
    assert relationship_average_precision(relations) == pytest.approx(1)


def test_a_profile_of_zeros_is_similar_to_nothing_and_genes_may_stand_in_a_column():
    adata = profiles()
    adata.X[1] = 0
    relations = Relations(adata, SETS)
    assert (relations.unit[1] == 0).all()
    adata.obs["symbol"], adata.obs_names = adata.obs_names.to_numpy(), [f"row{i}" for i in range(10)]
    assert relationship_recall(adata, SETS, gene_key="symbol") == relationship_recall(relations)


@pytest.mark.parametrize("tail", [0, 0.5])
def test_two_tails_leave_something_between(tail):
    with pytest.raises(ValueError, match=f"tail={tail}"):
        relationship_recall(profiles(), SETS, tail=tail)


def test_curves_that_cannot_be_drawn():
    with pytest.raises(ValueError, match="between 0 and 100"):
        relationship_curve(profiles(), SETS, percentiles=[90, 101])
    with pytest.raises(ValueError, match="two points"):
        relationship_area(relationship_curve(profiles(), SETS, percentiles=[90]))


# what they are by chance


def a_map(x: np.ndarray, size: int) -> Relations:
    return Relations(profiles(x), net_of([(f"c{i // size}", f"G{i}") for i in range(len(x))]))


@pytest.mark.parametrize("ties", [False, True])
def test_chance_is_the_mean_over_relations_of_random_pairs(ties):
    """Of few pairs, where the prevalence alone would be half of it."""
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (10, 2)) if ties else rng.normal(size=(10, 3))
    relations = a_map(x.astype(float), size=2)
    ordered, known = relations.ranked
    drawn = []
    for _ in range(400):
        relations.__dict__["ranked"] = ordered, np.sort(rng.choice(ordered, len(known), replace=False))
        drawn.append(scores(relations))
    table = pd.DataFrame(drawn)
    for score, expected in expected_relationship_scores(relations).items():
        assert table[score].mean() == pytest.approx(expected, abs=4 * table[score].std() / np.sqrt(len(table)))
    assert expected_relationship_scores(relations)["average_precision"] > len(known) / len(ordered)


def test_profiles_in_random_order_score_at_chance():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(40, 8)), 6, axis=0) + 0.5 * rng.normal(size=(240, 8))
    table = pd.DataFrame([scores(a_map(x[rng.permutation(240)], size=6)) for _ in range(20)])
    relations = a_map(x, size=6)
    expected = expected_relationship_scores(relations)
    for score, value in expected.items():
        assert table[score].mean() == pytest.approx(value, rel=0.1)
        assert scores(relations)[score] > 2 * value
    prevalence = relations.pairs()[1].mean()
    assert expected["area"] == pytest.approx(0.38 * prevalence, rel=0.02)
    assert expected["recall"] == pytest.approx(0.1, rel=0.01)
    assert expected["average_precision"] == pytest.approx(prevalence, rel=0.02)


def test_a_map_of_one_point_or_of_one_pair_scores_its_chance():
    point = a_map(np.ones((8, 3)), size=4)
    assert expected_relationship_scores(point) == pytest.approx(scores(point))
    pair = a_map(np.array([[1.0, 0.0], [0.6, 0.8]]), size=2)
    found = expected_relationship_scores(pair, percentiles=[0])
    assert np.isnan(found["area"])
    assert (found["recall"], found["average_precision"]) == (relationship_recall(pair), pytest.approx(1))


def test_the_curve_and_the_tail_that_are_asked_for_decide_chance():
    relations = a_map(np.random.default_rng(0).normal(size=(60, 4)), size=6)
    narrow = expected_relationship_scores(relations, percentiles=range(90, 100), tail=0.1)
    assert narrow["area"] == pytest.approx(expected_relationship_scores(relations)["area"] * 0.18 / 0.38, rel=0.05)
    assert narrow["recall"] == pytest.approx(0.2, rel=0.02)


# how sure they are


@pytest.mark.parametrize("score", ["average_precision", "recall", "area"])
def test_intervals_are_repeatable_and_shrink_with_more_genes(score):
    widths = []
    for n_sets in (15, 60):
        profiles, net = map_of_complexes(n_sets=n_sets, found=n_sets // 3)
        low, high = relationship_interval(profiles, net, score=score, n_bootstrap=60)
        widths.append(high - low)
    assert 0 < widths[1] < widths[0]
    assert relationship_interval(profiles, net, score=score, n_bootstrap=60) == (low, high)


def test_an_interval_leaves_as_many_on_either_side():
    profiles, net = map_of_complexes()
    ends = {level: relationship_interval(profiles, net, level=level, n_bootstrap=41) for level in (0.0, 0.5, 0.9, 1.0)}
    low, high = np.array(list(ends.values())).T
    assert low[0] == high[0]  # of no coverage: the median
    assert (np.diff(low) < 0).all() and (np.diff(high) > 0).all()


def noisy(adata: AnnData, sd: float, seed: int) -> AnnData:
    return AnnData(X=adata.X + sd * np.random.default_rng(seed).normal(size=adata.shape), obs=adata.obs)


def test_a_difference_is_surer_than_the_scores_it_is_of():
    adata, net = map_of_complexes(n_sets=40, found=20)
    better, worse = (Relations(noisy(adata, sd, 1), net) for sd in (0.1, 3))
    low, high = relationship_interval(better, other=worse, n_bootstrap=100)
    assert 0 < low < relationship_average_precision(better) - relationship_average_precision(worse) < high
    widths = [np.diff(relationship_interval(one, n_bootstrap=100))[0] for one in (better, worse)]
    assert high - low < 0.9 * np.hypot(*widths)  # as wide as were the two drawn apart
    assert relationship_interval(better, other=better, n_bootstrap=20) == (0, 0)
    assert relationship_interval(adata, net, other=noisy(adata, 1, 0), n_bootstrap=20)[0] > -1


def test_only_maps_of_the_same_relations_differ_by_something():
    profiles, net = map_of_complexes()
    relations = Relations(profiles, net)
    for other in (Relations(profiles[::-1], net), Relations(profiles, net[:8]), Relations(profiles, net[4:8])):
        with pytest.raises(ValueError, match="genes or relations of profiles and other differ"):
            relationship_interval(relations, other=other)


def test_one_complex_does_not_tell_of_others():
    profiles, net = map_of_complexes()
    with pytest.raises(ValueError, match="one complex"):
        relationship_interval(profiles, net[:4], universe="profiles")
    with pytest.raises(ValueError, match="score='f1'"):
        relationship_interval(profiles, net, score="f1")  # type: ignore[arg-type]


def heavy(seed: int) -> tuple[AnnData, pd.DataFrame]:
    """Twenty complexes of twelve genes, of which each has a strength of its own."""
    rng = np.random.default_rng(seed)
    of_complex = 0.9 * np.abs(rng.normal(size=(20, 1))) * rng.normal(size=(20, 16))
    x = np.repeat(of_complex, 12, axis=0) + rng.normal(size=(240, 16))
    return profiles(x), net_of([(f"complex {i // 12}", f"G{i}") for i in range(240)])


def test_few_large_complexes_are_as_uncertain_as_they_are():
    """Genes drawn one by one gave intervals of little more than half of this width."""
    scores = [relationship_average_precision(*heavy(seed)) for seed in range(40)]
    widths = [np.diff(relationship_interval(*heavy(seed), n_bootstrap=60))[0] for seed in range(5)]
    assert np.mean(widths) > 0.8 * 3.92 * np.std(scores)


def test_differences_are_as_uncertain_as_they_are():
    """Neither as sure as were single genes drawn, nor as unsure as were each of the two drawn apart."""

    def both(seed: int) -> tuple[Relations, Relations]:
        adata, net = heavy(seed)
        return Relations(adata, net), Relations(noisy(adata, 1, seed + 1_000), net)

    scores = np.array([[relationship_average_precision(one) for one in both(seed)] for seed in range(40)])
    found = [np.diff(relationship_interval(one, other=two, n_bootstrap=60)) for one, two in map(both, range(6))]
    assert 0.7 < np.mean(found) / (3.92 * np.std(scores[:, 0] - scores[:, 1])) < 1.3


# complexes, and each gene


@given(st.integers(0, 300))
def test_genes_and_complexes_are_scored_as_by_loops(seed):
    x, genes, net = small(seed)
    expected = naive.of_genes(x, genes, net)
    if not expected:
        return
    relations = Relations(profiles(x), net, universe="profiles")
    found = partner_average_precision(relations)["average_precision"]
    assert found.index.to_list() == list(expected)
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-12)
    of_sets = naive.of_sets(x, genes, net)
    found = complex_table(relations, net, n_permutations=10)["average_precision"].dropna()
    assert set(found.index) == set(of_sets)
    np.testing.assert_allclose(found, [of_sets[name] for name in found.index], rtol=1e-12)


@pytest.mark.parametrize("universe", ["annotated", "profiles"])
def test_of_a_point_each_gene_and_complex_scores_chance(universe):
    x, _, net = small(1)
    relations = Relations(profiles(np.ones_like(x)), net, universe=universe)
    for table in (partner_average_precision(relations), complex_table(relations, net, n_permutations=10)):
        np.testing.assert_allclose(table["average_precision"], table["chance"], rtol=1e-12)


def test_where_everything_is_related_there_is_nothing_to_find():
    profiles, net = map_of_complexes(n_sets=1, size=5)
    assert partner_average_precision(Relations(profiles, net)).empty
    table = complex_table(profiles, net, n_permutations=20)
    assert table[["average_precision", "chance"]].isna().all(axis=None)


KNOWN_OF_GENES: list[tuple[dict[str, Any], int, float]] = [
    ({}, 1195, 0.18548),
    ({"universe": "profiles"}, 1195, 0.13415),
    ({"max_set_size": 30}, 1082, 0.14758),
]


@pytest.mark.parametrize(("how", "n", "expected"), KNOWN_OF_GENES)
def test_known_answers_of_genes(shared, how, n, expected):
    """Of CORUM and the profiles of Funk et al.; scikit-learn's for each gene, its mean by hand."""
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    found = partner_average_precision(Relations(funk_profiles(shared), net, **how))["average_precision"]
    assert (len(found), round(found.mean(), 5)) == (n, expected)


def test_complexes_that_are_there_are_found():
    profiles, net = map_of_complexes()
    table = complex_table(profiles, net)
    assert set(table.index[:5]) == {f"complex {i}" for i in range(5)}
    assert (table["fdr"].iloc[:5] < 0.05).all() and (table["fdr"].iloc[5:] > 0.05).all()
    assert (table["fdr"] >= table["p_value"]).all()
    first = table.loc["complex 2"]
    rows = profiles[first["genes"].split()].X
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert first["mean_cosine"] == pytest.approx((unit @ unit.T)[np.triu_indices(4, 1)].mean())
    assert first["size"] == 4


def test_few_complexes_among_many_are_found():
    """A hundred random sets give no p value that is small enough for five among three hundred."""
    profiles, net = map_of_complexes(n_sets=300, size=3, found=5)
    table = complex_table(profiles, net, n_permutations=100)
    assert set(table.index[table["fdr"] < 0.05]) == {f"complex {i}" for i in range(5)}
    assert table["p_value"].min() == pytest.approx(1 / 6_000)


def test_small_p_values_are_no_more_frequent_than_they_say():
    tables = [
        complex_table(*map_of_complexes(n_sets=100, found=0, seed=seed), n_permutations=40)["p_value"]
        for seed in range(6)
    ]
    p = np.concatenate(tables)
    for t in (0.003, 0.01, 0.03, 0.1, 0.3):
        assert (p <= t).mean() < t + 3.5 * np.sqrt(t * (1 - t) / len(p))
    assert 0.45 < p.mean() < 0.55


def test_no_p_value_is_zero():
    """Of ten random sets none may be as good: that is one of eleven, and not nothing."""
    with pytest.warns(UserWarning, match=r"max_permutations=10 is few for 20 complexes.* 399 "):
        table = complex_table(*map_of_complexes(), max_permutations=10)
    assert table["p_value"].min() == pytest.approx(1 / 11)


def test_complexes_that_bear_names_of_genes_are_complexes_where_that_is_said():
    profiles, net = map_of_complexes()
    named = net.assign(source=net.groupby("source")["target"].transform("first"))
    table = complex_table(profiles, named, net_kind="sets", n_permutations=50)
    expected = complex_table(profiles, net, n_permutations=50)
    assert sorted(table["mean_cosine"]) == sorted(expected["mean_cosine"])


def test_what_has_no_table_of_complexes():
    adata, net = map_of_complexes()
    with pytest.raises(ValueError, match="net holds pairs"):
        complex_table(adata, net_of([("G0", "G1"), ("G2", "G3")]))
    with pytest.raises(ValueError, match="No complex of net has two of the 8 genes"):
        complex_table(Relations(adata[:8], net), net[8:])
    with pytest.raises(ValueError, match="gene_key and universe and max_set_size"):
        complex_table(Relations(adata, net), net, gene_key="symbol", universe="profiles", max_set_size=3)
    for number in ("n_permutations", "max_permutations"):
        with pytest.raises(ValueError, match=f"{number}=0"):
            complex_table(adata, net, **{number: 0})  # type: ignore[arg-type]
