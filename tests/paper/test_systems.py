from __future__ import annotations

from typing import Any

import pandas as pd
from markdown_tables import rows_of
from pictures import is_drawn

from scbd.paper._systems import cmnist_systems, screen_systems_report, systems_report
from scbd.workflows import MODEL_SPACE


def test_the_paper_s_budget_is_the_paper_s_space():
    trials = [trial for trial in cmnist_systems("paper", 1) if trial.system == "IRM"]
    assert len(trials) == 4 * 9 * 3 and {trial.training["max_steps"] for trial in trials} == {1500, 30_000, 150_000}
    assert {trial.model["penalty"] for trial in trials} == {1, 10, 100, 1000}
    assert {trial.training["batch_size"] for trial in trials} == {32}
    assert {trial.system for trial in cmnist_systems("small", 1)} == {
        *MODEL_SPACE,
        *("SCBD", "random encoder", "pixel PCA"),
    }


def row(system: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"dataset": "colored_mnist", "system": system, "seed": seed} | more


def test_each_system_is_chosen_in_distribution_and_stands_beside_the_paper(tmp_path):
    rows = [
        row("CORAL", seed, penalty=p, **{"own in": i, "own out": o, "r_c in": 1 - i, "r_c out": o / 2})
        for seed in (0, 1)
        for p, i, o in ((0.1, 0.9, 0.3 + 0.1 * seed), (1.0, 0.8, 0.9))
    ]
    rows += [
        row("iVAE", 0, **{"r_c in": 0.7, "r_c out": 0.6}),
        row("random encoder", 0, alpha=0.0, **{"r_c in": 0.9, "r_c out": 0.5}),
    ]
    rows.append(row("pixel PCA", 0, **{"r_c in": 0.92, "r_c out": 0.91}))
    rows += [row("SCBD", 0, alpha=a, **{"r_c in": 0.98, "r_c out": 0.97, "z_c out": 0.96}) for a in ("auto", 0.01)]
    text = systems_report(pd.DataFrame(rows), tmp_path)
    found = {line["name"]: line for line in rows_of(text)}
    # by its own head, which is the one that it is chosen by
    assert found["CORAL"]["out, online head, %"] == "35.0 ± 7.1" and found["CORAL"]["paper: out, %"] == "37.6 ± 3.6"
    assert found["CORAL"]["out of distribution, %"] == "17.5 ± 3.5"
    assert found["pixel PCA"]["out of distribution, %"] == "91.0" and found["iVAE"]["out, online head, %"] == "–"
    assert found["iVAE"]["out of distribution, %"] == "60.0" and found["SCBD, alpha auto"]["z_c out, %"] == "96.0"
    assert is_drawn(tmp_path / "trade_off.png")


def test_systems_of_a_screen_are_told_apart(tmp_path):
    scores = {"relationship_average_precision": 0.9, "e_probe_f1": 0.1, "y_probe_f1": 0.2, "relationship_area": 0.3}
    rows = [row("iVAE", 0, style_posterior=p, **scores) for p in ("xe", "x")] + [row("pixel PCA, TVN", 0, **scores)]
    rows += [row("SCBD", 0, alpha=a, invariance=f, **scores) for a, f in ((8.0, "listing"), ("auto", "variance"))]
    text = screen_systems_report(pd.DataFrame(rows), tmp_path)
    for name in ("iVAE", "iVAE, x only", "pixel PCA, TVN", "listing, alpha 8", "variance, alpha auto"):
        assert f"| {name} |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"trade_off.png", "batch_correction.png"}
