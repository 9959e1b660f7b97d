"""What grids share: sizes of models, trainings and screens at three budgets, and the kinds of trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pandas as pd

from paper.trials import Trial

Budget = Literal["smoke", "small", "paper"]
# a system, arguments of its model, and arguments of its training
System: TypeAlias = tuple[str, dict[str, Any], dict[str, Any]]

# the objective as published; the model's defaults are our own
PUBLISHED: dict[str, Any] = {"invariance": "listing", "smoothing": 0.0}
# those defaults spelled out, so that rows say what they are; z_s is left out, which leaves z_c as it is
OURS: dict[str, Any] = {"invariance": "variance", "smoothing": 2 / 3, "style_target": None}
# today's defaults, which trials that do not name this do not have
TODAYS_INPUTS: dict[str, Any] = {"standardize_by": "auto"}
PUBLISHED_ALPHAS = (0, 64, 128, 192)
OUR_ALPHA = 0.01
OUR_ALPHAS = (0.0, 0.003, 0.01, 0.03, 0.1, "auto")

SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smoke": (PUBLISHED | {"encoder": "small"}, {"max_steps": 40, "batch_size": 256, "lr": 1e-3}),
    "small": (PUBLISHED | {"encoder": "small"}, {"max_steps": 1000, "batch_size": 512, "lr": 1e-3}),
    "paper": (PUBLISHED | {"encoder": "resnet18"}, {"max_steps": 25_000, "batch_size": 2048, "lr": 1e-4}),
}
TRAINING: dict[str, Any] = {"weight_decay": 0.01, "load_best": True}
# of data sets that are not used whole
DATA: dict[tuple[str, str], dict[str, Any]] = {
    ("colored_mnist", "smoke"): {"n_train": 4000, "n_test": 1000},
    ("camelyon17", "smoke"): {"n_per_split": 2000},
    ("camelyon17", "small"): {"n_per_split": 50_000},
    ("rxrx1", "smoke"): {"n_per_split": 2000},
}
SCREENS: dict[str, dict[str, Any]] = {
    "smoke": {"n_cells": 2000, "n_wells": 6, "image_size": 32},
    "small": {"n_cells": 20_000, "n_wells": 34, "image_size": 32},
    "paper": {"n_cells": 20_000, "n_wells": 34, "image_size": 64},
}
UNEQUAL_WELLS = {"well_imbalance": 0.6}
# a fifth is not learned from
NEW_CELLS = {"train_size": 0.8, "validation_size": 0.02}
# what the paper holds fixed for domain generalisation; images in [0, 1], as its own loader leaves them
_GENERALIZATION: dict[str, Any] = {"n_latent": 128, "style_target": "ye", "standardize": False}


def seeds_of(asked: int | None, budget: Budget, small: int, paper: int) -> int:
    """How many: those asked for, or the budget's."""
    return asked if asked is not None else {"smoke": 1, "small": small, "paper": paper}[budget]


def trials_of(
    protocol: str, dataset: str, systems: Iterable[System], data: dict[str, Any], n_seeds: int
) -> list[Trial]:
    """Each system with each seed, seed by seed."""
    systems = list(systems)
    return [
        Trial(protocol, dataset, system, seed, data, model, training)
        for seed in range(n_seeds)
        for system, model, training in systems
    ]


def generalization_settings(budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of model and training, for domain generalisation."""
    model, training = SIZES[budget]
    return _GENERALIZATION | model, training | TRAINING | {"split": "split"}


def generalization_trial(
    dataset: str,
    budget: Budget,
    seed: int,
    model: dict[str, Any],
    training: dict[str, Any],
    system: str = "SCBD",
    **data: Any,
) -> Trial:
    """Learn in some environments, and predict in another."""
    data = DATA.get((dataset, budget), {}) | data
    return Trial("domain generalization", dataset, system, seed, data, model, training)


def pixel_control(dataset: str, budget: Budget, seed: int, **data: Any) -> Trial:
    """What a linear head reads from the pixels: features that know no label, and hold all of the environment."""
    return generalization_trial(dataset, budget, seed, {"n_components": 64}, {}, "pixel PCA", **data)


def new_cells_settings(budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of model and training, for a simulated screen of which some cells are not learned from; the last weights."""
    model, training = SIZES[budget]
    return model | {"n_latent": 64}, training | {"weight_decay": 0.01, "load_best": False} | NEW_CELLS


def new_cells_trial(
    seed: int, data: dict[str, Any], model: dict[str, Any], training: dict[str, Any], system: str = "SCBD"
) -> Trial:
    """Embed the cells of a simulated screen that were not learned from."""
    return Trial("batch correction of new cells", "simulated_screen", system, seed, data, model, training)


@dataclass(frozen=True)
class Experiment:
    """A grid, and what is made of its rows."""

    trials: Callable[[Budget, int | None], list[Trial]]
    report: Callable[[pd.DataFrame, Path], str]

    @property
    def about(self) -> str:
        """One line."""
        return (self.trials.__doc__ or "").splitlines()[0]
