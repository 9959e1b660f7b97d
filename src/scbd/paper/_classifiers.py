"""Every system of the paper's tables of domain generalisation beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from scbd import pl
from scbd._outputs import save_figure
from scbd.paper._chosen import chosen, setting_of
from scbd.paper._experiment import Experiment
from scbd.paper._published import published_of
from scbd.paper._spaces import SPACES, systems
from scbd.paper._tables import ACCURACIES, by_environment, names_of, table

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial


def cmnist_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: every classifier and the iVAE over the paper's search space, beside SCBD (paper, table 1)."""
    return systems(SPACES["colored_mnist"], budget, n_seeds)


def camelyon17_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Camelyon17-WILDS: every classifier and the iVAE over the paper's search space, beside SCBD (paper, table 1)."""
    return systems(SPACES["camelyon17"], budget, n_seeds)


def pacs_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """PACS, each domain held out in turn: the classifiers of the paper's table beside SCBD (paper, appendix)."""
    return systems(SPACES["pacs"], budget, n_seeds)


def vlcs_systems(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """VLCS, each domain held out in turn: the classifiers of the paper's table beside SCBD (paper, appendix)."""
    return systems(SPACES["vlcs"], budget, n_seeds)


def systems_report(frame: pd.DataFrame, out: Path) -> str:
    """Each system at its best in distribution, beside the paper; every setting as a point of the trade-off."""
    return by_environment(frame, out, _of_environment)


def _of_environment(frame: pd.DataFrame, out: Path, environment: str) -> str:
    named = frame.assign(name=names_of(frame), setting=setting_of(frame))
    # drawn with the one head that all have
    drawn = named[named["system"] != "random encoder"]
    ax = pl.trade_off(drawn, "r_c in", "r_c out", setting="setting", traced=["SCBD"])
    ax.set(xlabel="accuracy in distribution", ylabel="accuracy out of distribution", title=environment)
    save_figure(cast("Figure", ax.figure), out / f"trade_off{'_' * bool(environment)}{environment}.png")
    published = published_of(str(frame["dataset"].iloc[0]), environment)
    return table(chosen(named, ["name"]), ["name"], ACCURACIES, published=published)


EXPERIMENTS = {
    "cmnist-systems": Experiment(cmnist_systems, systems_report),
    "camelyon17-systems": Experiment(camelyon17_systems, systems_report),
    "pacs-systems": Experiment(pacs_systems, systems_report),
    "vlcs-systems": Experiment(vlcs_systems, systems_report),
}
