"""Published tables of wells with known answers: mechanisms of drugs, and genes in several screens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paper.grids.profiles import FOLDS, with_settings
from paper.grids.shared import Budget, Experiment, seeds_of
from paper.reports import Column, table
from paper.trials import Trial

if TYPE_CHECKING:
    from pathlib import Path

_LIBRARIES = ("siGENOME", "ONTARGETPlus")
_ON_CONTROLS = "standardised on controls"
# each at its defaults, on features and on features standardised per plate on controls
_CORRECTIONS: list[tuple[str, dict[str, Any]]] = [
    ("sphering", {}),
    ("TVN", {}),
    ("WCCN", {}),
    ("WCCN", {"by_position": True}),
    ("LDA", {}),
    ("PLDA", {}),
    ("PLDA", {"by_position": True}),
    ("ComBat", {}),
    ("Harmony", {}),
]
_COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("features", {}),
    ("scaled", {}),
    ("scaled over all wells", {}),
    ("centred", {}),
    ("standardised", {}),
    (_ON_CONTROLS, {}),
    ("sphering", {"on": "scaled over all wells"}),
    *_CORRECTIONS,
    *((system, model | {"on": _ON_CONTROLS}) for system, model in _CORRECTIONS),
    # plates with few controls, whose standard deviation is not known well
    *((system, {"on": "centred"}) for system in ("sphering", "WCCN", "LDA", "PLDA")),
    # close to the setting with which the RhoGTPase screens were measured first
    ("WCCN", {"regularization": 0.5, "on": _ON_CONTROLS}),
]
_TRAINED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ERM", {"standardize_by": "auto"}, {}),
    ("ERM", {"standardize_by": "controls"}, {}),
    ("SCBD", {"standardize_by": "auto"}, {}),
    ("SCBD", {"standardize_by": "controls"}, {}),
    ("SCBD", {"standardize_by": None}, {}),
    # the maps from which training starts
    ("SCBD", {"standardize_by": "auto"}, {"max_steps": 1, "lr": 0.0}),
    ("SCBD", {"standardize_by": "controls"}, {"max_steps": 1, "lr": 0.0}),
]
# BBBC021 has so few wells that these are its defaults
_LINEAR: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (name, {"standardize_by": "auto", "encoder": "linear"}, {}) for name in ("ERM", "SCBD")
]
# what was learned from, by the argument of the loader that holds wells out
_ALL, _FITS = "all wells", {"fold": "compounds left out", "new_controls": "new DMSO wells", "library": "one library"}
_MECHANISMS = {
    "NSC, all wells": Column("NSC, all wells", digits=3),
    "NSCB, all wells": Column("NSCB, all wells", digits=3),
    "NSC, compounds left out": Column("NSC, compounds left out", digits=3),
    "NSCB, compounds left out": Column("NSCB, compounds left out", digits=3),
    "week, all wells": Column("week, seen DMSO wells", digits=3),
    "week, new DMSO wells": Column("week, new DMSO wells", digits=3),
}
_GENES = {
    f"{score}, {fit}": Column(f"{score}, {fit}", digits=3)
    for fit in (_ALL, "one library")
    for score in (
        "other library, LM2",
        "other library, MDA-MB-231",
        *(f"other line, {library}" for library in _LIBRARIES),
    )
}
# heading, columns, chance and its name of each data set
_TABLES = {
    "bbbc021_wells": ("BBBC021", _MECHANISMS, "week chance", "the week"),
    "rhogtpase_wells": ("RhoGTPase screens", _GENES, "chance", "a gene"),
}


def real_wells(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Published tables of wells: mechanisms of drugs (BBBC021), and genes in another siRNA library (RhoGTPases)."""
    seeds = range(seeds_of(n_seeds, budget, 3, 3))
    mechanisms: list[dict[str, Any]] = [{}, *({"fold": i} for i in range(FOLDS[budget])), {"new_controls": True}]
    genes: list[dict[str, Any]] = [{}, *({"library": library} for library in _LIBRARIES)]
    grid = []
    for protocol, dataset, parts, trained in (
        ("mechanisms of wells", "bbbc021_wells", mechanisms, _TRAINED),
        ("genes across screens", "rhogtpase_wells", genes, _TRAINED + _LINEAR),
    ):
        for data in parts:
            grid += [Trial(protocol, dataset, system, 0, data, model, {}) for system, model in _COMPUTED]
            grid += [
                Trial(protocol, dataset, system, seed, data, model, training)
                for system, model, training in trained
                for seed in seeds
            ]
    return grid


def wells_report(frame: pd.DataFrame, out: Path) -> str:
    """One table per data set, one line per system; a column states from which wells was learned."""
    frame = with_settings(frame).assign(fit=_ALL)
    for argument, fit in _FITS.items():
        if argument in frame:
            frame["fit"] = frame["fit"].mask(frame[argument].notna(), fit)
    texts = []
    for dataset, (title, columns, chance, named) in _TABLES.items():
        lines: dict[Any, dict[str, Any]] = {}
        own = frame[frame["dataset"] == dataset]
        for (system, seed, fit), runs in own.groupby(["system", "seed", "fit"], sort=False):
            scores = {f"{score}, {fit}": _pooled(runs, score) for score in own if f"{score}, {fit}" in columns}
            lines.setdefault((system, seed), {"system": system}).update(scores)
        if lines:
            shown = table(pd.DataFrame(list(lines.values())), ["system"], columns)
            texts.append(f"### {title}\n\n{shown}\n\nChance of {named}: {own[chance].iloc[0]:.4f}.")
    return "\n\n".join(texts)


def _pooled(runs: pd.DataFrame, score: str) -> float:
    """Mean over folds, in which each scored treatment has the same weight; over libraries, a plain mean."""
    runs = runs[runs[score].notna()]
    weights = runs[f"{score} n"] if f"{score} n" in runs else np.ones(len(runs))
    return float(np.average(runs[score], weights=weights)) if np.sum(weights) else float("nan")


EXPERIMENTS = {"real-wells": Experiment(real_wells, wells_report)}
