"""Batch correction of screens: biology up, batch down."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd

from paper import plots
from paper.grids.shared import (
    OUR_ALPHA,
    OUR_ALPHAS,
    OURS,
    SCREENS,
    SIZES,
    TRAINING,
    UNEQUAL_WELLS,
    Budget,
    Experiment,
    System,
    new_cells_settings,
    new_cells_trial,
    seeds_of,
    trials_of,
)
from paper.reports import (
    CORRECTION,
    HEALTH,
    Column,
    by_alpha,
    by_variant,
    cost_of_choosing,
    markdown,
    mean_sd,
    names_of,
    table,
)
from paper.scores import curves_of
from paper.systems import UNTRAINED
from paper.trials import Trial
from scbd import pl
from scbd._shared.files import save_figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# all cells are read where they lie, from a screen that knows their guides
_FUNK22: dict[str, dict[str, Any]] = {
    "smoke": {"n_cells": 5000},
    "small": {"n_cells": 200_000},
    "paper": {"guides": True},
}
_CELLPROFILER = {"y_key": "gene", "e_key": "well", "control": "nontargeting", "n_components": 64}


def screen(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The simulated screen: complexes found, wells not (the paper's protocol, where the truth is known)."""
    return _correction("simulated_screen", budget, (0, 1, 8), SCREENS[budget], seeds_of(n_seeds, budget, 3, 3))


def screen_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen with wells of unequal size, with our invariance loss at several alphas."""
    model, training = new_cells_settings(budget)
    return [
        new_cells_trial(seed, SCREENS[budget] | UNEQUAL_WELLS, model | OURS | {"alpha": alpha}, training)
        for seed in range(seeds_of(n_seeds, budget, 5, 5))
        for alpha in OUR_ALPHAS
    ]


def screen_variance(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen with wells of unequal size: our form of invariance beside the published one."""
    model, training = new_cells_settings(budget)
    model |= {"style_target": None}
    if budget == "small":  # the statistic is sharper in larger batches, at the same price
        training |= {"batch_size": 1024}
    data = SCREENS[budget] | UNEQUAL_WELLS
    data["n_cells"] *= 5  # so many that few are known by heart; a fifth is not learned from
    systems = [{"alpha": alpha} for alpha in (0.0, 1.0, 8.0)]
    systems += [OURS | {"alpha": alpha} for alpha in (0.0, OUR_ALPHA, "auto")]
    return [
        new_cells_trial(seed, data, model | system, training)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for system in systems
    ]


