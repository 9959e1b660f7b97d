from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from anndata import AnnData

from scbd.metrics import (
    aggregate,
    batch_mixing,
    batch_probe,
    benchmark,
    rank,
    relationship_average_precision,
    relationship_interval,
    replicate_retrieval,
    retrieval,
    styled,
    summarise,
)
from scbd.metrics._benchmark import (
    METRICS,
    EstimatedScore,
    find_metric,
    probe_scores,
    replicate_scores,
    retrieval_scores,
    score_title,
)
from scbd.metrics._relationships import Relations, expected_relationship_scores
from scbd.metrics._retrieval import Retrieval


def make_screen(seed: int = 0) -> tuple[AnnData, pd.DataFrame]:
    rng = np.random.default_rng(seed)
    n, n_genes = 900, 9
    gene, well = rng.integers(n_genes, size=n), rng.integers(3, size=n)
    effect = np.repeat(rng.normal(size=(3, 6)), 3, axis=0) * 3
    effect[-1] = 0
    names = np.array([*(f"G{i}" for i in range(n_genes - 1)), "nontargeting"])
    good = rng.normal(size=(n, 6)) + effect[gene]
    bad = rng.normal(size=(n, 6)) + 4 * np.eye(6)[well]
    obs = pd.DataFrame({"gene": names[gene], "well": well.astype(str)}, index=[str(i) for i in range(n)])
    net = pd.DataFrame({"source": [f"c{i // 3}" for i in range(8)], "target": names[:8]})
    obsm = {"good": good, "good_again": good + 0.1 * rng.normal(size=good.shape), "bad": bad}
    return AnnData(obs=obs, obsm=obsm | {"wide": np.hstack([good, bad, good])}), net


@pytest.mark.parametrize(("key", "metric"), [("e_key", "e_probe"), ("y_key", "y_probe")])
def test_benchmark_failed_score_names_embedding_and_label(key, metric):
    adata, _ = make_screen()
    adata.obs["same"] = "A"
    given: dict[str, Any] = {key: "same", "control": None}
    with pytest.raises(ValueError, match=f"^{metric} of 'mine' .*good.*{key}='same'.*: .* two labels"):
        benchmark(adata, {"mine": "good"}, **given)


def test_benchmark_two_embeddings_returns_all_metrics_in_tidy_frame():
    adata, net = make_screen()
    frame = benchmark(adata, ["good", "bad"], y_key="gene", e_key="well", net=net, n_neighbors=30)
    assert list(frame.columns) == ["metric", "representation", "key", "value", "chance", "better"]
    table = frame.pivot(index="metric", columns="representation", values="value")
    assert table.notna().all().all()
    without = {"effective_rank", "y_probe_accuracy", "e_probe_accuracy", "e_probe_quadratic_accuracy"}
    assert set(frame.loc[frame["chance"].isna(), "metric"]) == without
    assert set(frame.loc[frame["better"] == "", "metric"]) == {"effective_rank"}
    for metric in ("relationship_average_precision", "relationship_area", "y_probe_f1", "ilisi"):
        assert table.loc[metric, "good"] > table.loc[metric, "bad"]
    for metric in ("e_probe_f1", "same_environment_neighbours", "silhouette"):
        assert table.loc[metric, "good"] < table.loc[metric, "bad"]
    chance = frame.pivot(index="metric", columns="representation", values="chance")
    mixing = batch_mixing(adata, "good", "well", n_neighbors=30)
    for metric in ("ilisi", "same_environment", "silhouette"):
        of = "same_environment_neighbours" if metric == "same_environment" else metric
        assert chance.loc[of, "good"] == mixing[f"{metric}_expected"]
    profiles = aggregate(adata, "good", gene_key="gene")
    expected = relationship_average_precision(profiles, net)
    assert table.loc["relationship_average_precision", "good"] == pytest.approx(expected)
    probe = batch_probe(adata, "bad", "well")
    assert (table.loc["e_probe_f1", "bad"], chance.loc["e_probe_f1", "bad"]) == (probe["f1"], probe["chance_f1"])
    by_chance = expected_relationship_scores(Relations(profiles, net))["average_precision"]
    assert chance.loc["relationship_average_precision", "good"] == by_chance


