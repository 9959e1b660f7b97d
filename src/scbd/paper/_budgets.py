"""The grids of the paper's experiments, at three budgets."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from scbd.datasets import PACS_DOMAINS, VLCS_DOMAINS
from scbd.workflows._systems import UNTRAINED
from scbd.workflows._trials import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

Budget = Literal["smoke", "small", "paper"]

# what the paper holds fixed for domain generalisation; images in [0, 1], as its own loader leaves them
_GENERALIZATION: dict[str, Any] = {"n_latent": 128, "style_target": "ye", "standardize": False}
# the objective as published; the model's defaults are our own
PUBLISHED: dict[str, Any] = {"invariance": "listing", "smoothing": 0.0}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smoke": (PUBLISHED | {"encoder": "small"}, {"max_steps": 40, "batch_size": 256, "lr": 1e-3}),
    "small": (PUBLISHED | {"encoder": "small"}, {"max_steps": 1000, "batch_size": 512, "lr": 1e-3}),
    "paper": (PUBLISHED | {"encoder": "resnet18"}, {"max_steps": 25_000, "batch_size": 2048, "lr": 1e-4}),
}
_DATA: dict[tuple[str, str], dict[str, Any]] = {
    ("colored_mnist", "smoke"): {"n_train": 4000, "n_test": 1000},
    ("camelyon17", "smoke"): {"n_per_split": 2000},
    ("camelyon17", "small"): {"n_per_split": 50_000},
    ("rxrx1", "smoke"): {"n_per_split": 2000},
}
SCREENS: dict[str, dict[str, Any]] = {
    "smoke": {"n_cells": 2000, "n_wells": 6, "image_size": 32},
    "small": {"n_cells": 20_000, "n_wells": 34, "image_size": 32},
    "paper": {"n_cells": 20_000, "n_wells": 34, "image_size": 64},
}
TRAINING: dict[str, Any] = {"weight_decay": 0.01, "load_best": True}
_SPLIT: dict[str, Any] = TRAINING | {"split": "split"}


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


def cmnist_ablations(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: one setting changed at a time, at alpha 10 (paper budget: 192, as the paper)."""
    return _ablations("colored_mnist", budget, n_seeds)


