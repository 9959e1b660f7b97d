"""All systems of the paper beside each other: the grids, and what is made of their rows."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from scbd import pl
from scbd._outputs import save_figure
from scbd.paper._bounds import cmnist_variance
from scbd.paper._budgets import (
    NEW_CELLS,
    OURS,
    SCREENS,
    SIZES,
    UNEQUAL_WELLS,
    generalization_trial,
    new_cells_settings,
    new_cells_trial,
    pixel_control,
    seeds_of,
)
from scbd.paper._experiment import Experiment
from scbd.paper._published import TABLE_1
from scbd.paper._screens import correction_report
from scbd.paper._tables import ACCURACIES, CORRECTION, names_of, table, value_of
from scbd.paper._variants import by_variant
from scbd.workflows import MODEL_SPACE, TRAINING_SPACE, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial

# of the search space, what tells the settings of a system apart
_SETTINGS = ("lr", "weight_decay", "max_steps", "penalty", "step_size", "meta_lr", "pretrain_steps", "alpha")


def cmnist_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: every classifier and the iVAE over the paper's search space, beside SCBD (paper, table 1)."""
    n_seeds = seeds_of(n_seeds, budget, 3, 10)
    lengths = {"smoke": (30,), "small": (1500,), "paper": (1500, 30_000, 150_000)}[budget]
    trials = [
        _classifier(budget, system, seed, steps, model, training)
        for seed, system, steps in product(range(n_seeds), MODEL_SPACE, lengths)
        if system != "iVAE"
        for model, training in _space(budget, system, steps)
    ]
    trials += [_ivae(budget, seed, training) for seed in range(n_seeds) for _, training in _space(budget, "iVAE", 0)]
    trials += [trial for trial in cmnist_variance(budget, n_seeds) if trial.system in ("SCBD", "random encoder")]
    return trials + [pixel_control("colored_mnist", budget, seed) for seed in range(n_seeds)]


def screen_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of an easy simulated screen: features, latent-variable models and SCBD (paper, figure 4)."""
    published, contrastive = new_cells_settings(budget)
    # decoders are slow: twice the time of a contrastive run at a fifth of its images, at the small budget
    steps, size = {"smoke": (40, 128), "small": (400, 256), "paper": (contrastive["max_steps"], 1024)}[budget]
    bound = contrastive | {"max_steps": steps, "batch_size": size}
    pixels = {"n_components": 64}
    wells = pixels | {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    block = published | {"style_target": None}
    systems: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("pixel PCA", pixels, NEW_CELLS),
        ("pixel PCA, centred", wells, NEW_CELLS),
        ("pixel PCA, TVN", wells, NEW_CELLS),
        ("VAE", {"n_latent": 64}, bound),
        ("iVAE", {"n_latent": 64, "style_posterior": "xe"}, bound),
        ("iVAE", {"n_latent": 64, "style_posterior": "x"}, bound),
        ("mcVAE", {"n_latent": 32, "kl_warmup_steps": bound["max_steps"] // 2}, bound),
        *(("SCBD", block | {"alpha": alpha}, contrastive) for alpha in (0.0, 1.0, 8.0)),
        *(("SCBD", block | OURS | {"alpha": alpha}, contrastive) for alpha in (0.0, 0.003, 0.01, 0.03, "auto")),
    ]
    return [
        new_cells_trial(seed, SCREENS[budget] | UNEQUAL_WELLS, model, how, system)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for system, model, how in systems
    ]


def _space(budget: Budget, system: str, steps: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The paper's search space; a coarser one, for runs that are shorter than its warm-ups, below that budget."""
    model: dict[str, Sequence[Any]] = dict(MODEL_SPACE[system])
    training: Mapping[str, Sequence[Any]] = TRAINING_SPACE
    if budget != "paper":
        training = {"lr": (1e-4, 1e-3) if budget == "small" else (1e-3,), "weight_decay": (0.01,)}
        if system == "Fish":
            model = {"pretrain_steps": (steps // 3,), "meta_lr": (0.01, 0.1)}
        if system == "IRM":
            model["anneal_steps"] = (steps // 3,)
    if budget == "smoke":
        model = {name: values[:1] for name, values in model.items()}
    return list(product(settings_of(model), settings_of(training)))


def _classifier(
    budget: Budget, system: str, seed: int, steps: int, model: dict[str, Any], training: dict[str, Any]
) -> Trial:
    model = model | {"encoder": SIZES[budget][0]["encoder"], "standardize": False}
    how = training | {"max_steps": steps, "batch_size": 32, "split": "split", "load_best": True}
    return generalization_trial("colored_mnist", budget, seed, model, how, system)


def _ivae(budget: Budget, seed: int, training: dict[str, Any]) -> Trial:
    steps, size = {"smoke": (30, 128), "small": (500, 256), "paper": (50_000, 1024)}[budget]
    model = {"n_latent": 64, "standardize": False}
    how = training | {"max_steps": steps, "batch_size": size, "split": "split", "load_best": True}
    return generalization_trial("colored_mnist", budget, seed, model, how, "iVAE")


def systems_report(frame: pd.DataFrame, out: Path) -> str:
    """Each system at its best in distribution, beside the paper; every setting as a point of the trade-off."""
    named = frame.assign(name=names_of(frame), setting=_setting(frame))
    # drawn with the one head that all have
    drawn = named[named["system"] != "random encoder"]
    ax = pl.trade_off(drawn, "r_c in", "r_c out", setting="setting", traced=["SCBD"])
    ax.set(xlabel="accuracy in distribution", ylabel="accuracy out of distribution")
    save_figure(cast("Figure", ax.figure), out / "trade_off.png")
    # chosen by the head that learned with the encoder, where there is one
    by = named["r_c in"] if "own in" not in named else named["own in"].fillna(named["r_c in"])
    chosen = named.loc[by.groupby([named["name"], named["seed"]], sort=False).idxmax()]
    return table(chosen, ["name"], ACCURACIES, published=TABLE_1.get(frame["dataset"].iloc[0], {}))


def screen_systems_report(frame: pd.DataFrame, out: Path) -> str:
    """Biology and batch of each system: a table, bars, and one against the other."""
    form = frame["invariance"].map({"listing": "SCBD, published", "variance": "SCBD"}).fillna(frame["system"])
    named = by_variant(frame.assign(system=form, name=names_of(frame)), CORRECTION)
    named["setting"] = named["name"]
    traced = ["SCBD, published", "SCBD"]
    x, y = "e_probe_f1", "relationship_average_precision"
    ax = pl.trade_off(named, x, y, setting="setting", traced=traced)
    ax.set(xlabel="F1 of the well (lower is better)", ylabel="average precision of complexes")
    save_figure(cast("Figure", ax.figure), out / "trade_off.png")
    return correction_report(frame, out)


def _setting(frame: pd.DataFrame) -> pd.Series:
    """What tells the settings of one system apart, as words."""
    columns = [column for column in _SETTINGS if column in frame]
    return frame[columns].map(value_of).agg(" ".join, axis=1)


EXPERIMENTS = {
    "cmnist-systems": Experiment(cmnist_systems, systems_report),
    "screen-systems": Experiment(screen_systems, screen_systems_report),
}
