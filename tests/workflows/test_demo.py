from __future__ import annotations

import os

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from scbd._workflows import demo as demo_module
from scbd.cli import main


@pytest.mark.filterwarnings("ignore:z_c has collapsed")
@pytest.mark.usefixtures("permuted_once")
def test_demo_digits_compares_two_systems_and_two_controls(tmp_path, monkeypatch, capsys):
    """Check files and systems of a run of a few steps; the scores of a full run are in the documentation."""
    monkeypatch.setattr("scbd.pl.umap_blocks", lambda *args, **how: plt.subplots(squeeze=False)[1])  # takes seconds
    monkeypatch.setitem(demo_module.RANDOM_ENCODER_TRAINING, "max_steps", 5)
    monkeypatch.setitem(demo_module.DIGITS_TRAINING, "batch_size", 128)
    assert main(["demo", "digits", "--out", str(tmp_path / "demo"), "--max-steps", "40"]) == 0
    assert str(tmp_path / "demo") in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "demo" / "metrics.csv", index_col="system")
    assert list(table.index) == ["pixel PCA", "random encoder", "alpha = 0", "alpha = auto"]
    fitted = ["r_c in", "r_c white", "e from r_c"]
    embedded = fitted + ["z_c in", "z_c white", "e from z_c"]
    learned = embedded + ["own in", "own white"]
    assert set(learned) < set(table.columns)
    for names, known in ((["pixel PCA"], fitted), (["random encoder"], embedded), (table.index[2:], learned)):
        shown = table.loc[names, learned]
        assert set(shown.columns[shown.notna().all()]) == set(shown.columns[shown.notna().any()]) == set(known)
    # after a few dozen steps, the classifier already relies on colour, which fails on white digits
    assert table.loc["alpha = 0", "r_c in"] > 0.9
    assert table.loc["alpha = 0", "r_c white"] < table.loc["alpha = 0", "r_c in"] - 0.2
    written = ["digits.png", "metrics.csv", "model", "training_curves.png", "umap.png"]
    assert sorted(os.listdir(tmp_path / "demo")) == written


@pytest.mark.filterwarnings("ignore:z_c has")
def test_demo_screen_called_twice_writes_report_and_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scbd.pl.umap_blocks", lambda *args, **how: plt.subplots(squeeze=False)[1])
    monkeypatch.setattr("scbd._workflows.run.write_report", lambda report, path: path.write_text(report.verdict))
    monkeypatch.setitem(demo_module.SCREEN_SIMULATION, "n_cells", 400)
    out = tmp_path / "demo"
    for _ in range(2):  # the second call finds everything done
        assert main(["demo", "--out", str(out), "--max-steps", "3"]) == 0
        printed = capsys.readouterr()
        assert str(out / "report.html") in printed.out
        assert (out / "verdict.txt").read_text().strip() in printed.out
    assert len(os.listdir(out / "crops")) == 1_600 and len(pd.read_csv(out / "crops.csv")) == 400
    assert {"report.html", "screen.zarr", "cells.h5ad", "verdict.txt"} < set(os.listdir(out))
