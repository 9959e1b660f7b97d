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


def make_cells(n: int = 400, seed: int = 0) -> AnnData:
    rng = np.random.default_rng(seed)
    gene = rng.choice(["A", "B", "C", "nontargeting"], size=n, p=[0.4, 0.3, 0.2, 0.1])
    guide = np.array([f"{g}_{i}" for g, i in zip(gene, rng.integers(3, size=n), strict=True)])
    z = rng.normal(size=(n, 5)) + (gene == "B")[:, None]
    obs = pd.DataFrame({"gene": gene, "sgRNA": guide}, index=[str(i) for i in range(n)])
    return AnnData(obs=obs, obsm={"Z": z.astype(np.float32)})


def naive_gene_means(adata: AnnData, guide_key: str | None = "sgRNA", average: str = "mean") -> pd.DataFrame:
    frame = pd.DataFrame(np.asarray(adata.obsm["Z"], dtype=float))
    guides = adata.obs[guide_key or "gene"].to_numpy()
    return frame.groupby([adata.obs["gene"].to_numpy(), guides]).agg(average).groupby(level=0).mean()


@pytest.mark.parametrize("average", ["mean", "median"])
@pytest.mark.parametrize("guide_key", ["sgRNA", None])
def test_aggregate_guides_are_weighted_equally_and_control_subtracted(average, guide_key):
    adata = make_cells()
    ours = aggregate(adata, "Z", gene_key="gene", guide_key=guide_key, average=average, standardize=None)
    means = naive_gene_means(adata, guide_key, average)
    assert list(ours.obs_names) == ["A", "B", "C"]
    np.testing.assert_allclose(ours.X, (means - means.loc["nontargeting"]).drop("nontargeting"), rtol=1e-5, atol=1e-6)
    counts = adata.obs["gene"].value_counts()
    assert ours.obs["n_cells"].to_dict() == {gene: counts[gene] for gene in "ABC"}
    assert (ours.obs["n_guides"] == (3 if guide_key else 1)).all()


@pytest.mark.parametrize("standardize", ["with_control", "genes"])
@pytest.mark.parametrize("control", ["nontargeting", None])
def test_aggregate_standardize_is_equal_to_naive(standardize, control, tmp_path):
    adata = make_cells()
    means = naive_gene_means(adata)
    reference = means.drop("nontargeting") if control and standardize == "genes" else means
    expected = (means - reference.mean()) / reference.std(ddof=1)
    ours = aggregate(adata, "Z", **KEYS, standardize=standardize, control=control)
    np.testing.assert_allclose(ours.X, expected.drop("nontargeting") if control else expected, rtol=1e-4, atol=1e-5)
    ours.write_h5ad(tmp_path / "profiles.h5ad")


def test_aggregate_memory_map_in_blocks_is_equal_to_array(tmp_path, monkeypatch):
    adata = make_cells()
    expected = aggregate(adata, "Z", **KEYS).X
    np.save(tmp_path / "z.npy", adata.obsm["Z"])
    adata.obsm["Z"] = np.load(tmp_path / "z.npy", mmap_mode="r")
    monkeypatch.setattr("scbd.metrics._profiles._CELLS_PER_BLOCK", 37)
    np.testing.assert_allclose(aggregate(adata, "Z", **KEYS).X, expected, rtol=1e-5)


def test_aggregate_few_cells_or_guides_are_dropped_and_logged(caplog):
    adata = make_cells()
    adata.obs.iloc[0] = ["A", "A_rare"]
    adata.obs.iloc[1] = ["D", "D_0"]
    with caplog.at_level(logging.WARNING, logger="scbd"):
        ours = aggregate(adata, "Z", **KEYS, min_cells=2, min_guides=2)
    assert ours.uns["aggregate"]["dropped"] == {"guides": ["A_rare", "D_0"], "genes": ["D"]}
    assert "2 guides and 1 genes" in caplog.text
    assert ours.obs["n_guides"].to_dict() == {"A": 3, "B": 3, "C": 3}
    # min_guides does not apply to the control; by default, one cell and one guide are enough
    adata.obs.loc[adata.obs["gene"] == "nontargeting", "sgRNA"] = "pool"
    assert list(aggregate(adata, "Z", **KEYS, min_guides=2).obs_names) == ["A", "B", "C"]
    assert list(aggregate(adata, "Z", **KEYS).obs_names) == ["A", "B", "C", "D"]


