from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from markdown_tables import rows_of
from pictures import is_drawn

from scbd.paper._classifiers import cmnist_systems
from scbd.paper._lengths import cmnist_lengths, lengths_report, screen_lengths
from scbd.paper._systems import screen_systems


@pytest.mark.parametrize(("longer", "usual"), [(cmnist_lengths, cmnist_systems), (screen_lengths, screen_systems)])
def test_a_run_of_the_usual_length_is_the_one_of_every_system(longer, usual):
    keys = {trial.key for trial in usual("small", None)}
    trials = longer("small", None)
    shared = [trial for trial in trials if trial.key in keys]
    assert len(shared) == len(trials) / 2
    by_steps = {trial.training["max_steps"]: trial for trial in trials if trial.system == "iVAE" and trial.seed == 0}
    (short, long) = (by_steps[steps] for steps in sorted(by_steps))
    assert (short.model, short.data, short.seed) == (long.model, long.data, long.seed)
    assert {**long.training, "max_steps": short.training["max_steps"]} == dict(short.training)


def row(system: str, steps: int, **more: Any) -> dict[str, Any]:
    return {"system": system, "steps": steps, "seed": 0, "lr": 0.001} | more


def test_digits_are_shown_at_the_setting_that_is_best_in_distribution(tmp_path):
    settings = [(500, 0.001, 0.9, 0.8), (500, 0.0001, 0.7, 0.99), (2000, 0.001, 0.6, 0.98), (2000, 0.0001, 0.95, 0.5)]
    rows = [row("iVAE", steps, lr=lr, **{"r_c in": i, "r_c out": o}) for steps, lr, i, o in settings]
    found = rows_of(lengths_report(pd.DataFrame(rows), tmp_path))
    assert [(line["steps"], line["out of distribution, %"]) for line in found] == [("500", "80.0"), ("2000", "50.0")]
    assert is_drawn(tmp_path / "lengths.png")


def test_models_of_a_screen_stand_in_the_order_of_their_steps(tmp_path):
    scores = {"relationship_average_precision": 0.9, "e_probe_f1": 0.1}
    posteriors = {"VAE": None, "iVAE": "x"}
    rows = [
        row(system, steps, style_posterior=posterior, **scores)
        for steps in (1200, 400)
        for system, posterior in posteriors.items()
    ]
    found = rows_of(lengths_report(pd.DataFrame(rows), tmp_path))
    names = [(line["name"], line["steps"]) for line in found]
    assert names == [("VAE", "400"), ("VAE", "1200"), ("iVAE, x only", "400"), ("iVAE, x only", "1200")]
