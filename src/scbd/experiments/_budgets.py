"""The grids of the paper's experiments, at three budgets."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from scbd.datasets import PACS_DOMAINS, VLCS_DOMAINS
from scbd.experiments._systems import UNTRAINED
from scbd.experiments._trials import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

Budget = Literal["smoke", "small", "paper"]

# what the paper holds fixed for domain generalisation; images in [0, 1], as its own loader leaves them
_GENERALIZATION: dict[str, Any] = {"n_latent": 128, "style_target": "ye", "standardize": False}
# the objective as published; the model's defaults are our own
PUBLISHED: dict[str, Any] = {"invariance": "listing", "smoothing": 0.0}
# the model's defaults spelled out, so that rows say what they are; z_s is left out, which leaves z_c as it is
OURS: dict[str, Any] = {"invariance": "variance", "smoothing": 2 / 3, "style_target": None}
_OURS_ALPHA = 0.01
_ALPHAS = (0.0, 0.003, 0.01, 0.03, 0.1, "auto")
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
UNEQUAL_WELLS = {"well_imbalance": 0.6}
# a fifth is not learned from
NEW_CELLS = {"train_size": 0.8, "validation_size": 0.02}
_TRAINING: dict[str, Any] = {"weight_decay": 0.01, "load_best": True}
_SPLIT: dict[str, Any] = _TRAINING | {"split": "split"}


def cmnist(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: alpha against accuracy, and ERM (paper, table 1, figures 3 and 5)."""
    alphas = {"smoke": (0, 10, 192), "small": (0, 1, 3, 10, 30, 64, 128, 192), "paper": (0, 64, 128, 192)}[budget]
    return _sweeps("colored_mnist", budget, alphas, seeds_of(n_seeds, budget, 5, 10))


def cmnist_variance(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with our form of invariance, between a random encoder and an oracle."""
    model, training = _size("colored_mnist", budget)
    model |= OURS
    training |= _our_training(budget, max_steps=1500)
    trials = []
    for seed in range(seeds_of(n_seeds, budget, 10, 3)):
        trials.append(_scbd("colored_mnist", budget, seed, model | {"alpha": "auto"}, training))
        if seed < 3:
            trials.append(_scbd("colored_mnist", budget, seed, model | {"alpha": _OURS_ALPHA}, training))
            free = model | {"alpha": 0.0}
            trials.append(_scbd("colored_mnist", budget, seed, free, training | UNTRAINED, "random encoder"))
            trials.append(_scbd("colored_mnist", budget, seed, free, training, "oracle", colored=False))
    return trials


def cmnist_map(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: where z_c learns, goes blind or dies, by form, alpha, batch, environments and labels."""
    model, training = _size("colored_mnist", budget)
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
        trials += [_scbd("colored_mnist", budget, seed, model | form, how, **data | cells) for form in settings]
    return trials


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
    model, training = _size("colored_mnist", budget)
    training |= {"max_steps": {"smoke": 60, "small": 15_000, "paper": 100_000}[budget], "load_best": False}
    return [
        _scbd("colored_mnist", budget, seed, model | {"alpha": 192.0}, training)
        for seed in range(seeds_of(n_seeds, budget, 1, 1))
    ]


def screen(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The simulated screen: complexes found, wells not (the paper's protocol, where the truth is known)."""
    return _correction("simulated_screen", budget, (0, 1, 8), SCREENS[budget], seeds_of(n_seeds, budget, 3, 3))


def screen_variance(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """New cells of a simulated screen with wells of unequal size: our form of invariance beside the published one."""
    model, training = SIZES[budget]
    model = model | {"n_latent": 64, "style_target": None}
    training = training | _TRAINING | _our_training(budget) | NEW_CELLS
    data = SCREENS[budget] | UNEQUAL_WELLS
    data["n_cells"] *= 5  # so many that few are known by heart; a fifth is not learned from
    systems = [{"alpha": alpha} for alpha in (0.0, 1.0, 8.0)]
    systems += [OURS | {"alpha": alpha} for alpha in (0.0, _OURS_ALPHA, "auto")]
    return [
        Trial("batch correction of new cells", "simulated_screen", "SCBD", seed, data, model | system, training)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for system in systems
    ]


def funk22(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """The screen of Funk et al.: CORUM and wells (paper, figure 4)."""
    data = {"smoke": {"n_cells": 5000}, "small": {"n_cells": 200_000}, "paper": {}}[budget]
    return _correction("funk22", budget, (0, 1), data, seeds_of(n_seeds, budget, 3, 3), image_size=64)


def counterfactuals(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: blocks exchanged and decoded (paper, figure 2b), after the encoders and with them."""
    model, training = _size("colored_mnist", budget)
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


def _size(dataset: str, budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
    model, training = SIZES[budget]
    return _GENERALIZATION | model, training | _SPLIT


def _our_training(budget: Budget, **small: Any) -> dict[str, Any]:
    """The last weights; at the small budget, larger batches: the statistic is sharper at the same price."""
    return {"load_best": False} | ({"batch_size": 1024} | small if budget == "small" else {})


def _form(form: str) -> dict[str, Any]:
    """Our objective, or the published one with a contrastive form of invariance; z_c alone."""
    return OURS if form == "variance" else PUBLISHED | {"invariance": form, "style_target": None}


def _scbd(
    dataset: str,
    budget: Budget,
    seed: int,
    model: dict[str, Any],
    training: dict[str, Any],
    system: str = "SCBD",
    **data: Any,
) -> Trial:
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
    model, training = _size(dataset, budget)
    model |= changes or {}
    if max_steps is not None:
        training |= {"max_steps": max_steps}
    trials = []
    for seed in range(n_seeds):
        control = model | {"alpha": 0.0}
        trials.append(_scbd(dataset, budget, seed, control, training | UNTRAINED, "random encoder", **data))
        trials += [_scbd(dataset, budget, seed, model | {"alpha": float(a)}, training, **data) for a in alphas]
    return trials + (_erm(dataset, budget, data, model["encoder"]) if erm else [])


def _erm(dataset: str, budget: Budget, data: dict[str, Any], encoder: str) -> list[Trial]:
    """ERM over learning rate, weight decay and length (paper, search space): a cloud to correlate over."""
    lengths = {"smoke": (50,), "small": (150, 1500), "paper": (1500, 30_000, 150_000)}[budget]
    decays = (0.0,) if budget == "smoke" else (0.0, 0.01)
    return [
        _scbd(
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


def _alphas(dataset: str, budget: Budget, n_seeds: int | None, steps: int, **data: Any) -> list[Trial]:
    """Our form at several alphas."""
    model, training = _size(dataset, budget)
    training |= {"max_steps": steps, "load_best": False}
    return [
        _scbd(dataset, budget, seed, model | OURS | {"alpha": alpha}, training, **data)
        for seed in range(seeds_of(n_seeds, budget, 5, 5))
        for alpha in _ALPHAS
    ]


def _ablations(dataset: str, budget: Budget, n_seeds: int | None, **changes: Any) -> list[Trial]:
    model, training = _size(dataset, budget)
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
        _scbd(dataset, budget, seed, model | m, training | t)
        for seed in range(seeds_of(n_seeds, budget, 3, 3))
        for m, t in changed
    ]


def _correction(
    dataset: str, budget: Budget, alphas: Sequence[float], data: dict[str, Any], n_seeds: int, **changes: Any
) -> list[Trial]:
    settings, training = SIZES[budget]
    model = settings | {"n_latent": 64, "style_target": "e"} | changes
    training = training | _TRAINING
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
