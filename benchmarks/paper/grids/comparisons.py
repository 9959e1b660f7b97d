"""Every system beside every other on screens, as it is and corrected; and latent-variable models trained for longer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from paper import plots
from paper.grids.generalization import cmnist_systems
from paper.grids.screens import correction_report
from paper.grids.shared import (
    NEW_CELLS,
    OURS,
    SCREENS,
    SIZES,
    TODAYS_INPUTS,
    UNEQUAL_WELLS,
    Budget,
    Experiment,
    System,
    new_cells_settings,
    seeds_of,
    trials_of,
)
from paper.reports import (
    ACCURACIES,
    CORRECTION,
    HEALTH,
    Column,
    by_variant,
    chosen,
    names_of,
    percent,
    table,
)
from paper.scores import CHANCE
from paper.systems import SYSTEMS, UNTRAINED
from paper.trials import Trial
from scbd import datasets
from scbd._shared.files import save_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path


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
_PROTOCOL, _SCREEN = "new cells and perturbations", "simulated_screen_fold"
_NEW_PLATES = "map of new plates"
# the best that there can be, and pixels as they are
_TRUTH: System = ("obsm", {"obsm_key": "X_oracle"}, {})
_PIXELS: System = ("pixel PCA", {"n_components": 64}, {})
# z_c that shows less of the well than by default
_STRICT = 0.05


def _as_scbd(batch_size: int) -> dict[str, Any]:
    """Batches as SCBD has them; by default, models without a contrastive loss shuffle."""
    return {"perturbations_per_batch": batch_size // 8}


def screen_of(budget: Budget) -> dict[str, Any]:
    """Arguments of the hard screen."""
    return RIVAL_SCREEN | _CELLS[budget]


def screen_rivals(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells and unseen genes of a hard screen: every system, as it is and standardised, and every correction."""
    systems = [_TRUTH, *_rivals(budget)]
    return trials_of(_PROTOCOL, _SCREEN, systems, screen_of(budget), seeds_of(n_seeds, budget, 3, 3))