def test_summarise_seeds_returns_mean_and_deviation():
    adata, _ = make_screen()
    frame = benchmark(adata, {"ours": ["good", "good_again"], "other": "bad"}, e_key="well", n_neighbors=30)
    summary = summarise(frame).set_index(["metric", "representation"])
    values = frame.query("metric == 'e_probe_f1' and representation == 'ours'")["value"]
    assert summary.loc[("e_probe_f1", "ours"), "mean"] == pytest.approx(values.mean())
    assert summary.loc[("e_probe_f1", "ours"), "sd"] == pytest.approx(values.std())
    assert summary.loc[("e_probe_f1", "other"), "n"] == 1
    html = styled(frame).to_html()
    assert "±" in html
    assert "bold" in html


def find_bold_cells(rows: list[tuple[str, str, str, float]], chance: float = np.nan) -> set[tuple[int, int]]:
    """Return row and column of each bold cell in the styled table of ``rows``."""
    frame = pd.DataFrame(rows, columns=["metric", "representation", "key", "value"]).assign(chance=chance)
    rules = styled(frame, list(frame["metric"].unique())).to_html().split("</style>")[0]
    cells = re.search(r"((?:#T_\w+_row\d+_col\d+[, ]*)+)\{\s*font-weight: bold", rules)
    return {(int(row), int(column)) for row, column in re.findall(r"_row(\d+)_col(\d+)", cells[1] if cells else "")}


def test_styled_best_of_each_metric_is_bold():
    """Scores of biology and mixing are better if higher, scores of how well environments are distinguished if lower."""
    high = ["relationship_area", "relationship_recall", "relationship_average_precision", "y_probe_f1", "y_probe_auroc"]
    low = ["e_probe_f1", "e_probe_auroc", "same_environment_neighbours", "silhouette", "e_probe_quadratic_f1"]
    high.append("ilisi")
    bold = find_bold_cells(
        [(m, name, name, v) for m in (*high, *low, "other") for name, v in (("less", 0.1), ("more", 0.9))]
    )
    # iLISI is a batch metric and comes first among them
    assert bold == {(i, 1) for i in range(len(high))} | {(len(high) + i, 0) for i in range(len(low))}


@pytest.mark.parametrize("metric", ["silhouette", "same_environment_neighbours"])
def test_styled_mixing_metric_bolds_nearest_to_chance(metric):
    values = {"apart": 0.9, "mixed": 0.02, "odd": -0.3, "point": np.nan}
    rows = [(metric, name, name, value) for name, value in values.items()]
    assert find_bold_cells(rows) == {(0, 1)}
    assert find_bold_cells(rows, -0.25) == {(0, 2)}


@pytest.mark.parametrize(
    ("names", "how"),
    [
        ("Nothing to measure", {}),
        ("net needs y_key", {"e_key": "well", "net": make_screen()[1]}),
        ("label_key needs y_key", {"e_key": "well", "label_key": "target"}),
        ("replicates needs y_key", {"e_key": "well", "replicates": True}),
        ("replicates needs control", {"y_key": "gene", "e_key": "well", "replicates": "well", "control": None}),
        ("replicates needs control", {"y_key": "gene", "e_key": "well", "replicates": True, "control": []}),
        ("kind='cubic'", {"e_key": "well", "kinds": ["cubic"]}),
        ("reference needs n_bootstrap", {"e_key": "well", "reference": "good"}),
        ("reference='best'.* good", {"e_key": "well", "reference": "best", "n_bootstrap": 10}),
    ],
)
def test_benchmark_invalid_arguments_raise(names, how):
    with pytest.raises(ValueError, match=names):
        benchmark(make_screen()[0], ["good"], **how)


