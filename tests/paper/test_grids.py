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


def test_every_experiment_has_its_place():
    assert set(EXPERIMENTS) == set(_FOUND)


@pytest.mark.parametrize("budget", get_args(Budget))
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_grid_names_what_there_is_and_nothing_twice(name, budget):
    trials = EXPERIMENTS[name].trials(budget, None)
    assert len({trial.key for trial in trials}) == len(trials) > 0
    for trial in trials:
        assert trial.dataset in DATASETS and trial.protocol in PROTOCOLS
        assert trial.system in {**SYSTEMS, **TABLES} or is_computed(trial.system)
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
    trials = settings("counterfactuals")
    assert {trial.training["max_steps"] for trial in trials} == {25_000}
    published = [trial for trial in trials if trial.model["invariance"] == "listing"]
    assert {trial.model["alpha"] for trial in published} == {0, 64, 128, 192}
    assert {trial.model["alpha"] for trial in trials if trial not in published} == {"auto"}
    frozen = [decoder for trial in trials if not (decoder := trial.training["decoder"]).get("joint")]
    how = {"lr": 1e-4, "batch_size": 2048, "weight_decay": 0.01, "plan_kwargs": {"lr_decay": False}}
    assert len(frozen) == 15 and all(decoder == {"max_steps": 25_000, "width": 256} | how for decoder in frozen)


@pytest.mark.parametrize("budget", get_args(Budget))
def test_counterfactuals_of_the_ivae_are_of_the_one_beside_other_systems(budget):
    """At one rate; what it is and how it learns is the same."""
    trials = settings("counterfactuals", budget, "iVAE")
    assert len({trial.seed for trial in trials}) == len(trials) == (1 if budget == "smoke" else 3)
    beside = [
        (trial.seed, trial.data, trial.model, trial.training) for trial in settings("cmnist-systems", budget, "iVAE")
    ]
    assert all((trial.seed, trial.data, trial.model, trial.training) in beside for trial in trials)


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


def test_ablations_change_one_thing_at_a_time():
    trials = cmnist_ablations("small", 1)
    base = trials[0]
    for trial in trials[1:]:
        before, after = {**base.model, **base.training}, {**trial.model, **trial.training}
        changed = {name for name in before if before[name] != after[name]}
        assert len(changed) == 1 or changed == {"style_target", "alpha"}
    assert {trial.model["style_target"] for trial in trials} == {"ye", "e", None}


def test_a_single_block_is_a_curve_over_alpha_with_each_encoder_of_the_paper():
    """Appendix: ten seeds; of Camelyon17 with ResNet-18 both blocks, too."""
    for name, encoders in (("cmnist", ["resnet18"]), ("camelyon17", ["densenet121", "resnet18"])):
        trials = settings(f"{name}-ablations")
        assert {t.seed for t in trials} == set(range(10))
        curves = {(t.model["encoder"], t.model["style_target"], t.model["alpha"]) for t in [*trials, *settings(name)]}
        assert set(product(encoders, ("ye", None), (0.0, 64.0, 128.0, 192.0))) <= curves


def test_colored_mnist_and_camelyon17_have_the_paper_s_space():
    """Appendix of the paper, table of the search space; five epochs of Camelyon17 are no epochs of Colored MNIST."""
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
        # the paper has one rate of latent-variable models
        (ivae,) = {trial.training["lr"] for trial in trials if trial.system == "iVAE"}
        assert ivae == 1e-4
        # section 4.1 selects rate and weight decay of SCBD, too
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
def test_domains_have_the_systems_of_their_table(grid):
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
def test_erm_of_a_sweep_is_that_of_the_table(sweep, systems):
    """At the paper's budget there is one space, and a run answers for both."""
    clouds = [{trial.key for trial in grid("paper", None) if trial.system == "ERM"} for grid in (sweep, systems)]
    assert clouds[0] == clouds[1]


def test_small_runs_are_as_many_as_were_run():
    systems = {*MODEL_SPACE, "SCBD", "random encoder", "pixel PCA"}
    assert {trial.system for trial in cmnist_systems("small", 1)} == systems
    assert len(cmnist_systems("small", None)) == 102


def test_controls_and_erm_go_with_every_sweep():
    trials = cmnist("small", None)
    control = [trial for trial in trials if trial.system == "random encoder"]
    assert len(control) == 5 and all(trial.training["lr"] == 0 for trial in control)
    pixels = [trial for trial in trials if trial.system == "pixel PCA"]
    assert [trial.seed for trial in pixels] == list(range(5))
    erm = [trial for trial in trials if trial.system == "ERM"]
    assert {trial.training["lr"] for trial in erm} == {1e-4, 1e-3, 1e-2}
    assert {trial.training["batch_size"] for trial in erm} == {32}


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


