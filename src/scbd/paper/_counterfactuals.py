"""Blocks exchanged between coloured digits, and decoded."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd.paper._budgets import DATA, OURS, generalization_settings, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._tables import ACCURACIES, HEALTH, Column, percent, table
from scbd.workflows import Trial

if TYPE_CHECKING:
    from pathlib import Path

    from scbd.paper._budgets import Budget

_SCORES = {
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
    frame = frame.assign(decoder=pd.Categorical(map(_named, frame["decoder"]), _DECODERS))
    by = ["invariance", "alpha", "decoder"]
    frame = frame.assign(order=frame["alpha"].astype(str)).sort_values(
        ["invariance", "order", "decoder"], kind="stable"
    )
    frame["decoder"] = frame["decoder"].astype(str)
    return table(frame, by, _SCORES) + "\n\n" + table(frame, by, ACCURACIES | HEALTH)


def _named(decoder: dict[str, Any]) -> str:
    """How a decoder was trained."""
    after, alone, with_cycle = _DECODERS
    return after if not decoder.get("joint") else with_cycle if decoder["cycle"] else alone


EXPERIMENTS = {"counterfactuals": Experiment(counterfactuals, counterfactual_report)}
