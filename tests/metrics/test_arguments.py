from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import make_wells
from scipy import sparse

from scbd import metrics
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
    variance_table,
)
from scbd.metrics._arguments import (
    encode_label_column,
    get_embedding,
    get_label_texts,
    get_named_embeddings,
    training_mask,
)

# numbered in the alphabetical order of their names
NUMBERS = {"DMSO": 0, "EtOH": 1, "a": 2, "b": 3, "c": 4, "d": 5}


def make_screen() -> AnnData:
    rng = np.random.default_rng(0)
    y = np.tile(list(NUMBERS), 12)
    obs = pd.DataFrame({"y": y, "plate": np.arange(72) // 24, "guide": [f"{name}_{i % 2}" for i, name in enumerate(y)]})
    obs["moa"] = obs["y"].map({"EtOH": "one", "a": "one", "b": "one", "c": "two", "d": "two"})
    obs.index = obs.index.astype(str)
    return AnnData(obs=obs, obsm={"Z": rng.normal(size=(72, 5)) + np.repeat(rng.normal(size=(12, 5)), 6, axis=0)})


def compute_effects(adata: AnnData, control: Any) -> np.ndarray:
    return perturbation_effects(adata, "Z", y_key="y", e_key="plate", control=control, n_permutations=5).to_numpy()


def compute_replicate_retrieval(adata: AnnData, control: Any) -> np.ndarray:
    how: dict[str, Any] = {"y_key": "y", "e_key": "plate", "n_permutations": 5}
    return replicate_retrieval(adata, "Z", **how, control=control).table.to_numpy()


def compute_retrieval(adata: AnnData, control: Any) -> np.ndarray:
    how: dict[str, Any] = {"y_key": "y", "label_key": "moa", "n_permutations": 5}
    return retrieval(adata, "Z", **how, control=control).table.to_numpy()


def compute_profiles(adata: AnnData, control: Any) -> np.ndarray:
    return aggregate(adata, "Z", gene_key="y", guide_key="guide", control=control).X


EACH = pytest.mark.parametrize(
    "compute", [compute_effects, compute_replicate_retrieval, compute_retrieval, compute_profiles]
)
Compute = Callable[[AnnData, Any], np.ndarray]


@EACH
@pytest.mark.parametrize("dtype", [int, float, "category", object])
def test_metrics_numeric_control_is_equal_to_text(compute: Compute, dtype):
    adata, numbered = make_screen(), make_screen()
    numbered.obs["y"] = numbered.obs["y"].map(NUMBERS).astype(dtype)
    expected = compute(adata, "DMSO")
    for control in (0, 0.0, np.int64(0), "0", [0]):
        np.testing.assert_array_equal(compute(numbered, control), expected)
    both = compute(adata, ["DMSO", "EtOH"])
    assert both.shape != expected.shape or not np.array_equal(both, expected, equal_nan=True)
    for several in ([0, 1], np.array([0, 1]), (0.0, "1")):
        np.testing.assert_array_equal(compute(numbered, several), both)


@EACH
def test_metrics_missing_or_unknown_control_raises(compute: Compute):
    adata = make_screen()
    adata.obs["y"] = adata.obs["y"].replace({"a": "nan"})
    for control in (np.nan, ["DMSO", None]):
        with pytest.raises(ValueError, match="is no value"):
            compute(adata, control)
    with pytest.raises(ValueError, match="No row has the control '7' in 'y'"):
        compute(adata, ["DMSO", 7])


@pytest.mark.parametrize("compute", [compute_effects, compute_replicate_retrieval, compute_retrieval])
@pytest.mark.parametrize("other", ["dmso", "DMSO ", "D-MSO"])
def test_metrics_control_in_two_spellings_warns(compute: Compute, other):
    adata = make_screen()
    adata.obs["y"] = adata.obs["y"].replace({"EtOH": other})
    with pytest.warns(UserWarning, match="2 labels of 'y' differ"):
        compute(adata, "DMSO")
    compute(adata, ["DMSO", other])


def test_metrics_control_none_is_equal_to_empty_or_raises():
    adata = make_screen()
    for compute in (compute_retrieval, compute_profiles):
        np.testing.assert_array_equal(compute(adata, None), compute(adata, []))
    assert len(compute_profiles(adata, None)) == 6
    for needs_one in (compute_effects, compute_replicate_retrieval):
        with pytest.raises(ValueError, match="control=None"):
            needs_one(adata, None)


def test_get_label_texts_whole_floats_are_equal_to_integers():
    adata = AnnData(obs=pd.DataFrame({"y": [2.0, 1.5, 2.0], "both": [1, "1", "b"]}, index=list("abc")))
    assert get_label_texts(adata, "y").tolist() == ["2", "1.5", "2"]
    names, codes = encode_label_column(adata, "both")
    assert sorted(names) == ["1", "b"] and names[codes].tolist() == ["1", "1", "b"]


def compute_median_profiles(adata: AnnData) -> Any:
    return aggregate(adata, "Z", gene_key="y", guide_key="guide", control="DMSO", average="median").X


def compute_label_probe(adata: AnnData) -> Any:
    return list(label_probe(adata.obsm["Z"], adata.obs["y"]).values())


def compute_predictions(adata: AnnData) -> Any:
    return predict_labels(adata.obsm["Z"], adata.obs["y"], adata.obsm["Z"])


def compute_batch_probe(adata: AnnData) -> Any:
    return list(batch_probe(adata, "Z", "plate").values())


def compute_batch_mixing(adata: AnnData) -> Any:
    return list(batch_mixing(adata, "Z", "plate", n_neighbors=10).values())


def compute_benchmark(adata: AnnData) -> Any:
    table = benchmark(adata, ["Z"], y_key="y", e_key="plate", n_neighbors=10)
    return table.select_dtypes("number").to_numpy()


@pytest.mark.parametrize(
    "compute",
    [
        *(
            lambda adata, of=of: of(adata, "DMSO")
            for of in (compute_effects, compute_replicate_retrieval, compute_retrieval, compute_profiles)
        ),
        compute_median_profiles,
        compute_label_probe,
        compute_predictions,
        compute_batch_probe,
        compute_batch_mixing,
        compute_benchmark,
    ],
)
def test_metrics_frame_is_equal_to_array_and_sparse_raises(compute):
    adata = make_screen()
    z, expected = adata.obsm["Z"], compute(adata)
    for frame in (pd.DataFrame(z, adata.obs_names), pd.DataFrame(z, adata.obs_names, dtype="Float64")):
        adata.obsm["Z"] = frame
        found = compute(adata)
        if np.asarray(found).dtype.kind == "f":  # the order of summation depends on the memory layout
            np.testing.assert_allclose(found, expected, rtol=1e-10)
        else:
            np.testing.assert_array_equal(found, expected)
    adata.obsm["Z"] = frame.assign(guide="g")
    with pytest.raises(TypeError, match=r"guide"):
        compute(adata)
    adata.obsm["Z"] = sparse.csr_matrix(z)
    with pytest.raises(ValueError, match=r"sparse"):
        compute(adata)


REPLICATES: dict[str, Any] = {"y_key": "y", "e_key": "plate", "control": "DMSO"}
NET = pd.DataFrame({"source": ["one", "one"], "target": ["a", "b"]})
# every array argument of each function; Z and X are arrays stored in the table
OF_ARRAYS: dict[str, dict[str, Callable[[AnnData, Any], Any]]] = {
    "aggregate": {"Z": lambda table, z: aggregate(table, "Z", gene_key="y", control="DMSO")},
    "batch_mixing": {"Z": lambda table, z: batch_mixing(table, "Z", "plate", n_neighbors=10)},
    "batch_probe": {"Z": lambda table, z: batch_probe(table, "Z", "plate")},
    "benchmark": {
        "Z": lambda table, z: benchmark(table, ["Z"], y_key="y"),
        "embeddings": lambda table, z: benchmark(table, {"one": z}, y_key="y"),
        "several": lambda table, z: benchmark(table, {"one": [z, z]}, y_key="y"),
    },
    "label_probe": {
        "embedding": lambda table, z: label_probe(z, table.obs["y"]),
        "labels": lambda table, z: label_probe(z.data, z[:, 0] > 0),
        "groups": lambda table, z: label_probe(z.data, table.obs["y"], groups=z[:, 0]),
        "train": lambda table, z: label_probe(z.data, table.obs["y"], train=z[:, 0] > 0),
    },
    "perturbation_effects": {
        "Z": lambda table, z: perturbation_effects(table, "Z", **REPLICATES),
        "rep": lambda table, z: perturbation_effects(table, z, **REPLICATES),
        "trained_on": lambda table, z: perturbation_effects(table, z.data, **REPLICATES, trained_on=z[:, 0] > 0),
    },
    "predict_labels": {
        "train_embedding": lambda table, z: predict_labels(z, table.obs["y"], z.data),
        "train_labels": lambda table, z: predict_labels(z.data, z[:, 0], z.data),
        "embedding": lambda table, z: predict_labels(z.data, table.obs["y"], z),
    },
    "replicate_retrieval": {
        "Z": lambda table, z: replicate_retrieval(table, "Z", **REPLICATES),
        "rep": lambda table, z: replicate_retrieval(table, z, **REPLICATES),
        "queries": lambda table, z: replicate_retrieval(table, z.data, **REPLICATES, queries=z[:, 0] > 0),
        "trained_on": lambda table, z: replicate_retrieval(table, z.data, **REPLICATES, trained_on=z[:, 0] > 0),
    },
    "retrieval": {
        "Z": lambda table, z: retrieval(table, "Z", label_key="moa", y_key="y"),
        "rep": lambda table, z: retrieval(table, z, label_key="moa", y_key="y"),
        "queries": lambda table, z: retrieval(table, z.data, label_key="moa", y_key="y", queries=z[:, 0] > 0),
    },
    "variance_table": {
        "Z": lambda table, z: variance_table(table, ["Z"], ["y"]),
        "embeddings": lambda table, z: variance_table(table, {"one": z}, ["y"]),
    },
    "Relations": {"X": lambda table, z: metrics.Relations(table, NET)},
    "complex_table": {"X": lambda table, z: metrics.complex_table(table, NET)},
    "relationship_average_precision": {"X": lambda table, z: metrics.relationship_average_precision(table, NET)},
    "relationship_curve": {"X": lambda table, z: metrics.relationship_curve(table, NET)},
    "relationship_interval": {"X": lambda table, z: metrics.relationship_interval(table, NET)},
    "relationship_recall": {"X": lambda table, z: metrics.relationship_recall(table, NET)},
}
# functions and classes that take data frames
OF_FRAMES = {"Retrieval", "rank", "relationship_area", "styled", "summarise"}


@pytest.mark.parametrize(("name", "given"), [(name, given) for name, each in OF_ARRAYS.items() for given in each])
def test_metrics_masked_array_raises(name, given):
    table = make_screen()
    z = np.ma.masked_array(table.obsm["Z"], mask=table.obsm["Z"] > 1)
    table.obsm["Z"] = z
    if given == "X":
        table = AnnData(z[:6], obs=table.obs[:6].set_index("y"))
    with pytest.raises(TypeError, match="is a masked array, and what its mask hides would be used: drop the rows"):
        OF_ARRAYS[name][given](table, z)


def test_metrics_all_public_names_are_in_masked_array_test():
    assert {*OF_ARRAYS} | OF_FRAMES == set(metrics.__all__)


def test_training_mask_no_training_rows_is_false_or_raises():
    """A column of splits may mark no row as training; a column of other words raises an error."""
    adata = AnnData(obs=pd.DataFrame({"part": ["test", "left out"], "other": ["x", "y"]}, index=["0", "1"]))
    assert not training_mask(adata, "part").any()
    with pytest.raises(ValueError, match=r"obs\['other'\]"):
        training_mask(adata, "other")
    with pytest.raises(ValueError, match="train_indices"):
        training_mask(adata, np.array([0.5]), "train_indices")


def make_three_embeddings() -> AnnData:
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
def test_get_named_embeddings_key_list_or_dict_returns_named(asked, named):
    adata = make_three_embeddings()
    found = get_named_embeddings(adata, asked)
    assert [(one.representation, one.key) for one in found] == named
    assert all((one.values == adata.obsm[one.key]).all() for one in found)


def test_get_named_embeddings_missing_or_empty_raises():
    with pytest.raises(KeyError, match=r"'d'"):
        get_named_embeddings(make_three_embeddings(), {"one": ["a", "d"]})
    empty: tuple[Any, ...] = ([], {}, {"one": []})
    for nothing in empty:
        with pytest.raises(ValueError, match="No embedding"):
            get_named_embeddings(make_three_embeddings(), nothing)


def test_get_named_embeddings_array_and_file_are_equal_to_key(tmp_path):
    adata = AnnData(obsm={key: np.random.default_rng(i).normal(size=(20, 2)) for i, key in enumerate("ab")})
    stored = AnnData(obs=adata.obs[[]], obsm={"X_scbd_c": adata.obsm["a"], "X_scbd_s": adata.obsm["b"]})
    stored.write_h5ad(tmp_path / "z.h5ad")
    shuffled = stored[np.random.default_rng(0).permutation(stored.n_obs)].copy()
    shuffled.write_h5ad(tmp_path / "shuffled.h5ad")
    sources = {"ours": [tmp_path / "z.h5ad", tmp_path / "shuffled.h5ad"], "array": adata.obsm["a"]}
    found = get_named_embeddings(adata, sources)
    assert [one[:2] for one in found] == [
        ("ours", str(tmp_path / "z.h5ad")),
        ("ours", str(tmp_path / "shuffled.h5ad")),
        ("array", "array[0]"),
    ]
    for one in found:
        np.testing.assert_array_equal(one.values, adata.obsm["a"])


def test_get_named_embeddings_wrong_cells_or_file_raises(tmp_path):
    adata = AnnData(obsm={key: np.random.default_rng(i).normal(size=(20, 2)) for i, key in enumerate("ab")})
    AnnData(obs=adata.obs[:-1][[]], obsm={"X_pca": adata.obsm["a"][:-1]}).write_h5ad(tmp_path / "fewer.h5ad")
    with pytest.raises(ValueError, match="lacks 1 of the 20"):
        get_named_embeddings(adata, {"fewer": tmp_path / "fewer.h5ad"})
    AnnData(obs=adata.obs[[]], obsm={"one": adata.obsm["a"], "two": adata.obsm["b"]}).write_h5ad(tmp_path / "two.h5ad")
    with pytest.raises(ValueError, match="holds one, two"):
        get_named_embeddings(adata, {"two": tmp_path / "two.h5ad"})
    with pytest.raises(FileNotFoundError, match="none.h5ad"):
        get_named_embeddings(adata, {"none": tmp_path / "none.h5ad"})
    with pytest.raises(ValueError, match="one row for each of the 20"):
        get_named_embeddings(adata, {"short": adata.obsm["a"][:-1]})


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
@pytest.mark.parametrize("repeat", ["in both", "in the table"])
def test_get_named_embeddings_repeated_names_in_other_order_raises(tmp_path, repeat):
    stored = AnnData(obsm={"X_pca": np.random.default_rng(0).normal(size=(20, 2))})
    other = stored[[0, *range(19)]].copy()  # the first cell twice
    if repeat == "in both":
        stored = other
    stored.write_h5ad(tmp_path / "z.h5ad")
    (found,) = get_named_embeddings(stored, {"z": tmp_path / "z.h5ad"})
    np.testing.assert_array_equal(found.values, stored.obsm["X_pca"])
    with pytest.raises(ValueError, match="obs_names repeat"):
        get_named_embeddings(other[::-1].copy(), {"z": tmp_path / "z.h5ad"})


def test_get_embedding_x_and_layers_are_read_after_obsm():
    wells = make_wells()
    wells.layers["scaled"] = wells.obsm["own"] = wells.X * 2
    wells.layers["own"] = wells.X * 3
    np.testing.assert_array_equal(get_embedding(wells, "X"), wells.X)
    np.testing.assert_array_equal(get_embedding(wells, "scaled"), wells.X * 2)
    np.testing.assert_array_equal(get_embedding(wells, "own"), wells.X * 2)  # obsm takes precedence over layers
    assert [found.key for found in get_named_embeddings(wells, ["X", "scaled"])] == ["X", "scaled"]
    del wells.X
    with pytest.raises(KeyError, match="obsm has no 'X'"):
        get_embedding(wells, "X")
