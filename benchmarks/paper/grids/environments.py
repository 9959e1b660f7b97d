"""Environments that nobody wrote down, and plates that come later."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from paper.grids.comparisons import RIVAL_SCORES, screen_of
from paper.grids.generalization import cmnist_alphas
from paper.grids.profiles import FOLDS, PROFILE_SCORES
from paper.grids.shared import (
    OURS,
    SIZES,
    TODAYS_INPUTS,
    Budget,
    Experiment,
    seeds_of,
)
from paper.reports import (
    ACCURACIES,
    Column,
    by_variant,
    names_of,
    table,
)
from paper.trials import Trial
from scbd import datasets

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_AGREEMENT = {"agreement": Column("agreement")}
_DIGITS = {name: ACCURACIES[name] for name in ("r_c in", "r_c out", "z_c in", "z_c out", "e from r_c", "e from z_c")}
_WELLS_SCORES = (
    *("replicates seen", "replicates unseen", "floor-corrected", "across positions", "mechanism"),
    *("e, linear", "e, neighbours", "e, linear, new", "e, neighbours, new"),
)
_NEW_WELLS = {name: PROFILE_SCORES[name] for name in _WELLS_SCORES}
_HIDDEN_WELLS = {name: column for name, column in _NEW_WELLS.items() if name != "replicates unseen"}
_PLATES = 5  # of CPJUMP1, two of which are left out in each fold


def hidden_cmnist(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: colours known, inferred as two and as five environments, and none."""
    trials = [t for t in cmnist_alphas(budget, seeds_of(n_seeds, budget, 3, 5)) if t.model["alpha"] in (0.0, "auto")]
    return _known_and_hidden(trials, {"colored_mnist_hidden": (2, 5)})