def camelyon17_ablations(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Camelyon17: one setting changed at a time."""
    model = {"encoder": "densenet121"} if budget == "paper" else {}
    return _ablations("camelyon17", budget, n_seeds, **model)


def cmnist_long(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST at the published alpha for long, to see whether z_c ever leaves the ceiling."""
    model, training = sized("colored_mnist", budget)
    training |= {"max_steps": {"smoke": 60, "small": 15_000, "paper": 100_000}[budget], "load_best": False}
    return [
        scbd_trial("colored_mnist", budget, seed, model | {"alpha": 192.0}, training)
        for seed in range(seeds_of(n_seeds, budget, 1, 1))
    ]


def screen(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The simulated screen: complexes found, wells not (the paper's protocol, where the truth is known)."""
    return _correction("simulated_screen", budget, (0, 1, 8), SCREENS[budget], seeds_of(n_seeds, budget, 3, 3))


def funk22(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The screen of Funk et al.: CORUM and wells (paper, figure 4)."""
    data = {"smoke": {"n_cells": 5000}, "small": {"n_cells": 200_000}, "paper": {}}[budget]
    return _correction("funk22", budget, (0, 1), data, seeds_of(n_seeds, budget, 3, 3), image_size=64)


def funk22_cellprofiler(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The screen of Funk et al., measured by CellProfiler: a table of features a cell (paper, figure 4)."""
    data = {"smoke": {"n_cells": 5000}, "small": {"n_cells": 200_000}, "paper": {}}[budget]
    model = {"y_key": "gene", "e_key": "well", "control": "nontargeting", "n_components": 64}
    return [
        Trial("batch correction", "funk22_cellprofiler", "CellProfiler", seed, data, model)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
    ]


def counterfactuals(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: blocks exchanged and decoded (paper, figure 2b), after the encoders and with them."""
    model, training = sized("colored_mnist", budget)
    steps, width = {"smoke": (40, 8), "small": (1000, 32), "paper": (25_000, 256)}[budget]
    decoder: dict[str, Any] = {"max_steps": steps, "width": width}
    # jointly, the encoders go on for as long as their decoder learns
    together = decoder | {"joint": True, "lr": training["lr"], "batch_size": training["batch_size"]}
    return [
        Trial(
            "counterfactuals",
            "colored_mnist",
            "SCBD",
            seed,
            _DATA.get(("colored_mnist", budget), {}),
            model | {"alpha": alpha},
            training | {"decoder": how},
        )
        for seed, alpha, how in product(range(seeds_of(n_seeds, budget, 3, 3)), (0.0, 10.0), (decoder, together))
    ]


def seeds_of(asked: int | None, budget: Budget, small: int, paper: int) -> int:
    """How many: those asked for, or the budget's."""
    return asked if asked is not None else {"smoke": 1, "small": small, "paper": paper}[budget]


def sized(dataset: str, budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of model and training for domain generalisation."""
    model, training = SIZES[budget]
    return _GENERALIZATION | model, training | _SPLIT


def scbd_trial(
    dataset: str,
    budget: Budget,
    seed: int,
    model: dict[str, Any],
    training: dict[str, Any],
    system: str = "SCBD",
    **data: Any,
) -> Trial:
    """A trial of domain generalisation: SCBD, or a control of it."""
    data = _DATA.get((dataset, budget), {}) | data
    return Trial("domain generalization", dataset, system, seed, data, model, training)


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
    """SCBD at several alphas; as its control the encoder that was never trained; ERM for the paper's assumption."""
    data = data or {}
    model, training = sized(dataset, budget)
    model |= changes or {}
    if max_steps is not None:
        training |= {"max_steps": max_steps}
    trials = []
    for seed in range(n_seeds):
        control = model | {"alpha": 0.0}
        trials.append(scbd_trial(dataset, budget, seed, control, training | UNTRAINED, "random encoder", **data))
        trials += [scbd_trial(dataset, budget, seed, model | {"alpha": float(a)}, training, **data) for a in alphas]
    return trials + (_erm(dataset, budget, data, model["encoder"]) if erm else [])


def _erm(dataset: str, budget: Budget, data: dict[str, Any], encoder: str) -> list[Trial]:
    """ERM over learning rate, weight decay and length (paper, search space): a cloud to correlate over."""
    lengths = {"smoke": (50,), "small": (150, 1500), "paper": (1500, 30_000, 150_000)}[budget]
    decays = (0.0,) if budget == "smoke" else (0.0, 0.01)
    return [
        scbd_trial(
            dataset,
            budget,
            seed,
            {"encoder": encoder, "standardize": False},
            {
                "lr": lr,
                "weight_decay": decay,
                "max_steps": steps,
                "batch_size": 32,
                "split": "split",
                "load_best": True,
            },
            "ERM",
            **data,
        )
        for seed, lr, decay, steps in product(range(1 if budget == "smoke" else 2), (1e-4, 1e-3, 1e-2), decays, lengths)
    ]


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


def _ablations(dataset: str, budget: Budget, n_seeds: int | None, **changes: Any) -> list[Trial]:
    model, training = sized(dataset, budget)
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
        scbd_trial(dataset, budget, seed, model | m, training | t)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for m, t in changed
    ]


def _correction(
    dataset: str, budget: Budget, alphas: Sequence[float], data: dict[str, Any], n_seeds: int, **changes: Any
) -> list[Trial]:
    settings, training = SIZES[budget]
    model = settings | {"n_latent": 64, "style_target": "e"} | changes
    training = training | TRAINING
    if budget == "paper" and dataset == "funk22":
        training |= {"max_steps": 150_000, "perturbations_per_batch": 256, "train_size": 0.83, "validation_size": 0.02}
    trials = []
    for seed in range(n_seeds):
        trials.append(Trial("batch correction", dataset, "pixel PCA", seed, data, {"n_components": 64}))
        control = training | UNTRAINED
        trials.append(Trial("batch correction", dataset, "random encoder", seed, data, model | {"alpha": 0.0}, control))
        trials += [
            Trial("batch correction", dataset, "SCBD", seed, data, model | {"alpha": float(a)}, training)
            for a in alphas
        ]
    return trials
