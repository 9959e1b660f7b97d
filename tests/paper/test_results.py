"""Test that published tables and pages agree with the stored rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from paper import compared, overview
from paper.reproduce import EXPERIMENTS, finished, report

ROOT = Path(__file__).parents[2]
DOCS, PAPER = ROOT / "docs", ROOT / "benchmarks" / "paper"
FOLDERS = sorted(path for path in (PAPER / "results").glob("*") if path.is_dir())


def test_results_folder_is_not_empty():
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_report_stored_rows_reproduce_stored_table_and_figures(folder, tmp_path):
    frame = finished(EXPERIMENTS[folder.name].trials("small", None), folder)
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(frame["key"]) == [json.loads(line)["key"] for line in lines]
    assert not (folder / "rows").exists()  # all rows are in rows.jsonl
    assert report(folder.name, frame, tmp_path) + "\n" == (folder / "table.md").read_text(encoding="utf-8")
    plt.close("all")
    shown = "".join(page.read_text(encoding="utf-8") for page in sorted((PAPER / "notes").glob("*.md")))
    assert f"results/{folder.name}/table.md" in shown
    for figure in tmp_path.glob("*.png"):
        assert (folder / figure.name).is_file() and f"results/{folder.name}/{figure.name}" in shown


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_rows_each_belongs_to_a_trial_of_the_small_budget(folder):
    """Even if its system has changed since: a change of a grid must not drop stored rows."""
    grid = {json.dumps(asdict(trial), sort_keys=True) for trial in EXPERIMENTS[folder.name].trials("small", None)}
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.dumps(json.loads(line)["trial"], sort_keys=True) for line in lines} <= grid


def test_compared_page_equals_stored_page():
    assert compared.PAGE.read_text(encoding="utf-8") == compared.page()


@pytest.mark.skipif(not DOCS.is_dir(), reason="a source distribution comes without docs")
def test_results_page_numbers_equal_means_of_figure():
    means = {}
    for title, systems, scores, _ in overview.panels():
        for system, runs in systems.items():
            assert len(runs) >= 3, (title, system)  # fewer if a system was removed or renamed
            for score, (label, _) in scores.items():
                mean, spread = overview.mean_sd(runs, score)
                assert 0 <= mean <= 1 and 0 <= spread < 0.2, (title, system, label)
                means[title.split(":")[0], system, label] = mean
    said = {
        ("CPJUMP1 wells", "scbd, default", "replicates, AP"): "0.603 ",
        ("CPJUMP1 wells", "PLDA, by position", "replicates, AP"): "(0.572)",
        ("CPJUMP1 wells", "Harmony", "replicates, AP"): "(0.519)",
        ("CPJUMP1 wells", "sphering", "replicates, AP"): "(0.389)",
        ("CPJUMP1 wells", "Harmony on PLDA", "replicates, AP"): "(0.638)",
        ("Easy simulated screen", "scbd, default", "well, F1"): "0.043 ",
        ("Easy simulated screen", "scbd, default", "complexes, AP"): "0.99)",
        ("Easy simulated screen", "scbd, α = 0", "well, F1"): "(0.080)",
        ("Hard simulated screen", "scbd, default", "gene, AUROC"): "0.80)",
        ("Hard simulated screen", "scbd, default", "complexes, AP"): "0.66 ",
        ("Hard simulated screen", "ERM", "complexes, AP"): "0.56,",
        ("Hard simulated screen", "ERM, by well", "complexes, AP"): "(ERM 0.62 ",
        ("Hard simulated screen", "pixels, TVN + WCCN", "complexes, AP"): "0.44)",
        ("Hard simulated screen", "scbd, default", "well, F1"): "0.095,",
    }
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    for what, text in said.items():
        number = text.strip("();, ERM")
        assert text in page and f"{means[what]:.{len(number) - 2}f}" == number, what
