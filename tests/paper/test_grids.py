from __future__ import annotations

import json
from itertools import product
from typing import get_args

import pytest

from paper.datasets import DATASETS
from paper.grids.comparisons import cmnist_lengths, screen_lengths, screen_rivals, screen_systems
from paper.grids.environments import new_plates, new_plates_cpjump1
from paper.grids.generalization import (
    camelyon17,
    camelyon17_systems,
    cmnist,
    cmnist_ablations,
    cmnist_systems,
    pacs,
    pacs_systems,
    vlcs_systems,
)
from paper.grids.screens import screen_neighbours
from paper.grids.shared import Budget
from paper.protocols import PROTOCOLS
from paper.reproduce import _FOUND, EXPERIMENTS, as_authors
from paper.systems import MODEL_SPACE, SYSTEMS, TABLES, is_computed


def test_experiments_equal_names_in_found():
    assert set(EXPERIMENTS) == set(_FOUND)


@pytest.mark.parametrize("budget", get_args(Budget))
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_trials_each_experiment_uses_known_names_and_unique_keys(name, budget):
    trials = EXPERIMENTS[name].trials(budget, None)
    assert len({trial.key for trial in trials}) == len(trials) > 0
    for trial in trials:
        assert trial.dataset in DATASETS and trial.protocol in PROTOCOLS
        assert trial.system in {**SYSTEMS, **TABLES} or is_computed(trial.system)
    one = EXPERIMENTS[name].trials(budget, 1)
    assert {trial.key for trial in one} <= {trial.key for trial in trials}
    assert EXPERIMENTS[name].about.endswith(".")


def trials_of_system(name: str, budget: Budget = "paper", system: str = "SCBD"):
    return [trial for trial in EXPERIMENTS[name].trials(budget, None) if trial.system == system]


def test_trials_paper_budget_equal_settings_of_the_paper():
    """The settings are those of appendix A of the paper; a table in the reading notes lists them."""
    trials = trials_of_system("cmnist")
    assert {trial.model["alpha"] for trial in trials} == {0, 64, 128, 192} and len({t.seed for t in trials}) == 10
    for trial in trials:
        assert trial.model["encoder"] == "resnet18" and trial.model["n_latent"] == 128
        assert trial.model["style_target"] == "ye" and trial.training["load_best"]
        assert trial.model["invariance"] == "listing" and trial.model["smoothing"] == 0
        assert trial.training["max_steps"] == 25_000 and trial.training["batch_size"] == 2048
        assert trial.training["lr"] == 1e-4 and trial.training["weight_decay"] == 0.01
    assert {trial.model["encoder"] for trial in trials_of_system("camelyon17")} == {"densenet121"}
    for trial in trials_of_system("funk22"):
        assert trial.model["n_latent"] == 64 and trial.model["style_target"] == "e" and trial.model["image_size"] == 64
        assert trial.training["max_steps"] == 150_000 and trial.training["perturbations_per_batch"] == 256
        assert trial.training["train_size"] == 0.83 and trial.training["validation_size"] == 0.02
    trials = trials_of_system("counterfactuals")
    assert {trial.training["max_steps"] for trial in trials} == {25_000}
    published = [trial for trial in trials if trial.model["invariance"] == "listing"]
    assert {trial.model["alpha"] for trial in published} == {0, 64, 128, 192}
    assert {trial.model["alpha"] for trial in trials if trial not in published} == {"auto"}
    frozen = [decoder for trial in trials if not (decoder := trial.training["decoder"]).get("joint")]
    how = {"lr": 1e-4, "batch_size": 2048, "weight_decay": 0.01, "plan_kwargs": {"lr_decay": False}}
    assert len(frozen) == 15 and all(decoder == {"max_steps": 25_000, "width": 256} | how for decoder in frozen)


@pytest.mark.parametrize("budget", get_args(Budget))
def test_trials_counterfactuals_ivae_settings_occur_in_cmnist_systems(budget):
    """Each trial also occurs in `cmnist-systems`, with the same model and training settings."""
    trials = trials_of_system("counterfactuals", budget, "iVAE")
    assert len({trial.seed for trial in trials}) == len(trials) == (1 if budget == "smoke" else 3)
    beside = [
        (trial.seed, trial.data, trial.model, trial.training)
        for trial in trials_of_system("cmnist-systems", budget, "iVAE")
    ]
    assert all((trial.seed, trial.data, trial.model, trial.training) in beside for trial in trials)