@pytest.mark.parametrize("guide_key", ["sgRNA", None])
@pytest.mark.parametrize("control", [["nontargeting", "B"], ["B", "nontargeting"]])
def test_aggregate_several_controls_are_pooled(guide_key, control):
    adata, renamed = make_cells(), make_cells()
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
def test_aggregate_invalid_arguments_raise(given, error, named):
    with pytest.raises(error, match=named):
        aggregate(make_cells(), "Z", **KEYS | given)


def test_aggregate_nan_or_missing_embedding_raises():
    adata = make_cells()
    adata.obsm["Z"][7] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        aggregate(adata, "Z", **KEYS)
    with pytest.raises(KeyError, match="'X'"):
        aggregate(adata, "X", **KEYS)


# relations of genes in a network


def make_profiles(x: np.ndarray | int = 10, genes: list[str] | None = None) -> AnnData:
    x = np.random.default_rng(0).normal(size=(x, 4)) if isinstance(x, int) else np.asarray(x)
    genes = [f"G{i}" for i in range(len(x))] if genes is None else genes
    return AnnData(X=x, obs=pd.DataFrame(index=genes))


def make_net(rows: list[tuple[str, str]], kind: str | None = None) -> pd.DataFrame:
    net = pd.DataFrame(rows, columns=["source", "target"])
    if kind is not None:
        net.attrs["kind"] = kind
    return net


def find_related_pairs(genes: list[str], net: pd.DataFrame, **how: Any) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(len(genes), 3))
    return Relations(make_profiles(x, genes), net, universe="profiles", **how).known.toarray()


SETS = make_net([*(("a", f"G{i}") for i in range(3)), *(("b", f"G{i}") for i in range(3, 6))])


def test_relations_sets_and_pairs_relate_profiled_genes():
    genes = ["G0", "G1", "G2", "G3"]
    expected = np.zeros((4, 4), dtype=bool)
    expected[[0, 2, 2, 3], [2, 0, 3, 2]] = True
    sets = make_net([("a", "G0"), ("a", "G2"), ("b", "G2"), ("b", "G3"), ("b", "absent")])
    pairs = make_net([("G0", "G2"), ("G3", "G2"), ("G2", "G3"), ("G2", "absent")])
    for net in (sets, pairs):
        np.testing.assert_array_equal(find_related_pairs(genes, net), expected)
        np.testing.assert_array_equal(find_related_pairs(genes, pd.concat([net, net])), expected)


@given(st.integers(0, 10_000), st.booleans())
def test_relations_subset_of_pairs_is_read_as_pairs(seed, says):
    rng = np.random.default_rng(seed)
    genes = np.array([f"G{i}" for i in range(12)])
    one, two = np.triu_indices(12, k=1)
    chosen = rng.choice(len(one), rng.integers(1, 9), replace=False)
    net = make_net(list(zip(genes[one[chosen]], genes[two[chosen]], strict=True)), "pairs" if says else None)
    expected = np.zeros((12, 12), dtype=bool)
    expected[one[chosen], two[chosen]] = True
    np.testing.assert_array_equal(find_related_pairs(genes.tolist(), net), expected | expected.T)


def test_relations_regulons_are_read_as_net_kind_states():
    rows = [("TP53", "A"), ("TP53", "B"), ("MYC", "B"), ("MYC", "C"), ("A", "TP53"), ("A", "MYC")]
    genes = ["A", "B", "C", "TP53", "MYC"]
    pairs, sets = (find_related_pairs(genes, make_net(rows, kind)) for kind in ("pairs", "sets"))
    assert pairs[3, 0] and not pairs[1, 2]
    assert sets[1, 2] and not sets[3, 0]
    # the argument takes precedence over the attribute of the frame
    np.testing.assert_array_equal(find_related_pairs(genes, make_net(rows, "pairs"), net_kind="sets"), sets)
    assert "net of pairs" in repr(Relations(make_profiles(), make_net([("G0", "G1")])))