def test_benchmark_missing_embedding_or_rows_raises():
    adata, _ = make_screen()
    with pytest.raises(KeyError, match="obsm has no 'best'"):
        benchmark(adata, ["good", "best"], e_key="well")
    with pytest.raises(ValueError, match="no rows to score"):
        benchmark(adata[:0].copy(), ["good"], e_key="well")


@pytest.mark.parametrize(
    ("score", "words", "side", "better"),
    [
        ("e_probe_f1", "F1 of the environment", "batch", "lower"),
        ("e_probe_quadratic_f1", "F1 of the environment, quadratic", "batch", "lower"),
        ("relationship_recall (corum 4.0)", "recall of known relations (corum 4.0)", "biology", "higher"),
        ("retrieval_moa_map", "retrieval moa map", "biology", "higher"),
        ("y_probe_unseen_f1", "y probe unseen f1", "biology", "higher"),
        ("ilisi", "mixing of environments (iLISI)", "batch", "higher"),
        ("silhouette", "silhouette by environment", "batch", "nearer to chance"),
        ("effective_rank", "directions in use", "shape", ""),
        ("mine (of a network)", "mine (of a network)", "shape", ""),
        ("replicates_seen", "replicates seen", "shape", ""),
    ],
)
def test_score_title_and_find_metric_return_title_and_direction(score, words, side, better):
    assert score_title(score) == words
    assert (find_metric(score).side, find_metric(score).better) == (side, better)


def test_benchmark_new_metric_is_a_row_of_frame_and_table(monkeypatch):
    adata, _ = make_screen()
    of_norm = METRICS["effective_rank"]._replace(
        function=lambda cells: {"x": EstimatedScore(float(np.linalg.norm(cells.x)))}
    )
    monkeypatch.setitem(METRICS, "norm", of_norm._replace(better="lower", side="batch", title={"x": "how long"}))
    frame = benchmark(adata, ["good"], e_key="well", kinds=[], n_neighbors=30)
    row = frame.set_index("metric").loc["norm_x"]
    assert row["value"] == np.linalg.norm(adata.obsm["good"]) and row["better"] == "lower"
    assert list(styled(frame, ["norm_x"]).data.index) == [("batch", "how long ↓")]


def test_benchmark_reference_returns_paired_intervals():
    adata, net = make_screen()
    embeddings = {"good": "good", "again": "good", "bad": "bad"}
    keys: dict[str, Any] = {"y_key": "gene", "e_key": "well", "net": net, "n_neighbors": 30}
    frame = benchmark(adata, embeddings, **keys, n_bootstrap=100, reference="good")
    assert list(frame.columns[-6:]) == ["low", "high", "difference", "difference_low", "difference_high", "p_value"]
    drawn = {"relationship_area", "relationship_recall", "relationship_average_precision"}
    drawn |= {
        f"{probe}_{score}" for probe in ("y_probe", "e_probe", "e_probe_quadratic") for score in ("f1", "accuracy")
    }
    assert set(frame.loc[frame["low"].notna(), "metric"]) == drawn
    known = frame.dropna(subset="low")
    assert ((known["low"] <= known["value"]) & (known["value"] <= known["high"])).all()
    again, bad = (frame[frame["representation"] == name].set_index("metric") for name in ("again", "bad"))
    assert (again["difference"] == 0).all()
    assert (again.loc[list(drawn), "p_value"] == 1).all()
    for metric in ("y_probe_f1", "e_probe_f1"):
        row = bad.loc[metric]
        assert row["p_value"] < 0.01
        assert row["difference_low"] < row["difference"] < row["difference_high"]
        assert row["difference_low"] * row["difference_high"] > 0
    profiles = aggregate(adata, "good", gene_key="gene")
    expected = relationship_interval(profiles, net, n_bootstrap=100)
    row = frame.set_index(["representation", "metric"]).loc[("good", "relationship_average_precision")]
    assert (row["low"], row["high"]) == expected


