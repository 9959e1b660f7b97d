"""New cells and genes of a hard screen: what is trained, and corrections, each also standardised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd import datasets, pl
from scbd._outputs import save_figure
from scbd.paper._budgets import OURS, SIZES, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._tables import HEALTH, Column, names_of, table
from scbd.paper._variants import by_variant
from scbd.workflows import CHANCE, UNTRAINED, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget

# at the strength of HARD_SCREEN, small encoders find next to nothing: few systems could be told apart
RIVAL_SCREEN = datasets.HARD_SCREEN | {"n_complexes": 30, "effect_size": 0.7, "active": 0.7}
_CELLS: dict[str, dict[str, Any]] = {
    "smoke": {"n_cells": 4_000},
    "small": {"n_cells": 30_000},
    "paper": {"n_cells": 200_000, "image_size": 64},
}
# what principal components are followed by, in turn
_CORRECTIONS = (
    "centred",
    "standardised on controls",
    "ComBat",
    "Harmony",
    "sphering",
    "TVN",
    "WCCN",
    "LDA",
    "PLDA",
    "standardised, sphering",
    "standardised, WCCN",
    "standardised, LDA",
    "standardised, PLDA",
    "TVN, WCCN",
)
# components have one unit: no further ones are taken of them
_SETTINGS: dict[str, dict[str, Any]] = {"Harmony": {"Harmony": {"n_components": None}}}
RIVAL_SCORES = {
    "relationship_average_precision": Column("average precision", digits=3),
    "relationship_map_seen": Column("complexes, seen genes", digits=3),
    "relationship_map_unseen": Column("complexes, unseen genes", digits=3),
    "y_probe_f1": Column("gene F1", digits=3),
    "y_probe_auroc": Column("gene AUROC", digits=3),
    "y_probe_unseen_auroc": Column("unseen gene AUROC", digits=3),
    "e_probe_f1": Column("well F1, linear", digits=3),
    "e_probe_quadratic_f1": Column("well F1, quadratic", digits=3),
    "e_probe_neighbours_f1": Column("well F1, neighbours", digits=3),
    "ilisi": Column("iLISI", digits=3),
}
_PROBES = {
    "e_probe_f1": "linear probe",
    "e_probe_quadratic_f1": "quadratic probe",
    "e_probe_neighbours_f1": "neighbours",
}


def screen_rivals(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells and unseen genes of a hard screen: every system, as it is and standardised, and every correction."""
    small, contrastive, training = _settings(budget)
    # decoders are slow: twice the time of a contrastive run at a fifth of its images, at the small budget
    steps, size = {"smoke": (20, 64), "small": (400, 256), "paper": (training["max_steps"], 1024)}[budget]
    bound = training | {"max_steps": steps, "batch_size": size}
    warm_up = {"kl_warmup_steps": steps // 2}
    systems: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("obsm", {"obsm_key": "X_oracle"}, {}),
        ("pixel PCA", {"n_components": 64}, {}),
        *((name, model, {}) for name, model in corrected_pixels(_CORRECTIONS)),
        ("random encoder", contrastive | {"alpha": 0.0}, training | UNTRAINED),
        ("ERM", small, training),
        ("CORAL", small | {"penalty": 1.0}, training),
        ("DANN", small | {"penalty": 1.0}, training),
        ("VAE", {"n_latent": 64}, bound),
        ("iVAE", {"n_latent": 64}, bound),
        ("mcVAE", {"n_latent": 64} | warm_up, bound),
        *(("SCBD", contrastive | {"alpha": alpha}, training) for alpha in (0.0, 0.003, "auto")),
    ]
    return _trials(systems, RIVAL_SCREEN | _CELLS[budget], range(seeds_of(n_seeds, budget, 3, 3)))


def corrected_pixels(corrections: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Systems: principal components of the pixels, followed by each of these corrections; and their settings."""
    return [(f"pixel PCA, {name}", {"n_components": 64} | _SETTINGS.get(name, {})) for name in corrections]


def screen_wells(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The same screen with 384 wells on 16 plates, a twelfth of the cells in each: SCBD without and with invariance."""
    _, contrastive, training = _settings(budget)
    systems: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("obsm", {"obsm_key": "X_oracle"}, {}),
        ("pixel PCA", {"n_components": 64}, {}),
        ("pixel PCA, TVN", {"n_components": 64, "e_key": "plate"}, {}),  # most wells have no two controls
        *(("SCBD", contrastive | {"alpha": alpha}, training) for alpha in (0.0, "auto")),
    ]
    wells = {"n_wells": 384, "plate_wells": 24}
    return _trials(systems, RIVAL_SCREEN | _CELLS[budget] | wells, range(seeds_of(n_seeds, budget, 3, 3)))


def _settings(budget: Budget) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of a model of any kind, of a contrastive one, and of training."""
    encoder, training = SIZES[budget]
    small = {"encoder": encoder["encoder"]}
    return small, small | OURS | {"n_latent": 64}, training | {"weight_decay": 0.01, "load_best": False}


def _trials(
    systems: Iterable[tuple[str, dict[str, Any], dict[str, Any]]], screen: dict[str, Any], seeds: Iterable[int]
) -> list[Trial]:
    return [
        Trial("new cells and perturbations", "simulated_screen_fold", system, seed, screen, model, how)
        for seed in seeds
        for system, model, how in systems
    ]


def rivals_report(frame: pd.DataFrame, out: Path) -> str:
    """A line a system and correction, the best that there can be first, chance last; genes against wells, two figures.

    One of what is trained and one of corrections of pixels; a line joins each embedding to itself once standardised.
    """
    import matplotlib.pyplot as plt

    frame = frame.assign(name=names_of(frame))
    frame["name"] = frame["name"].replace("obsm", "truth")
    lines = by_variant(frame, RIVAL_SCORES | HEALTH)
    drawn = lines[lines["variant"] != CHANCE]
    drawn = drawn.assign(system=frame.set_index("key")["name"].reindex(drawn["key"]).to_numpy(), setting=drawn["name"])
    pixels = drawn["system"].str.startswith("pixel PCA")
    for name, part in {"systems": drawn[~pixels], "corrections": drawn[pixels]}.items():
        if part.empty:
            continue
        figure = plt.figure(figsize=(5 * len(_PROBES) + 2, 4), layout="constrained")
        for ax, (probe, label) in zip(figure.subplots(1, len(_PROBES), sharey=True), _PROBES.items(), strict=True):
            pl.trade_off(part, probe, "relationship_map_unseen", traced=list(part["system"].unique()), ax=ax)
            ax.set(xlabel=f"F1 of the well, {label} (lower is better)", ylabel="complexes of unseen genes")
            if probe != list(_PROBES)[-1]:
                ax.get_legend().remove()
        save_figure(figure, out / f"{name}.png")
    return table(lines, ["name"], RIVAL_SCORES | HEALTH)


EXPERIMENTS = {
    "screen-rivals": Experiment(screen_rivals, rivals_report),
    "screen-wells": Experiment(screen_wells, rivals_report),
}
