from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from markdown_tables import rows_of
from pictures import is_drawn

from scbd.paper._rivals import rivals_report, screen_rivals
from scbd.paper._variants import by_variant


def test_everything_that_is_trained_stands_beside_every_correction_on_the_same_cells():
    trials = screen_rivals("small", None)
    assert len({str(trial.data) for trial in trials}) == 1 and len({trial.seed for trial in trials}) == 3
    systems = {trial.system for trial in trials}
    assert {"ERM", "CORAL", "DANN", "VAE", "iVAE", "mcVAE", "SCBD", "random encoder", "pixel PCA", "obsm"} <= systems
    assert {f"pixel PCA, {c}" for c in ("ComBat", "Harmony", "sphering", "TVN", "WCCN", "LDA", "PLDA")} <= systems
    assert [trial.model["alpha"] for trial in trials if trial.system == "SCBD" and trial.seed == 0] == [
        0,
        0.003,
        "auto",
    ]
    assert trials[0].data["n_plate_maps"] > 1 and trials[0].data["well_imbalance"] > 0


def row(key: str, system: str, **scores: Any) -> dict[str, Any]:
    return {"key": key, "system": system, "seed": 0} | scores


def line(of: str, f1: float) -> dict[str, float]:
    """What a row says of one variant."""
    scores = {"relationship_map_unseen": 1 - f1, "e_probe_f1": f1, "e_probe_quadratic_f1": f1}
    return {of + name: value for name, value in (scores | {"e_probe_neighbours_f1": f1}).items()}


ROWS = [
    row("a", "obsm", **line("", 0.01), **line("standardised: ", 0.02), **line("chance: ", 0.2)),
    row("b", "pixel PCA", **line("", 0.9), **line("standardised: ", 0.1), **line("chance: ", 0.4)),
    row("c", "pixel PCA, TVN", **line("", 0.3)),
    row("d", "SCBD", alpha="auto", learned_c=0.5, **line("", 0.2), **line("standardised: ", 0.15)),
    row("e", "mcVAE", **line("salient block: ", 0.6), **line("both blocks, standardised: ", 0.7)),
]


def test_a_row_is_a_line_for_each_way_it_was_scored(tmp_path):
    found = rows_of(rivals_report(pd.DataFrame(ROWS), tmp_path))
    assert [(line["name"], line["well F1, linear"]) for line in found] == [
        ("truth", "0.010"),
        ("truth, standardised", "0.020"),
        ("pixel PCA", "0.900"),
        ("pixel PCA, standardised", "0.100"),
        ("pixel PCA, TVN", "0.300"),
        ("SCBD, alpha auto", "0.200"),
        ("SCBD, alpha auto, standardised", "0.150"),
        ("mcVAE, salient block", "0.600"),
        ("mcVAE, both blocks, standardised", "0.700"),
        ("chance", "0.300 ± 0.141"),
    ]
    # what training came to is told once
    assert [line["learned"] for line in found if line["name"].startswith("SCBD")] == ["0.50", "–"]
    assert {path.name for path in tmp_path.iterdir()} == {"systems.png", "corrections.png"}
    assert all(map(is_drawn, tmp_path.iterdir()))


def test_rows_with_one_score_each_stay_as_they_are():
    frame = pd.DataFrame({"name": ["b", "a"], "e_probe_f1": [0.1, np.nan], "y": [np.nan, 1.0]}, index=[7, 3])
    lines = by_variant(frame, ["e_probe_f1", "y"])
    pd.testing.assert_frame_equal(lines[frame.columns], frame.reset_index(drop=True))
