from __future__ import annotations

from typing import Any

import pandas as pd
from pictures import is_drawn

from scbd.paper._ablations import ablation_report, cmnist_ablations


def test_ablations_change_one_thing_at_a_time():
    trials = cmnist_ablations("small", 1)
    base = trials[0]
    for trial in trials[1:]:
        before, after = {**base.model, **base.training}, {**trial.model, **trial.training}
        changed = {name for name in before if before[name] != after[name]}
        assert len(changed) == 1 or changed == {"style_target", "alpha"}
    assert {trial.model["style_target"] for trial in trials} == {"ye", "e", None}


def test_ablations(tmp_path):
    base: dict[str, Any] = {
        "n_latent": 128,
        "batch_size": 512,
        "weight_decay": 0.01,
        "style_target": "ye",
        "alpha": 10.0,
    }
    base |= {"r_c in": 0.9, "r_c out": 0.8}
    changes: list[dict[str, Any]] = [
        {},
        {},
        {"n_latent": 32, "r_c out": 0.7},
        {"batch_size": 128},
        {"weight_decay": 0.1},
    ]
    changes += [{"style_target": None, "r_c out": 0.6}, {"style_target": None, "alpha": 0.0}]
    text = ablation_report(pd.DataFrame([base | change for change in changes]), tmp_path)
    assert "| 32 | 90.0 | 70.0 | 1 |" in text and "| 128 | 90.0 ± 0.0 | 80.0 ± 0.0 | 2 |" in text
    assert "| none | 10 | 90.0 | 60.0 | 1 |" in text
    assert is_drawn(tmp_path / "ablations.png")