def test_benchmark_and_summarise_seeds_are_compared_in_pairs():
    adata, _ = make_screen()
    pairs = {"ours": ["good", "good_again"], "other": ["good_again", "good"], "one": "bad"}
    frame = benchmark(adata, pairs, e_key="well", n_neighbors=30, n_bootstrap=20, reference="one")
    table = frame.set_index(["metric", "representation", "key"])
    values, differences = table["value"]["e_probe_f1"], table["difference"]["e_probe_f1"]
    for key in ("good", "good_again"):
        assert differences["ours", key] == values["ours", key] - values["one", "bad"]
    compared = summarise(frame, reference="one").set_index(["metric", "representation"]).loc["e_probe_f1"]
    of_ours = frame.query("metric == 'e_probe_f1' and representation == 'ours'")["difference"]
    assert compared.loc["ours", "difference"] == pytest.approx(of_ours.mean())
    assert compared.loc["ours", "difference_sd"] == pytest.approx(of_ours.std())
    expected = scipy.stats.ttest_1samp(of_ours, 0).pvalue
    assert compared.loc["ours", "p_value"] == pytest.approx(expected)
    assert np.isnan(compared.loc["one", "p_value"])
    with pytest.raises(ValueError, match="'one' has 1 keys and the reference 'ours' has 2"):
        benchmark(adata, pairs, e_key="well", n_bootstrap=20, reference="ours")
    with pytest.raises(ValueError, match="'one' has 1 keys and the reference 'ours' has 2"):
        summarise(frame, reference="ours")


def make_fold_scores(seeds: dict[str, list[float]], n_folds: int = 8) -> pd.DataFrame:
    """Make scores of each representation, seed and fold; they rise by 0.01 per fold."""
    rows = [
        ("f1", name, f"{name}{seed}", f"fold {fold}", value + 0.01 * fold, 0.25)
        for name, values in seeds.items()
        for seed, value in enumerate(values)
        for fold in range(n_folds)
    ]
    return pd.DataFrame(rows, columns=["metric", "representation", "key", "fold", "value", "chance"])


def test_summarise_folds_are_averaged_within_seeds():
    a, b = [0.5, 0.6, 0.4], [0.45, 0.4, 0.42]
    found = summarise(make_fold_scores({"a": a, "b": b}), reference="b").set_index("representation").loc["a"]
    assert (found["n"], found["chance"]) == (3, 0.25)
    assert found["mean"] == pytest.approx(np.mean(a) + 0.035) and found["sd"] == pytest.approx(np.std(a, ddof=1))
    expected = scipy.stats.ttest_rel(a, b)
    assert found["p_value"] == pytest.approx(expected.pvalue) and found["p_value"] > 0.1
    one = summarise(make_fold_scores({"a": a[:1], "b": b[:1]}), reference="b")
    assert (one["n"] == 1).all() and one[["sd", "difference_sd", "p_value"]].isna().all(axis=None)
    assert one["difference"].to_list() == pytest.approx([0.05, 0])


@pytest.mark.parametrize("lost", [slice(0, 1), slice(0, 9)])
def test_summarise_missing_runs_or_folds_returns_nan(lost):
    """A mean over the remaining runs or folds would be biased towards those that succeeded."""
    frame = make_fold_scores({"a": [0.9, 0.9], "b": [0.5, 0.6]})
    frame.loc[frame.index[lost], "value"] = np.nan
    for runs in (frame, frame.drop(columns="fold")):
        found = summarise(runs, reference="b").set_index("representation")
        assert found.loc["a", ["mean", "sd", "difference", "difference_sd", "p_value"]].isna().all()
        assert found.loc["b", ["mean", "sd", "difference"]].notna().all()
    assert found["n"].to_list() == [16, 16]
    values = [("a", 0.9), ("a", np.nan), ("b", 0.5), ("b", 0.5)]
    assert find_bold_cells([("y_probe_f1", name, str(i), value) for i, (name, value) in enumerate(values)]) == {(0, 1)}