def test_trials_funk22_systems_use_all_cells_and_published_settings():
    trials = EXPERIMENTS["funk22-systems"].trials("paper", None)
    assert {json.dumps(trial.data) for trial in trials} == {'{"guides": true}'}  # all cells are used
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


def test_trials_small_budget_has_documented_alphas_and_seeds():
    trials = trials_of_system("cmnist", "small")
    assert sorted({trial.model["alpha"] for trial in trials}) == [0, 1, 3, 10, 30, 64, 128, 192]
    assert len({trial.seed for trial in trials}) == 5 and {t.model["encoder"] for t in trials} == {"small"}
    assert sorted({trial.model["alpha"] for trial in trials_of_system("screen", "small")}) == [0, 1, 8]
    domains = {trial.data["test_environment"] for trial in trials_of_system("pacs", "small")}
    assert domains == {"art_painting", "cartoon", "photo", "sketch"}


def test_trials_variance_form_same_settings_on_digits_and_screens():
    digits, screen = (
        next(trial for trial in trials_of_system(name, "small") if trial.model["alpha"] == "auto")
        for name in ("cmnist-variance", "screen-variance")
    )
    for name in ("alpha", "smoothing", "invariance", "encoder"):
        assert digits.model[name] == screen.model[name], name
    for name in ("batch_size", "lr", "weight_decay", "load_best"):
        assert digits.training[name] == screen.training[name], name
    assert screen.data["well_imbalance"] > 0
    oracles = trials_of_system("cmnist-variance", "small", "oracle")
    assert {trial.data["colored"] for trial in oracles} == {False} and {t.model["alpha"] for t in oracles} == {0}
    assert len({trial.seed for trial in trials_of_system("cmnist-variance", "small")}) == 10


def test_cmnist_ablations_each_trial_changes_one_setting():
    trials = cmnist_ablations("small", 1)
    base = trials[0]
    for trial in trials[1:]:
        before, after = {**base.model, **base.training}, {**trial.model, **trial.training}
        changed = {name for name in before if before[name] != after[name]}
        assert len(changed) == 1 or changed == {"style_target", "alpha"}
    assert {trial.model["style_target"] for trial in trials} == {"ye", "e", None}


def test_trials_ablations_include_single_block_for_each_alpha_and_encoder():
    """Appendix of the paper: ten seeds. On Camelyon17, both blocks are also trained with ResNet-18."""
    for name, encoders in (("cmnist", ["resnet18"]), ("camelyon17", ["densenet121", "resnet18"])):
        trials = trials_of_system(f"{name}-ablations")
        assert {t.seed for t in trials} == set(range(10))
        curves = {
            (t.model["encoder"], t.model["style_target"], t.model["alpha"]) for t in [*trials, *trials_of_system(name)]
        }
        assert set(product(encoders, ("ye", None), (0.0, 64.0, 128.0, 192.0))) <= curves


def test_systems_grid_cmnist_and_camelyon17_equal_paper_search_space():
    """Search space of the paper's appendix. Five epochs have other numbers of steps on each data set."""
    sizes = {"ERM": 1, "CORAL": 3, "DANN": 3, "IRM": 4, "Fish": 6, "Group DRO": 1}
    for grid, lengths in ((cmnist_systems, {1500, 30_000, 150_000}), (camelyon17_systems, {47_260})):
        trials = grid("paper", None)
        assert {trial.seed for trial in trials} == set(range(10))
        for system, size in sizes.items():
            mine = [trial for trial in trials if trial.system == system]
            assert len(mine) == 10 * size * 9 * len(lengths)
            assert {trial.training["batch_size"] for trial in mine} == {32}
            assert {trial.training["max_steps"] - trial.model.get("pretrain_steps", 0) for trial in mine} == lengths
            assert {trial.training["weight_decay"] for trial in mine} == {0, 0.001, 0.01}
        # the paper uses one learning rate for latent-variable models
        (ivae,) = {trial.training["lr"] for trial in trials if trial.system == "iVAE"}
        assert ivae == 1e-4
        # section 4.1 also selects learning rate and weight decay of SCBD
        published = [t for t in trials if t.system == "SCBD" and t.model["invariance"] == "listing"]
        tried = {(t.model["alpha"], t.training["lr"], t.training["weight_decay"]) for t in published}
        assert tried == set(product((0.0, 192.0), (1e-4, 1e-3, 1e-2), (0.0, 0.001, 0.01)))
        assert {t.data.get("image_size", 32) for t in trials if t.system == "iVAE"} == {
            32 if grid is cmnist_systems else 64
        }
    assert {trial.model["penalty"] for trial in cmnist_systems("paper", 1) if trial.system == "IRM"} == {
        1,
        10,
        100,
        1000,
    }