def funk22(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The screen of Funk et al.: CORUM and wells, at the alphas of the paper and of its code (paper, figure 4)."""
    return _correction("funk22", budget, (0, 1, 8), _FUNK22[budget], seeds_of(n_seeds, budget, 3, 3), image_size=64)


def funk22_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The screen of Funk et al.: CellProfiler, latent-variable models and SCBD (paper, figure 4).

    CellProfiler's features are those of the screen, ``obsm["X_cellprofiler"]``; they come first, so that their absence
    is said before anything is trained.
    """
    data, training = _FUNK22[budget], SIZES[budget][1] | TRAINING | _split(budget)
    steps, size = {"smoke": (40, 128), "small": (400, 256), "paper": (0, 1024)}[budget]
    if budget == "paper":  # three epochs, as of Wang et al. (2023), whose divergences warm up over 4,500 batches
        training = {key: value for key, value in training.items() if key != "max_steps"} | {"max_epochs": 3}
    else:
        training |= {"max_steps": steps}
    training |= {"batch_size": size, "perturbations_per_batch": None}
    latent = {"n_latent": 64, "image_size": 64, "kl_warmup_steps": 4500 if budget == "paper" else steps // 2}
    # a batch is of pairs; the decoder is told the well
    pairs = {"n_environment_latent": 32}
    systems: list[System] = [
        ("CellProfiler", _CELLPROFILER, {}),
        ("VAE", latent, training),
        ("iVAE", latent, training),
        ("mcVAE", latent | pairs, training | {"batch_size": 2 * size}),
    ]
    n = seeds_of(n_seeds, budget, 3, 3)
    return trials_of("batch correction", "funk22", systems, data, n) + funk22(budget, n_seeds)


def funk22_cellprofiler(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The screen of Funk et al., measured by CellProfiler: a table of features a cell (paper, figure 4)."""
    data = {key: value for key, value in _FUNK22[budget].items() if key != "guides"}
    systems: list[System] = [("CellProfiler", _CELLPROFILER, {})]
    return trials_of("batch correction", "funk22_cellprofiler", systems, data, seeds_of(n_seeds, budget, 3, 3))


def _split(budget: Budget) -> dict[str, Any]:
    """Of Funk et al. at the paper's budget: 15 % of cells are neither learned from nor validated on."""
    return {"train_size": 0.83, "validation_size": 0.02} if budget == "paper" else {}


def _correction(
    dataset: str, budget: Budget, alphas: Sequence[float], data: dict[str, Any], n_seeds: int, **changes: Any
) -> list[Trial]:
    """Pixels, SCBD at several alphas, and as its control the encoder that was never trained."""
    settings, training = SIZES[budget]
    model = settings | {"n_latent": 64, "style_target": "e"} | changes
    training = training | TRAINING
    if budget == "paper" and dataset == "funk22":
        training |= {"max_steps": 150_000, "perturbations_per_batch": 256} | _split(budget)
    systems: list[System] = [
        ("pixel PCA", {"n_components": 64}, {}),
        ("random encoder", model | {"alpha": 0.0}, training | UNTRAINED),
        *(("SCBD", model | {"alpha": float(alpha)}, training) for alpha in alphas),
    ]
    return trials_of("batch correction", dataset, systems, data, n_seeds)


def correction_report(frame: pd.DataFrame, out: Path) -> str:
    """A table, the paper's figure of two panels, and where rows have them curves of precision and recall."""
    frame = by_alpha(frame) if "alpha" in frame else frame
    for column in ("invariance", "system"):
        if column in frame:
            frame = frame.sort_values(column, ascending=column != "system", kind="stable")
    named = by_variant(frame.assign(name=names_of(frame)), CORRECTION | HEALTH)
    order = list(named["name"].unique())
    long = named.melt("name", [c for c in CORRECTION if c in named], "metric", "value").dropna()
    chance = {"e_probe_f1": named["e_probe_chance_f1"].mean()} if "e_probe_chance_f1" in named else {}
    long = long.rename(columns={"name": "representation"}).assign(key="", chance=long["metric"].map(chance))
    long = long.sort_values("representation", key=lambda names: names.map(order.index), kind="stable")
    save_figure(pl.benchmark(long)[0].figure, out / "batch_correction.png")
    if curves := curves_of(named):
        ax = pl.relationship_curve(curves)
        ax.set(title="known relations, both tails of 80 to 100 percent")
        plots.save_axes(ax, out / "precision_recall.png")
    return table(named, ["name"], CORRECTION | HEALTH)


def new_cells_report(frame: pd.DataFrame, out: Path) -> str:
    """The same for a sweep of alpha on new cells, and what choosing it by their perturbation costs in biology."""
    score = {"ins": "y_probe_accuracy", "outs": "relationship_average_precision"}
    return correction_report(frame, out) + cost_of_choosing(frame, **score, what="average precision")


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


EXPERIMENTS = {
    "screen": Experiment(screen, correction_report),
    "screen-alphas": Experiment(screen_alphas, new_cells_report),
    "screen-variance": Experiment(screen_variance, correction_report),
    "funk22": Experiment(funk22, correction_report),
    "funk22-systems": Experiment(funk22_systems, correction_report),
    "funk22-cellprofiler": Experiment(funk22_cellprofiler, correction_report),
    "screen-neighbours": Experiment(screen_neighbours, neighbours_report),
}
