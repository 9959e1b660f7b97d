"""Whether batches of stretches, which a disk reads fast, teach what batches of any cells teach."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from scbd.paper._budgets import OURS, SCREENS, UNEQUAL_WELLS, new_cells_settings, new_cells_trial, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._tables import CORRECTION, HEALTH, Column, markdown, mean_sd, table

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial

_COMPARED = {
    "relationship_average_precision": Column("average precision", digits=3),
    "y_probe_f1": Column("gene F1", digits=3),
    "e_probe_f1": Column("well F1", digits=3),
}


def screen_neighbours(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen: batches of any cells of a perturbation, and of stretches of neighbours.

    Rows of this screen are in a random order, so that those of a perturbation follow each other as in a screen that was
    written: the two differ in who meets whom, and in nothing else.
    """
    model, training = new_cells_settings(budget)
    model |= OURS | {"alpha": "auto"}
    data = SCREENS[budget] | UNEQUAL_WELLS
    if budget == "small":  # so few cells that each is in 21 batches, where it may meet 149 others
        data |= {"n_cells": 6000}
        training |= {"max_steps": 400, "batch_size": 256}
    training |= {"perturbations_per_batch": training["batch_size"] // 8}
    ways = [training | {"neighbours": neighbours} for neighbours in (False, True)]
    return [
        new_cells_trial(seed, data, model, way) for seed, way in product(range(seeds_of(n_seeds, budget, 5, 5)), ways)
    ]


def neighbours_report(frame: pd.DataFrame, out: Path) -> str:
    """Scores of both ways, and their difference seed by seed."""
    wide = frame.pivot(index="seed", columns="neighbours", values=list(_COMPARED))
    pairs = {score: (wide[score, True] - wide[score, False]).dropna() for score in _COMPARED}
    difference = [mean_sd(pairs[score], column) for score, column in _COMPARED.items()]
    lines = [[column.name for column in _COMPARED.values()], ["---"] * len(_COMPARED), difference]
    frame = frame.sort_values("neighbours", kind="stable")
    frame = frame.assign(cells=frame["neighbours"].map({False: "any", True: "in stretches"}))
    text = table(frame, ["cells"], CORRECTION | HEALTH)
    return f"{text}\n\nIn stretches less any, seed by seed:\n\n{markdown(lines)}"


EXPERIMENTS = {"screen-neighbours": Experiment(screen_neighbours, neighbours_report)}
