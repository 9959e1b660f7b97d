from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import aggregate


def cells(n: int = 400, seed: int = 0) -> AnnData:
    rng = np.random.default_rng(seed)
    gene = rng.choice(["A", "B", "C", "nontargeting"], size=n, p=[0.4, 0.3, 0.2, 0.1])
    guide = np.array([f"{g}_{i}" for g, i in zip(gene, rng.integers(3, size=n), strict=True)])
    z = rng.normal(size=(n, 5)) + (gene == "B")[:, None]
    obs = pd.DataFrame({"gene": gene, "sgRNA": guide}, index=[str(i) for i in range(n)])
    return AnnData(obs=obs, obsm={"Z": z.astype(np.float32)})


def naive(adata: AnnData, average: str = "mean", subtract: bool = True) -> pd.DataFrame:
    frame = pd.DataFrame(np.asarray(adata.obsm["Z"], dtype=float))
    guides = frame.groupby([adata.obs["gene"].to_numpy(), adata.obs["sgRNA"].to_numpy()]).agg(average)
    genes = guides.groupby(level=0).mean()
    return genes - genes.loc["nontargeting"] if subtract else genes


@pytest.mark.parametrize("average", ["mean", "median"])
def test_guides_count_equally_and_the_control_is_subtracted(average):
    adata = cells()
    ours = aggregate(adata, "Z", gene_key="gene", guide_key="sgRNA", average=average, standardize=None)
    assert list(ours.obs_names) == ["A", "B", "C"]
    np.testing.assert_allclose(ours.X, naive(adata, average).drop("nontargeting"), rtol=1e-5, atol=1e-6)
    counts = adata.obs["gene"].value_counts()
    assert ours.obs["n_cells"].to_dict() == {gene: counts[gene] for gene in "ABC"}
    assert (ours.obs["n_guides"] == 3).all()


def test_standardising_with_and_without_the_control():
    adata = cells()
    genes = naive(adata)
    references: dict[Any, pd.DataFrame] = {"with_control": genes, "genes": genes.drop("nontargeting")}
    for mode, reference in references.items():
        ours = aggregate(adata, "Z", gene_key="gene", guide_key="sgRNA", standardize=mode)
        expected = ((genes - reference.mean()) / reference.std(ddof=1)).drop("nontargeting")
        np.testing.assert_allclose(ours.X, expected, rtol=1e-4, atol=1e-5)


def test_without_guides_cells_count_equally():
    adata = cells()
    ours = aggregate(adata, "Z", gene_key="gene", standardize=None)
    means = pd.DataFrame(adata.obsm["Z"]).groupby(adata.obs["gene"].to_numpy()).mean()
    np.testing.assert_allclose(ours.X, (means - means.loc["nontargeting"]).drop("nontargeting"), rtol=1e-4, atol=1e-5)


def test_embeddings_on_disk_are_read_in_blocks(tmp_path, monkeypatch):
    adata = cells()
    expected = aggregate(adata, "Z", gene_key="gene", guide_key="sgRNA").X
    np.save(tmp_path / "z.npy", adata.obsm["Z"])
    adata.obsm["Z"] = np.load(tmp_path / "z.npy", mmap_mode="r")
    # the package's attribute of this name is the function
    monkeypatch.setattr(sys.modules[aggregate.__module__], "_BLOCK", 37)
    np.testing.assert_allclose(aggregate(adata, "Z", gene_key="gene", guide_key="sgRNA").X, expected, rtol=1e-5)


def test_too_few_cells_are_dropped_and_said(caplog):
    adata = cells()
    adata.obs.iloc[0] = ["A", "A_rare"]
    adata.obs.iloc[1] = ["D", "D_0"]
    with caplog.at_level(logging.WARNING, logger="scbd"):
        ours = aggregate(adata, "Z", gene_key="gene", guide_key="sgRNA", min_cells=2, min_guides=2)
    assert ours.uns["aggregate"]["dropped"] == {"guides": ["A_rare", "D_0"], "genes": ["D"]}
    assert "Dropped 2 guides and 1 genes" in caplog.text
    assert ours.obs["n_guides"].to_dict() == {"A": 3, "B": 3, "C": 3}


def test_as_many_as_are_asked_for_are_enough():
    adata = cells()
    smallest = adata.obs["sgRNA"].value_counts().min()
    keys: dict[str, Any] = {"gene_key": "gene", "guide_key": "sgRNA"}
    kept, fewer = (
        aggregate(adata, "Z", **keys, min_cells=n).uns["aggregate"]["dropped"] for n in (smallest, smallest + 1)
    )
    assert kept == {"guides": [], "genes": []} and len(fewer["guides"]) > 0
    # a single cell, and a single guide, unless more are asked for
    adata.obs.iloc[0] = ["D", "D_0"]
    assert list(aggregate(adata, "Z", **keys).obs_names) == ["A", "B", "C", "D"]


