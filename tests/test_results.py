"""The tables of the documentation are what their rows say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from scbd.paper import EXPERIMENTS
from scbd.paper._reproduce import finished, report

DOCS = Path(__file__).parents[1] / "docs"
FOLDERS = sorted(path for path in (DOCS / "results").glob("*") if path.is_dir())


@pytest.mark.skipif(not DOCS.is_dir(), reason="a source distribution comes without docs")
def test_there_are_results_to_show():
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_tables_are_made_of_their_rows(folder, tmp_path):
    frame = finished(EXPERIMENTS[folder.name].trials("small", None), folder)
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(frame["key"]) == [json.loads(line)["key"] for line in lines]
    assert not (folder / "rows").exists()  # all are at rest
    assert report(folder.name, frame, tmp_path) + "\n" == (folder / "table.md").read_text(encoding="utf-8")
    plt.close("all")
    shown = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "archive").glob("*.md")))
    assert f"results/{folder.name}/table.md" in shown
    for figure in tmp_path.glob("*.png"):
        assert (folder / figure.name).is_file() and f"results/{folder.name}/{figure.name}" in shown


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_row_answers_a_trial_of_the_small_budget(folder):
    """Whatever its system means today: a grid that changes must not lose what was run of it."""
    grid = {json.dumps(asdict(trial), sort_keys=True) for trial in EXPERIMENTS[folder.name].trials("small", None)}
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.dumps(json.loads(line)["trial"], sort_keys=True) for line in lines} <= grid