def test_relations_one_source_named_like_a_gene_is_read_as_sets():
    net = make_net([(name, f"G{i + j}") for i, name in enumerate(["G7", *"abcdefghijklmnopqrst"]) for j in (0, 1)])
    assert Relations(make_profiles(30), net).net_kind == "sets"


def test_relations_rows_without_source_are_ignored():
    net = pd.DataFrame({"source": ["a", "a", None, None], "target": ["G0", "G1", "G1", "G2"]})
    assert find_related_pairs(["G0", "G1", "G2"], net).sum() == 2
    with pytest.raises(ValueError, match="no rows"):
        find_related_pairs(["G0", "G1"], net.iloc[2:])


@given(st.integers(0, 1_000), st.integers(2, 6))
def test_relations_max_set_size_counts_profiled_genes(seed, most):
    rng = np.random.default_rng(seed)
    genes = np.array([f"G{i}" for i in range(9)])
    sets = [rng.choice([*genes, "absent", "away"], rng.integers(1, 9), replace=False) for _ in range(4)]
    net = make_net([(f"c{k}", gene) for k, one in enumerate(sets) for gene in one])
    expected = np.zeros((9, 9), dtype=bool)
    for one in sets:
        inside = np.isin(genes, one)
        if inside.sum() <= most:
            expected |= np.outer(inside, inside)
    np.fill_diagonal(expected, False)
    if expected.any():
        np.testing.assert_array_equal(find_related_pairs(genes.tolist(), net, max_set_size=most), expected)
    else:
        with pytest.raises(ValueError, match=f"max_set_size={most}|No two"):
            find_related_pairs(genes.tolist(), net, max_set_size=most)


def test_relations_max_set_size_excludes_large_sets():
    """A gene of a large set stays if it is also in a small set; the rest of the large set is not a complex."""
    net = pd.concat([SETS, make_net([("large", f"G{i}") for i in (0, 1, 3, 9)])])
    without, expected = Relations(make_profiles(), net, max_set_size=3), Relations(make_profiles(), SETS)
    assert repr(without) == "Relations of 6 genes: 6 of 15 pairs are known (net of sets of up to 3 genes)"
    np.testing.assert_array_equal(without.genes, expected.genes)
    assert relationship_average_precision(without) == relationship_average_precision(expected)
    assert len(Relations(make_profiles(), net, max_set_size=4).genes) == 7
    for table in (
        complex_table(make_profiles(), net, max_set_size=3, n_permutations=20),
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
        (make_net([("G0", "G1")], "complexes"), {}, ValueError, "kind.*'complexes'"),
        (
            make_net([("G0", "G1"), ("G2", "G3"), ("c", "G4"), ("c", "G5")]),
            {},
            ValueError,
            "2 of its 3 sources.*net_kind",
        ),
        (make_net([("one", "G0"), ("two", "G1")]), {}, ValueError, "No two of the 10"),
        (make_net([("a", "g0"), ("a", "g1")]), {}, ValueError, "G0, G1.*g0, g1.*gene_key"),
        (make_net([("G0", "G1")]), {"max_set_size": 30}, ValueError, "max_set_size=30"),
        (SETS, {"max_set_size": 2}, ValueError, "max_set_size=2"),
        *((SETS, {"max_set_size": size}, ValueError, f"max_set_size={size!r}") for size in (1, 2.5, True, "30")),
    ],
)
def test_relations_invalid_network_raises(net, how, error, named):
    with pytest.raises(error, match=named):
        Relations(make_profiles(), net, **how)


