from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from anndata import AnnData

from scbd.metrics._embeddings import named_embeddings


def table() -> AnnData:
    return AnnData(obsm={key: np.full((3, 2), value) for value, key in enumerate(["a", "b", "c"])})


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("b", [("b", "b")]),
        (["b", "a"], [("b", "b"), ("a", "a")]),
        ({"one": "c", "other": "a"}, [("one", "c"), ("other", "a")]),
        ({"seeds": ["a", "b"], "other": "c"}, [("seeds", "a"), ("seeds", "b"), ("other", "c")]),
    ],
)
def test_embeddings_are_named(asked, named):
    adata = table()
    found = named_embeddings(adata, asked)
    assert [(one.representation, one.key) for one in found] == named
    assert all((one.values == adata.obsm[one.key]).all() for one in found)


def test_bad_input_gets_a_sentence():
    with pytest.raises(KeyError, match=r"obsm has no 'd' \(its keys: a, b, c\)"):
        named_embeddings(table(), {"one": ["a", "d"]})
    empty: tuple[Any, ...] = ([], {}, {"one": []})
    for nothing in empty:
        with pytest.raises(ValueError, match="No embedding was asked for: name keys of obsm"):
            named_embeddings(table(), nothing)
