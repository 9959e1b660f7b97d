"""Plates that come later: what adapting to them gives back, beside corrections of the embedding, in five splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd import datasets
from scbd.paper._budgets import OURS, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._profiles import PROFILE_SCORES
from scbd.paper._tables import Column, names_of, table
from scbd.paper._variants import by_variant
from scbd.workflows import Trial

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget

_FOLDS = {"smoke": 1, "small": 5, "paper": 5}
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
_WELLS = {
    name: PROFILE_SCORES[name]
    for name in (
        *("replicates seen", "replicates unseen", "floor-corrected", "across positions", "mechanism"),
        *("e, linear", "e, neighbours", "e, linear, new", "e, neighbours, new"),
    )
}


def new_plates(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Images of a hard screen, a plate left out: SCBD of two norms and without invariance, and ERM."""
    contrastive = {"encoder": "small", "n_latent": 64} | OURS
    systems: list[tuple[str, dict[str, Any]]] = [
        *(("SCBD", contrastive | ({"norm": norm} if norm != "batch" else {})) for norm in ("batch", "instance")),
        ("SCBD", contrastive | {"alpha": 0.0}),
        ("ERM", {"encoder": "small"}),
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
        for fold in range(_FOLDS[budget])
        for seed in range(seeds_of(n_seeds, budget, 1, 3))
        for system, model in systems
    ]


def new_plates_cpjump1(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Wells of CPJUMP1 as features, two plates left out: the linear map, and hidden layers."""
    return [
        Trial("new environments", "cpjump1", "SCBD", seed, {"fold": fold}, model, {})
        for fold in range(_FOLDS[budget])
        for seed in range(seeds_of(n_seeds, budget, 1, 3))
        for model in _ENCODERS
    ]


def transfer_report(frame: pd.DataFrame, out: Path) -> str:
    """A line a system and way to embed new plates."""
    return table(by_variant(frame.assign(name=names_of(frame)), _TRANSFER), ["name"], _TRANSFER)


def wells_report(frame: pd.DataFrame, out: Path) -> str:
    """The same, of wells."""
    named = frame.assign(name=frame["system"] + ", " + frame["encoder"])
    return table(by_variant(named, _WELLS), ["name"], _WELLS)


EXPERIMENTS = {
    "new-plates": Experiment(new_plates, transfer_report),
    "new-plates-cpjump1": Experiment(new_plates_cpjump1, wells_report),
}