def test_relations_invalid_profiles_raise():
    repeated = make_profiles()
    repeated.obs["symbol"] = ["G0", "G0", *repeated.obs_names[2:]]
    with pytest.raises(ValueError, match=r"several profiles \(G0\)"):
        Relations(repeated, SETS, gene_key="symbol")
    repeated.X[4] = np.nan
    with pytest.raises(ValueError, match=r"NaN.*\(G4\)"):
        Relations(repeated, SETS)
    with pytest.raises(ValueError, match="net is missing"):
        relationship_curve(make_profiles())


SCORES = relationship_curve, relationship_recall, relationship_average_precision, relationship_interval


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "beside", [{"net": SETS}, {"net_kind": "sets"}, {"gene_key": "symbol"}, {"universe": "profiles"}], ids=str
)
def test_relationship_scores_relations_with_other_arguments_raise(score, beside):
    with pytest.raises(ValueError, match=f"{next(iter(beside))} cannot be given together with Relations"):
        score(Relations(make_profiles(), SETS), **beside)


def test_relationship_scores_net_kind_is_passed_to_relations():
    regulons = make_net([*(("G8", f"G{i}") for i in range(3)), *(("G9", f"G{i}") for i in range(3, 6))])
    adata = make_profiles()
    for kind in ("pairs", "sets"):
        relations = Relations(adata, regulons, net_kind=kind)
        for score in SCORES:
            assert np.array_equal(score(adata, regulons, net_kind=kind), score(relations))


@pytest.mark.parametrize("block", [1, 25, 1 << 24])
def test_relations_pairs_any_block_size_return_upper_triangle(monkeypatch, block):
    monkeypatch.setattr(module, "_MAX_COSINES_IN_MEMORY", block)
    relations = Relations(make_profiles(), SETS, universe="profiles")
    upper = np.triu_indices(10, k=1)
    cosine, known = relations.pairs()
    np.testing.assert_allclose(cosine, (relations.unit @ relations.unit.T)[upper], atol=1e-15)
    np.testing.assert_array_equal(known, relations.known.toarray()[upper])
    ordered, of_known = relations.ranked
    np.testing.assert_array_equal(ordered, np.sort(cosine))
    np.testing.assert_array_equal(of_known, np.sort(cosine[known]))


# scores over pairs


def make_small_sets(seed: int, n: int = 12) -> tuple[np.ndarray, list[str], pd.DataFrame]:
    """Make overlapping sets, some of one gene, and genes without a set."""
    rng = np.random.default_rng(seed)
    genes = [f"G{i}" for i in range(n)]
    rows = [(f"c{k}", g) for k in range(4) for g in rng.choice([*genes, "absent"], rng.integers(1, 6), replace=False)]
    return rng.normal(size=(n, 3)), genes, make_net(rows)


@given(st.integers(0, 500))
def test_relationship_scores_random_sets_are_equal_to_naive(seed):
    x, genes, net = make_small_sets(seed)
    square, cosine, truth = naive.pairs(x, genes, net)
    if not len(square):
        with pytest.raises(ValueError, match="No two"):
            Relations(make_profiles(x), net)
        return
    relations = Relations(make_profiles(x), net)
    np.testing.assert_allclose(relations.unit @ relations.unit.T, square, atol=1e-9)
    expected = naive.curve(relations.unit, list(relations.genes), net, list(PERCENTILES))
    np.testing.assert_allclose(relationship_curve(relations)[["precision", "recall"]], expected, atol=1e-9)
    assert relationship_average_precision(relations) == pytest.approx(average_precision_score(truth, cosine))
    low, high = np.percentile(cosine, [5, 95])
    assert relationship_recall(relations) == pytest.approx(np.mean((cosine[truth] > high) | (cosine[truth] < low)))


def compute_scores(relations: Relations, tail: float = 0.05) -> dict[str, float]:
    return {
        "area": relationship_area(relationship_curve(relations)),
        "recall": relationship_recall(relations, tail=tail),
        "average_precision": relationship_average_precision(relations),
    }


