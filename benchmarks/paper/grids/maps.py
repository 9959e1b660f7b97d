"""The map of regimes: where z_c learns, goes blind or dies, by form, alpha, batch, environments and labels."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from paper import plots
from paper.grids.shared import (
    OUR_ALPHAS,
    OURS,
    PUBLISHED,
    SCREENS,
    UNEQUAL_WELLS,
    Budget,
    Experiment,
    generalization_settings,
    generalization_trial,
    new_cells_settings,
    new_cells_trial,
    seeds_of,
)
from paper.reports import (
    ACCURACIES,
    CORRECTION,
    HEALTH,
    Column,
    only,
    table,
)
from paper.trials import Trial
from scbd._shared.files import save_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_STEPS = {"smoke": 10, "small": 300, "paper": 5000}
_FORMS = ("listing", "variance")
# what varies beside the form and alpha, and its columns in rows
_FACTORS = ("batch", "environments", "labels")


class _Map(NamedTuple):
    """What rows call the factors, and what is shown of their scores."""

    titles: tuple[str, str, str]
    environments: str
    imbalance: str
    labels: str
    # what rows do not say where it is the default
    defaults: Mapping[str, object]
    figures: Mapping[str, tuple[str, str]]
    scores: dict[str, Column]


_DIGITS = _Map(
    titles=("cells a batch", "environments", "labels"),
    environments="n_environments",
    imbalance="imbalance",
    labels="n_digits",
    defaults={"n_environments": 2, "imbalance": 0.0, "n_digits": 10, "include_self": True},
    figures={
        "map": ("z_c out", "white digits from $z_c$"),
        "learned": ("learned_c", "learned of the labels"),
        "environment": ("e from r_c", "environment from $r_c$"),
    },
    scores={key: ACCURACIES[key] for key in ("z_c in", "z_c out", "r_c out", "e from r_c")},
)
_SCREEN = _Map(
    titles=("cells a batch", "wells", "complexes"),
    environments="n_wells",
    imbalance="well_imbalance",
    labels="n_complexes",
    defaults={"well_imbalance": 0.0, "n_complexes": 12, "include_self": True},
    figures={
        "map": ("relationship_average_precision", "average precision"),
        "spread": ("spread", "spread of $z_c$"),
        "environment": ("e above chance", "well, above chance"),
    },
    scores={
        key: CORRECTION[key]
        for key in ("relationship_average_precision", "y_probe_f1", "e_probe_f1", "e_probe_chance_f1")
    },
)


def cmnist_map(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: where z_c learns, goes blind or dies, by form, alpha, batch, environments and labels."""
    model, training = generalization_settings(budget)
    # many short runs: which regime it is shows early
    training |= {"load_best": False, "max_steps": _STEPS[budget]}
    data = {} if budget == "smoke" else {"n_train": 20_000, "n_test": 5000}
    few: dict[str, Sequence[float]] = {"listing": (1, 10, 100), "variance": (0.01, 0.03, 0.1)}
    many: dict[str, Sequence[float]] = {
        "listing": (1, 3, 10, 30, 100, 256),
        "variance": (0.003, 0.01, 0.03, 0.1, 0.3),
    }
    batch = training["batch_size"]
    # what is swept, on which data, in which batches
    plan: list[tuple[dict[str, Sequence[float]], dict[str, Any], int]] = [(many, {}, batch)]
    plan += [(few if budget == "smoke" else many, {}, batch // 4), (few, {"n_environments": 8}, batch)]
    if budget != "smoke":
        plan += [(few, {}, batch * 4), (few, {"n_environments": 34}, batch)]
        plan += [(few, {"n_environments": 34, "imbalance": 0.6}, batch)]
        plan += [(few, {"n_digits": n}, batch) for n in (5, 2)]
    trials = []
    for seed, (forms, cells, size) in product(range(seeds_of(n_seeds, budget, 1, 3)), plan):
        # without invariance, all contrastive forms are one
        settings = [_form(form) | {"alpha": 0.0} for form in few]
        settings += [_form(form) | {"alpha": float(a)} for form, alphas in forms.items() for a in alphas]
        if forms is many:
            settings += [_form("listing") | {"alpha": 10.0, "include_self": False}]
        how = training | {"batch_size": size}
        trials += [
            generalization_trial("colored_mnist", budget, seed, model | form, how, **data | cells) for form in settings
        ]
    return trials


def screen_map(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen: the same map, by form, alpha, batch, wells and genes."""
    model, training = new_cells_settings(budget)
    training["max_steps"] = _STEPS[budget]
    batch, screen = training["batch_size"], SCREENS[budget]
    plan: list[tuple[dict[str, Any], int]] = [({}, batch), ({"n_wells": 2}, batch)]
    if budget != "smoke":
        plan += [({}, batch // 4), ({}, batch * 4), ({"n_wells": 8}, batch), (UNEQUAL_WELLS, batch)]
        plan += [({"n_complexes": 3}, batch)]
    settings = [_form("listing") | {"alpha": alpha} for alpha in (0.0, 1.0, 10.0, 100.0)]
    settings += [OURS | {"alpha": alpha} for alpha in OUR_ALPHAS]
    return [
        new_cells_trial(seed, screen | cells, model | form, training | {"batch_size": size})
        for seed, (cells, size), form in product(range(seeds_of(n_seeds, budget, 1, 3)), plan, settings)
    ]


def _form(form: str) -> dict[str, Any]:
    """Our objective, or the published one with a contrastive form of invariance; z_c alone."""
    return OURS if form == "variance" else PUBLISHED | {"invariance": form, "style_target": None}


def digits_map_report(frame: pd.DataFrame, out: Path) -> str:
    """White digits, how much of what the labels say was learned, and how well the environment is read."""
    return _report(frame, out, _DIGITS)


def screen_map_report(frame: pd.DataFrame, out: Path) -> str:
    """Complexes found, how far apart z_c keeps cells, and how well the well is read from new cells.

    Chance differs with the number of wells, so that F1 is drawn from permuted labels (0) to every well right (1).
    """
    chance = frame["e_probe_chance_f1"]
    frame = frame.assign(**{"e above chance": (frame["e_probe_f1"] - chance) / (1 - chance)})
    return _report(frame, out, _SCREEN)


def _report(frame: pd.DataFrame, out: Path, regimes: _Map) -> str:
    """Regimes of alpha by form of invariance, batch, environments and labels: three figures and a table.

    A row of panels a form, a column a factor, a line a value of it; the other factors at their most frequent value.
    """
    import matplotlib.pyplot as plt

    frame = _named(frame, regimes)
    usual = frame["with_self"] == "yes"
    base = {factor: frame[factor].mode()[0] for factor in _FACTORS}
    forms = [form for form in _FORMS if form in set(frame["form"])]
    for name, (score, label) in regimes.figures.items():
        figure = plt.figure(figsize=(4 * len(_FACTORS), 2.8 * len(forms)), layout="constrained")
        axes = figure.subplots(len(forms), len(_FACTORS), squeeze=False)
        panels = product(forms, zip(_FACTORS, regimes.titles, strict=True))
        top = max(frame[score].max(), 0.1)
        for (form, (factor, title)), ax in zip(panels, axes.flat, strict=True):
            others = {column: value for column, value in base.items() if column != factor}
            part = only(frame[usual], {"form": form} | others)
            if part.empty or (factor != "batch" and part[factor].nunique() == 1):
                ax.set_axis_off()  # this form was not tried yet, or at one value of it
                continue
            plots.by_group(part, "alpha", score, factor, ax=ax)
            ax.set(title=f"{form}, by {title}", ylabel=label, ylim=(-0.02 * top, 1.02 * top))
        save_figure(figure, out / f"{name}.png")
    several = ["form", *(["with_self"] if usual.nunique() > 1 else [])]
    shown = frame.sort_values([*several, "batch"], kind="stable")
    shown = shown.rename(columns=dict(zip(_FACTORS, regimes.titles, strict=True)))
    return table(shown, [*several, *regimes.titles, "alpha"], regimes.scores | HEALTH)


def _named(frame: pd.DataFrame, regimes: _Map) -> pd.DataFrame:
    """Rows in the order of their factors, with these by the names that are shown."""
    given = {c: frame[c].where(frame[c].notna(), v) if c in frame else v for c, v in regimes.defaults.items()}
    frame = frame.assign(**given)
    order = ["batch_size", regimes.environments, regimes.imbalance, regimes.labels]
    frame = frame.sort_values(order, kind="stable")
    unequal = frame[regimes.imbalance].astype(float).gt(0).map({True: ", unequal", False: ""})
    return frame.assign(
        form=frame["invariance"],
        with_self=frame["include_self"].map({True: "yes", False: "no"}),
        batch=frame["batch_size"].astype(int),
        environments=frame[regimes.environments].astype(int).astype(str) + unequal,
        labels=frame[regimes.labels].astype(int),
    )


EXPERIMENTS = {
    "cmnist-map": Experiment(cmnist_map, digits_map_report),
    "screen-map": Experiment(screen_map, screen_map_report),
}
