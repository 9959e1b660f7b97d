"""The grids of our own form of invariance, beside the published ones in :mod:`scbd.paper._budgets`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from scbd.datasets import PACS_DOMAINS
from scbd.paper._budgets import PUBLISHED, SCREENS, SIZES, TRAINING, scbd_trial, seeds_of, sized
from scbd.workflows._systems import UNTRAINED
from scbd.workflows._trials import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.paper._budgets import Budget

# the model's defaults spelled out, so that rows say what they are; z_s is left out, which leaves z_c as it is
OURS: dict[str, Any] = {"invariance": "variance", "smoothing": 2 / 3, "style_target": None}
_OURS_ALPHA = 0.01
_ALPHAS = (0.0, 0.003, 0.01, 0.03, 0.1, "auto")
UNEQUAL_WELLS = {"well_imbalance": 0.6}
# a fifth is not learned from
NEW_CELLS = {"train_size": 0.8, "validation_size": 0.02}


def cmnist_variance(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with our form of invariance, between a random encoder and an oracle."""
    model, training = sized("colored_mnist", budget)
    model |= OURS
    training |= _our_training(budget, max_steps=1500)
    trials = []
    for seed in range(seeds_of(n_seeds, budget, 10, 3)):
        trials.append(scbd_trial("colored_mnist", budget, seed, model | {"alpha": "auto"}, training))
        if seed < 3:
            trials.append(scbd_trial("colored_mnist", budget, seed, model | {"alpha": _OURS_ALPHA}, training))
            free = model | {"alpha": 0.0}
            trials.append(scbd_trial("colored_mnist", budget, seed, free, training | UNTRAINED, "random encoder"))
            trials.append(scbd_trial("colored_mnist", budget, seed, free, training, "oracle", colored=False))
    return trials


def cmnist_map(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: where z_c learns, goes blind or dies, by form, alpha, batch, environments and labels."""
    model, training = sized("colored_mnist", budget)
    # many short runs: which regime it is shows early
    training |= {"load_best": False, "max_steps": {"smoke": 10, "small": 300, "paper": 5000}[budget]}
    data = {} if budget == "smoke" else {"n_train": 20_000, "n_test": 5000}
    few: dict[str, Sequence[float]] = {"listing": (1, 10, 100), "variance": (0.01, 0.03, 0.1)}
    many: dict[str, Sequence[float]] = {
        "listing": (1, 3, 10, 30, 100, 256),
        "variance": (0.003, 0.01, 0.03, 0.1, 0.3),
        "mean": (1, 10, 100),
        "mass": (1, 10, 100),
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
        trials += [scbd_trial("colored_mnist", budget, seed, model | form, how, **data | cells) for form in settings]
    return trials


def screen_map(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen: the same map, by form, alpha, batch, wells and genes."""
    model, training = SIZES[budget]
    model = model | {"n_latent": 64}
    training = training | {"weight_decay": 0.01, "load_best": False} | NEW_CELLS
    training["max_steps"] = {"smoke": 10, "small": 300, "paper": 5000}[budget]
    batch, screen = training["batch_size"], SCREENS[budget]
    plan: list[tuple[dict[str, Any], int]] = [({}, batch), ({"n_wells": 2}, batch)]
    if budget != "smoke":
        plan += [({}, batch // 4), ({}, batch * 4), ({"n_wells": 8}, batch), (UNEQUAL_WELLS, batch)]
        plan += [({"n_complexes": 3}, batch)]
    settings = [_form("listing") | {"alpha": alpha} for alpha in (0.0, 1.0, 10.0, 100.0)]
    settings += [OURS | {"alpha": alpha} for alpha in _ALPHAS]
    return [
        Trial(
            "batch correction of new cells",
            "simulated_screen",
            "SCBD",
            seed,
            screen | cells,
            model | form,
            training | {"batch_size": size},
        )
        for seed, (cells, size), form in product(range(seeds_of(n_seeds, budget, 1, 3)), plan, settings)
    ]


def cmnist_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with our form at several alphas: what choosing one costs, and what finds itself."""
    return _alphas("colored_mnist", budget, n_seeds, {"smoke": 20, "small": 500, "paper": 25_000}[budget])


def pacs_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """PACS with our form at several alphas, each domain held out in turn."""
    steps = {"smoke": 20, "small": 300, "paper": 25_000}[budget]
    domains = PACS_DOMAINS[: 1 if budget == "smoke" else None]
    return [trial for d in domains for trial in _alphas("pacs", budget, n_seeds, steps, test_environment=d)]


def screen_alphas(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen with wells of unequal size, with our form at several alphas."""
    model, training = SIZES[budget]
    model = model | OURS | {"n_latent": 64}
    training = training | {"weight_decay": 0.01, "load_best": False} | NEW_CELLS
    data = SCREENS[budget] | UNEQUAL_WELLS
    return [
        Trial("batch correction of new cells", "simulated_screen", "SCBD", seed, data, model | {"alpha": a}, training)
        for seed in range(seeds_of(n_seeds, budget, 5, 5))
        for a in _ALPHAS
    ]


def screen_variance(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen with wells of unequal size: our form of invariance beside the published one."""
    model, training = SIZES[budget]
    model = model | {"n_latent": 64, "style_target": None}
    training = training | TRAINING | _our_training(budget) | NEW_CELLS
    data = SCREENS[budget] | UNEQUAL_WELLS
    data["n_cells"] *= 5  # so many that few are known by heart; a fifth is not learned from
    systems = [{"alpha": alpha} for alpha in (0.0, 1.0, 8.0)]
    systems += [OURS | {"alpha": alpha} for alpha in (0.0, _OURS_ALPHA, "auto")]
    return [
        Trial("batch correction of new cells", "simulated_screen", "SCBD", seed, data, model | system, training)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for system in systems
    ]


def _our_training(budget: Budget, **small: Any) -> dict[str, Any]:
    """The last weights; at the small budget, larger batches: the statistic is sharper at the same price."""
    return {"load_best": False} | ({"batch_size": 1024} | small if budget == "small" else {})


def _form(form: str) -> dict[str, Any]:
    """Our objective, or the published one with a contrastive form of invariance; z_c alone."""
    return OURS if form == "variance" else PUBLISHED | {"invariance": form, "style_target": None}


def _alphas(dataset: str, budget: Budget, n_seeds: int | None, steps: int, **data: Any) -> list[Trial]:
    """Our form at several alphas."""
    model, training = sized(dataset, budget)
    training |= {"max_steps": steps, "load_best": False}
    return [
        scbd_trial(dataset, budget, seed, model | OURS | {"alpha": alpha}, training, **data)
        for seed in range(seeds_of(n_seeds, budget, 5, 5))
        for alpha in _ALPHAS
    ]