KNOWN: list[tuple[Any, dict[str, Any], int, int, float, float, float]] = [
    # columns, arguments, genes, related pairs, area, recall, average precision of the real profiles of Funk et al.
    (range(64), {}, 1195, 19053, 0.05006, 0.37653, 0.19726),
    (range(32), {}, 1195, 19053, 0.04985, 0.37238, 0.19577),
    (range(32, 64), {}, 1195, 19053, 0.03439, 0.28258, 0.13330),
    # if set sizes counted all genes of the network, five more sets would be excluded
    (range(64), {"max_set_size": 30}, 1082, 6433, 0.01627, 0.33779, 0.10455),
]


@pytest.mark.parametrize(("columns", "how", "n_genes", "n_known", "area", "recall", "average_precision"), KNOWN)
def test_relationship_scores_real_profiles_are_equal_to_known(
    shared, columns, how, n_genes, n_known, area, recall, average_precision
):
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    relations = Relations(funk_profiles(shared, columns), net, **how)
    assert (len(relations.genes), relations.known.nnz) == (n_genes, 2 * n_known)
    found = {name: round(score, 5) for name, score in compute_scores(relations).items()}
    assert found == {"area": area, "recall": recall, "average_precision": average_precision}


def test_relationship_scores_universe_profiles_are_equal_to_known(shared):
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    relations = Relations(funk_profiles(shared, drop_control=True), net, universe="profiles")
    found = relationship_recall(relations), relationship_average_precision(relations)
    assert tuple(round(score, 5) for score in found) == (0.45006, 0.06259)


@pytest.mark.parametrize("name", ["CORUM", "StringDB"])
def test_relations_subset_of_real_pairs_is_read_as_pairs(shared, name):
    net = gene_pairs(shared / "corum" / f"{name}.txt")
    rng = np.random.default_rng(0)
    for n in (50, 300) * 4:
        genes = rng.choice(np.unique(net), n, replace=False).tolist()
        part = net[net["source"].isin(genes) & net["target"].isin(genes)]
        for frame in (
            (part, make_net(part.to_numpy().tolist())) if len(part) else ()
        ):  # the second frame does not state its kind
            relations = Relations(make_profiles(rng.normal(size=(n, 3)), genes), frame)
            assert (relations.net_kind, relations.known.nnz) == ("pairs", 2 * len(part))


def test_relationship_curve_and_recall_point_have_no_information():
    """All pairs tie: none is in a tail, and none is predicted twice where both thresholds are equal."""
    relations = Relations(make_profiles(np.repeat(np.eye(3)[:1], 6, axis=0)), SETS)
    assert relationship_recall(relations) == 0
    for diagonal in (True, False):
        curve = relationship_curve(relations, diagonal=diagonal)
        assert (curve["recall"] == 1).all()  # every pair is predicted, once
        np.testing.assert_allclose(curve["precision"], relations.pairs()[1].mean())


def test_relationship_recall_tied_pairs_are_in_no_tail():
    """Six of fifteen pairs tie at quantiles 0.64 to 1 of the cosine, and count only if the tail holds them all."""
    relations = Relations(make_profiles(np.repeat(np.eye(2), 3, axis=0)), SETS)
    assert relationship_recall(relations, tail=0.3) == 0
    assert relationship_recall(relations, tail=0.45) == 1
    assert relationship_average_precision(relations) == pytest.approx(1)


def test_relations_zero_profile_stays_zero_and_gene_key_is_used():
    adata = make_profiles()
    adata.X[1] = 0
    relations = Relations(adata, SETS)
    assert (relations.unit[1] == 0).all()
    adata.obs["symbol"], adata.obs_names = adata.obs_names.to_numpy(), [f"row{i}" for i in range(10)]
    assert relationship_recall(adata, SETS, gene_key="symbol") == relationship_recall(relations)


@pytest.mark.parametrize("tail", [0, 0.5])
def test_relationship_recall_invalid_tail_raises(tail):
    with pytest.raises(ValueError, match=f"tail={tail}"):
        relationship_recall(make_profiles(), SETS, tail=tail)


