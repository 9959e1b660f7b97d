from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from reference import retrieval as naive
from scipy import sparse

from scbd.metrics import retrieval

LABELS = ["kinase", "kinase|GPCR", "GPCR", "channel", "channel | kinase", "", None, "alone"]


def make_profiles(seed: int = 0, n_wells: int = 3, signal: float = 0.0) -> AnnData:
    """Eight perturbations of a few mechanisms, some with two, one unknown; and controls."""
    rng = np.random.default_rng(seed)
    names = [f"p{i}" for i in range(len(LABELS))] + ["DMSO"]
    mechanism = pd.Series([*LABELS, "vehicle"], index=names)
    obs = pd.DataFrame({"y": np.tile(names, n_wells)}, index=[str(i) for i in range(n_wells * len(names))])
    obs["moa"] = mechanism.loc[obs["y"]].to_numpy()
    effect = rng.normal(size=(4, 6))
    kinds = ["kinase", "GPCR", "channel", "alone"]
    mean = [sum((effect[k] for k, kind in enumerate(kinds) if kind in str(moa)), np.zeros(6)) for moa in obs["moa"]]
    return AnnData(obs=obs, obsm={"Z": rng.normal(size=(len(obs), 6)) + signal * np.array(mean)})


@given(st.integers(0, 200))
def test_scores_are_those_of_loops(seed):
    wells = make_profiles(seed)
    consensus = pd.DataFrame(wells.obsm["Z"]).groupby(wells.obs["y"].to_numpy()).mean().drop("DMSO")
    labels = [{part.strip() for part in (label or "").split("|")} - {""} for label in LABELS]
    expected = naive.related(consensus.to_numpy(), labels)
    found = retrieval(wells, "Z", label_key="moa", y_key="y", control="DMSO", n_permutations=10)
    assert found.table.index.to_list() == [f"p{i}" for i in expected]
    np.testing.assert_allclose(found.table["average_precision"], list(expected.values()), rtol=1e-12)
    assert found.left_out == ("p5", "p6", "p7")  # without a label, and without a partner


def test_numbers_by_hand():
    found = retrieval(make_profiles(), "Z", label_key="moa", y_key="y", control="DMSO", n_permutations=10)
    assert found.table["n_positives"].to_list() == [2, 3, 1, 1, 3]
    assert found.table["n_negatives"].to_list() == [3, 2, 4, 4, 2]
    assert set(found.table["n_queries"]) == {1}


def test_perturbations_that_a_label_links_are_one_unit():
    wells = make_profiles()
    found = retrieval(wells, "Z", label_key="moa", y_key="y", control="DMSO", n_permutations=10)
    units = pd.Series(found.units, index=found.table.index)
    assert units[["p0", "p1", "p4"]].nunique() == 1 and len(units) == 5  # of a kinase, and what shares its labels
    apart = AnnData(obs=pd.DataFrame({"moa": [*"aabbb", "", "c"]}, index=[*"tuvwxyz"]), obsm={"Z": np.eye(7)})
    units = retrieval(apart, "Z", label_key="moa", n_permutations=10).units
    assert units is not None and pd.factorize(units)[0].tolist() == [0, 0, 1, 1, 1]


def test_mechanisms_that_are_there_are_found():
    found = retrieval(make_profiles(signal=50), "Z", label_key="moa", y_key="y", control="DMSO")
    assert found.mean_average_precision > 0.85 > 0.7 > found.chance
    assert repr(found).startswith("Retrieval of 5 perturbations: average precision 0.")
    assert set(found.scores()) == {"mean_average_precision", "chance", "n_called"}


def test_a_point_scores_chance():
    wells = make_profiles()
    found = retrieval(wells, np.ones((wells.n_obs, 3)), label_key="moa", y_key="y", control="DMSO", n_permutations=10)
    np.testing.assert_allclose(found.table["average_precision"], found.table["chance"], rtol=1e-12)


def test_queries_are_perturbations_with_such_a_row():
    wells = make_profiles()
    everyone = retrieval(wells, "Z", label_key="moa", y_key="y", control="DMSO", n_permutations=10).table
    found = retrieval(wells, "Z", label_key="moa", y_key="y", control="DMSO", queries=[0, 6], n_permutations=10)
    pd.testing.assert_frame_equal(found.table.drop(columns="q_value"), everyone.loc[["p0"]].drop(columns="q_value"))
    assert len(found.table) == 1 and found.left_out == ("p6",)


def test_rows_are_profiles_unless_perturbations_are_named():
    wells = make_profiles(n_wells=1)
    by_row = retrieval(wells[:-1].copy(), "Z", label_key="moa", n_permutations=10)
    by_name = retrieval(wells, "Z", label_key="moa", y_key="y", control=["DMSO"], n_permutations=10)
    np.testing.assert_array_equal(by_row.table, by_name.table)
    assert by_row.table.index.to_list() == ["0", "1", "2", "3", "4"]


