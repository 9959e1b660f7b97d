from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scbd.metrics._known_pairs import read_network, related_genes


def related(genes: np.ndarray, net: pd.DataFrame, max_set_size: int | None = None) -> np.ndarray:
    return related_genes(genes, read_network(net, genes, max_set_size=max_set_size)).toarray()


def test_sets_and_pairs_relate_the_genes_that_are_there():
    genes = np.array(["G0", "G1", "G2", "G3"])
    sets = pd.DataFrame({"source": ["a", "a", "b", "b", "b"], "target": ["G0", "G2", "G2", "G3", "absent"]})
    expected = np.zeros((4, 4), dtype=bool)
    expected[[0, 2, 2, 3], [2, 0, 3, 2]] = True
    np.testing.assert_array_equal(related(genes, sets), expected)
    pairs = pd.DataFrame({"source": ["G0", "G3", "G2", "G2"], "target": ["G2", "G2", "G3", "absent"]})
    np.testing.assert_array_equal(related(genes, pairs), expected)


@pytest.mark.parametrize(
    ("genes", "said"),
    [
        ([f"g{i}" for i in range(12)], "differ in upper and lower case"),
        ([f"ENSG{i}" for i in range(12)], "Ensembl identifiers"),
        ([str(i) for i in range(12)], "Entrez"),
        ([f"G{i}-alias" for i in range(12)], "map aliases to symbols"),
    ],
)
def test_genes_that_match_nothing_are_told_what_it_looks_like(genes, said):
    net = pd.DataFrame({"source": list("aaabbb"), "target": [f"G{i}" for i in range(6)]})
    with pytest.raises(ValueError, match=said):
        related(np.array(genes), net)


def pair_net(pairs: list[tuple[str, str]], kind: str | None = None) -> pd.DataFrame:
    net = pd.DataFrame(pairs, columns=["source", "target"])
    if kind is not None:
        net.attrs["kind"] = kind
    return net


@given(st.integers(0, 10_000), st.booleans())
def test_a_part_of_pairs_stays_pairs(seed, says):
    """Few sources of a small list are targets, too; it once was read as sets then."""
    rng = np.random.default_rng(seed)
    genes = np.array([f"G{i}" for i in range(12)])
    one, two = np.triu_indices(12, k=1)
    chosen = rng.choice(len(one), rng.integers(1, 9), replace=False)
    net = pair_net(list(zip(genes[one[chosen]], genes[two[chosen]], strict=True)), "pairs" if says else None)
    expected = np.zeros((12, 12), dtype=bool)
    expected[one[chosen], two[chosen]] = True
    np.testing.assert_array_equal(related(genes, net), expected | expected.T)


def test_hubs_are_related_to_their_partners_and_these_not_to_each_other():
    net = pair_net([(hub, f"G{i}") for hub in ("H0", "H1") for i in range(10)])
    genes = np.array(["H0", "H1", *(f"G{i}" for i in range(10))])
    assert related(genes, net).sum() == 2 * 20


def test_regulons_may_be_read_either_way_and_are_read_as_said():
    net = pair_net([("TP53", "A"), ("TP53", "B"), ("MYC", "B"), ("MYC", "C"), ("A", "TP53"), ("A", "MYC")])
    genes = np.array(["A", "B", "C", "TP53", "MYC"])
    as_said = {kind: related_genes(genes, read_network(net, genes, kind)).toarray() for kind in ("pairs", "sets")}
    assert as_said["pairs"][3, 0] and not as_said["pairs"][1, 2]
    assert as_said["sets"][1, 2] and not as_said["sets"][3, 0]
    for kind, expected in as_said.items():  # the argument rules over what the frame says
        other = "pairs" if kind == "sets" else "sets"
        said = read_network(pair_net(net.to_numpy().tolist(), other), genes, kind)  # type: ignore[arg-type]
        np.testing.assert_array_equal(related_genes(genes, said).toarray(), expected)


