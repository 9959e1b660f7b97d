from __future__ import annotations

import importlib
import io
import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from scbd.data._block_store import BlockStore
from scbd.data._screens import ScreenPlan
from scbd.model._plan import TrainingPlan

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks" / "speed"
# longer benchmarks, which store their results in separate files
LONG = {"precision", "million", "faults"}
SHORT = sorted({path.stem for path in BENCHMARKS.glob("[!_]*.py")} - LONG)
PAGES = [BENCHMARKS / name for name in ("performance.md", "large_screens.md")]
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not part of this copy")
# warnings are ignored, as in `python benchmarks/speed`: measured code may be slow, or its embedding may collapse
unwarned = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def load(monkeypatch) -> Any:
    """Import benchmarks as top-level modules: they are scripts in one folder, not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def run_in_process(load, monkeypatch) -> Iterator[None]:
    """Run scripts in this process instead of a new one, where loading libraries would take seconds."""

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess:
        _, script, *arguments = command
        printed = io.StringIO()
        with redirect_stdout(printed), monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [script, *arguments])
            exec(arguments[0], {}) if script == "-c" else runpy.run_path(script, run_name="__main__")
        return subprocess.CompletedProcess(command, 0, printed.getvalue())

    monkeypatch.setattr(subprocess, "run", run)
    yield
    logging.disable(logging.NOTSET)


def check_rows(rows: list[dict[str, Any]], printed: str) -> None:
    """Require a duration and equal results of the naive form and ours in each row, and that each row is printed."""
    assert len({row["claim"] for row in rows}) == len(rows) > 0
    for row in rows:
        assert row["ours_s"] >= 0, row
        assert row.get("difference", 0) < 1e-3, row
        assert row["claim"] in printed, row


@unwarned
@pytest.mark.usefixtures("permuted_once")
@pytest.mark.parametrize("name", [name for name in SHORT if name != "gpu"])  # its script is tested below
def test_rows_each_short_benchmark_smoke_scale_returns_equal_results(name, load, run_in_process, monkeypatch):
    monkeypatch.setattr("scbd.pl.umap_blocks", lambda *args, **how: plt.subplots(squeeze=False)[1])  # takes seconds
    # compiled code is not tested here, and a compiler is not always available
    with torch.compiler.set_stance("force_eager"):
        rows = load(name).rows(load("_scale").SMOKE)
    check_rows(rows, load("_report").as_text(rows))


@unwarned
def test_command_smoke_prints_results_unknown_name_exits(run_in_process, monkeypatch, capsys):
    results = (BENCHMARKS / "results.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--smoke", "metrics"])
    runpy.run_path(str(BENCHMARKS), run_name="__main__")
    printed = capsys.readouterr().out
    assert "curve, 60 genes" in printed and "torch" in printed
    assert (BENCHMARKS / "results.json").read_bytes() == results
    monkeypatch.setattr(sys, "argv", ["benchmarks", "metric"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(BENCHMARKS), run_name="__main__")
    assert "no benchmark metric: choose from losses" in capsys.readouterr().err


@unwarned
@pytest.mark.usefixtures("permuted_once")
@pytest.mark.parametrize("arguments", [[], ["--digits", "60"]])
def test_gpu_script_smoke_writes_results(arguments, load, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path), "--smoke", *arguments])
    with torch.compiler.set_stance("force_eager"):
        load("gpu").main()
    logging.disable(logging.NOTSET)
    if arguments:
        runs = json.loads((tmp_path / "digits.json").read_text())["runs"]
        assert [(run["alpha"], run["steps"]) for run in runs] == [(0, 3), (192, 3)]
        assert all({"r_c white", "z_c white", "collapsed"} <= run.keys() for run in runs)
        return
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    check_rows(rows, capsys.readouterr().out)
    assert sum("goal" in row.get("note", "") for row in rows) > len(rows) / 2
    assert "Self CPU" in (tmp_path / "profile.txt").read_text()


def test_child_script_returns_its_number(load):
    assert load("_compare").child("losses.py", "nothing", "16") > 10


@pytest.fixture
def run_benchmark(load, run_in_process, tmp_path, monkeypatch) -> Any:
    """Return a function that runs a benchmark with its own results file, and returns its module and table."""

    def run(name: str, *arguments: str) -> tuple[Any, list[dict[str, str]]]:
        module = load(name)
        monkeypatch.setattr(module, "RESULTS", tmp_path / f"{name}.json")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module.main()
        return module, module.result()["table"]

    return run


@unwarned
@pytest.mark.usefixtures("permuted_once")
def test_precision_second_call_reuses_results(run_benchmark, tmp_path, monkeypatch):
    arguments = ["--smoke", "--seeds", "1", "--tasks", "digits", "screen"]
    module, table = run_benchmark("precision", *arguments)
    assert [(row["task"], row["seeds"]) for row in table[::5]] == [("digits", "1"), ("screen", "1")]
    module.plot(tmp_path / "precision.png")
    assert (tmp_path / "precision.png").exists()
    monkeypatch.setattr(module, "run", None)  # running anything would fail
    assert run_benchmark("precision", *arguments)[1] == table


@unwarned
@pytest.mark.usefixtures("permuted_once")
def test_million_smoke_writes_table_and_plot(load, run_benchmark, tmp_path, monkeypatch):
    million = load("million")
    watched = million.watched

    def run_stage(stage: str, folder: Path, size: Any) -> dict[str, Any]:
        """Run the first stage in a new process, the others in this process, where libraries are loaded."""
        if stage == "simulate":
            return watched(stage, folder, size)
        return {"stage": stage, "own_mib": 1, "trace": [[0.1, 1, 1]]} | million.one_stage(stage, folder, size)

    monkeypatch.setattr(million, "watched", run_stage)
    module, table = run_benchmark("million", "--smoke")
    assert [row["stage"] for row in table] == module.STAGES[:3] + ["train, steps of 1,024"] + module.STAGES[4:]
    assert table[1]["cells"] == "600"
    module.plot(tmp_path / "million.png")
    assert (tmp_path / "million.png").exists()


@unwarned
def test_faults_no_job_killed_counts_no_losses(load, run_benchmark, monkeypatch):
    """No job is killed, and each kind of damage occurs once."""

    def run_to_end(done: Path, code: str, *arguments: Any, **how: Any) -> int:
        names: dict[str, Any] = {}
        with monkeypatch.context() as patch:
            # the jobs slow these methods down, and sleep; undo both
            for slowed in (ScreenPlan, BlockStore, TrainingPlan):
                for name in vars(slowed).keys() & {"images", "write", "training_step"}:
                    patch.setattr(slowed, name, getattr(slowed, name))
            patch.setattr("time.sleep", lambda seconds: None)
            exec(code, names)
            names["job"]()
        assert done.exists()
        return 1

    faults = load("faults")
    monkeypatch.setattr(faults, "kill_until", run_to_end)
    # two steps only: each checkpoint takes 262 MiB
    monkeypatch.setattr(faults.runs, "train_large", lambda folder: faults.runs.train(folder, max_steps=2))
    _, table = run_benchmark("faults", "--kills", "1", "--damages", "1")
    assert {row["lost or unnoticed"] for row in table} == {"0"} and {row["tried"] for row in table} == {"1"}
    assert {"kill -9 while training", "a flipped bit"} <= {row["what goes wrong"] for row in table}


def test_write_docs_stored_results_reproduce_pages(load, tmp_path):
    results = json.loads((BENCHMARKS / "results.json").read_text())
    assert sorted(results) == SHORT
    results |= {name: load(name).result() for name in sorted(LONG)}
    for page in PAGES:
        (tmp_path / page.name).write_text(page.read_text())
        load("_report").write_docs(results, tmp_path / page.name)
        assert (tmp_path / page.name).read_text() == page.read_text()
    for name, result in results.items():
        assert sum(page.read_text().count(f"<!-- {name} -->") for page in PAGES) == 1
        assert result["machine"]


def test_as_markdown_rounds_and_drops_empty_columns(load):
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


def test_losses_ours_value_and_gradient_are_equal_to_naive(load):
    losses = load("losses")
    inputs = losses.batch(64, torch.float64)
    naive, ours = (losses.value_and_gradient(form, inputs) for form in (losses.listing, losses.ours))
    assert losses.difference(ours, naive) < 1e-12


def test_step_ours_losses_are_equal_to_naive(load):
    step = load("step")
    naive, ours = step.pair("resnet18", (3, 32, 32))
    inputs = step.batch(32, (3, 32, 32))
    losses = [step.take_step(*form, inputs, bf16=False) for form in (naive, ours)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


def test_command_keeps_number_of_threads():
    """The helpers of the tests set torch to one thread; benchmarks must not load them."""
    code = f"""
import runpy, sys, torch
before = torch.get_num_threads()
sys.path.insert(0, {str(BENCHMARKS)!r})
import _compare
_compare.child = lambda *command: 1.0  # whose processes load all libraries again
sys.argv = ["benchmarks", "losses", "--smoke"]
runpy.run_path({str(BENCHMARKS)!r}, run_name="__main__")
assert torch.get_num_threads() == before and "conftest" not in sys.modules
"""
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=free)
    assert not ended.returncode, ended.stderr
