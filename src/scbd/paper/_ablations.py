"""One setting changed at a time: size of the embedding, batch, weight decay, and what z_s is clustered by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd import pl
from scbd._outputs import save_figure
from scbd.paper._budgets import generalization_settings, generalization_trial, seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._tables import ACCURACIES, HEALTH, only, table

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial

_FACTORS = {"n_latent": "embedding size", "batch_size": "batch size", "weight_decay": "weight decay"}


def cmnist_ablations(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: one setting changed at a time, at alpha 10 (paper budget: 192, as the paper)."""
    return _ablations("colored_mnist", budget, n_seeds)


def camelyon17_ablations(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Camelyon17: one setting changed at a time."""
    model = {"encoder": "densenet121"} if budget == "paper" else {}
    return _ablations("camelyon17", budget, n_seeds, **model)


def _ablations(dataset: str, budget: Budget, n_seeds: int | None, **changes: Any) -> list[Trial]:
    model, training = generalization_settings(budget)
    model |= {"alpha": 192.0 if budget == "paper" else 10.0} | changes
    training |= {"max_steps": {"smoke": 20, "small": 500, "paper": 25_000}[budget]}
    batch = training["batch_size"]
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})]
    changed += [({"n_latent": n}, {}) for n in (32, 64, 256)]
    changed += [({}, {"batch_size": n}) for n in (batch // 4, batch // 2, batch * 2)]
    changed += [({}, {"weight_decay": decay}) for decay in (0.0, 0.001, 0.1)]
    changed += [({"style_target": target}, {}) for target in ("e", None)]
    changed += [({"style_target": None, "alpha": 0.0}, {})]
    if budget == "smoke":
        changed = changed[:2] + changed[-1:]
    return [
        generalization_trial(dataset, budget, seed, model | m, training | t)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for m, t in changed
    ]


def ablation_report(frame: pd.DataFrame, out: Path) -> str:
    """A table a setting and a figure of three panels."""
    import matplotlib.pyplot as plt

    frame = frame.assign(style_target=frame["style_target"].fillna("none"))
    base = {column: frame[column].mode()[0] for column in [*_FACTORS, "style_target", "alpha"]}
    tables, figure = [], plt.figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, len(_FACTORS))
    for ax, (factor, name) in zip(axes, _FACTORS.items(), strict=True):
        part = only(frame, {column: value for column, value in base.items() if column != factor})
        part = part.sort_values(factor, kind="stable")
        pl.sweep(part, factor, {"r_c in": "in distribution", "r_c out": "out of distribution"}, ax=ax).set(xlabel=name)
        tables.append(f"**{name}**\n\n" + table(part, [factor], ACCURACIES | HEALTH))
    part = only(frame, {column: base[column] for column in _FACTORS})
    tables.append("**style target** (none: a single block)\n\n" + table(part, ["style_target", "alpha"], ACCURACIES))
    save_figure(figure, out / "ablations.png")
    return "\n\n".join(tables)


EXPERIMENTS = {
    "cmnist-ablations": Experiment(cmnist_ablations, ablation_report),
    "camelyon17-ablations": Experiment(camelyon17_ablations, ablation_report),
}
