"""Feature tables of real plates and cells: what is trained beside what is computed, on what neither has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from paper.grids.shared import (
    TODAYS_INPUTS,
    Budget,
    Experiment,
    seeds_of,
)
from paper.reports import (
    Column,
    table,
    value_of,
)
from paper.trials import Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

FOLDS = {"smoke": 1, "small": 5, "paper": 5}
_INNER = {"smoke": 1, "small": 2, "paper": 3}

# corrections as they are published, or as they did best on training plates in a pilot; cpjump1-settings looks again
_RIVALS: list[tuple[str, dict[str, Any]]] = [
    ("features", {}),
    ("scaled", {}),
    ("standardised", {"on_controls": True}),
    ("standardised", {"on_controls": False}),
    ("sphering", {"regularization": 1.0}),
    ("sphering", {"regularization": 30.0}),
    ("TVN", {}),
    ("WCCN", {"regularization": 3.0}),
    ("WCCN", {"regularization": 3.0, "by_position": True}),
    ("LDA", {}),
    ("PLDA", {}),
    ("PLDA", {"by_position": True}),
    ("ComBat", {}),
    ("Harmony", {}),
    ("Harmony", {"on": "PLDA", "n_components": None}),
]
# what each part of SCBD's default contributes
_WITHOUT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"max_steps": 1, "lr": 0.0}),
    ({"whitening_kwargs": {"position_weight": 0.0}}, {}),
    ({"whitening": "within"}, {}),
    ({"whitening": "lda"}, {}),
    ({"whitening": None}, {}),
    ({"encoder": "mlp"}, {}),
    ({"encoder": "mlp", "whitening": "plda"}, {}),
    ({"alpha": 0.0}, {}),
    ({"alpha": 0.1}, {}),
    ({"smoothing": 0.5}, {}),
    ({}, {"max_steps": 1000}),
]
_CLASSIFIERS = ("ERM", "DANN")
# settings that a row of a table tells, where they were asked for
_TOLD = (
    *("on_controls", "regularization", "by_position", "on", "n_components"),
    *("standardize_by", "encoder", "whitening", "whitening_kwargs"),
    *("alpha", "smoothing", "lr", "max_steps"),
)

PROFILE_SCORES = {
    "replicates seen": Column("seen, new plates", digits=3),
    "replicates unseen": Column("unseen, new plates", digits=3),
    "replicates unseen, all plates": Column("unseen, all plates", digits=3),
    "floor": Column("floor", digits=3),
    "floor-corrected": Column("floor-corrected", digits=3),
    "across positions": Column("across positions", digits=3),
    "mechanism": Column("mechanism", digits=3),
    "target": Column("target", digits=3),
    "y across e": Column("y across e", digits=3),
    **{name: Column(name, digits=3) for name in ("e, linear", "e, quadratic", "e, neighbours")},
    # of wells that were not learned from
    **{f"{name}, new": Column(f"{name}, new", digits=3) for name in ("e, linear", "e, quadratic", "e, neighbours")},
    "seconds": Column("s", digits=1),
}


def cpjump1(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Wells of CPJUMP1 as features: SCBD and corrections on compounds and plates that were held out."""
    seeds = range(seeds_of(n_seeds, budget, 3, 3))
    trials = []
    for fold in range(FOLDS[budget]):
        trials += [_wells(system, 0, fold, model, {}) for system, model in _RIVALS]
        trained = ("SCBD", *_CLASSIFIERS)
        trials += [_wells(name, seed, fold, TODAYS_INPUTS, {}) for name in trained for seed in seeds]
    return trials


def cpjump1_ablations(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Wells of CPJUMP1: what whitening, depth, alpha, smoothing and length each contribute."""
    seeds = range(seeds_of(n_seeds, budget, 1, 3))
    return [
        _wells("SCBD", seed, fold, model, training)
        for fold in range(FOLDS[budget])
        for model, training in _WITHOUT
        for seed in seeds
    ]


def cpjump1_settings(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Wells of CPJUMP1: settings compared on training plates and compounds alone."""
    grid: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("features", {}, {})]
    for strength in (1.0, 3.0, 30.0):
        grid += [("sphering", {"regularization": strength}, {}), ("WCCN", {"regularization": strength}, {})]
        grid += [("LDA", {"regularization": strength}, {})]
        for by_position in (False, True):
            grid += [("PLDA", {"regularization": strength, "by_position": by_position}, {})]
    grid += [("SCBD", {}, {"max_steps": 1, "lr": 0.0})]  # the map that it starts from
    for lr in (1e-4, 5e-4):
        for steps in (50, 200):
            grid += [("SCBD", {"alpha": alpha}, {"max_steps": steps, "lr": lr}) for alpha in ("auto", 0.1)]
    return [
        _wells(system, 0, fold, model, training, inner=inner)
        for fold in range(min(3, FOLDS[budget]))
        for inner in range(_INNER[budget])
        for system, model, training in grid
    ]


def breinig2015(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Single cells of Breinig et al. as features: targets read in one replicate by what another one taught."""
    seeds = range(seeds_of(n_seeds, budget, 3, 3))
    rivals: Sequence[tuple[str, dict[str, Any]]] = [
        ("features", {}),
        ("standardised", {}),
        ("WCCN", {}),
        ("LDA", {"n_components": 16}),
        ("PLDA", {}),
        ("ComBat", {}),
        ("Harmony", {"n_components": None}),
    ]
    learned: Sequence[tuple[str, dict[str, Any]]] = [
        ("SCBD", {}),
        ("SCBD", {"alpha": 0.0}),
        ("ERM", {}),
        ("DANN", {}),
    ]
    trials = []
    for fold in range(FOLDS[budget]):
        trials += [_cells(system, 0, fold, model) for system, model in rivals]
        trials += [_cells(system, seed, fold, model) for system, model in learned for seed in seeds]
    return trials


def _wells(system: str, seed: int, fold: int, model: dict[str, Any], training: dict[str, Any], **data: Any) -> Trial:
    return Trial("unseen perturbations", "cpjump1", system, seed, {"fold": fold} | data, model, training)


def _cells(system: str, seed: int, fold: int, model: dict[str, Any]) -> Trial:
    return Trial("labels across environments", "breinig2015", system, seed, {"fold": fold}, model, {})


def profiles_report(frame: pd.DataFrame, out: Path) -> str:
    """Mean and standard deviation over folds and seeds, a line a system and its settings."""
    return table(with_settings(frame), ["system"], PROFILE_SCORES)


def with_settings(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the settings that were given added to the name of their system."""
    settings = [name for name in _TOLD if name in frame]
    return frame.assign(system=[_named(row, settings) for row in frame.to_dict("records")])


def _named(row: dict[str, Any], settings: Iterable[str]) -> str:
    """The system, and what was asked of it."""
    told: dict[str, Any] = {}
    for name in settings:
        value = row[name]
        if value is None or value == value:  # NaN: nothing was asked
            told |= value if isinstance(value, dict) else {name: "none" if value is None else value}
    return ", ".join([row["system"], *(f"{name} {value_of(value)}" for name, value in told.items())])


EXPERIMENTS = {
    "cpjump1": Experiment(cpjump1, profiles_report),
    "cpjump1-settings": Experiment(cpjump1_settings, profiles_report),
    "cpjump1-ablations": Experiment(cpjump1_ablations, profiles_report),
    "breinig2015": Experiment(breinig2015, profiles_report),
}
