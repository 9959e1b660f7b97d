from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.dataset_files import write_mnist

import scbd
from paper.datasets import DATASETS
from paper.grids import generalization, shared
from paper.reproduce import EXPERIMENTS, reproduce
from paper.systems import UNTRAINED

FOLDER = Path(__file__).parents[2] / "benchmarks" / "paper"
pytestmark = [pytest.mark.filterwarnings("ignore:z_c has collapsed"), pytest.mark.usefixtures("permuted_once")]


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Four small files in the layout of MNIST, and a budget of a few seconds."""
    model, training = shared.SIZES["smoke"]
    monkeypatch.setitem(shared.SIZES, "smoke", (model | {}, training | {"max_steps": 3, "batch_size": 64}))
    monkeypatch.setitem(shared.DATA, ("colored_mnist", "smoke"), {"n_train": 300, "n_test": 100})
    monkeypatch.setattr(generalization, "UNTRAINED", UNTRAINED | {"max_steps": 2})
    return write_mnist(tmp_path / "mnist")


def test_reproduce_cmnist_writes_files_and_second_call_runs_nothing(tmp_path, digits, monkeypatch):
    out = tmp_path / "out"
    frame = reproduce("cmnist", path=digits, out=out)
    assert list(frame["system"]) == ["pixel PCA", "random encoder", *["SCBD"] * 3, *["ERM"] * 3]
    # every row of an encoder also states the score of the random encoder
    encoders = frame[frame["system"] != "pixel PCA"]
    for part in ("in", "out"):
        assert (encoders[f"random encoder, r_c {part}"] == encoders[f"r_c {part}"].iloc[0]).all()
    assert {"rows.jsonl", "runs", "table.md", "alpha.png", "erm.png"} == {path.name for path in out.iterdir()}
    rows = (out / "rows.jsonl").read_text()
    assert len(rows.splitlines()) == 8
    # rows do not contain folders of this machine
    assert str(tmp_path) not in rows
    (out / "table.md").unlink()
    monkeypatch.setattr("paper.runner.run_trial", None)  # running any trial would fail
    assert reproduce("cmnist", path=digits, out=out).equals(frame)
    assert reproduce("cmnist", out=out, report_only=True).equals(frame)
    assert (out / "table.md").exists()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"name": "mnist"}, "'mnist': use one of cmnist"),
        ({"name": "cmnist", "budget": "huge"}, "'huge': use one of smoke"),
        ({"name": "cmnist", "protocol": "theirs"}, "'theirs': use one of ours, authors"),
        ({"name": "vlcs"}, "vlcs is not downloaded"),
        ({"name": "cmnist", "n_seeds": 0}, "n_seeds=0"),
        ({"name": "screen", "report_only": True}, "no finished run of screen"),
    ],
)
def test_reproduce_invalid_arguments_raise_before_writing(tmp_path, asked, named):
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        reproduce(**asked, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_report_prints_stored_table(tmp_path):
    """The command works from any working directory."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "rows.jsonl").write_bytes((FOLDER / "results" / "screen" / "rows.jsonl").read_bytes())
    command = [sys.executable, str(FOLDER), "screen", "--budget", "small", "--report", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(Path(scbd.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
    assert done.stdout.startswith((FOLDER / "results" / "screen" / "table.md").read_text())


def test_listed_returns_data_and_duration_of_each_experiment(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    lines = runpy.run_path(str(FOLDER / "__main__.py"))["listed"]()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert lines[0].startswith("cmnist ") and "MNIST" in lines[0] and re.search(r" [1-9]\d* min ", lines[0])


def test_reproduce_funk22_cellprofiler_finds_complexes_and_removes_wells(tmp_path, monkeypatch):
    """Genes of one complex share a direction. Wells shift all features, which standardisation removes."""
    rng = np.random.default_rng(0)
    complexes = {f"G{i}": i % 6 for i in range(24)}
    genes = rng.choice([*complexes, *["nontargeting"] * 24], 1200)
    wells, directions = rng.integers(4, size=1200), np.eye(6)
    features = rng.normal(size=(1200, 6)) + 20.0 * wells[:, None]
    for gene, of in complexes.items():
        features[genes == gene] += 3 * directions[of]
    table = pd.DataFrame(features, columns=[f"feature {i}" for i in range(6)])
    table = table.assign(gene_symbol_0=genes, sgRNA_0=genes, plate="P", well=wells.astype(str))
    table.to_parquet(tmp_path / "features.parquet")
    pairs = [(a, b) for a in complexes for b in complexes if a < b and complexes[a] == complexes[b]]
    net = pd.DataFrame(pairs, columns=["source", "target"])
    known = replace(DATASETS["funk22_cellprofiler"], relations=lambda adata: net)
    monkeypatch.setitem(DATASETS, "funk22_cellprofiler", known)
    frame = reproduce("funk22-cellprofiler", path=tmp_path / "features.parquet", out=tmp_path / "out", n_seeds=1)
    assert frame["relationship_average_precision"].item() > 0.9 and frame["e_probe_f1"].item() < 0.4
    assert "| CellProfiler |" in (tmp_path / "out" / "table.md").read_text()
    table.drop(columns="well").to_parquet(tmp_path / "features.parquet")
    with pytest.raises(KeyError, match="well"):
        reproduce("funk22-cellprofiler", path=tmp_path / "features.parquet", out=tmp_path / "other", n_seeds=1)
