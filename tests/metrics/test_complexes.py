from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from small_tables import map_of_complexes

from scbd.metrics import Relations, complex_table


def test_complexes_that_are_there_are_found():
    profiles, net = map_of_complexes()
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
    profiles, net = map_of_complexes(n_sets=200, found=0)
    p = complex_table(profiles, net, n_permutations=400)["p_value"]
    assert abs(p.mean() - 0.5) < 0.08
    assert abs((p < 0.1).mean() - 0.1) < 0.06


def test_few_complexes_among_many_are_found():
    """A thousand random sets give no p value that is small enough for five among two thousand."""
    profiles, net = map_of_complexes(n_sets=2000, size=3, found=5)
    table = complex_table(profiles, net)
    assert set(table.index[table["fdr"] < 0.05]) == {f"complex {i}" for i in range(5)}
    assert table["p_value"].min() == pytest.approx(1 / 40_000)


def test_small_p_values_are_no_more_frequent_than_they_say():
    p = np.concatenate(
        [
            complex_table(*map_of_complexes(n_sets=150, found=0, seed=seed), n_permutations=40)["p_value"]
            for seed in range(8)
        ]
    )
    for t in (0.003, 0.01, 0.03, 0.1, 0.3):
        assert (p <= t).mean() < t + 3.5 * np.sqrt(t * (1 - t) / len(p))
    assert (p <= 0.003).any()


def test_no_p_value_is_zero():
    """Of ten random sets none may be as good: that is one of eleven, and not nothing."""
    profiles, net = map_of_complexes()
    with pytest.warns(
        UserWarning, match=r"max_permutations=10 is few for 20 complexes.* would be 1 at best. Give 399 for"
    ):
        table = complex_table(profiles, net, n_permutations=1000, max_permutations=10)
    assert table["p_value"].min() == pytest.approx(1 / 11)


def test_pairs_are_no_complexes():
    profiles, _ = map_of_complexes()
    net = pd.DataFrame({"source": ["G0", "G2"], "target": ["G1", "G3"]})
    with pytest.raises(ValueError, match="net holds pairs of genes"):
        complex_table(profiles, net)
    net.attrs["kind"] = "pairs"
    with pytest.raises(ValueError, match="net holds pairs of genes"):
        complex_table(profiles, net)


def test_complexes_that_bear_names_of_genes_are_complexes_where_that_is_said():
    profiles, net = map_of_complexes()
    named = net.assign(source=net.groupby("source")["target"].transform("first"))
    table = complex_table(profiles, named, net_kind="sets", n_permutations=50)
    expected = complex_table(profiles, net, n_permutations=50)
    assert sorted(table["mean_cosine"]) == sorted(expected["mean_cosine"])


def test_relations_of_another_net_know_no_complex():
    profiles, net = map_of_complexes()
    relations = Relations(profiles[:8], net)
    with pytest.raises(ValueError, match="No complex of net has two of the 8 genes"):
        complex_table(relations, net[8:])


def test_bad_numbers_of_permutations():
    with pytest.raises(ValueError, match="n_permutations=0: give"):
        complex_table(*map_of_complexes(), n_permutations=0)
    with pytest.raises(ValueError, match="max_permutations=0: give"):
        complex_table(*map_of_complexes(), max_permutations=0)