def hidden_screen(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """A hard screen: wells known, inferred as so many and as fewer, plates known and the rest inferred, and none."""
    encoder, training = SIZES[budget]
    model = OURS | {"encoder": encoder["encoder"], "n_latent": 64}
    training |= {"weight_decay": 0.01, "load_best": False}
    protocol, dataset = "new cells and perturbations", "simulated_screen_untold"
    trials = [
        Trial(protocol, dataset, "SCBD", seed, screen_of(budget), model | {"alpha": alpha}, training)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for alpha in (0.0, "auto")
    ]
    n_wells = trials[0].data["n_wells"]
    hidden = {"simulated_screen_hidden": (n_wells, 8), "simulated_screen_half_hidden": (n_wells // 2,)}
    return _known_and_hidden(trials, hidden)


def hidden_cpjump1(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Wells of CPJUMP1 as features: plates known, inferred, and none."""
    trials = [
        Trial("unseen perturbations", "cpjump1", "SCBD", seed, {"fold": fold}, {"alpha": alpha}, {})
        for fold in range(FOLDS[budget])
        for seed in range(seeds_of(n_seeds, budget, 1, 3))
        for alpha in (0.0, "auto")
    ]
    return _known_and_hidden(trials, {"cpjump1_hidden": (_PLATES - 2,)})


def _known_and_hidden(trials: Iterable[Trial], hidden: dict[str, tuple[int, ...]]) -> list[Trial]:
    """Each trial; and those with invariance again, without what is known of environments."""
    grid = []
    for trial in trials:
        grid.append(trial)
        if trial.model["alpha"] != 0:
            grid += [
                replace(
                    trial,
                    protocol=f"{trial.protocol}, environments hidden",
                    dataset=dataset,
                    data={**trial.data, "n_inferred": n},
                )
                for dataset, numbers in hidden.items()
                for n in numbers
            ]
    return grid


def _report(scores: dict[str, Column]) -> Any:
    def report(frame: pd.DataFrame, out: Path) -> str:
        """A line a way to know environments."""
        named = frame.assign(environments=[_known_environments(row) for row in frame.to_dict("records")])
        return table(named.sort_values("environments", kind="stable"), ["environments"], scores | _AGREEMENT)

    return report


def _known_environments(row: dict[str, Any]) -> str:
    """What a model knew of environments."""
    if row["alpha"] == 0:
        return "not used (alpha 0)"
    n = row.get("n_inferred")
    if n is None or n != n:  # NaN: none were inferred
        return "known"
    known = "plates known, others inferred" if "half" in row["dataset"] else "inferred"
    return f"{known}, {n:.0f}"


# six plates of six wells, all with the same genes
_SCREEN = datasets.HARD_SCREEN | {
    "n_complexes": 20,
    "genes_per_complex": 4,
    "effect_size": 0.9,
    "active": 0.8,
    "n_wells": 36,
    "n_plate_maps": 1,
}
_CELLS = {"smoke": 2_000, "small": 16_000, "paper": 100_000}
_TRAINING: dict[str, dict[str, Any]] = {
    "smoke": {"max_steps": 10, "batch_size": 128, "lr": 1e-3},
    "small": {"max_steps": 300, "batch_size": 256, "lr": 1e-3},
    "paper": {"max_steps": 10_000, "batch_size": 2048, "lr": 1e-4},
}
_ENCODERS: tuple[dict[str, Any], ...] = ({"encoder": "linear"}, {"encoder": "mlp"})
_TRANSFER = {
    "y AUROC": Column("gene AUROC", digits=3),
    "y F1": Column("gene F1", digits=3),
    "new or old": Column("new or old plate, accuracy", digits=3),
}


def new_plates(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Images of a hard screen, a plate left out: SCBD, without invariance, with inputs as they are, and ERM."""
    contrastive = {"encoder": "small", "n_latent": 64} | OURS
    systems: list[tuple[str, dict[str, Any]]] = [
        *(
            ("SCBD", contrastive | own)
            for own in (TODAYS_INPUTS, TODAYS_INPUTS | {"alpha": 0.0}, {"standardize_by": None})
        ),
        ("ERM", TODAYS_INPUTS | {"encoder": "small"}),
    ]
    return [
        Trial(
            "new environments",
            "simulated_screen_plates",
            system,
            seed,
            _SCREEN | {"n_cells": _CELLS[budget], "fold": fold},
            model,
            _TRAINING[budget] | {"weight_decay": 0.01},
        )
        for fold in range(FOLDS[budget])
        for seed in range(seeds_of(n_seeds, budget, 1, 3))
        for system, model in systems
    ]


def new_plates_cpjump1(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Wells of CPJUMP1 as features, two plates left out: the linear map, and hidden layers."""
    return [
        Trial("new environments", "cpjump1", "SCBD", seed, {"fold": fold}, TODAYS_INPUTS | model, {})
        for fold in range(FOLDS[budget])
        for seed in range(seeds_of(n_seeds, budget, 1, 3))
        for model in _ENCODERS
    ]


def transfer_report(frame: pd.DataFrame, out: Path) -> str:
    """A line a system and way to embed new plates."""
    return table(by_variant(frame.assign(name=names_of(frame)), _TRANSFER), ["name"], _TRANSFER)


def wells_report(frame: pd.DataFrame, out: Path) -> str:
    """The same, of wells."""
    named = frame.assign(name=frame["system"] + ", " + frame["encoder"])
    return table(by_variant(named, _NEW_WELLS), ["name"], _NEW_WELLS)


EXPERIMENTS = {
    "hidden-cmnist": Experiment(hidden_cmnist, _report(_DIGITS)),
    "hidden-screen": Experiment(hidden_screen, _report(RIVAL_SCORES)),
    "hidden-cpjump1": Experiment(hidden_cpjump1, _report(_HIDDEN_WELLS)),
    "new-plates": Experiment(new_plates, transfer_report),
    "new-plates-cpjump1": Experiment(new_plates_cpjump1, wells_report),
}
