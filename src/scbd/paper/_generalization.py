"""Alpha against accuracy in and out of distribution, on digits, tissue, cell lines and domains of pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from scbd import pl
from scbd._outputs import save_figure
from scbd.datasets import PACS_DOMAINS
from scbd.paper._alphas import by_alpha, cost_of_choosing
from scbd.paper._budgets import OUR_ALPHAS, OURS, generalization_settings, generalization_trial, seeds_of
from scbd.paper._chosen import chosen
from scbd.paper._experiment import Experiment
from scbd.paper._published import published_of
from scbd.paper._spaces import SPACES, sweep
from scbd.paper._tables import ACCURACIES, HEALTH, by_environment, names_of, table
from scbd.workflows import in_out_correlation

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial


def cmnist(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: alpha against accuracy, and ERM (paper, table 1, figures 3 and 5)."""
    return sweep(SPACES["colored_mnist"], budget, n_seeds)


def camelyon17(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Camelyon17-WILDS: alpha against accuracy, and ERM (paper, table 1)."""
    return sweep(SPACES["camelyon17"], budget, n_seeds)


def rxrx1(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """RxRx1-WILDS, which the paper does not have: alpha against accuracy."""
    return sweep(SPACES["rxrx1"], budget, n_seeds, erm=False)


def pacs(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """PACS, each domain held out in turn (paper, appendix)."""
    return sweep(SPACES["pacs"], budget, n_seeds)


def vlcs(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """VLCS, each domain held out in turn (paper, appendix)."""
    return sweep(SPACES["vlcs"], budget, n_seeds)


def cmnist_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with our invariance loss at several alphas: what choosing one costs, and alpha="auto"."""
    return _our_alphas("colored_mnist", budget, n_seeds, {"smoke": 20, "small": 500, "paper": 25_000}[budget])


def pacs_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """PACS with our invariance loss at several alphas, each domain held out in turn."""
    steps = {"smoke": 20, "small": 300, "paper": 25_000}[budget]
    domains = PACS_DOMAINS[: 1 if budget == "smoke" else None]
    return [trial for d in domains for trial in _our_alphas("pacs", budget, n_seeds, steps, test_environment=d)]


def _our_alphas(dataset: str, budget: Budget, n_seeds: int | None, steps: int, **data: Any) -> list[Trial]:
    model, training = generalization_settings(budget)
    training |= {"max_steps": steps, "load_best": False}
    return [
        generalization_trial(dataset, budget, seed, model | OURS | {"alpha": alpha}, training, **data)
        for seed in range(seeds_of(n_seeds, budget, 5, 5))
        for alpha in OUR_ALPHAS
    ]


def generalization_report(frame: pd.DataFrame, out: Path) -> str:
    """Accuracy at each alpha with its controls, and ERM's correlation; one table and two figures a test environment.

    Parameters
    ----------
    frame
        Rows of :class:`scbd.workflows.Results`.
    out
        Directory for the figures.

    Returns
    -------
    The tables, as Markdown.
    """
    return by_environment(frame, out, _of_environment)


def _of_environment(frame: pd.DataFrame, out: Path, environment: str) -> str:
    scbd, erm = frame[frame["system"] == "SCBD"], frame[frame["system"] == "ERM"]
    control, pixels = (frame[frame["system"] == system] for system in ("random encoder", "pixel PCA"))
    rows = pd.concat([part for part in (pixels, control, by_alpha(scbd), chosen(erm, ["system"])) if len(part)])
    rows = rows.assign(name=names_of(rows))
    published = published_of(str(frame["dataset"].iloc[0]), environment)
    text = table(rows, ["name"], ACCURACIES | HEALTH, published=published)
    suffix = f"_{environment}" if environment else ""
    if len(scbd):
        shown = {"r_c in": "in distribution", "r_c out": "out of distribution", "z_c out": "out, z_c itself"}
        ax = pl.sweep(scbd, "alpha", shown, control=control[list(shown)].mean() if len(control) else None)
        ax.set(ylabel="accuracy", title=environment)
        save_figure(_figure(ax), out / f"alpha{suffix}.png")
    text += cost_of_choosing(scbd, "z_c in", "z_c out", "accuracy of $z_c$ out of distribution")
    if len(erm) > 2:
        save_figure(_figure(pl.in_against_out(erm)), out / f"erm{suffix}.png")
        found = in_out_correlation(erm)
        text += (
            f"\n\nERM, {found['n']:.0f} runs: in- and out-of-distribution accuracy correlate with "
            f"{found['pearson']:.2f} (ranks {found['spearman']:.2f}; better half {found['strong']:.2f})."
        )
    return text


def _figure(ax: Axes) -> Figure:
    return cast("Figure", ax.figure)


EXPERIMENTS = {
    "cmnist": Experiment(cmnist, generalization_report),
    "camelyon17": Experiment(camelyon17, generalization_report),
    "rxrx1": Experiment(rxrx1, generalization_report),
    "pacs": Experiment(pacs, generalization_report),
    "vlcs": Experiment(vlcs, generalization_report),
    "cmnist-alphas": Experiment(cmnist_alphas, generalization_report),
    "pacs-alphas": Experiment(pacs_alphas, generalization_report),
}
