from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse

from scbd.metrics import (
    aggregate,
    batch_mixing,
    batch_probe,
    benchmark,
    label_probe,
    perturbation_effects,
    predict_labels,
    replicate_retrieval,
    retrieval,
)
from scbd.metrics._table import coded_labels, label_names, trained_rows

# of the order of their names
NUMBERS = {"DMSO": 0, "EtOH": 1, "a": 2, "b": 3, "c": 4, "d": 5}


def wells() -> AnnData:
    rng = np.random.default_rng(0)
    y = np.tile(list(NUMBERS), 12)
    obs = pd.DataFrame({"y": y, "plate": np.arange(72) // 24, "guide": [f"{name}_{i % 2}" for i, name in enumerate(y)]})
    obs["moa"] = obs["y"].map({"EtOH": "one", "a": "one", "b": "one", "c": "two", "d": "two"})
    obs.index = obs.index.astype(str)
    return AnnData(obs=obs, obsm={"Z": rng.normal(size=(72, 5)) + np.repeat(rng.normal(size=(12, 5)), 6, axis=0)})


def of_effects(adata: AnnData, control: Any) -> np.ndarray:
    return perturbation_effects(adata, "Z", y_key="y", e_key="plate", control=control, n_permutations=5).to_numpy()


def of_replicates(adata: AnnData, control: Any) -> np.ndarray:
    how: dict[str, Any] = {"y_key": "y", "e_key": "plate", "n_permutations": 5}
    return replicate_retrieval(adata, "Z", **how, control=control).table.to_numpy()


def of_mechanisms(adata: AnnData, control: Any) -> np.ndarray:
    how: dict[str, Any] = {"y_key": "y", "label_key": "moa", "n_permutations": 5}
    return retrieval(adata, "Z", **how, control=control).table.to_numpy()


def of_genes(adata: AnnData, control: Any) -> np.ndarray:
    return aggregate(adata, "Z", gene_key="y", guide_key="guide", control=control).X


EACH = pytest.mark.parametrize("compute", [of_effects, of_replicates, of_mechanisms, of_genes])
Compute = Callable[[AnnData, Any], np.ndarray]


@EACH
@pytest.mark.parametrize("dtype", [int, float, "category", object])
def test_controls_may_be_numbers_wherever_they_are_named(compute: Compute, dtype):
    adata, numbered = wells(), wells()
    numbered.obs["y"] = numbered.obs["y"].map(NUMBERS).astype(dtype)
    expected = compute(adata, "DMSO")
    for control in (0, 0.0, np.int64(0), "0", [0]):
        np.testing.assert_array_equal(compute(numbered, control), expected)
    both = compute(adata, ["DMSO", "EtOH"])
    assert both.shape != expected.shape or not np.array_equal(both, expected, equal_nan=True)
    for several in ([0, 1], np.array([0, 1]), (0.0, "1")):
        np.testing.assert_array_equal(compute(numbered, several), both)


@EACH
def test_what_is_missing_is_no_control(compute: Compute):
    adata = wells()
    adata.obs["y"] = adata.obs["y"].replace({"a": "nan"})
    for control in (np.nan, ["DMSO", None]):
        with pytest.raises(ValueError, match="is no value: give control the value of 'y' for unperturbed"):
            compute(adata, control)
    with pytest.raises(ValueError, match="No row has the control '7' in 'y'"):
        compute(adata, ["DMSO", 7])


def test_where_no_control_is_needed_none_is_none():
    adata = wells()
    for compute in (of_mechanisms, of_genes):
        np.testing.assert_array_equal(compute(adata, None), compute(adata, []))
    assert len(of_genes(adata, None)) == 6
    for needs_one in (of_effects, of_replicates):
        with pytest.raises(ValueError, match="control=None is no value"):
            needs_one(adata, None)


def test_labels_are_text_and_whole_numbers_have_one_name():
    adata = AnnData(obs=pd.DataFrame({"y": [2.0, 1.5, 2.0], "both": [1, "1", "b"]}, index=list("abc")))
    assert label_names(adata, "y").tolist() == ["2", "1.5", "2"]
    names, codes = coded_labels(adata, "both")
    assert sorted(names) == ["1", "b"] and names[codes].tolist() == ["1", "1", "b"]


def of_medians(adata: AnnData) -> Any:
    return aggregate(adata, "Z", gene_key="y", guide_key="guide", control="DMSO", average="median").X


def of_probes(adata: AnnData) -> Any:
    return list(label_probe(adata.obsm["Z"], adata.obs["y"]).values())


def of_predictions(adata: AnnData) -> Any:
    return predict_labels(adata.obsm["Z"], adata.obs["y"], adata.obsm["Z"])


def of_environments(adata: AnnData) -> Any:
    return list(batch_probe(adata, "Z", "plate").values())


def of_neighbours(adata: AnnData) -> Any:
    return list(batch_mixing(adata, "Z", "plate", n_neighbors=10).values())


def of_all(adata: AnnData) -> Any:
    table = benchmark(adata, ["Z"], y_key="y", e_key="plate", n_neighbors=10)
    return table.select_dtypes("number").to_numpy()


@pytest.mark.parametrize(
    "compute",
    [
        *(lambda adata, of=of: of(adata, "DMSO") for of in (of_effects, of_replicates, of_mechanisms, of_genes)),
        of_medians,
        of_probes,
        of_predictions,
        of_environments,
        of_neighbours,
        of_all,
    ],
)
def test_an_embedding_may_be_a_frame_and_not_sparse(compute):
    """Some took one and some failed where a row was asked for; sparse, each failed in a way of its own."""
    adata = wells()
    z, expected = adata.obsm["Z"], compute(adata)
    for frame in (pd.DataFrame(z, adata.obs_names), pd.DataFrame(z, adata.obs_names, dtype="Float64")):
        adata.obsm["Z"] = frame
        found = compute(adata)
        if np.asarray(found).dtype.kind == "f":  # sums over columns that lie otherwise in memory
            np.testing.assert_allclose(found, expected, rtol=1e-10)
        else:
            np.testing.assert_array_equal(found, expected)
    adata.obsm["Z"] = frame.assign(guide="g")
    with pytest.raises(TypeError, match=r"has columns that hold no numbers \(guide\): leave columns of text out"):
        compute(adata)
    adata.obsm["Z"] = sparse.csr_matrix(z)
    with pytest.raises(ValueError, match=r"is a sparse matrix, and a dense one is needed: give .*toarray\(\)"):
        compute(adata)


def test_rows_that_were_trained_on_may_all_be_elsewhere():
    """A table of held-out rows says of each that it was not trained on; a column of other words says nothing."""
    adata = AnnData(obs=pd.DataFrame({"part": ["test", "left out"], "other": ["x", "y"]}, index=["0", "1"]))
    assert not trained_rows(adata, "part").any()
    with pytest.raises(ValueError, match=r"No row of obs\['other'\] says True or 'train'"):
        trained_rows(adata, "other")
    with pytest.raises(ValueError, match="train_indices is float64"):
        trained_rows(adata, np.array([0.5]), "train_indices")