@pytest.mark.parametrize("grid", [pacs_systems, vlcs_systems])
def test_systems_grid_pacs_and_vlcs_contain_systems_of_their_table(grid):
    trials = grid("paper", None)
    systems = {"ERM", "CORAL", "DANN", "IRM", "Group DRO", "SCBD", "random encoder", "pixel PCA"}
    assert {trial.system for trial in trials} == systems and {trial.seed for trial in trials} == {0, 1, 2}
    assert len({trial.data["test_environment"] for trial in trials}) == 4
    assert {trial.data["image_size"] for trial in trials} == {224}
    trained = [trial for trial in trials if "encoder" in trial.model]
    assert {trial.model["encoder"] for trial in trained} == {"resnet50"}
    assert {trial.training["max_steps"] for trial in trials if trial.system == "ERM"} == {5000}
    assert {trial.model["alpha"] for trial in trained if trial.system == "SCBD"} == {0, "auto"}


@pytest.mark.parametrize(
    ("sweep", "systems"), [(cmnist, cmnist_systems), (camelyon17, camelyon17_systems), (pacs, pacs_systems)]
)
def test_grid_paper_budget_erm_trials_of_sweep_equal_those_of_systems(sweep, systems):
    """At the paper's budget the search spaces are equal, so that one run serves both experiments."""
    clouds = [{trial.key for trial in grid("paper", None) if trial.system == "ERM"} for grid in (sweep, systems)]
    assert clouds[0] == clouds[1]


def test_cmnist_systems_small_budget_returns_102_trials():
    systems = {*MODEL_SPACE, "SCBD", "random encoder", "pixel PCA"}
    assert {trial.system for trial in cmnist_systems("small", 1)} == systems
    assert len(cmnist_systems("small", None)) == 102


def test_cmnist_small_budget_includes_controls_and_erm():
    trials = cmnist("small", None)
    control = [trial for trial in trials if trial.system == "random encoder"]
    assert len(control) == 5 and all(trial.training["lr"] == 0 for trial in control)
    pixels = [trial for trial in trials if trial.system == "pixel PCA"]
    assert [trial.seed for trial in pixels] == list(range(5))
    erm = [trial for trial in trials if trial.system == "ERM"]
    assert {trial.training["lr"] for trial in erm} == {1e-4, 1e-3, 1e-2}
    assert {trial.training["batch_size"] for trial in erm} == {32}


@pytest.mark.parametrize(("longer", "usual"), [(cmnist_lengths, cmnist_systems), (screen_lengths, screen_systems)])
def test_lengths_grid_shorter_runs_are_shared_with_systems_grid(longer, usual):
    keys = {trial.key for trial in usual("small", None)}
    trials = longer("small", None)
    shared = [trial for trial in trials if trial.key in keys]
    assert len(shared) == len(trials) / 2
    by_steps = {trial.training["max_steps"]: trial for trial in trials if trial.system == "iVAE" and trial.seed == 0}
    (short, long) = (by_steps[steps] for steps in sorted(by_steps))
    assert (short.model, short.data, short.seed) == (long.model, long.data, long.seed)
    assert {**long.training, "max_steps": short.training["max_steps"]} == dict(short.training)


def test_screen_neighbours_pairs_differ_only_in_neighbours():
    trials = screen_neighbours("small", None)
    assert len(trials) == 10
    for any_cells, stretches in zip(trials[::2], trials[1::2], strict=True):
        assert (any_cells.seed, any_cells.data, any_cells.model) == (stretches.seed, stretches.data, stretches.model)
        assert {**any_cells.training, "neighbours": True} == dict(stretches.training)
        assert not any_cells.training["neighbours"]


