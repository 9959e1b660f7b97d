from __future__ import annotations

import os

import pytest

from scbd.paper import demo


@pytest.mark.filterwarnings("ignore:z_c has collapsed")
def test_the_demo_compares_three_systems(tmp_path, monkeypatch):
    """A handful of steps: what it writes and what it compares. Its numbers at full length are in the docs."""
    # seconds of compiling; the tests of the figure compute one
    monkeypatch.setattr("scbd.pl._umap.umap", lambda embedding, **how: embedding[:, :2])
    table = demo(tmp_path / "demo", max_steps=30)
    assert list(table.index) == ["random encoder", "alpha = 0", "alpha = auto"]
    accuracies = ["r_c in", "r_c white", "z_c in", "z_c white", "e from r_c", "e from z_c"]
    assert set(accuracies) < set(table.columns)
    assert table[accuracies].notna().all(axis=None)
    # after thirty steps, colour is already read in distribution, and already misleads on white digits
    assert table.loc["alpha = 0", "r_c in"] > 0.9
    assert table.loc["alpha = 0", "r_c white"] < table.loc["alpha = 0", "r_c in"] - 0.2
    assert sorted(os.listdir(tmp_path / "demo")) == [
        "digits.png",
        "metrics.csv",
        "model",
        "training_curves.png",
        "umap.png",
    ]