def test_rows_of_one_name_are_two_profiles():
    """Of two plates that were put together."""
    wells = make_profiles(n_wells=1)[:-1].copy()
    expected = retrieval(wells, "Z", label_key="moa", n_permutations=10).table
    wells.obs_names = ["0", "0", "1", "1", "2", *map(str, range(3, wells.n_obs - 2))]
    found = retrieval(wells, "Z", label_key="moa", n_permutations=10).table
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("control", [0, [0], "0", np.int64(0)])
def test_a_control_may_be_a_number(control):
    wells = make_profiles()
    expected = retrieval(wells, "Z", label_key="moa", y_key="y", control="DMSO", n_permutations=10).table
    wells.obs["y"] = wells.obs["y"].map({"DMSO": 0} | {f"p{i}": i + 1 for i in range(9)}).astype(int)
    found = retrieval(wells, "Z", label_key="moa", y_key="y", control=control, n_permutations=10).table
    np.testing.assert_array_equal(found, expected)


def test_rows_of_a_perturbation_may_name_different_labels():
    wells = make_profiles()
    wells.obs["moa"] = wells.obs["moa"].astype("category")
    first = wells.obs["y"].duplicated().to_numpy()
    wells.obs.loc[first & (wells.obs["y"] == "p1").to_numpy(), "moa"] = "GPCR"
    found = retrieval(wells, "Z", label_key="moa", y_key="y", control="DMSO", n_permutations=10)
    assert found.table.loc["p1", "n_positives"] == 3  # all that it is called on any row


def test_another_separator():
    wells = make_profiles()
    wells.obs["moa"] = wells.obs["moa"].str.replace("|", ";")
    with_it = retrieval(wells, "Z", label_key="moa", y_key="y", control="DMSO", separator=";", n_permutations=10)
    assert with_it.table["n_positives"].to_list() == [2, 3, 1, 1, 3]


def test_bad_input_gets_a_sentence():
    wells = make_profiles()
    with pytest.raises(KeyError, match="obs has no 'target'"):
        retrieval(wells, "Z", label_key="target")
    with pytest.raises(ValueError, match="No two perturbations share a label of obs.'y'., or none has another: 8 of 8"):
        retrieval(wells, "Z", label_key="y", y_key="y", control="DMSO")
    with pytest.raises(ValueError, match="No row has the control 'dmso' in 'y'"):
        retrieval(wells, "Z", label_key="moa", y_key="y", control="dmso")
    with pytest.raises(ValueError, match="control='DMSO' is a value of y_key: give y_key, too"):
        retrieval(wells, "Z", label_key="moa", control="DMSO")
    wells.obs["one"] = "all the same"
    with pytest.raises(ValueError, match="or none has another"):
        retrieval(wells, "Z", label_key="one", y_key="y")
    with pytest.raises(ValueError, match=r"rep is a sparse matrix, and a dense one is needed: give rep.toarray\(\)"):
        retrieval(wells, sparse.csr_matrix(wells.obsm["Z"]), label_key="moa")


def test_the_same_as_a_peer_on_real_wells(shared):
    """Of compounds with one target each: with several, the peer scores each label apart."""
    copairs = pytest.importorskip("copairs.map")
    from scbd.datasets import cpjump1

    wells = cpjump1(shared / "profiles" / "cpjump1_cellprofiler_wells.parquet")
    known = wells.obs["Metadata_gene"].notna() & ~wells.obs["Metadata_gene"].astype(str).str.contains("|", regex=False)
    wells = wells[known & (wells.obs["Metadata_broad_sample"] != "DMSO")].copy()
    found = retrieval(wells, wells.X, label_key="Metadata_gene", y_key="Metadata_broad_sample", n_permutations=10)
    of_compound = pd.DataFrame(wells.X.astype(float)).groupby(wells.obs["Metadata_broad_sample"].astype(str).to_numpy())
    gene = wells.obs.astype(str).drop_duplicates("Metadata_broad_sample").set_index("Metadata_broad_sample")
    meta = gene[["Metadata_gene"]].loc[of_compound.mean().index].rename_axis("compound").reset_index()
    sameby: dict[str, list[str]] = {"pos_sameby": ["Metadata_gene"], "pos_diffby": [], "neg_sameby": []}
    peer = copairs.average_precision(meta, of_compound.mean().to_numpy(), **sameby, neg_diffby=["Metadata_gene"])
    expected = peer.dropna(subset="average_precision").set_index("compound")["average_precision"]
    assert len(found.table) > 50
    np.testing.assert_allclose(found.table["average_precision"], expected.loc[found.table.index], rtol=0, atol=1e-6)
