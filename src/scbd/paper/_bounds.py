"""Our form of invariance between an encoder that was never trained and an oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scbd.paper._budgets import OUR_ALPHA, OURS, generalization_settings, generalization_trial, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._tables import ACCURACIES, HEALTH, names_of, table
from scbd.workflows import UNTRAINED

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial


def cmnist_variance(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with our form of invariance, between a random encoder and an oracle."""
    model, training = generalization_settings(budget)
    model |= OURS
    training |= {"load_best": False}
    if budget == "small":  # the statistic is sharper in larger batches, at the same price
        training |= {"batch_size": 1024, "max_steps": 1500}
    trials = []
    for seed in range(seeds_of(n_seeds, budget, 10, 3)):
        trials.append(generalization_trial("colored_mnist", budget, seed, model | {"alpha": "auto"}, training))
        if seed < 3:
            ours, free = model | {"alpha": OUR_ALPHA}, model | {"alpha": 0.0}
            trials += [
                generalization_trial("colored_mnist", budget, seed, ours, training),
                generalization_trial("colored_mnist", budget, seed, free, training | UNTRAINED, "random encoder"),
                generalization_trial("colored_mnist", budget, seed, free, training, "oracle", colored=False),
            ]
    return trials


def bounded_report(frame: pd.DataFrame, out: Path) -> str:
    """Accuracy between the two: a table."""
    systems = ["random encoder", "SCBD", "oracle"]
    frame = frame.sort_values("system", key=lambda names: names.map(systems.index), kind="stable")
    return table(frame.assign(name=names_of(frame)), ["name"], ACCURACIES | HEALTH)


EXPERIMENTS = {"cmnist-variance": Experiment(cmnist_variance, bounded_report)}