def test_summarise_repeated_keys_are_counted_as_seeds():
    frames = [make_fold_scores({"a": [value]}) for value in (0.5, 0.7)]
    other = pd.DataFrame({"metric": "ilisi", "representation": "a", "key": "a0", "value": [1.0, 3.0]})
    found = summarise(pd.concat([*frames, other])).set_index("metric")
    assert found["n"].to_dict() == {"f1": 2, "ilisi": 2}
    assert found["mean"].to_dict() == pytest.approx({"f1": 0.635, "ilisi": 2})


def test_benchmark_several_networks_returns_one_row_each():
    adata, net = make_screen()
    other = net[net["source"] != "c0"]
    frame = benchmark(adata, ["good"], y_key="gene", net={"all": net, "fewer": other}).set_index("metric")
    for name, known in (("all", net), ("fewer", other)):
        expected = relationship_average_precision(aggregate(adata, "good", gene_key="gene"), known)
        row = frame.loc[f"relationship_average_precision ({name})"]
        assert row["value"] == pytest.approx(expected) and row["better"] == "higher"


def test_benchmark_wells_scores_are_equal_to_retrieval_functions():
    rng = np.random.default_rng(0)
    y, e = np.tile(np.repeat(np.arange(9), 2), 3), np.repeat(np.arange(3), 18)
    names = np.array(["DMSO", *(f"drug {i}" for i in range(8))])
    position = np.tile(np.arange(18), 3)
    obs = pd.DataFrame({"drug": names[y], "plate": e.astype(str), "well": position.astype(str)})
    obs["target"] = np.where(y > 0, (y - 1) // 2, -1).astype(str)
    obs.index = obs.index.astype(str)
    effect = np.repeat(rng.normal(size=(4, 12)), 2, axis=0) + 0.5 * rng.normal(size=(8, 12))
    wells = AnnData(obs=obs, obsm={"x": np.vstack([np.zeros(12), effect])[y] + 0.8 * rng.normal(size=(54, 12))})
    keys: dict[str, Any] = {"y_key": "drug", "e_key": "plate", "control": "DMSO", "n_neighbors": 10}
    frame = benchmark(wells, ["x"], **keys, label_key="target", replicates="well", n_bootstrap=50)
    scores = frame.set_index("metric")
    found = replicate_retrieval(wells, "x", y_key="drug", e_key="plate", control="DMSO", position_key="well")
    assert scores.loc["replicate_map", "value"] == pytest.approx(found.mean_average_precision)
    assert scores.loc["replicate_map", "chance"] == pytest.approx(found.chance)
    assert scores.loc["replicate_floor_corrected", "value"] == found.floor_corrected
    assert scores.loc["replicate_called", "value"] == found.n_called / 8
    row = scores.loc["replicate_map"]
    assert row["low"] < row["value"] < row["high"]
    targets = retrieval(wells, "x", label_key="target", y_key="drug", control="DMSO")
    assert scores.loc["retrieval_target_map", "value"] == targets.mean_average_precision
    wells.obsm["X_scbd_c"] = -wells.obsm["x"].astype(np.float32)
    wells.obs["scbd_split"] = np.where(wells.obs["drug"] == "drug 3", "train", "validation")  # as scbd run writes it
    with pytest.warns(UserWarning, match=r"1 of 8 perturbations .* \(drug 3\)"):
        benchmark(wells, ["X_scbd_c"], **keys, replicates=True)
    without = benchmark(wells, ["x"], y_key="drug", control="DMSO")
    assert not without["metric"].str.contains("replicate|retrieval").any()


def test_rank_scores_are_scaled_between_chance_and_best():
    rows = [
        ("y_probe_f1", "ours", 0.8, 0.2),
        ("y_probe_f1", "raw", 0.5, 0.2),
        ("y_probe_f1", "point", 0.2, 0.2),
        ("e_probe_f1", "ours", 0.3, 0.25),
        ("e_probe_f1", "raw", 0.75, 0.25),
        ("e_probe_f1", "point", 0.25, 0.25),
        ("effective_rank", "ours", 9.0, np.nan),
        ("effective_rank", "raw", 20.0, np.nan),
        ("effective_rank", "point", 0.0, np.nan),
    ]
    frame = pd.DataFrame(rows, columns=["metric", "representation", "value", "chance"])
    ranked = rank(frame)
    assert ranked["y_probe_f1"].to_dict() == pytest.approx({"ours": 1, "raw": 0.5, "point": 0})
    assert ranked["e_probe_f1"].to_dict() == pytest.approx({"ours": 0.9, "raw": 0, "point": 1})
    assert ranked["overall"].to_dict() == pytest.approx({"ours": 0.96, "raw": 0.3, "point": 0.4})
    # a point hides environments only because it holds no information, so it ranks last
    assert ranked.index.to_list() == ["ours", "raw", "point"]
    assert list(rank(frame, ["y_probe_f1"]).columns) == ["overall", "biology", "y_probe_f1"]
    # also if ranked by two metrics only
    assert rank(frame, ["y_probe_f1", "e_probe_f1"]).index.to_list() == ["ours", "raw", "point"]
    with pytest.raises(ValueError, match="no metric 'ilisi'; there are: y_probe_f1"):
        rank(frame, ["ilisi"])
    with pytest.raises(ValueError, match="None of effective_rank has a chance to rank by"):
        rank(frame, ["effective_rank"])


@pytest.mark.parametrize("values", [[np.nan], [], [1.0, np.nan]])
def test_rank_missing_score_is_the_worst(values):
    """Excluding it would give the other metrics more weight."""
    rows = [("y_probe_f1", name, value, 0.2) for name, value in (("good", 0.8), ("fair", 0.5), ("broken", 0.52))]
    rows += [("ilisi", name, value, 0.9) for name, value in (("good", 0.7), ("fair", 0.3))]
    rows += [("e_probe_f1", name, 0.25, 0.25) for name in ("good", "fair", "broken")]
    rows += [("ilisi", "broken", value, 0.9) for value in values]
    ranked = rank(pd.DataFrame(rows, columns=["metric", "representation", "value", "chance"]))
    assert ranked["ilisi"].to_dict() == pytest.approx({"good": 2 / 3, "fair": 0, "broken": 0})
    assert ranked.loc["broken", "batch"] == ranked.loc["fair", "batch"] == 0.5


def test_benchmark_effective_rank_of_point_is_zero_and_of_line_one():
    adata, _ = make_screen()
    line = np.random.default_rng(0).normal(size=(adata.n_obs, 1)) @ np.ones((1, 5))
    adata.obsm["line"], adata.obsm["round"] = line, np.random.default_rng(1).normal(size=(adata.n_obs, 5))
    adata.obsm["point"] = np.full((adata.n_obs, 5), 3.7, dtype=np.float32)
    with pytest.warns(UserWarning, match="one place"):
        frame = benchmark(adata, ["line", "round", "point"], e_key="well", n_neighbors=30)
    ranks = frame[frame["metric"] == "effective_rank"].set_index("key")["value"]
    assert ranks.to_dict() == pytest.approx({"line": 1, "round": 5, "point": 0}, abs=0.05)


def test_styled_rows_are_grouped_and_chance_is_a_column():
    adata, _ = make_screen()
    frame = benchmark(adata, ["good", "bad"], y_key="gene", e_key="well", n_neighbors=30)
    table = styled(frame).data
    assert list(table.index) == [
        ("biology", "F1 of the perturbation ↑"),
        ("batch", "F1 of the environment ↓"),
        ("batch", "F1 of the environment, quadratic ↓"),
        ("batch", "mixing of environments (iLISI) ↑"),
        ("other", "directions in use"),
    ]
    assert list(table.columns) == ["good", "bad", "chance"]
    chance = frame.loc[frame["metric"] == "ilisi", "chance"].mean()
    assert table.loc[("batch", "mixing of environments (iLISI) ↑"), "chance"] == f"{chance:.2f}"
    assert table.loc[("other", "directions in use"), "chance"] == ""
    assert list(styled(frame, ["silhouette"]).data.index) == [("batch", "silhouette by environment →")]
    html = styled(frame, ["silhouette"]).to_html()
    assert "→ nearer to chance is better. The best is bold." in html and "higher is better" not in html
    assert "overflow-x: auto" in html and 'class="dataframe"' in html


def test_styled_digits_sets_decimals():
    rows = [("effective_rank", "a", 12.345), ("e_probe_f1", "a", 0.98765), ("e_probe_f1", "b", np.nan)]
    frame = pd.DataFrame(rows, columns=["metric", "representation", "value"]).assign(key="k", chance=0.1234)
    assert styled(frame).data["a"].to_list() == ["0.99", "12.3"]
    table = styled(frame, digits=3).data
    assert table["a"].to_list() == ["0.988", "12.35"]
    assert table["b"].to_list() == ["", ""] and table["chance"].to_list() == ["0.123", "0.123"]
    assert styled(frame, ["effective_rank"], digits=0).data["a"].to_list() == ["12"]
    assert "caption" not in styled(frame, ["effective_rank"]).to_html().split("</style>")[1]


def test_styled_invalid_frame_or_digits_raises():
    frame = pd.DataFrame({"metric": ["ilisi"], "representation": ["chance"], "key": ["k"], "value": [0.5]})
    with pytest.raises(ValueError, match="'chance'"):
        styled(frame)
    with pytest.raises(ValueError, match="silhouette"):
        styled(frame, ["silhouette"])
    for digits in (-1, 7):
        with pytest.raises(ValueError, match="digits"):
            styled(frame, digits=digits)


def estimate_mean_score(values: np.ndarray, seed: int = 0, units: np.ndarray | None = None) -> EstimatedScore:
    """Estimate the mean of ``values``, the average precision of each perturbation."""
    table = pd.DataFrame({"average_precision": values, "chance": 0.1, "q_value": 1.0})
    return retrieval_scores(Retrieval(table, units=units), 200, seed)["map"]


@pytest.mark.parametrize("n", [3, 40])
def test_estimated_score_few_perturbations_has_nominal_error_rates(n):
    """Plain quantiles of resamples covered the truth in 48 to 93 % of cases; 52 to 10 % of p values were below 0.05."""
    rng = np.random.default_rng(n)
    held, called, n_runs = 0, 0, 800
    for _ in range(n_runs):
        both = 0.5 + 0.1 * (rng.normal(size=n) + rng.normal(size=(2, n)))
        one, other = map(estimate_mean_score, both)
        low, high = one.interval(0.95)
        held += low < 0.5 < high
        called += one.minus(other).p_value() < 0.05
    assert held / n_runs == pytest.approx(0.95, abs=0.025)  # three standard errors
    assert called / n_runs == pytest.approx(0.05, abs=0.025)


@pytest.mark.parametrize("sizes", [[6] * 20, [2] * 10 + [8] * 10])
def test_estimated_score_with_units_has_nominal_error_rates(sizes):
    """Resampling correlated perturbations one by one, 20 mechanisms of 6 each, gave a coverage of 57 % only."""
    rng = np.random.default_rng(0)
    mechanism = np.repeat(np.arange(len(sizes)), sizes)
    held, called, n_runs = 0, 0, 600
    for _ in range(n_runs):
        both = 0.5 + 0.1 * rng.normal(size=(2, len(sizes)))[:, mechanism] + 0.05 * rng.normal(size=(2, len(mechanism)))
        one, other = (estimate_mean_score(values, units=mechanism) for values in both)
        low, high = one.interval(0.95)
        held += low < 0.5 < high
        called += one.minus(other).p_value() < 0.05
    assert held / n_runs == pytest.approx(0.95, abs=0.03)
    assert called / n_runs == pytest.approx(0.05, abs=0.03)


@pytest.mark.parametrize("n_units", [1.6, 3.0, 12.0, 500.0])
def test_estimated_score_p_value_agrees_with_interval(n_units):
    """Few complexes widened the interval but not the p value: without a difference, 10.8 % were below 0.05."""
    rng = np.random.default_rng(0)
    for shift in rng.uniform(-4, 4, 60):
        score = EstimatedScore(shift, draws=shift + rng.normal(size=999), n_units=n_units)
        p = score.p_value()
        for level in (0.5, 0.8, 0.95):
            low, high = score.interval(level)
            if abs(p - (1 - level)) > 0.02:  # closer to the level, interval ends fall between two draws
                assert p > 1 - level or not low <= 0 <= high
                assert (
                    p < 1 - level or low <= 0 <= high or n_units < 12
                )  # the interval cannot exceed the outermost draw
    many = EstimatedScore(0.0, draws=rng.normal(size=999) + 1.5, n_units=1e9)
    assert many.p_value() == pytest.approx(2 * (1 + (many.draws <= 0).sum()) / 1000, rel=1e-3)


@pytest.mark.parametrize("n_wells", [2, 10])
def test_probe_scores_interval_contains_value(n_wells):
    """Some resamples lack a label, whose F1 then counts as 0, so plain quantiles lay below the score."""
    rng = np.random.default_rng(0)
    gene, well = np.repeat(np.arange(20), n_wells * 10), np.repeat(np.arange(20 * n_wells), 10)
    z = 0.8 * rng.normal(size=(20, 8))[gene] + 0.4 * rng.normal(size=(20 * n_wells, 8))[well]
    z += rng.normal(size=z.shape)
    how = {"kind": "linear", "groups": well}
    for score in ("f1", "accuracy"):
        found = probe_scores(z, gene, n_bootstrap=100, seed=0, **how)[score]
        low, high = found.interval(0.95)
        assert low < found.value < high and high - low < 0.5


@pytest.mark.parametrize("n_wells", [2, 5])
@pytest.mark.parametrize("right", [True, False])
def test_probe_scores_all_right_or_wrong_returns_binomial_interval(n_wells, right):
    """All resamples are equal to the score, so an interval of their quantiles would have no width."""
    gene, well = np.tile(np.repeat([0, 1], 10), n_wells * 2), np.repeat(np.arange(n_wells * 4), 10)
    is_train = well < n_wells * 2
    z = np.eye(2)[np.where(is_train | right, gene, 1 - gene)]
    how = {"kind": "linear", "groups": well, "train": is_train}
    scores = probe_scores(z, gene, n_bootstrap=20, seed=0, **how)
    n_tested = n_wells * 2
    found = scores["accuracy"]
    assert found.value == right
    low, high = found.interval(0.95)
    expected = scipy.stats.binomtest(n_tested * right, n_tested).proportion_ci(0.95, method="exact")
    assert (low, high) == pytest.approx((expected.low, expected.high))
    for other in (scores["f1"], found.minus(found), EstimatedScore(0.5, 0.5, np.full(9, 0.5), 4, True, True)):
        assert np.isnan(other.interval(0.95)).all()


def test_estimated_score_without_draws_or_one_unit_returns_nan():
    for score in (EstimatedScore(0.5), estimate_mean_score(np.array([0.5]))):
        assert np.isnan([*score.interval(0.95), score.minus(score).p_value()]).all()
    same = estimate_mean_score(np.full(4, 0.5))
    assert same.minus(same).p_value() == 1 and same.minus(estimate_mean_score(np.full(4, 0.4))).p_value() == 0


def test_replicate_scores_at_chance_floor_corrected_is_its_chance():
    """Average precisions at chance give the corrected score at chance, whatever the number of wells and controls."""
    columns = ["average_precision", "chance", "q_value"]
    table = pd.DataFrame([[0.3, 0.3, 1.0], [0.1, 0.1, 1.0]], columns=columns)
    controls = pd.DataFrame([[0.05, 0.05, 1.0]], columns=columns)
    score = replicate_scores(Retrieval(table, floor_table=controls), 0, 0)["floor_corrected"]
    assert score.chance == pytest.approx(score.value) and score.chance == pytest.approx(0.15 / 0.95)
