"""Whether z_c ever leaves the ceiling at the published alpha."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from scbd import pl
from scbd._outputs import save_figure
from scbd.paper._budgets import generalization_settings, generalization_trial, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._tables import ACCURACIES, HEALTH, names_of, table

if TYPE_CHECKING:
    from pathlib import Path

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial


def cmnist_long(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST at the published alpha for long, to see whether z_c ever learns."""
    model, training = generalization_settings(budget)
    training |= {"max_steps": {"smoke": 60, "small": 15_000, "paper": 100_000}[budget], "load_best": False}
    return [
        generalization_trial("colored_mnist", budget, seed, model | {"alpha": 192.0}, training)
        for seed in range(seeds_of(n_seeds, budget, 1, 1))
    ]


def long_report(frame: pd.DataFrame, out: Path) -> str:
    """The course of z_c over a long run; ``runs/`` has the histories."""
    text = table(frame.assign(name=names_of(frame)), ["name", "steps"], ACCURACIES | HEALTH)
    for key, ceiling in zip(frame["key"], frame["ceiling"], strict=True):
        path = out / "runs" / key / "history.csv"
        if path.is_file():
            history = pd.read_csv(path, index_col="step")
            frames = {name: history[[name]].dropna() for name in history}
            save_figure(pl.history(frames, ceiling=ceiling)[0].figure, out / f"{key}.png")
    return text


EXPERIMENTS = {"cmnist-long": Experiment(cmnist_long, long_report)}
