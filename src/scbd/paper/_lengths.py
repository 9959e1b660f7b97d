"""Whether short runs do latent-variable models justice: the same settings, trained for longer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scbd import pl
from scbd._outputs import save_figure
from scbd.paper._budgets import seeds_of
from scbd.paper._chosen import chosen
from scbd.paper._classifiers import cmnist_systems
from scbd.paper._experiment import Experiment
from scbd.paper._systems import screen_systems
from scbd.paper._tables import ACCURACIES, CORRECTION, names_of, table
from scbd.paper._variants import by_variant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial

_LATENT = ("VAE", "iVAE", "mcVAE")
# what is drawn against the steps: of each, the columns that rows have
_DRAWN = {
    "r_c in": "accuracy in distribution",
    "r_c out": "accuracy out of distribution",
    "e from r_c": "environment from $z_c$",
    "relationship_average_precision": "average precision of complexes",
    "e_probe_f1": "F1 of the well",
}


def cmnist_lengths(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: the iVAE at its length in cmnist-systems, and at another."""
    times = {"smoke": (1, 2), "small": (1, 4), "paper": (0.2, 1)}[budget]
    return _at_lengths(cmnist_systems(budget, seeds_of(n_seeds, budget, 3, 3)), times)


def screen_lengths(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen: latent-variable models at their length in screen-systems, and at another."""
    times = {"smoke": (1, 2), "small": (1, 3), "paper": (0.2, 1)}[budget]
    return _at_lengths(screen_systems(budget, seeds_of(n_seeds, budget, 3, 3)), times)


def _at_lengths(trials: Sequence[Trial], times: Sequence[float]) -> list[Trial]:
    """Each trial of a latent-variable model at multiples of its steps, all else as it is (the ramp of the KL, too)."""
    return [
        replace(trial, training={**trial.training, "max_steps": round(factor * trial.training["max_steps"])})
        for trial in trials
        if trial.system in _LATENT
        for factor in times
    ]


def lengths_report(frame: pd.DataFrame, out: Path) -> str:
    """Scores at each length: a table, and a figure of a panel a score; digits at the setting best in distribution."""
    import matplotlib.pyplot as plt

    frame = frame.assign(name=names_of(frame))
    if "r_c in" in frame:
        frame = chosen(frame, ["name", "steps"])
    frame = by_variant(frame, ACCURACIES | CORRECTION)
    frame = frame.sort_values(["name", "steps"], kind="stable")
    drawn = {score: label for score, label in _DRAWN.items() if score in frame}
    figure = plt.figure(figsize=(4 * len(drawn), 3.2), layout="constrained")
    for ax, (score, label) in zip(figure.subplots(1, len(drawn), squeeze=False).flat, drawn.items(), strict=True):
        pl.by_group(frame, "steps", score, "name", ax=ax)
        ax.set(ylabel=label, ylim=(-0.02, 1.02))
    save_figure(figure, out / "lengths.png")
    return table(frame, ["name", "steps"], ACCURACIES | CORRECTION)


EXPERIMENTS = {
    "cmnist-lengths": Experiment(cmnist_lengths, lengths_report),
    "screen-lengths": Experiment(screen_lengths, lengths_report),
}
