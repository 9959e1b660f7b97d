"""Pictures: blocks exchanged between coloured digits and decoded, and what a gene does to a cell in its own well."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paper.grids.comparisons import RIVAL_SCREEN
from paper.grids.shared import (
    DATA,
    OURS,
    SCREENS,
    SIZES,
    Budget,
    Experiment,
    generalization_settings,
    seeds_of,
)
from paper.reports import (
    ACCURACIES,
    HEALTH,
    Column,
    by_variant,
    percent,
    table,
)
from paper.trials import Trial

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from paper.grids.shared import Budget


_EXCHANGED = {
    "digit kept": percent("digit kept"),
    "color moved": percent("colour moved"),
    "shade error": Column("shade error"),
    "digit reconstructed": percent("digit reconstructed"),
    "color reconstructed": percent("colour reconstructed"),
    "mse": Column("squared error", digits=4),
    "mse of the mean image": Column("of the mean image", digits=4),
    "reader": percent("reader on originals"),
}
_DECODERS = ["after", "with encoders, no cycle", "with encoders, cycle"]


def counterfactuals(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: blocks exchanged and decoded (paper, figure 2b), after the encoders and with them."""
    model, training = generalization_settings(budget)
    steps, joint_steps, width = {"smoke": (40, 40, 8), "small": (1000, 600, 32), "paper": (25_000, 25_000, 256)}[budget]
    decoder: dict[str, Any] = {"max_steps": steps, "width": width}
    # jointly, the encoders go on for as long as their decoder learns; in smaller batches, since decoders are slow
    together = decoder | {"max_steps": joint_steps, "joint": True, "weight": 30.0, "lr": training["lr"]}
    together["batch_size"] = min(training["batch_size"], 256)
    decoders = (decoder, together | {"cycle": 0.0}, together | {"cycle": 1.0})
    objectives = ({"alpha": 0.0}, {"alpha": 10.0}, OURS | {"style_target": "ye", "alpha": "auto"})
    data = DATA.get(("colored_mnist", budget), {})
    return [
        Trial(
            "counterfactuals",
            "colored_mnist",
            "SCBD",
            seed,
            data,
            model | objective,
            training | {"decoder": how},
        )
        for seed, objective, how in product(range(seeds_of(n_seeds, budget, 3, 3)), objectives, decoders)
    ]


def counterfactual_report(frame: pd.DataFrame, out: Path) -> str:
    """Digits and colours read from pictures with exchanged blocks."""
    frame = frame.assign(decoder=pd.Categorical(map(_decoder, frame["decoder"]), _DECODERS))
    by = ["invariance", "alpha", "decoder"]
    frame = frame.assign(order=frame["alpha"].astype(str)).sort_values(
        ["invariance", "order", "decoder"], kind="stable"
    )
    frame["decoder"] = frame["decoder"].astype(str)
    return table(frame, by, _EXCHANGED) + "\n\n" + table(frame, by, ACCURACIES | HEALTH)


def _decoder(decoder: dict[str, Any]) -> str:
    """How a decoder was trained."""
    after, alone, with_cycle = _DECODERS
    return after if not decoder.get("joint") else with_cycle if decoder["cycle"] else alone


_EFFECTS = {
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
    lines = by_variant(frame.assign(name="alpha " + frame["alpha"].astype(str)), _EFFECTS)
    by = ["screen", "name"]
    return table(lines, by, _EFFECTS) + "\n\n" + table(frame, ["screen", "alpha"], HEALTH)


EXPERIMENTS = {
    "counterfactuals": Experiment(counterfactuals, counterfactual_report),
    "effect-pictures": Experiment(effect_pictures, effect_pictures_report),
}