def test_new_plates_each_fold_has_the_same_systems():
    trials = new_plates("small", None)
    assert {trial.data["fold"] for trial in trials} == set(range(5))
    of_one = [trial for trial in trials if trial.data["fold"] == 0]
    assert [trial.system for trial in of_one] == ["SCBD", "SCBD", "SCBD", "ERM"]
    asked = [(trial.model.get("alpha", "auto"), trial.model.get("standardize_by", "auto")) for trial in of_one]
    assert asked == [("auto", "auto"), (0.0, "auto"), ("auto", None), ("auto", "auto")]
    assert {trial.data["n_wells"] // trial.data["plate_wells"] for trial in trials} == {6}
    assert len(new_plates_cpjump1("small", None)) == 10


def test_screen_rivals_all_systems_and_corrections_share_data():
    trials = screen_rivals("small", None)
    assert len({str(trial.data) for trial in trials}) == 1 and len({trial.seed for trial in trials}) == 3
    systems = {trial.system for trial in trials}
    assert {"ERM", "CORAL", "DANN", "VAE", "iVAE", "mcVAE", "SCBD", "random encoder", "pixel PCA", "obsm"} <= systems
    assert {f"pixel PCA, {c}" for c in ("ComBat", "Harmony", "sphering", "TVN", "WCCN", "LDA", "PLDA")} <= systems
    trained = [trial for trial in trials if trial.system in SYSTEMS]
    assert {trial.model["standardize_by"] for trial in trained} == {"auto"}  # all systems get the same inputs
    ours = [trial.model["alpha"] for trial in trials if trial.system == "SCBD" and trial.seed == 0]
    assert ours == [0, "auto", 0.05]
    assert trials[0].data["n_plate_maps"] > 1 and trials[0].data["well_imbalance"] > 0


def trials_as_authors(name: str, budget: Budget = "paper"):
    return as_authors(name, EXPERIMENTS[name].trials(budget, 1))


def test_as_authors_scbd_steps_are_halved_and_validation_is_added():
    trials = [trial for trial in trials_as_authors("cmnist") if trial.system == "SCBD"]
    assert {trial.training["max_steps"] for trial in trials} == {12_500}
    assert {trial.training["validate_every"] for trial in trials} == {4992}
    assert all(trial.data == {"protocol": "authors"} and trial.training["load_best"] for trial in trials)
    assert {trial.training["max_steps"] for trial in trials_as_authors("funk22") if trial.system == "SCBD"} == {75_000}


def test_as_authors_other_systems_keys_are_unchanged():
    ours = {trial.system: trial for trial in EXPERIMENTS["camelyon17-systems"].trials("paper", 1)}
    theirs = {trial.system: trial for trial in trials_as_authors("camelyon17-systems")}
    for system in set(ours) - {"SCBD"}:
        assert theirs[system].key == ours[system].key, system
    assert theirs["SCBD"].training["load_best"] and not ours["SCBD"].training["load_best"]


def test_as_authors_uses_one_data_set_and_rejects_varied_data():
    """All trials use the authors' data set, and the oracle its uncoloured digits.

    Experiments that vary the data, or that use other data, are rejected.
    """
    assert {trial.data["protocol"] for trial in trials_as_authors("cmnist", "smoke")} == {"authors"}
    oracles = [trial.data for trial in trials_as_authors("cmnist-variance") if trial.system == "oracle"]
    assert oracles == [{"colored": False, "protocol": "authors"}]
    with pytest.raises(ValueError, match="cmnist-map varies n_environments"):
        trials_as_authors("cmnist-map", "smoke")
    with pytest.raises(ValueError, match="cpjump1"):
        trials_as_authors("cpjump1")


@pytest.mark.parametrize("name", ["camelyon17", "pacs-systems", "screen", "screen-systems", "funk22", "cmnist-systems"])
def test_as_authors_each_paper_experiment_returns_unique_trials(name):
    trials = trials_as_authors(name, "small")
    assert len({trial.key for trial in trials}) == len(trials) > 0
