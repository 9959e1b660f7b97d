from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import aggregate, batch_probe, benchmark, relationship_average_precision, styled, summarise
from scbd.metrics._readers import Kind


def screen(seed: int = 0) -> tuple[AnnData, pd.DataFrame]:
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


def test_every_metric_of_every_embedding_in_a_tidy_frame():
    adata, net = screen()
    frame = benchmark(adata, ["good", "bad"], y_key="gene", e_key="well", gene_key="gene", net=net, n_neighbors=30)
    assert list(frame.columns) == ["metric", "representation", "key", "value"]
    table = frame.pivot(index="metric", columns="representation", values="value")
    assert table.notna().all().all()
    for metric in ("relationship_average_precision", "relationship_area", "y_probe_f1", "ilisi"):
        assert table.loc[metric, "good"] > table.loc[metric, "bad"]
    for metric in ("e_probe_f1", "same_environment_neighbours", "silhouette"):
        assert table.loc[metric, "good"] < table.loc[metric, "bad"]
    for metric in ("ilisi", "same_environment", "silhouette"):
        assert f"{metric}_expected" in table.index
    profiles = aggregate(adata, "good", gene_key="gene")
    expected = relationship_average_precision(profiles, net)
    assert table.loc["relationship_average_precision", "good"] == pytest.approx(expected)
    assert table.loc["e_probe_f1", "bad"] == batch_probe(adata, "bad", "well")["f1"]


def test_environments_that_differ_in_spread_alone_do_not_pass():
    adata, _ = screen()
    spread = 1 + adata.obs["well"].astype(int).to_numpy()
    adata.obsm["spread"] = np.random.default_rng(0).normal(size=(900, 6)) * spread[:, None]
    kinds: list[Kind] = ["linear", "quadratic", "neighbours"]
    scores = benchmark(adata, ["spread"], e_key="well", kinds=kinds, n_neighbors=30).set_index("metric")["value"]
    assert scores["e_probe_f1"] < 0.4 < 0.5 < scores["e_probe_quadratic_f1"]
    for kind in kinds[1:]:
        probe = batch_probe(adata, "spread", "well", kind=kind)
        assert {name: scores[f"e_probe_{kind}_{name}"] for name in probe} == probe
    frame = benchmark(adata, ["good"], e_key="well", n_neighbors=30)
    found = {metric.removesuffix("_f1") for metric in frame["metric"] if metric.endswith("_f1")}
    assert found == {"e_probe", "e_probe_chance", "e_probe_quadratic", "e_probe_quadratic_chance"}


def test_seeds_become_mean_and_deviation():
    adata, _ = screen()
    frame = benchmark(adata, {"ours": ["good", "good_again"], "other": "bad"}, e_key="well", n_neighbors=30)
    summary = summarise(frame).set_index(["metric", "representation"])
    values = frame.query("metric == 'e_probe_f1' and representation == 'ours'")["value"]
    assert summary.loc[("e_probe_f1", "ours"), "mean"] == pytest.approx(values.mean())
    assert summary.loc[("e_probe_f1", "ours"), "sd"] == pytest.approx(values.std())
    assert summary.loc[("e_probe_f1", "other"), "n"] == 1
    html = styled(frame).to_html()
    assert "±" in html
    assert "bold" in html


def bold_cells(rows: list[tuple[str, str, str, float]]) -> set[tuple[int, int]]:
    """Row and column of what a table of these has in bold."""
    frame = pd.DataFrame(rows, columns=["metric", "representation", "key", "value"])
    rules = styled(frame).to_html().split("</style>")[0]
    return {(int(row), int(column)) for row, column in re.findall(r"_row(\d+)_col(\d+)", rules)}


def test_the_best_of_each_metric_is_bold():
    """Biology and mixing are good where they are high, what tells environments where it is low."""
    high = ["relationship_area", "relationship_recall", "relationship_average_precision", "y_probe_f1", "y_probe_auroc"]
    low = ["e_probe_f1", "e_probe_auroc", "same_environment_neighbours", "silhouette", "e_probe_quadratic_f1"]
    high.append("ilisi")
    bold = bold_cells(
        [(m, name, name, v) for m in (*high, *low, "other") for name, v in (("less", 0.1), ("more", 0.9))]
    )
    assert bold == {(1, i) for i in range(len(high))} | {(0, len(high) + i) for i in range(len(low))}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("silhouette", "silhouette_expected"), ("same_environment_neighbours", "same_environment_expected")],
)
def test_what_is_below_chance_is_not_mixed_best(metric, expected):
    values = {"apart": 0.9, "mixed": 0.02, "odd": -0.3, "point": np.nan}
    rows = [(metric, name, name, value) for name, value in values.items()]
    assert bold_cells(rows) == {(1, 0)}
    assert bold_cells([*rows, *((expected, name, name, -0.25) for name in values)]) == {(2, 0)}


def test_features_of_any_scale_count_equally():
    adata, _ = screen()
    noise = 1e4 * np.random.default_rng(1).normal(size=(adata.n_obs, 4))
    adata.obsm["mixed"] = np.hstack([adata.obsm["good"], noise])
    frame = benchmark(adata, ["mixed"], y_key="gene", n_pcs=4).set_index("metric")
    alone = benchmark(adata, ["good"], y_key="gene").set_index("metric")
    assert frame.loc["y_probe_f1", "value"] > 0.7 * alone.loc["y_probe_f1", "value"]


def test_wide_features_are_reduced():
    adata, _ = screen()
    wide = benchmark(adata, ["wide"], y_key="gene", n_pcs=4)
    again = benchmark(adata, ["wide"], y_key="gene")
    assert not wide["value"].equals(again["value"])
    narrow = benchmark(adata, ["good"], y_key="gene", n_pcs=64)
    assert narrow["value"].equals(benchmark(adata, ["good"], y_key="gene")["value"])


def test_bad_input_gets_a_sentence():
    adata, net = screen()
    with pytest.raises(ValueError, match="Nothing to measure: give e_key, y_key, or net"):
        benchmark(adata, ["good"])
    with pytest.raises(ValueError, match="net needs gene_key"):
        benchmark(adata, ["good"], net=net)
    with pytest.raises(ValueError, match="kind='cubic' is not known: use one of 'linear'"):
        benchmark(adata, ["best"], e_key="well", kinds=["cubic"])  # type: ignore[list-item]
    with pytest.raises(KeyError, match="obsm has no 'best'"):
        benchmark(adata, ["good", "best"], e_key="well")