def test_relationship_curve_and_area_invalid_percentiles_raise():
    with pytest.raises(ValueError, match="between 0 and 100"):
        relationship_curve(make_profiles(), SETS, percentiles=[90, 101])
    with pytest.raises(ValueError, match="two points"):
        relationship_area(relationship_curve(make_profiles(), SETS, percentiles=[90]))


# scores expected by chance


def make_map(x: np.ndarray, size: int) -> Relations:
    return Relations(make_profiles(x), make_net([(f"c{i // size}", f"G{i}") for i in range(len(x))]))


@pytest.mark.parametrize("ties", [False, True])
def test_expected_relationship_scores_are_equal_to_permutation_mean(ties):
    """With few pairs, the prevalence would be half of the expected average precision."""
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (10, 2)) if ties else rng.normal(size=(10, 3))
    relations = make_map(x.astype(float), size=2)
    ordered, known = relations.ranked
    drawn = []
    for _ in range(400):
        relations.__dict__["ranked"] = ordered, np.sort(rng.choice(ordered, len(known), replace=False))
        drawn.append(compute_scores(relations))
    table = pd.DataFrame(drawn)
    for score, expected in expected_relationship_scores(relations).items():
        assert table[score].mean() == pytest.approx(expected, abs=4 * table[score].std() / np.sqrt(len(table)))
    assert expected_relationship_scores(relations)["average_precision"] > len(known) / len(ordered)


def test_expected_relationship_scores_match_shuffled_profiles():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(40, 8)), 6, axis=0) + 0.5 * rng.normal(size=(240, 8))
    table = pd.DataFrame([compute_scores(make_map(x[rng.permutation(240)], size=6)) for _ in range(20)])
    relations = make_map(x, size=6)
    expected = expected_relationship_scores(relations)
    for score, value in expected.items():
        assert table[score].mean() == pytest.approx(value, rel=0.1)
        assert compute_scores(relations)[score] > 2 * value
    prevalence = relations.pairs()[1].mean()
    assert expected["area"] == pytest.approx(0.38 * prevalence, rel=0.02)
    assert expected["recall"] == pytest.approx(0.1, rel=0.01)
    assert expected["average_precision"] == pytest.approx(prevalence, rel=0.02)


def test_expected_relationship_scores_point_or_pair_equal_scores():
    point = make_map(np.ones((8, 3)), size=4)
    assert expected_relationship_scores(point) == pytest.approx(compute_scores(point))
    pair = make_map(np.array([[1.0, 0.0], [0.6, 0.8]]), size=2)
    found = expected_relationship_scores(pair, percentiles=[0])
    assert np.isnan(found["area"])
    assert (found["recall"], found["average_precision"]) == (relationship_recall(pair), pytest.approx(1))


def test_expected_relationship_scores_depend_on_percentiles_and_tail():
    relations = make_map(np.random.default_rng(0).normal(size=(60, 4)), size=6)
    narrow = expected_relationship_scores(relations, percentiles=range(90, 100), tail=0.1)
    assert narrow["area"] == pytest.approx(expected_relationship_scores(relations)["area"] * 0.18 / 0.38, rel=0.05)
    assert narrow["recall"] == pytest.approx(0.2, rel=0.02)


# confidence intervals


