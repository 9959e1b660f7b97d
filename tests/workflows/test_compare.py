"""Tests of the comparison of embeddings of any origin on cells that were not trained on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import make_cells

from scbd import compare, evaluate
from scbd.corrections import correct
from scbd.metrics import benchmark

KEYS: dict[str, Any] = {"y_key": "gene", "e_key": "well", "control": "none"}
HOW = KEYS | {"n_neighbors": 10}
NET = pd.DataFrame({"source": np.repeat(["A", "B", "C"], 2), "target": [f"g{i}" for i in range(6)]})


@pytest.fixture(scope="module")
def cells() -> AnnData:
    """Return three pairs of related genes and controls, in wells that shift all cells; g1 and g4 are not trained on."""
    rng, n = np.random.default_rng(0), 1400
    gene, well = np.arange(n) % 7, rng.integers(4, size=n)
    of_pair = 3 * np.eye(4)[[0, 0, 1, 1, 2, 2, 3]]
    truth = of_pair[gene] + 0.5 * np.eye(7)[:, :4][gene] + 0.3 * rng.normal(size=(n, 4))
    shifted = np.hstack([truth, rng.normal(size=(n, 1))]) + 20 * rng.normal(size=(4, 5))[well]
    names = np.array([*(f"g{i}" for i in range(6)), "none"])[gene]
    obs = pd.DataFrame({"gene": pd.Categorical(names), "well": pd.Categorical(well.astype(str))})
    obs["split"] = np.where((rng.random(n) < 0.5) & ~np.isin(gene, [1, 4]), "train", "test")
    obs.index = obs.index.astype(str)
    noise = rng.normal(size=(n, 4))
    return AnnData(obs=obs, obsm={"X_true": truth, "X_shifted": shifted, "X_noise": noise})


def scores(frame: pd.DataFrame, representation: str) -> pd.Series:
    return frame[frame["representation"] == representation].set_index("metric")["value"]


def test_compare_keys_given_scores_each_key_and_its_standardised_form(cells, caplog):
    frame = compare(cells, {"mine": "X_shifted", "noise": "X_noise"}, trained_on="split", net=NET, **HOW)
    assert frame["representation"].unique().tolist() == ["mine", "mine, standardised", "noise", "noise, standardised"]
    assert "y_probe_unseen_auroc are of 2 perturbations that were not learned from: of so few" in caplog.text
    as_it_is, standardised, noise = (scores(frame, name) for name in ("mine", "mine, standardised", "noise"))
    assert as_it_is["e_probe_f1"] > 0.9 and standardised["e_probe_f1"] < 0.4
    assert standardised["relationship_map_unseen"] == 1 > noise["relationship_map_unseen"]
    assert standardised["y_probe_unseen_f1"] > 0.95 and 0.3 < noise["y_probe_unseen_f1"] < 0.7
    probes = {"e_probe_f1", "e_probe_quadratic_f1", "e_probe_neighbours_f1"}
    assert probes <= set(frame.dropna(subset="chance")["metric"]) and set(frame["key"]) == {"X_shifted", "X_noise"}


def test_compare_correction_fit_on_training_cells_is_equal_to_benchmark(cells):
    fit = (cells.obs["split"] == "train").to_numpy()
    frame = compare(cells, ["X_shifted"], trained_on=fit, corrections=["TVN"], **HOW)
    known = {"environments": cells.obs["well"], "controls": cells.obs["gene"] == "none", "fit": fit}
    new = {"TVN": correct(cells.obsm["X_shifted"], "TVN", **known)[~fit]}
    kinds = ["linear", "quadratic", "neighbours"]
    by_hand = benchmark(cells[~fit], new, **HOW, kinds=kinds).set_index("metric")  # type: ignore[arg-type]
    found = frame.set_index("metric").loc[by_hand.index]
    pd.testing.assert_frame_equal(found[["value", "chance", "better"]], by_hand[["value", "chance", "better"]])


def test_compare_one_gene_per_well_unseen_probe_holds_out_wells():
    """Each well holds one gene and the embedding encodes wells only; a probe of single cells would reach 0.9."""
    rng = np.random.default_rng(0)
    well = np.repeat(np.arange(60), 20)
    z = 2 * rng.normal(size=(60, 16))[well] + rng.normal(size=(1200, 16))
    obs = pd.DataFrame({"gene": (well // 3).astype(str), "well": well.astype(str)}, index=map(str, range(1200)))
    trained = (well < 30) & (np.arange(1200) % 2 == 0)
    keys: dict[str, Any] = {"y_key": "gene", "e_key": "well", "trained_on": trained, "n_neighbors": 10}
    frame = compare(AnnData(obs=obs, obsm={"z": z}), ["z"], **keys, corrections=[None])
    found = frame.set_index("metric")["value"]
    assert found["y_probe_unseen_f1"] < 0.4 and found["y_probe_unseen_auroc"] < 0.75


@pytest.mark.parametrize("control", [None, "6", 6, 6.0])
def test_compare_numeric_labels_is_equal_to_text_labels(cells, control):
    """Integers in a column with missing values are stored as floats, such as 1.0."""
    number = cells.obs["gene"].map({**{f"g{i}": i for i in range(6)}, "none": 6}).astype(int)
    frames = []
    for genes in (number.astype(str), number, number.astype(float)):
        obs = cells.obs.assign(gene=genes)
        net = pd.DataFrame({"source": NET["source"], "target": pd.Series(range(6), dtype=genes.dtype)})
        how = HOW | {"control": control, "net": net, "corrections": ["standardised"], "trained_on": "split"}
        frames.append(compare(AnnData(obs=obs, obsm={"z": cells.obsm["X_shifted"]}), ["z"], **how))
    assert frames[0].set_index("metric").loc["relationship_map_unseen", "value"] == 1
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0])


def test_compare_several_seeds_all_labels_seen_returns_no_unseen_metric(cells):
    seeds = {"mine": ["X_shifted", cells.obsm["X_true"]]}
    frame = compare(cells, seeds, trained_on=np.arange(0, cells.n_obs, 2), corrections=[None], **HOW)
    assert frame.groupby("representation")["key"].unique().loc["mine"].tolist() == ["X_shifted", "mine[1]"]
    assert not frame["metric"].str.contains("unseen").any()


def test_compare_several_networks_is_equal_to_single_networks(cells):
    how = HOW | {"trained_on": "split", "corrections": [None]}
    alone = compare(cells, ["X_true"], net=NET, **how).set_index("metric")
    found = compare(cells, ["X_true"], net={"one": NET, "again": NET}, **how).set_index("metric")
    for metric in ("relationship_map_seen", "relationship_map_unseen"):
        for name in ("one", "again"):
            columns = ["value", "chance"]
            assert found.loc[f"{metric} ({name})", columns].equals(alone.loc[metric, columns])


def test_compare_all_genes_related_relationship_map_is_nan(cells):
    everything = pd.DataFrame({"source": "all", "target": NET["target"]})
    found = compare(cells, ["X_true"], trained_on="split", net=everything, **HOW).set_index("metric")["value"]
    assert found["relationship_average_precision"].notna().all()
    assert found[["relationship_map_seen", "relationship_map_unseen"]].isna().all()


def test_compare_replicates_of_trained_perturbations_warns(cells):
    """The scored rows were not trained on, but their perturbations were, so an encoder may have memorised these."""
    few = cells[:400]
    how: dict[str, Any] = {"trained_on": "split", "corrections": [None], **HOW}
    with pytest.warns(UserWarning, match=r"trained on 4 of 6 perturbations that are scored \(g0, g2, g3, g5\)"):
        compare(few, ["X_true"], replicates=True, **how)
    unseen = few[few.obs["gene"].isin(["g1", "g4", "none"])]
    compare(unseen, ["X_true"], replicates=True, **how)


def test_compare_reference_given_returns_differences_from_it(cells):
    both: dict[str, Any] = {"true": "X_true", "noise": ["X_noise", "X_true"]}
    how = HOW | {"trained_on": "split", "n_bootstrap": 20, "reference": "true, standardised"}
    frame = compare(cells, both, **how).dropna(subset="p_value")
    frame = frame.set_index(["representation", "key", "metric"]).sort_index()
    for key in (("true, standardised", "X_true"), ("noise, standardised", "X_true")):
        assert (frame.loc[key, "difference"] == 0).all()
    assert frame.loc[("noise", "X_noise", "y_probe_f1"), "difference_high"] < 0


def test_compare_well_without_training_cells_raises_before_scoring(cells, monkeypatch):
    monkeypatch.setattr("scbd._workflows.compare.benchmark", None)
    trained = ((cells.obs["split"] == "train") & (cells.obs["well"] != "2")).to_numpy()
    with pytest.raises(ValueError, match="'2'"):
        compare(cells, ["X_true", "X_noise"], trained_on=trained, **HOW)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"embeddings": ["X_mine"]}, KeyError, "obsm has no 'X_mine'"),
        ({"trained_on": "part"}, KeyError, "obs has no 'part'"),
        (
            {"trained_on": np.ones(1400, dtype=bool)},
            ValueError,
            "trained_on marks 1400 of 1400 cells: .*train_size=0.7",
        ),
        ({"trained_on": np.zeros(1400, dtype=bool)}, ValueError, "trained_on marks 0 of 1400 cells"),
        ({"trained_on": np.arange(1400) % 2}, ValueError, r"names a row twice"),
        ({"trained_on": [3, 5, 3]}, ValueError, "trained_on names a row twice"),
        ({"control": "nontargeting"}, ValueError, "nontargeting"),
        ({"corrections": ["Combat"]}, ValueError, "correction='Combat' is not known"),
        (
            {"reference": "true", "n_bootstrap": 9},
            ValueError,
            "'true' is no .* here; there are: X_true, X_true, standard",
        ),
        ({"reference": "X_true"}, ValueError, "reference needs n_bootstrap"),
        ({"corrections": ["TVN"], "control": None}, ValueError, "TVN learns from controls, and none are given"),
    ],
)
def test_compare_invalid_input_raises_before_scoring(cells, given, error, message, monkeypatch):
    monkeypatch.setattr("scbd._workflows.compare.benchmark", None)  # scoring would raise another error
    monkeypatch.setattr("scbd._workflows.compare.correct", None)
    asked: dict[str, Any] = {"embeddings": ["X_true"], "trained_on": "split"} | HOW | given
    with pytest.raises(error, match=message):
        compare(cells, **asked)


def test_compare_failed_score_names_the_embedding(cells):
    cells = cells.copy()
    cells.obsm["X_constant"] = np.ones((cells.n_obs, 3))
    with pytest.raises(ValueError, match=r"^'flat, WCCN' \(X_constant\): all features are constant"):
        compare(cells, {"true": "X_true", "flat": "X_constant"}, trained_on="split", corrections=[None, "WCCN"], **HOW)
    # one test cell of each unseen perturbation is too few for a probe
    rare = np.isin(cells.obs["gene"], ["g1", "g4"]) & cells.obs["gene"].duplicated()
    with pytest.raises(ValueError, match=r"unseen .*gene.* of 'true' \(X_true\): .* labels"):
        compare(cells[~rare].copy(), {"true": "X_true"}, trained_on="split", corrections=[None], group_key=None, **HOW)


@pytest.fixture
def few() -> AnnData:
    return make_cells()


def test_evaluate_missing_embedding_raises(few):
    with pytest.raises(KeyError, match="obsm has no 'X_scbd_c'"):
        evaluate(few, ["gene"])


@pytest.mark.parametrize("left", [50, 49, 0])
def test_evaluate_few_held_out_cells_warns_and_tests_on_all_cells(few, left):
    few.obsm["z"] = np.random.default_rng(0).normal(size=(few.n_obs, 2))
    said = f"only {left} of 96 cells were held out"
    told = pytest.warns(UserWarning, match=said) if left < 50 else nullcontext()
    with told:
        table = evaluate(few, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(few.n_obs - left))
    assert table["tested_on"].tolist() == ["all cells" if left < 50 else "held-out cells"]
    assert evaluate(few, "gene", embeddings={"z": "z"})["tested_on"].tolist() == ["all cells"]


@pytest.mark.parametrize(("n", "is_advised"), [(96, False), (160, False), (170, True)])
def test_evaluate_advises_to_hold_out_more_only_if_it_suffices(n, is_advised):
    cells = make_cells(n)
    cells.obsm["z"] = np.random.default_rng(0).normal(size=(n, 2))
    with pytest.warns(UserWarning, match="Scores are too high") as warned:
        evaluate(cells, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(n - 49))
    assert ("train_size=0.7" in str(warned[0].message)) == is_advised


def test_evaluate_train_mask_is_equal_to_row_numbers(few):
    """Regression: the length of the mask was taken for the number of training rows, and all cells were scored."""
    few.obsm["z"] = np.random.default_rng(0).normal(size=(few.n_obs, 2))
    rows = np.random.default_rng(1).permutation(few.n_obs)[:40]
    by_number, by_mask = (
        evaluate(few, ["gene"], embeddings={"z": "z"}, train_indices=given)
        for given in (rows, np.isin(np.arange(few.n_obs), rows))
    )
    assert by_mask["tested_on"].tolist() == ["held-out cells"]
    pd.testing.assert_frame_equal(by_number, by_mask)


def test_evaluate_arrays_and_columns_are_equal_to_keys_and_rows(few):
    few.obsm["z"] = np.random.default_rng(0).normal(size=(few.n_obs, 2))
    few.obs["part"] = np.where(np.arange(few.n_obs) < 40, "train", "test")
    by_key = evaluate(few, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(40))
    by_array = evaluate(few, ["gene"], embeddings={"z": few.obsm["z"]}, train_indices="part")
    pd.testing.assert_frame_equal(by_key, by_array)


def test_evaluate_unseen_labels_are_scored_separately(few):
    """Regression: unseen labels counted as errors, although a probe cannot predict a label it was not trained on."""
    few.obsm["z"] = np.eye(4)[few.obs["gene"].cat.codes] + 0.01 * np.random.default_rng(0).normal(size=(few.n_obs, 4))
    few.obs["part"] = np.where(
        few.obs["gene"].isin(["gene_0", "gene_1"]) | (np.arange(few.n_obs) < 30), "test", "train"
    )
    table = evaluate(few, ["gene"], embeddings={"z": "z"}, train_indices="part")
    assert table["tested_on"].tolist() == ["held-out cells", "unseen labels"]
    assert (table["f1"] == 1).all()


def test_evaluate_interval_contains_score_and_shrinks_with_cells():
    widths = []
    for n in (200, 2_000):
        cells = make_cells(n)
        cells.obsm["z"] = cells.obs["gene"].cat.codes.to_numpy()[:, None] + np.random.default_rng(0).normal(size=(n, 1))
        row = evaluate(cells, ["gene"], embeddings={"z": "z"}, train_indices=np.arange(n // 2)).iloc[0]
        assert row["f1_low"] < row["f1"] < row["f1_high"]
        widths.append(row["f1_high"] - row["f1_low"])
    assert widths[1] < widths[0] / 2
