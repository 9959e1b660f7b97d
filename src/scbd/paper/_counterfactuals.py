"""Blocks exchanged between coloured digits, and decoded."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd

from scbd.paper._budgets import DATA, generalization_settings, seeds_of
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


def counterfactuals(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: blocks exchanged and decoded (paper, figure 2b), after the encoders and with them."""
    model, training = generalization_settings(budget)
    steps, width = {"smoke": (40, 8), "small": (1000, 32), "paper": (25_000, 256)}[budget]
    decoder: dict[str, Any] = {"max_steps": steps, "width": width}
    # jointly, the encoders go on for as long as their decoder learns
    together = decoder | {"joint": True, "lr": training["lr"], "batch_size": training["batch_size"]}
    data = DATA.get(("colored_mnist", budget), {})
    return [
        Trial(
            "counterfactuals",
            "colored_mnist",
            "SCBD",
            seed,
            data,
            model | {"alpha": alpha},
            training | {"decoder": how},
        )
        for seed, alpha, how in product(range(seeds_of(n_seeds, budget, 3, 3)), (0.0, 10.0), (decoder, together))
    ]


def counterfactual_report(frame: pd.DataFrame, out: Path) -> str:
    """Digits and colours read from pictures with exchanged blocks."""
    together = [bool(decoder.get("joint")) for decoder in frame["decoder"]]
    frame = frame.assign(decoder=pd.Series(together, frame.index).map({True: "with encoders", False: "after"}))
    by = ["alpha", "decoder"]
    frame = frame.sort_values(by, kind="stable")
    return table(frame, by, _SCORES) + "\n\n" + table(frame, by, ACCURACIES | HEALTH)


EXPERIMENTS = {"counterfactuals": Experiment(counterfactuals, counterfactual_report)}