@pytest.mark.parametrize("score", ["average_precision", "recall", "area"])
def test_relationship_interval_more_sets_is_narrower_and_repeatable(score):
    widths = []
    for n_sets in (15, 60):
        profiles, net = map_of_complexes(n_sets=n_sets, found=n_sets // 3)
        low, high = relationship_interval(profiles, net, score=score, n_bootstrap=60)
        widths.append(high - low)
    assert 0 < widths[1] < widths[0]
    assert relationship_interval(profiles, net, score=score, n_bootstrap=60) == (low, high)


def test_relationship_interval_higher_level_is_wider_on_both_sides():
    profiles, net = map_of_complexes()
    ends = {level: relationship_interval(profiles, net, level=level, n_bootstrap=41) for level in (0.0, 0.5, 0.9, 1.0)}
    low, high = np.array(list(ends.values())).T
    assert low[0] == high[0]  # level 0 returns the median
    assert (np.diff(low) < 0).all() and (np.diff(high) > 0).all()


def add_noise(adata: AnnData, sd: float, seed: int) -> AnnData:
    return AnnData(X=adata.X + sd * np.random.default_rng(seed).normal(size=adata.shape), obs=adata.obs)


def test_relationship_interval_other_is_narrower_than_unpaired():
    adata, net = map_of_complexes(n_sets=40, found=20)
    better, worse = (Relations(add_noise(adata, sd, 1), net) for sd in (0.1, 3))
    low, high = relationship_interval(better, other=worse, n_bootstrap=100)
    assert 0 < low < relationship_average_precision(better) - relationship_average_precision(worse) < high
    widths = [np.diff(relationship_interval(one, n_bootstrap=100))[0] for one in (better, worse)]
    assert high - low < 0.9 * np.hypot(*widths)  # the width if both were resampled independently
    assert relationship_interval(better, other=better, n_bootstrap=20) == (0, 0)
    assert relationship_interval(adata, net, other=add_noise(adata, 1, 0), n_bootstrap=20)[0] > -1


def test_relationship_interval_other_with_other_relations_raises():
    profiles, net = map_of_complexes()
    relations = Relations(profiles, net)
    for other in (Relations(profiles[::-1], net), Relations(profiles, net[:8]), Relations(profiles, net[4:8])):
        with pytest.raises(ValueError, match="genes or relations of profiles and other differ"):
            relationship_interval(relations, other=other)


def test_relationship_interval_one_complex_or_unknown_score_raises():
    profiles, net = map_of_complexes()
    with pytest.raises(ValueError, match="one complex"):
        relationship_interval(profiles, net[:4], universe="profiles")
    with pytest.raises(ValueError, match="score='f1'"):
        relationship_interval(profiles, net, score="f1")  # type: ignore[arg-type]


def make_large_complexes(seed: int) -> tuple[AnnData, pd.DataFrame]:
    """Make twenty complexes of twelve genes, each complex with its own signal strength."""
    rng = np.random.default_rng(seed)
    of_complex = 0.9 * np.abs(rng.normal(size=(20, 1))) * rng.normal(size=(20, 16))
    x = np.repeat(of_complex, 12, axis=0) + rng.normal(size=(240, 16))
    return make_profiles(x), make_net([(f"complex {i // 12}", f"G{i}") for i in range(240)])


def test_relationship_interval_few_large_complexes_has_true_width():
    """Resampling single genes gave intervals of little more than half of this width."""
    scores = [relationship_average_precision(*make_large_complexes(seed)) for seed in range(40)]
    widths = [np.diff(relationship_interval(*make_large_complexes(seed), n_bootstrap=60))[0] for seed in range(5)]
    assert np.mean(widths) > 0.8 * 3.92 * np.std(scores)


def test_relationship_interval_other_has_true_width():
    """Resampling single genes would give a narrower interval, resampling both maps independently a wider one."""

    def make_both_maps(seed: int) -> tuple[Relations, Relations]:
        adata, net = make_large_complexes(seed)
        return Relations(adata, net), Relations(add_noise(adata, 1, seed + 1_000), net)

    scores = np.array([[relationship_average_precision(one) for one in make_both_maps(seed)] for seed in range(40)])
    found = [
        np.diff(relationship_interval(one, other=two, n_bootstrap=60)) for one, two in map(make_both_maps, range(6))
    ]
    assert 0.7 < np.mean(found) / (3.92 * np.std(scores[:, 0] - scores[:, 1])) < 1.3


# scores of complexes and of single genes


@given(st.integers(0, 300))
def test_gene_and_complex_scores_random_sets_are_equal_to_naive(seed):
    x, genes, net = make_small_sets(seed)
    expected = naive.of_genes(x, genes, net)
    if not expected:
        return
    relations = Relations(make_profiles(x), net, universe="profiles")
    found = partner_average_precision(relations)["average_precision"]
    assert found.index.to_list() == list(expected)
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-12)
    of_sets = naive.of_sets(x, genes, net)
    found = complex_table(relations, net, n_permutations=10)["average_precision"].dropna()
    assert set(found.index) == set(of_sets)
    np.testing.assert_allclose(found, [of_sets[name] for name in found.index], rtol=1e-12)


