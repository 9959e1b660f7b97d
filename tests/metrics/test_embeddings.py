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


def test_an_array_and_a_file_are_read_as_a_key_is(tmp_path):
    adata = AnnData(obsm={key: np.random.default_rng(i).normal(size=(20, 2)) for i, key in enumerate("ab")})
    stored = AnnData(obs=adata.obs[[]], obsm={"X_scbd_c": adata.obsm["a"], "X_scbd_s": adata.obsm["b"]})
    stored.write_h5ad(tmp_path / "z.h5ad")
    shuffled = stored[np.random.default_rng(0).permutation(stored.n_obs)].copy()
    shuffled.write_h5ad(tmp_path / "shuffled.h5ad")
    sources = {"ours": [tmp_path / "z.h5ad", tmp_path / "shuffled.h5ad"], "array": adata.obsm["a"]}
    found = named_embeddings(adata, sources)
    assert [one[:2] for one in found] == [
        ("ours", str(tmp_path / "z.h5ad")),
        ("ours", str(tmp_path / "shuffled.h5ad")),
        ("array", "array[0]"),
    ]
    for one in found:
        np.testing.assert_array_equal(one.values, adata.obsm["a"])


def test_files_and_arrays_of_other_cells_are_refused(tmp_path):
    adata = AnnData(obsm={key: np.random.default_rng(i).normal(size=(20, 2)) for i, key in enumerate("ab")})
    AnnData(obs=adata.obs[:-1][[]], obsm={"X_pca": adata.obsm["a"][:-1]}).write_h5ad(tmp_path / "fewer.h5ad")
    with pytest.raises(ValueError, match=f"lacks 1 of the {adata.n_obs} cells of the table"):
        named_embeddings(adata, {"fewer": tmp_path / "fewer.h5ad"})
    AnnData(obs=adata.obs[[]], obsm={"one": adata.obsm["a"], "two": adata.obsm["b"]}).write_h5ad(tmp_path / "two.h5ad")
    with pytest.raises(ValueError, match="holds one, two: open it with scbd.data.open_embedding, and give one"):
        named_embeddings(adata, {"two": tmp_path / "two.h5ad"})
    with pytest.raises(FileNotFoundError, match="There is no file"):
        named_embeddings(adata, {"none": tmp_path / "none.h5ad"})
    with pytest.raises(ValueError, match=f"give one row for each of the {adata.n_obs} rows"):
        named_embeddings(adata, {"short": adata.obsm["a"][:-1]})


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
@pytest.mark.parametrize("repeat", ["in both", "in the table"])
def test_cells_of_one_name_are_told_by_their_order_alone(tmp_path, repeat):
    """They ended in pandas, or one row stood for two cells."""
    stored = AnnData(obsm={"X_pca": np.random.default_rng(0).normal(size=(20, 2))})
    other = stored[[0, *range(19)]].copy()  # the first cell twice
    if repeat == "in both":
        stored = other
    stored.write_h5ad(tmp_path / "z.h5ad")
    (found,) = named_embeddings(stored, {"z": tmp_path / "z.h5ad"})
    np.testing.assert_array_equal(found.values, stored.obsm["X_pca"])
    with pytest.raises(
        ValueError, match=r"z.h5ad and of the table .* and obs_names repeat: give the cells in the order"
    ):
        named_embeddings(other[::-1].copy(), {"z": tmp_path / "z.h5ad"})
