from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
# take longer than the others, and keep what they found in a file of their own
LONG = {"precision", "million", "faults"}
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="benchmarks are not part of this copy")


@pytest.fixture
def load(monkeypatch) -> Any:
    """Benchmarks are scripts beside each other, and not a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_every_benchmark_can_be_loaded_and_was_run(load):
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} - LONG
    assert scripts == set(json.loads((ROOT / "benchmarks" / "results.json").read_text()))
    for name in scripts:
        assert callable(load(name).rows)


def test_the_pages_show_what_was_measured(load, tmp_path):
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    check_page("performance.md", results | {"precision": load("precision").result()}, load, tmp_path)
    check_page("scaling.md", {name: load(name).result() for name in ("million", "faults")}, load, tmp_path)


def check_page(name: str, results: dict[str, Any], load: Any, tmp_path: Path) -> None:
    page, copy = ROOT / "docs" / name, tmp_path / name
    copy.write_text(page.read_text())
    load("_report").write_docs(results, copy)
    assert copy.read_text() == page.read_text()
    for name, result in results.items():
        assert f"<!-- {name} -->" in page.read_text()
        assert result["machine"]


def test_tables_round_and_leave_out_what_nobody_has(load):
    report = load("_report")
    rows = [
        {"claim": "a", "naive_s": 2.0, "ours_s": 0.00052, "ratio": 3846.15, "ratio_sd": 1.0, "difference": 1e-16},
        {"claim": "b", "ours_s": 4e-7},
    ]
    assert report.as_markdown(report.cells(rows)).splitlines() == [
        "| what | naive | scbd | ratio | difference |",
        "| --- | --- | --- | --- | --- |",
        "| a | 2 s | 520 µs | 3846.15× ± 1.00 | 1.0e-16 |",
        "| b |  | 0.4 µs |  |  |",
    ]


def test_both_forms_of_the_losses_are_the_same_thing(load):
    losses = load("losses")
    inputs = losses.batch(64, torch.float64)
    naive, ours = (losses.value_and_gradient(form, inputs) for form in (losses.listing, losses.ours))
    assert losses.difference(ours, naive) < 1e-12


def test_both_forms_of_a_step_are_the_same_thing(load):
    step = load("step")
    naive, ours = step.pair((3, 32, 32))
    inputs = step.batch(32, (3, 32, 32))
    losses = [step.take_step(*form, inputs, bf16=False) for form in (naive, ours)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
