"""Pictures of what a gene does to a cell in its own well, beside the truth of simulated screens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd.paper._budgets import OURS, SCREENS, SIZES, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._rivals import RIVAL_SCREEN
from scbd.paper._tables import HEALTH, Column, table
from scbd.paper._variants import by_variant
from scbd.workflows import Trial

if TYPE_CHECKING:
    from pathlib import Path

    from scbd.paper._budgets import Budget

_SCORES = {
    "correlation": Column("correlation with the truth", digits=3),
    "error": Column("squared error, share", digits=3),
}
# of encoders and decoder, which needs longer: on the easy screen 400 steps gave a correlation of 0.58, 1,600 of 0.82
_STEPS = {"smoke": (10, 10), "small": (400, 1600), "paper": (25_000, 25_000)}


def effect_pictures(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Two simulated screens, an easy and a hard one, without and with invariance; decoders trained afterwards."""
    model, training = SIZES[budget]
    steps, decoder_steps = _STEPS[budget]
    how: dict[str, Any] = training | {"max_steps": steps, "batch_size": min(256, training["batch_size"])}
    how |= {"weight_decay": 0.01, "load_best": False, "decoder": {"max_steps": decoder_steps, "width": 32}}
    easy = SCREENS[budget]
    hard = RIVAL_SCREEN | {"n_cells": easy["n_cells"], "image_size": easy["image_size"]}
    blocks = OURS | {"style_target": "e", "encoder": model["encoder"], "n_latent": 64}
    return [
        Trial("effect pictures", "simulated_screen", "SCBD", seed, screen, blocks | {"alpha": alpha}, how)
        for screen in (easy, hard)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for alpha in (0.0, "auto")
    ]


def effect_pictures_report(frame: pd.DataFrame, out: Path) -> str:
    """A line a screen, an alpha and a way to draw effects."""
    is_hard = frame.get("interaction", pd.Series(0.0, frame.index)).fillna(0) > 0
    frame = frame.assign(screen=np.where(is_hard, "hard", "easy"))
    lines = by_variant(frame.assign(name="alpha " + frame["alpha"].astype(str)), _SCORES)
    by = ["screen", "name"]
    return table(lines, by, _SCORES) + "\n\n" + table(frame, ["screen", "alpha"], HEALTH)


EXPERIMENTS = {"effect-pictures": Experiment(effect_pictures, effect_pictures_report)}