@pytest.mark.parametrize("universe", ["annotated", "profiles"])
def test_gene_and_complex_scores_point_are_at_chance(universe):
    x, _, net = make_small_sets(1)
    relations = Relations(make_profiles(np.ones_like(x)), net, universe=universe)
    for table in (partner_average_precision(relations), complex_table(relations, net, n_permutations=10)):
        np.testing.assert_allclose(table["average_precision"], table["chance"], rtol=1e-12)


def test_gene_and_complex_scores_all_related_return_nothing():
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
def test_partner_average_precision_real_profiles_is_equal_to_known(shared, how, n, expected):
    """Profiles of Funk et al. and CORUM; known values are means over genes of scikit-learn's average precision."""
    net = gene_sets(shared / "corum" / "CORUM_clusters.tsv")
    found = partner_average_precision(Relations(funk_profiles(shared), net, **how))["average_precision"]
    assert (len(found), round(found.mean(), 5)) == (n, expected)


def test_complex_table_simulated_complexes_are_found():
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


def test_complex_table_few_complexes_among_many_are_found():
    """A hundred random sets alone cannot give p values small enough to detect five complexes among three hundred."""
    profiles, net = map_of_complexes(n_sets=300, size=3, found=5)
    table = complex_table(profiles, net, n_permutations=100)
    assert set(table.index[table["fdr"] < 0.05]) == {f"complex {i}" for i in range(5)}
    assert table["p_value"].min() == pytest.approx(1 / 6_000)


def test_complex_table_no_complexes_p_values_are_calibrated():
    tables = [
        complex_table(*map_of_complexes(n_sets=100, found=0, seed=seed), n_permutations=40)["p_value"]
        for seed in range(6)
    ]
    p = np.concatenate(tables)
    for t in (0.003, 0.01, 0.03, 0.1, 0.3):
        assert (p <= t).mean() < t + 3.5 * np.sqrt(t * (1 - t) / len(p))
    assert 0.45 < p.mean() < 0.55


def test_complex_table_few_permutations_warns_and_p_values_exceed_zero():
    """If none of ten random sets is as good, the p value is 1/11, not 0."""
    with pytest.warns(UserWarning, match=r"max_permutations=10 is few for 20 complexes.* 399 "):
        table = complex_table(*map_of_complexes(), max_permutations=10)
    assert table["p_value"].min() == pytest.approx(1 / 11)


def test_complex_table_net_kind_sets_accepts_sources_named_like_genes():
    profiles, net = map_of_complexes()
    named = net.assign(source=net.groupby("source")["target"].transform("first"))
    table = complex_table(profiles, named, net_kind="sets", n_permutations=50)
    expected = complex_table(profiles, net, n_permutations=50)
    assert sorted(table["mean_cosine"]) == sorted(expected["mean_cosine"])


def test_complex_table_invalid_input_raises():
    adata, net = map_of_complexes()
    with pytest.raises(ValueError, match="net holds pairs"):
        complex_table(adata, make_net([("G0", "G1"), ("G2", "G3")]))
    with pytest.raises(ValueError, match="No complex of net has two of the 8 genes"):
        complex_table(Relations(adata[:8], net), net[8:])
    with pytest.raises(ValueError, match="gene_key and universe and max_set_size"):
        complex_table(Relations(adata, net), net, gene_key="symbol", universe="profiles", max_set_size=3)
    for number in ("n_permutations", "max_permutations"):
        with pytest.raises(ValueError, match=f"{number}=0"):
            complex_table(adata, net, **{number: 0})  # type: ignore[arg-type]