def test_what_is_not_plain_is_refused():
    genes = np.array([f"G{i}" for i in range(10)])
    net = pair_net([("G0", "G1"), ("G2", "G3"), ("complex", "G4"), ("complex", "G5")])
    with pytest.raises(ValueError, match=r"2 of its 3 sources are genes themselves \(such as G0, G2\). Say which"):
        related(genes, net)
    net.attrs["kind"] = "complexes"
    with pytest.raises(ValueError, match=r"net.attrs\['kind'\] is 'complexes', which is not known"):
        related(genes, net)
    with pytest.raises(ValueError, match="net_kind='pair' is not known: use 'auto', 'pairs' or 'sets'"):
        read_network(net, genes, "pair")  # type: ignore[arg-type]
    net.attrs["kind"] = "sets"
    assert related(genes, net).sum() == 2


def test_a_name_or_two_of_a_complex_may_be_genes():
    net = pair_net([(name, f"G{i + j}") for i, name in enumerate(["G7", *"abcdefghijklmnopqrst"]) for j in (0, 1)])
    genes = np.array([f"G{i}" for i in range(30)])
    assert read_network(net, genes).kind == "sets"


def test_rows_without_a_name_say_nothing():
    genes = np.array(["G0", "G1", "G2"])
    net = pd.DataFrame({"source": ["a", "a", None, None], "target": ["G0", "G1", "G1", "G2"]})
    assert related(genes, net).sum() == 2
    with pytest.raises(ValueError, match="net has no rows"):
        related(genes, net.iloc[2:])
    with pytest.raises(ValueError, match="net has no rows"):
        related(genes, net.iloc[:0])


def test_why_no_pair_is_known():
    genes = np.array(["A", "B"])
    with pytest.raises(ValueError, match="2 of the symbols are there: no pair has profiles of both of its genes"):
        related(genes, pair_net([("A", "C"), ("B", "D")]))
    with pytest.raises(ValueError, match="each is alone in its set"):
        related(genes, pair_net([("one", "A"), ("two", "B")]))


@given(st.integers(0, 1_000), st.integers(2, 6))
def test_large_sets_are_left_out_by_what_is_profiled_of_them(seed, most):
    rng = np.random.default_rng(seed)
    genes = np.array([f"G{i}" for i in range(9)])
    sets = [rng.choice([*genes, "absent", "away"], rng.integers(1, 9), replace=False) for _ in range(4)]
    net = pd.DataFrame([(f"c{k}", gene) for k, one in enumerate(sets) for gene in one], columns=["source", "target"])
    expected = np.zeros((9, 9), dtype=bool)
    for one in sets:
        inside = np.isin(genes, one)
        if inside.sum() <= most:
            expected |= np.outer(inside, inside)
    np.fill_diagonal(expected, False)
    if expected.any():
        np.testing.assert_array_equal(related(genes, net, most), expected)
        np.testing.assert_array_equal(related(genes, pd.concat([net, net]), most), expected)
    else:
        with pytest.raises(ValueError, match=f"more than max_set_size={most}|each is alone in its set"):
            related(genes, net, most)


def test_the_size_of_sets_is_none_of_pairs():
    genes = np.array(["G0", "G1", "G2"])
    with pytest.raises(ValueError, match="max_set_size=30 is of sets of genes, and net holds pairs: leave it out"):
        related(genes, pair_net([("G0", "G1"), ("G1", "G2")]), 30)
    sets = pd.DataFrame({"source": list("aaabbb"), "target": [*genes, *genes]})
    with pytest.raises(ValueError, match="Each set that has two profiled genes has more than max_set_size=2"):
        related(genes, sets, 2)
    for size in (1, 2.5, True, "30"):
        with pytest.raises(ValueError, match=f"max_set_size={size!r}: give a whole number, 2 or larger"):
            related(genes, sets, size)  # type: ignore[arg-type]
