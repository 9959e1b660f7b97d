"""Alpha against accuracy in and out of distribution, on digits, tissue, cell lines and domains of pictures."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from scbd import pl
from scbd._outputs import save_figure
from scbd.datasets import PACS_DOMAINS, VLCS_DOMAINS
from scbd.paper._alphas import by_alpha, cost_of_choosing
from scbd.paper._budgets import OUR_ALPHAS, OURS, generalization_settings, generalization_trial, pixel_control, seeds_of
from scbd.paper._chosen import chosen
from scbd.paper._experiment import Experiment
from scbd.paper._published import HELD_OUT, TABLE_1
from scbd.paper._tables import ACCURACIES, HEALTH, names_of, table
from scbd.workflows import UNTRAINED, in_out_correlation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial


def cmnist(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: alpha against accuracy, and ERM (paper, table 1, figures 3 and 5)."""
    alphas = {"smoke": (0, 10, 192), "small": (0, 1, 3, 10, 30, 64, 128, 192), "paper": (0, 64, 128, 192)}[budget]
    return _sweeps("colored_mnist", budget, alphas, seeds_of(n_seeds, budget, 5, 10))


def camelyon17(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Camelyon17-WILDS: alpha against accuracy, and ERM (paper, table 1)."""
    alphas = {"smoke": (0, 10), "small": (0, 3, 10, 30, 192), "paper": (0, 64, 128, 192)}[budget]
    model = {"encoder": "densenet121"} if budget == "paper" else {}
    return _sweeps("camelyon17", budget, alphas, seeds_of(n_seeds, budget, 3, 10), changes=model)


def rxrx1(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """RxRx1-WILDS, which the paper does not have: alpha against accuracy."""
    alphas = {"smoke": (0, 1), "small": (0, 1, 10), "paper": (0, 1, 10, 64)}[budget]
    return _sweeps("rxrx1", budget, alphas, seeds_of(n_seeds, budget, 3, 3), erm=False)


def pacs(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """PACS, each domain held out in turn (paper, appendix)."""
    return _held_out("pacs", PACS_DOMAINS, budget, n_seeds)


def vlcs(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """VLCS, each domain held out in turn (paper, appendix)."""
    return _held_out("vlcs", VLCS_DOMAINS, budget, n_seeds)


def cmnist_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with our form at several alphas: what choosing one costs, and what finds itself."""
    return _our_alphas("colored_mnist", budget, n_seeds, {"smoke": 20, "small": 500, "paper": 25_000}[budget])


def pacs_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """PACS with our form at several alphas, each domain held out in turn."""
    steps = {"smoke": 20, "small": 300, "paper": 25_000}[budget]
    domains = PACS_DOMAINS[: 1 if budget == "smoke" else None]
    return [trial for d in domains for trial in _our_alphas("pacs", budget, n_seeds, steps, test_environment=d)]


def _held_out(dataset: str, domains: Sequence[str], budget: Budget, n_seeds: int | None) -> list[Trial]:
    alphas = {"smoke": (0, 10), "small": (0, 3, 10, 30), "paper": (0, 64, 128, 192)}[budget]
    steps = {"smoke": 20, "small": 400, "paper": 25_000}[budget]
    return [
        trial
        for domain in domains[: 1 if budget == "smoke" else None]
        for trial in _sweeps(
            dataset,
            budget,
            alphas,
            seeds_of(n_seeds, budget, 3, 3),
            max_steps=steps,
            data={"test_environment": domain},
        )
    ]


def _sweeps(
    dataset: str,
    budget: Budget,
    alphas: Sequence[float],
    n_seeds: int,
    *,
    max_steps: int | None = None,
    erm: bool = True,
    data: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> list[Trial]:
    """SCBD at several alphas; as controls the pixels, and an encoder never trained; ERM for the paper's assumption."""
    data = data or {}
    model, training = generalization_settings(budget)
    model |= changes or {}
    if max_steps is not None:
        training |= {"max_steps": max_steps}
    trials = []
    for seed in range(n_seeds):
        trials.append(pixel_control(dataset, budget, seed, **data))
        control = training | UNTRAINED
        for system, alpha, how in [("random encoder", 0, control), *(("SCBD", alpha, training) for alpha in alphas)]:
            settings = model | {"alpha": float(alpha)}
            trials.append(generalization_trial(dataset, budget, seed, settings, how, system, **data))
    return trials + (_erm(dataset, budget, data, model["encoder"]) if erm else [])


def _erm(dataset: str, budget: Budget, data: dict[str, Any], encoder: str) -> list[Trial]:
    """ERM over learning rate, weight decay and length (paper, search space): a cloud to correlate over."""
    lengths = {"smoke": (50,), "small": (150, 1500), "paper": (1500, 30_000, 150_000)}[budget]
    decays = (0.0,) if budget == "smoke" else (0.0, 0.01)
    seeds = range(1 if budget == "smoke" else 2)
    model, same = {"encoder": encoder, "standardize": False}, {"batch_size": 32, "split": "split", "load_best": True}
    return [
        generalization_trial(
            dataset,
            budget,
            seed,
            model,
            {"lr": lr, "weight_decay": decay, "max_steps": steps} | same,
            "ERM",
            **data,
        )
        for seed, lr, decay, steps in product(seeds, (1e-4, 1e-3, 1e-2), decays, lengths)
    ]


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
    held_out = "test_environment" in frame
    parts = [
        _of_environment(part, out, str(name) if held_out else "")
        for name, part in (frame.groupby("test_environment") if held_out else [("", frame)])
    ]
    return "\n\n".join(parts)


def _of_environment(frame: pd.DataFrame, out: Path, environment: str) -> str:
    scbd, erm = frame[frame["system"] == "SCBD"], frame[frame["system"] == "ERM"]
    control, pixels = (frame[frame["system"] == system] for system in ("random encoder", "pixel PCA"))
    rows = pd.concat([part for part in (pixels, control, by_alpha(scbd), chosen(erm, ["system"])) if len(part)])
    rows = rows.assign(name=names_of(rows))
    published = HELD_OUT.get(environment) or TABLE_1.get(frame["dataset"].iloc[0], {})
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
    return f"### {environment} held out\n\n{text}" if environment else text


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