def test_pairs_differ_in_who_meets_whom_alone():
    trials = screen_neighbours("small", None)
    assert len(trials) == 10
    for any_cells, stretches in zip(trials[::2], trials[1::2], strict=True):
        assert (any_cells.seed, any_cells.data, any_cells.model) == (stretches.seed, stretches.data, stretches.model)
        assert {**any_cells.training, "neighbours": True} == dict(stretches.training)
        assert not any_cells.training["neighbours"]


def test_every_system_is_trained_in_every_split():
    trials = new_plates("small", None)
    assert {trial.data["fold"] for trial in trials} == set(range(5))
    of_one = [trial for trial in trials if trial.data["fold"] == 0]
    assert [trial.system for trial in of_one] == ["SCBD", "SCBD", "SCBD", "ERM"]
    asked = [(trial.model.get("alpha", "auto"), trial.model.get("standardize_by", "auto")) for trial in of_one]
    assert asked == [("auto", "auto"), (0.0, "auto"), ("auto", None), ("auto", "auto")]
    assert {trial.data["n_wells"] // trial.data["plate_wells"] for trial in trials} == {6}
    assert len(new_plates_cpjump1("small", None)) == 10


def test_everything_that_is_trained_stands_beside_every_correction_on_the_same_cells():
    trials = screen_rivals("small", None)
    assert len({str(trial.data) for trial in trials}) == 1 and len({trial.seed for trial in trials}) == 3
    systems = {trial.system for trial in trials}
    assert {"ERM", "CORAL", "DANN", "VAE", "iVAE", "mcVAE", "SCBD", "random encoder", "pixel PCA", "obsm"} <= systems
    assert {f"pixel PCA, {c}" for c in ("ComBat", "Harmony", "sphering", "TVN", "WCCN", "LDA", "PLDA")} <= systems
    trained = [trial for trial in trials if trial.system in SYSTEMS]
    assert {trial.model["standardize_by"] for trial in trained} == {"auto"}  # the same inputs
    ours = [trial.model["alpha"] for trial in trials if trial.system == "SCBD" and trial.seed == 0]
    assert ours == [0, "auto", 0.05]
    assert trials[0].data["n_plate_maps"] > 1 and trials[0].data["well_imbalance"] > 0


def authors(name: str, budget: Budget = "paper"):
    return as_authors(name, EXPERIMENTS[name].trials(budget, 1))


def test_25_000_of_their_steps_are_12_500_batches_with_two_validations():
    trials = [trial for trial in authors("cmnist") if trial.system == "SCBD"]
    assert {trial.training["max_steps"] for trial in trials} == {12_500}
    assert {trial.training["validate_every"] for trial in trials} == {4992}
    assert all(trial.data == {"protocol": "authors"} and trial.training["load_best"] for trial in trials)
    assert {trial.training["max_steps"] for trial in authors("funk22") if trial.system == "SCBD"} == {75_000}


def test_what_has_one_optimiser_or_is_never_trained_is_as_long_as_it_was():
    ours = {trial.system: trial for trial in EXPERIMENTS["camelyon17-systems"].trials("paper", 1)}
    theirs = {trial.system: trial for trial in authors("camelyon17-systems")}
    for system in set(ours) - {"SCBD"}:
        assert theirs[system].key == ours[system].key, system
    assert theirs["SCBD"].training["load_best"] and not ours["SCBD"].training["load_best"]


def test_their_digits_are_one_data_set():
    """A part of them is not; an oracle learns from white ones."""
    assert {trial.data["protocol"] for trial in authors("cmnist", "smoke")} == {"authors"}
    oracles = [trial.data for trial in authors("cmnist-variance") if trial.system == "oracle"]
    assert oracles == [{"colored": False, "protocol": "authors"}]
    with pytest.raises(ValueError, match="cmnist-map varies n_environments"):
        authors("cmnist-map", "smoke")
    with pytest.raises(ValueError, match="cpjump1"):
        authors("cpjump1")


@pytest.mark.parametrize("name", ["camelyon17", "pacs-systems", "screen", "screen-systems", "funk22", "cmnist-systems"])
def test_every_experiment_of_the_paper_has_it(name):
    trials = authors(name, "small")
    assert len({trial.key for trial in trials}) == len(trials) > 0