def _rivals(budget: Budget) -> list[System]:
    """Pixels, as they are and with each correction, and all that is trained."""
    # decoders are slow: twice the time of a contrastive run at a fifth of its images, at the small budget
    steps, size = {"smoke": (20, 64), "small": (400, 256), "paper": (SIZES["paper"][1]["max_steps"], 1024)}[budget]
    bound = {"max_steps": steps, "batch_size": size, "lr": 1e-3, "weight_decay": 0.01, "load_best": False}
    drawn = bound | _as_scbd(size)
    warm_up = {"kl_warmup_steps": steps // 2}
    return [
        _PIXELS,
        *((name, model, {}) for name, model in corrected_pixels(_CORRECTIONS)),
        *_trained(budget, ("ERM", "CORAL", "DANN"), (0.0, "auto", _STRICT), _as_scbd),
        ("random encoder", TODAYS_INPUTS | {"encoder": SIZES[budget][0]["encoder"], "alpha": 0.0}, UNTRAINED),
        ("VAE", TODAYS_INPUTS | {"n_latent": 64}, drawn),
        ("iVAE", TODAYS_INPUTS | {"n_latent": 64}, drawn),
        ("mcVAE", TODAYS_INPUTS | {"n_latent": 64} | warm_up, bound),
    ]


def _rivals_on_plates(budget: Budget) -> list[System]:
    """The same; the protocol itself standardises each of them on controls, too."""
    return [system for system in _rivals(budget) if system[0] != "pixel PCA, standardised on controls"]


def screen_plates(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Two new plates of eight of a hard screen: every system by the protocol of Set-DINO (Yao et al., 2024)."""
    plates = {"n_wells": 48, "n_plate_maps": 1, "n_left_out": 2}
    systems = [_TRUTH, *_rivals_on_plates(budget)]
    screen, n = screen_of(budget) | plates, seeds_of(n_seeds, budget, 3, 3)
    return trials_of(_NEW_PLATES, "simulated_screen_plates", systems, screen, n)


def funk22_plates(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Two new plates of the screen of Funk et al.: every system by the protocol of Set-DINO (Yao et al., 2024)."""
    cells: dict[str, Any] = {} if budget == "paper" else {"n_cells": {"smoke": 5_000, "small": 200_000}[budget]}
    size = {} if budget == "smoke" else {"image_size": 64}
    systems = [(name, model | (size if name in SYSTEMS else {}), how) for name, model, how in _rivals_on_plates(budget)]
    return trials_of(_NEW_PLATES, "funk22_plates", systems, cells, seeds_of(n_seeds, budget, 3, 3))


# what Yao et al. (2024) publish of plates LaC024B and LaC024C of Funk et al., in %
_SET_DINO = {
    "paper: engineered features": (25.9, 33.0, None, 1.62, 19.2),
    "paper: DINO, standardised on controls": (25.4, 33.7, None, 0.64, 21.7),
    "paper: Set-DINO by guide": (28.6, 37.9, None, 3.71, 20.2),
    "paper: Set-DINO by gene": (29.5, 38.3, None, 4.51, 17.3),
}
PLATE_SCORES = {
    "recall at 5": percent("recall, outer 5"),
    "recall at 10": percent("recall, outer 10"),
    "gene mAP": percent("gene mAP"),
    "guide mAP": percent("guide mAP"),
    "well, 20 neighbours": percent("well, neighbours"),
}


def plates_report(frame: pd.DataFrame, out: Path) -> str:
    """A line a system, as it is and standardised on controls; of the real screen, what was published beside."""
    frame = frame.assign(name=names_of(frame).replace("obsm", "truth"))
    lines = by_variant(frame, PLATE_SCORES | HEALTH)
    drawn = lines[~lines["name"].str.startswith("pixel PCA, ")].assign(setting=lines["name"])
    ax = plots.trade_off(drawn, "well, 20 neighbours", "recall at 5", traced=["SCBD"])
    ax.set(xlabel="accuracy of the well (lower is better)", ylabel="recall of complexes, outer 5 %")
    plots.save_axes(ax, out / "plates.png")
    if (frame["dataset"] == "funk22_plates").any():
        published = pd.DataFrame(_SET_DINO, index=list(PLATE_SCORES)).astype(float).T.div(100)
        lines = pd.concat([lines, published.rename_axis("name").reset_index()])
    return table(lines, ["name"], PLATE_SCORES | HEALTH)


def _trained(
    budget: Budget,
    rivals: Sequence[str],
    alphas: Sequence[float | str],
    batches: Callable[[int], dict[str, Any]] = lambda _: {},
) -> list[System]:
    """Classifiers and SCBD as they come; of blocks z_c alone; ``batches`` those of ERM, by their size."""
    inputs = TODAYS_INPUTS | {"encoder": SIZES[budget][0]["encoder"]}
    length: dict[str, Any] = {"max_steps": 20, "batch_size": 64} if budget == "smoke" else {}
    drawn = length | batches(length.get("batch_size", 512))
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"ERM": ({}, drawn)} | dict.fromkeys(
        ("CORAL", "DANN"), ({"penalty": 1.0}, length)
    )
    systems = [(name, inputs | model, how) for name, (model, how) in rows.items() if name in rivals]
    return systems + [("SCBD", inputs | {"style_target": None, "alpha": alpha}, length) for alpha in alphas]


def corrected_pixels(corrections: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Systems: principal components of the pixels, followed by each of these corrections; and their settings."""
    return [(f"pixel PCA, {name}", {"n_components": 64} | _SETTINGS.get(name, {})) for name in corrections]


def screen_wells(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The same screen with 384 wells on 16 plates, a twelfth of the cells in each."""
    systems: list[System] = [
        _TRUTH,
        _PIXELS,
        ("pixel PCA, TVN", {"n_components": 64, "e_key": "plate"}, {}),  # most wells have no two controls
        *_trained(budget, ("ERM",), (0.0, "auto"), _as_scbd),
    ]
    wells = {"n_wells": 384, "plate_wells": 24}
    return trials_of(_PROTOCOL, _SCREEN, systems, screen_of(budget) | wells, seeds_of(n_seeds, budget, 3, 3))


def screen_drawn(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """A small screen by other code than scbd's: forty genes, six wells, new cells."""
    systems: list[System] = [
        _TRUTH,
        _PIXELS,
        *((name, model, {}) for name, model in corrected_pixels(("standardised on controls", "TVN", "TVN, WCCN"))),
        *_trained(budget, ("ERM",), (0.0, "auto")),
    ]
    cells: dict[str, Any] = {"n_cells": 1_000 if budget == "smoke" else 3_000}
    return trials_of(_PROTOCOL, "drawn_screen_fold", systems, cells, seeds_of(n_seeds, budget, 3, 3))


def screen_titration(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The hard screen with few cells a gene, and with many."""
    systems: list[System] = [
        _TRUTH,
        *((name, model, {}) for name, model in corrected_pixels(("standardised on controls", "TVN, WCCN"))),
        *_trained(budget, ("ERM",), ("auto",), _as_scbd),
    ]
    sizes = (2_000, 4_000) if budget == "smoke" else (5_000, 10_000, 20_000, 40_000, 80_000, 160_000)
    screens, seeds = [screen_of(budget) | {"n_cells": n} for n in sizes], seeds_of(n_seeds, budget, 2, 3)
    return [trial for screen in screens for trial in trials_of(_PROTOCOL, _SCREEN, systems, screen, seeds)]


def rivals_report(frame: pd.DataFrame, out: Path) -> str:
    """A line a system and correction, the best that there can be first, chance last; genes against wells, two figures.

    One of what is trained and one of corrections of pixels; a line joins each embedding to itself once standardised.
    """
    import matplotlib.pyplot as plt

    frame = frame.assign(name=names_of(frame).replace("obsm", "truth"))
    lines = by_variant(frame, RIVAL_SCORES | HEALTH)
    drawn = lines[lines["variant"] != CHANCE]
    drawn = drawn.assign(system=frame.set_index("key")["name"].reindex(drawn["key"]).to_numpy(), setting=drawn["name"])
    pixels = drawn["system"].str.startswith("pixel PCA")
    for name, part in {"systems": drawn[~pixels], "corrections": drawn[pixels]}.items():
        if part.empty:
            continue
        figure = plt.figure(figsize=(5 * len(_PROBES) + 2, 4), layout="constrained")
        for ax, (probe, label) in zip(figure.subplots(1, len(_PROBES), sharey=True), _PROBES.items(), strict=True):
            plots.trade_off(part, probe, "relationship_map_unseen", traced=list(part["system"].unique()), ax=ax)
            ax.set(xlabel=f"F1 of the well, {label} (lower is better)", ylabel="complexes of unseen genes")
            if probe != list(_PROBES)[-1]:
                ax.get_legend().remove()
        save_figure(figure, out / f"{name}.png")
    return table(lines, ["name"], RIVAL_SCORES | HEALTH)


def titration_report(frame: pd.DataFrame, out: Path) -> str:
    """A line a system and number of cells that a gene has in all; two scores against that number."""
    n_genes = RIVAL_SCREEN["n_complexes"] * RIVAL_SCREEN["genes_per_complex"]
    frame = frame.assign(name=names_of(frame).replace("obsm", "truth"))
    frame["cells a gene"] = (frame["n_cells"] / n_genes).round().astype(int)
    lines = by_variant(frame, RIVAL_SCORES)
    lines = lines[lines["variant"] != CHANCE].sort_values(["name", "cells a gene"], kind="stable")
    drawn = lines[(lines["variant"] == "") | (lines["system"] == "ERM")]
    scores = {"relationship_average_precision": "average precision of complexes", "y_probe_auroc": "AUROC of the gene"}
    _draw_panels(drawn, "cells a gene", scores, out / "cells.png", size=(11, 4))
    return table(lines, ["name", "cells a gene"], RIVAL_SCORES)


def _draw_panels(
    frame: pd.DataFrame, setting: str, scores: Mapping[str, str], path: Path, *, size: tuple[float, float], **axes: Any
) -> None:
    """A panel a score, with its label: a line a name, against a setting; ``axes`` are properties of all of them."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained")
    for ax, (score, label) in zip(figure.subplots(1, len(scores), squeeze=False).flat, scores.items(), strict=True):
        plots.by_group(frame, setting, score, "name", ax=ax)
        ax.set(ylabel=label, **axes)
    save_figure(figure, path)


# ComBat and Harmony see the cells that are scored, too
_CHEAP = ("standardised", "ComBat", "Harmony", "WCCN")


def screen_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of an easy simulated screen: features, latent-variable models and SCBD (paper, figure 4)."""
    published, contrastive = new_cells_settings(budget)
    # decoders are slow: twice the time of a contrastive run at a fifth of its images, at the small budget
    steps, size = {"smoke": (40, 128), "small": (400, 256), "paper": (contrastive["max_steps"], 1024)}[budget]
    bound = contrastive | {"max_steps": steps, "batch_size": size}
    pixels = {"n_components": 64}
    wells = pixels | {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    block = published | {"style_target": None}
    systems: list[System] = [
        ("pixel PCA", pixels, NEW_CELLS),
        ("pixel PCA, centred", wells, NEW_CELLS),
        ("pixel PCA, TVN", wells, NEW_CELLS),
        *((name, model, NEW_CELLS) for name, model in corrected_pixels(_CHEAP)),
        ("ERM", {"encoder": published["encoder"]}, contrastive),
        ("VAE", {"n_latent": 64}, bound),
        ("iVAE", {"n_latent": 64, "style_posterior": "xe"}, bound),
        ("iVAE", {"n_latent": 64, "style_posterior": "x"}, bound),
        ("mcVAE", {"n_latent": 32, "kl_warmup_steps": bound["max_steps"] // 2}, bound),
        *(("SCBD", block | {"alpha": alpha}, contrastive) for alpha in (0.0, 1.0, 8.0)),
        *(("SCBD", block | OURS | {"alpha": alpha}, contrastive) for alpha in (0.0, 0.003, 0.01, 0.03, "auto")),
    ]
    screen, n = SCREENS[budget] | UNEQUAL_WELLS, seeds_of(n_seeds, budget, 3, 3)
    return trials_of("batch correction of new cells", "simulated_screen", systems, screen, n)


def screen_systems_report(frame: pd.DataFrame, out: Path) -> str:
    """Biology and batch of each system: a table, bars, and one against the other."""
    form = frame["invariance"].map({"listing": "SCBD, published", "variance": "SCBD"}).fillna(frame["system"])
    named = by_variant(frame.assign(system=form, name=names_of(frame)), CORRECTION)
    named["setting"] = named["name"]
    traced = ["SCBD, published", "SCBD"]
    x, y = "e_probe_f1", "relationship_average_precision"
    ax = plots.trade_off(named, x, y, setting="setting", traced=traced)
    ax.set(xlabel="F1 of the well (lower is better)", ylabel="average precision of complexes")
    plots.save_axes(ax, out / "trade_off.png")
    return correction_report(frame, out)


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
    frame = frame.assign(name=names_of(frame))
    if "r_c in" in frame:
        frame = chosen(frame, ["name", "steps"])
    frame = by_variant(frame, ACCURACIES | CORRECTION)
    frame = frame.sort_values(["name", "steps"], kind="stable")
    drawn = {score: label for score, label in _DRAWN.items() if score in frame}
    _draw_panels(frame, "steps", drawn, out / "lengths.png", size=(4 * len(drawn), 3.2), ylim=(-0.02, 1.02))
    return table(frame, ["name", "steps"], ACCURACIES | CORRECTION)


EXPERIMENTS = {
    "screen-rivals": Experiment(screen_rivals, rivals_report),
    "screen-wells": Experiment(screen_wells, rivals_report),
    "screen-drawn": Experiment(screen_drawn, rivals_report),
    "screen-titration": Experiment(screen_titration, titration_report),
    "screen-plates": Experiment(screen_plates, plates_report),
    "funk22-plates": Experiment(funk22_plates, plates_report),
    "screen-systems": Experiment(screen_systems, screen_systems_report),
    "cmnist-lengths": Experiment(cmnist_lengths, lengths_report),
    "screen-lengths": Experiment(screen_lengths, lengths_report),
}
