from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scbd.metrics._known_pairs import related_genes


def test_sets_and_pairs_relate_the_genes_that_are_there():
    genes = np.array(["G0", "G1", "G2", "G3"])
    sets = pd.DataFrame({"source": ["a", "a", "b", "b", "b"], "target": ["G0", "G2", "G2", "G3", "absent"]})
    expected = np.zeros((4, 4), dtype=bool)
    expected[[0, 2, 2, 3], [2, 0, 3, 2]] = True
    np.testing.assert_array_equal(related_genes(genes, sets).toarray(), expected)
    pairs = pd.DataFrame({"source": ["G0", "G3", "G2", "G2"], "target": ["G2", "G2", "G3", "absent"]})
    np.testing.assert_array_equal(related_genes(genes, pairs).toarray(), expected)


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
        related_genes(np.array(genes), net)
