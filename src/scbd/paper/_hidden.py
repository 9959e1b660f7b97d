"""Environments that nobody wrote down: how much of what known ones gain is kept when they are inferred."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scbd.paper._budgets import seeds_of
from scbd.paper._experiment import Experiment
from scbd.paper._generalization import cmnist_alphas
from scbd.paper._profiles import PROFILE_SCORES
from scbd.paper._rivals import RIVAL_SCORES, screen_rivals
from scbd.paper._tables import ACCURACIES, Column, table
from scbd.workflows import Trial

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget

_AGREEMENT = {"agreement": Column("agreement")}
_FOLDS = {"smoke": 1, "small": 5, "paper": 5}
_DIGITS = {name: ACCURACIES[name] for name in ("r_c in", "r_c out", "z_c in", "z_c out", "e from r_c", "e from z_c")}
_WELLS = {
    name: PROFILE_SCORES[name]
    for name in (
        *("replicates seen", "floor-corrected", "across positions", "mechanism"),
        *("e, linear", "e, neighbours", "e, linear, new", "e, neighbours, new"),
    )
}
_PLATES = 5  # of CPJUMP1, two of which are left out in each fold


def hidden_cmnist(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: colours known, inferred as two and as five environments, and none."""
    trials = [t for t in cmnist_alphas(budget, seeds_of(n_seeds, budget, 3, 5)) if t.model["alpha"] in (0.0, "auto")]
    return _known_and_hidden(trials, {"colored_mnist_hidden": (2, 5)})


def hidden_screen(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """A hard screen: wells known, inferred as so many and as fewer, plates known and the rest inferred, and none."""
    trials = [t for t in screen_rivals(budget, n_seeds) if t.system == "SCBD" and t.model["alpha"] in (0.0, "auto")]
    n_wells = trials[0].data["n_wells"]
    hidden = {"simulated_screen_hidden": (n_wells, 8), "simulated_screen_half_hidden": (n_wells // 2,)}
    return _known_and_hidden(trials, hidden)


def hidden_cpjump1(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Wells of CPJUMP1 as features: plates known, inferred, and none."""
    trials = [
        Trial("unseen perturbations", "cpjump1", "SCBD", seed, {"fold": fold}, {"alpha": alpha}, {})
        for fold in range(_FOLDS[budget])
        for seed in range(seeds_of(n_seeds, budget, 1, 3))
        for alpha in (0.0, "auto")
    ]
    return _known_and_hidden(trials, {"cpjump1_hidden": (_PLATES - 2,)})


def _known_and_hidden(trials: Iterable[Trial], hidden: dict[str, tuple[int, ...]]) -> list[Trial]:
    """Each trial; and those with invariance again, without what is known of environments."""
    grid = []
    for trial in trials:
        grid.append(trial)
        if trial.model["alpha"] != 0:
            grid += [
                replace(
                    trial,
                    protocol=f"{trial.protocol}, environments hidden",
                    dataset=dataset,
                    data={**trial.data, "n_inferred": n},
                )
                for dataset, numbers in hidden.items()
                for n in numbers
            ]
    return grid


def _report(scores: dict[str, Column]) -> Any:
    def report(frame: pd.DataFrame, out: Path) -> str:
        """A line a way to know environments."""
        named = frame.assign(environments=[_named(row) for row in frame.to_dict("records")])
        return table(named.sort_values("environments", kind="stable"), ["environments"], scores | _AGREEMENT)

    return report


def _named(row: dict[str, Any]) -> str:
    """What a model knew of environments."""
    if row["alpha"] == 0:
        return "not used (alpha 0)"
    n = row.get("n_inferred")
    if n is None or n != n:  # NaN: none were inferred
        return "known"
    known = "plates known, others inferred" if "half" in row["dataset"] else "inferred"
    return f"{known}, {n:.0f}"


EXPERIMENTS = {
    "hidden-cmnist": Experiment(hidden_cmnist, _report(_DIGITS)),
    "hidden-screen": Experiment(hidden_screen, _report(RIVAL_SCORES)),
    "hidden-cpjump1": Experiment(hidden_cpjump1, _report(_WELLS)),
}
