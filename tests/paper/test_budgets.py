from __future__ import annotations

import json
from typing import get_args

import pytest

from scbd.paper import EXPERIMENTS
from scbd.paper._budgets import Budget
from scbd.workflows import DATASETS, PROTOCOLS, SYSTEMS
from scbd.workflows._rivals import RIVALS
from scbd.workflows._systems import is_computed


@pytest.mark.parametrize("budget", get_args(Budget))
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_grid_names_what_there_is_and_nothing_twice(name, budget):
    trials = EXPERIMENTS[name].trials(budget, None)
    assert len({trial.key for trial in trials}) == len(trials) > 0
    for trial in trials:
        assert trial.dataset in DATASETS and trial.protocol in PROTOCOLS
        assert trial.system in {**SYSTEMS, **RIVALS} or is_computed(trial.system)
    one = EXPERIMENTS[name].trials(budget, 1)
    assert {trial.key for trial in one} <= {trial.key for trial in trials}
    assert EXPERIMENTS[name].about.endswith(".")


def settings(name: str, budget: Budget = "paper", system: str = "SCBD"):
    return [trial for trial in EXPERIMENTS[name].trials(budget, None) if trial.system == system]


def test_the_paper_s_settings():
    """Appendix A of the paper, see the table of the reading notes."""
    trials = settings("cmnist")
    assert {trial.model["alpha"] for trial in trials} == {0, 64, 128, 192} and len({t.seed for t in trials}) == 10
    for trial in trials:
        assert trial.model["encoder"] == "resnet18" and trial.model["n_latent"] == 128
        assert trial.model["style_target"] == "ye" and trial.training["load_best"]
        assert trial.model["invariance"] == "listing" and trial.model["smoothing"] == 0
        assert trial.training["max_steps"] == 25_000 and trial.training["batch_size"] == 2048
        assert trial.training["lr"] == 1e-4 and trial.training["weight_decay"] == 0.01
    assert {trial.model["encoder"] for trial in settings("camelyon17")} == {"densenet121"}
    for trial in settings("funk22"):
        assert trial.model["n_latent"] == 64 and trial.model["style_target"] == "e" and trial.model["image_size"] == 64
        assert trial.training["max_steps"] == 150_000 and trial.training["perturbations_per_batch"] == 256
        assert trial.training["train_size"] == 0.83 and trial.training["validation_size"] == 0.02
    assert {trial.training["max_steps"] for trial in settings("counterfactuals")} == {25_000}


def test_the_screen_of_funk_et_al_is_read_where_it_lies_by_every_system_of_the_figure():
    trials = EXPERIMENTS["funk22-systems"].trials("paper", None)
    assert {json.dumps(trial.data) for trial in trials} == {'{"guides": true}'}  # and no number of cells
    by_system = {trial.system: trial for trial in trials}
    names = {"CellProfiler", "VAE", "iVAE", "mcVAE", "SCBD", "pixel PCA", "random encoder"}
    assert set(by_system) == names and trials[0].system == "CellProfiler"
    assert {trial.model["alpha"] for trial in trials if trial.system == "SCBD"} == {0, 1, 8}
    for name in ("VAE", "iVAE", "mcVAE"):
        model, training = by_system[name].model, by_system[name].training
        assert model["n_latent"] == 64 and model["image_size"] == 64 and model["kl_warmup_steps"] == 4500
        assert training["max_epochs"] == 3 and "max_steps" not in training and training["train_size"] == 0.83
        assert training["lr"] == 1e-4 and training["weight_decay"] == 0.01 and training["load_best"]
    # 1,024 pairs of a control and a perturbed cell, as contrastive-ops draws them
    assert by_system["mcVAE"].training["batch_size"] == 2048 and by_system["mcVAE"].model["n_environment_latent"] == 32
    assert by_system["VAE"].training["batch_size"] == 1024


def test_the_small_budget_is_the_one_that_was_asked_for():
    trials = settings("cmnist", "small")
    assert sorted({trial.model["alpha"] for trial in trials}) == [0, 1, 3, 10, 30, 64, 128, 192]
    assert len({trial.seed for trial in trials}) == 5 and {t.model["encoder"] for t in trials} == {"small"}
    assert sorted({trial.model["alpha"] for trial in settings("screen", "small")}) == [0, 1, 8]
    domains = {trial.data["test_environment"] for trial in settings("pacs", "small")}
    assert domains == {"art_painting", "cartoon", "photo", "sketch"}


def test_our_form_runs_at_the_same_settings_on_digits_and_screens():
    digits, screen = (
        next(trial for trial in settings(name, "small") if trial.model["alpha"] == "auto")
        for name in ("cmnist-variance", "screen-variance")
    )
    for name in ("alpha", "smoothing", "invariance", "encoder"):
        assert digits.model[name] == screen.model[name], name
    for name in ("batch_size", "lr", "weight_decay", "load_best"):
        assert digits.training[name] == screen.training[name], name
    assert screen.data["well_imbalance"] > 0
    oracles = settings("cmnist-variance", "small", "oracle")
    assert {trial.data["colored"] for trial in oracles} == {False} and {t.model["alpha"] for t in oracles} == {0}
    assert len({trial.seed for trial in settings("cmnist-variance", "small")}) == 10