def test_the_control_needs_no_number_of_guides():
    adata = cells()
    adata.obs.loc[adata.obs["gene"] == "nontargeting", "sgRNA"] = "pool"
    ours = aggregate(adata, "Z", gene_key="gene", guide_key="sgRNA", min_guides=2)
    assert list(ours.obs_names) == ["A", "B", "C"]


@pytest.mark.parametrize("guide_key", ["sgRNA", None])
def test_several_controls_are_one(guide_key, tmp_path):
    adata, renamed = cells(), cells()
    is_b = (adata.obs["gene"] == "B").to_numpy()
    renamed.obs.loc[is_b, "gene"] = "nontargeting"
    keys: dict[str, Any] = {"gene_key": "gene", "guide_key": guide_key}
    ours = aggregate(adata, "Z", **keys, control=["nontargeting", "B"])
    expected = aggregate(renamed, "Z", **keys)
    assert list(ours.obs_names) == list(expected.obs_names) == ["A", "C"]
    np.testing.assert_allclose(ours.X, expected.X, rtol=1e-5, atol=1e-6)
    assert ours.uns["aggregate"]["control"] == ["nontargeting", "B"]
    assert ours.uns["aggregate"]["dropped"] == {"guides": [], "genes": []}
    np.testing.assert_allclose(aggregate(adata, "Z", **keys, control=["B", "nontargeting"]).X, ours.X, rtol=1e-5)
    ours.write_h5ad(tmp_path / "profiles.h5ad")


def test_without_a_control_nothing_is_subtracted(tmp_path):
    adata = cells()
    keys: dict[str, Any] = {"gene_key": "gene", "guide_key": "sgRNA", "control": None}
    means = naive(adata, subtract=False)
    raw = aggregate(adata, "Z", **keys, standardize=None)
    assert list(raw.obs_names) == ["A", "B", "C", "nontargeting"]
    np.testing.assert_allclose(raw.X, means, rtol=1e-5, atol=1e-6)
    for mode in ("with_control", "genes"):
        ours = aggregate(adata, "Z", **keys, standardize=mode)
        np.testing.assert_allclose(ours.X, (means - means.mean()) / means.std(ddof=1), rtol=1e-4, atol=1e-5)
    ours.write_h5ad(tmp_path / "profiles.h5ad")
    with pytest.raises(ValueError, match="0 genes are left, where profiles need two"):
        aggregate(adata, "Z", **keys, min_cells=10_000)


def test_columns_of_any_name(tmp_path):
    adata = cells()
    adata.obs = adata.obs.rename(columns={"gene": "Metadata_gene", "sgRNA": "Metadata_guide"}).astype("category")
    ours = aggregate(adata, "Z", gene_key="Metadata_gene", guide_key="Metadata_guide")
    np.testing.assert_array_equal(ours.X, aggregate(cells(), "Z", gene_key="gene", guide_key="sgRNA").X)
    ours.write_h5ad(tmp_path / "profiles.h5ad")


def test_bad_input_gets_a_sentence():
    adata = cells()
    keys: dict[str, Any] = {"gene_key": "gene", "guide_key": "sgRNA"}
    with pytest.raises(ValueError, match=r"No row has the control 'NTC' in 'gene' \(it holds A, B, C, nontargeting\)"):
        aggregate(adata, "Z", **keys, control="NTC")
    with pytest.raises(ValueError, match="No row has the control 'DMSO' in 'gene'"):
        aggregate(adata, "Z", **keys, control=["nontargeting", "DMSO"])
    with pytest.raises(ValueError, match="min_guides=2 counts the guides of a gene: name their column with guide_key"):
        aggregate(adata, "Z", gene_key="gene", min_guides=2)
    with pytest.raises(KeyError, match="obsm has no 'X'"):
        aggregate(adata, "X", **keys)
    with pytest.raises(KeyError, match="obs has no 'guide'"):
        aggregate(adata, "Z", gene_key="gene", guide_key="guide")
    with pytest.raises(ValueError, match="average='mode' is not known"):
        aggregate(adata, "Z", **keys, average="mode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="standardize='all' is not known"):
        aggregate(adata, "Z", **keys, standardize="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 genes are left, the control not among them"):
        aggregate(adata, "Z", **keys, min_cells=10_000)
    adata.obs.loc["3", "sgRNA"] = None
    with pytest.raises(ValueError, match=r"obs\['sgRNA'\] has no value for 1 of 400 cells"):
        aggregate(adata, "Z", **keys)
    adata = cells()
    adata.obsm["Z"][7] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity in 1"):
        aggregate(adata, "Z", **keys)
