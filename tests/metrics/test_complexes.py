from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import (
    Relations,
    complex_table,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_interval,
    relationship_recall,
)
from scbd.metrics._complexes import _Ordered


def screen(n_sets: int = 20, size: int = 4, found: int = 5, seed: int = 0) -> tuple[AnnData, pd.DataFrame]:
    """The first complexes share a direction, the others do not."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n_sets * size, 16))
    for i in range(found):
        x[i * size : (i + 1) * size] += 3 * rng.normal(size=16)
    genes = [f"G{i}" for i in range(len(x))]
    net = pd.DataFrame({"source": [f"complex {i // size}" for i in range(len(x))], "target": genes})
    return AnnData(X=x, obs=pd.DataFrame(index=genes)), net


def test_complexes_that_are_there_are_found():
    profiles, net = screen()
    table = complex_table(profiles, net)
    assert set(table.index[:5]) == {f"complex {i}" for i in range(5)}
    assert (table["fdr"].iloc[:5] < 0.05).all()
    assert (table["fdr"].iloc[5:] > 0.05).all()
    assert (table["fdr"] >= table["p_value"]).all()
    first = table.loc["complex 2"]
    rows = profiles[first["genes"].split()].X
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert first["mean_cosine"] == pytest.approx((unit @ unit.T)[np.triu_indices(4, 1)].mean())
    assert first["size"] == 4


def test_p_values_are_uniform_without_information():
    profiles, net = screen(n_sets=200, found=0)
    p = complex_table(profiles, net, n_permutations=400)["p_value"]
    assert abs(p.mean() - 0.5) < 0.08
    assert abs((p < 0.1).mean() - 0.1) < 0.06


def test_no_p_value_is_zero():
    """Of ten random sets none may be as good: that is one of eleven, and not nothing."""
    profiles, net = screen()
    assert complex_table(profiles, net, n_permutations=10)["p_value"].min() == pytest.approx(1 / 11)


def test_pairs_are_no_complexes():
    profiles, _ = screen()
    net = pd.DataFrame({"source": ["G0", "G2"], "target": ["G1", "G3"]})
    with pytest.raises(ValueError, match="net holds pairs of genes"):
        complex_table(profiles, net)
    net.attrs["kind"] = "pairs"
    with pytest.raises(ValueError, match="net holds pairs of genes"):
        complex_table(profiles, net)


def test_complexes_that_bear_names_of_genes_are_complexes_where_that_is_said():
    profiles, net = screen()
    named = net.assign(source=net.groupby("source")["target"].transform("first"))
    table = complex_table(profiles, named, net_kind="sets", n_permutations=50)
    expected = complex_table(profiles, net, n_permutations=50)
    assert sorted(table["mean_cosine"]) == sorted(expected["mean_cosine"])


@pytest.mark.parametrize("seed", range(5))
def test_a_resample_of_each_gene_once_gives_the_scores_themselves(seed):
    profiles, net = screen(seed=seed)
    relations = Relations(profiles, net)
    one, two = np.triu_indices(len(relations.genes), k=1)
    cosine, related = relations.pairs()
    order = np.argsort(cosine, kind="stable")
    ordered = _Ordered(cosine[order], related[order], one[order], two[order])
    each = np.ones(len(relations.genes), dtype=int)
    assert ordered.score(each, "average_precision", 0.05) == pytest.approx(relationship_average_precision(relations))
    assert ordered.score(each, "recall", 0.05) == pytest.approx(relationship_recall(relations))
    area = relationship_area(relationship_curve(relations))
    assert ordered.score(each, "area", 0.05) == pytest.approx(area)


@pytest.mark.parametrize("score", ["average_precision", "recall", "area"])
def test_intervals_hold_the_score_and_shrink_with_more_genes(score):
    widths = []
    for n_sets in (15, 60):
        profiles, net = screen(n_sets=n_sets, found=n_sets // 3)
        low, high = relationship_interval(profiles, net, score=score, n_bootstrap=60)
        assert low < high
        widths.append(high - low)
    assert widths[1] < widths[0]
    assert relationship_interval(profiles, net, score=score, n_bootstrap=60) == (low, high)


def test_an_interval_leaves_as_many_on_either_side():
    profiles, net = screen()
    ends = {level: relationship_interval(profiles, net, level=level, n_bootstrap=41) for level in (0.0, 0.5, 0.9, 1.0)}
    low, high = np.array(list(ends.values())).T
    assert low[0] == high[0]  # of no coverage: the median
    assert (np.diff(low) < 0).all() and (np.diff(high) > 0).all()


def test_unknown_score():
    with pytest.raises(ValueError, match="score='f1' is not known"):
        relationship_interval(*screen(), score="f1")  # type: ignore[arg-type]
