"""The paper's space, stated once: of each data set what its tables hold fixed, and what they search over.

Colored MNIST and Camelyon17 are as the paper's appendix has them. Of PACS and VLCS it gives results alone, which for
the classifiers are DomainBed's: so are the settings here (224 pixels, ResNet-50, batches of 32 a training domain, 5,000
steps, a look at validation cells every 300), but for AdamW and for photographs that are neither cropped nor turned.
"""

from __future__ import annotations

from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from scbd.datasets import PACS_DOMAINS, VLCS_DOMAINS
from scbd.paper._bounds import cmnist_variance
from scbd.paper._budgets import (
    OURS,
    PUBLISHED_ALPHAS,
    SIZES,
    generalization_settings,
    generalization_trial,
    pixel_control,
    seeds_of,
)
from scbd.workflows import MODEL_SPACE, TRAINING_SPACE, UNTRAINED, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial

    # arguments of a model and of its training
    Settings = tuple[dict[str, Any], dict[str, Any]]


class Space(NamedTuple):
    """A data set of domain generalisation; what is said of the paper's budget is so there alone."""

    dataset: str
    alphas: Mapping[Budget, Sequence[float]]
    """That are swept, of SCBD as published."""
    tables: Mapping[Budget, Sequence[float]]
    """Those of them that stand beside other systems."""
    seeds: tuple[int, int] = (3, 10)
    """Of a sweep, at the small and the paper's budget."""
    steps: Mapping[Budget, int] = MappingProxyType({})
    """Of SCBD, where they are others than everywhere."""
    encoder: str = "resnet18"
    """At the paper's budget."""
    published: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the data set at the paper's budget."""
    standardize: bool = False
    """Whether channels are standardised at the paper's budget, as pretrained weights expect it."""
    batches: tuple[int, int] = (2048, 32)
    """Cells a batch of SCBD, and of a classifier, at the paper's budget."""
    epoch: int = 1500
    """Batches of a classifier between two looks at validation cells: a pass over the training cells."""
    lengths: Sequence[int] = (1, 20, 100)
    """Of a classifier, in such epochs."""
    classifiers: Sequence[str] = ("ERM", "CORAL", "DANN", "IRM", "Fish", "Group DRO")
    domains: Sequence[str] = ()
    """Each held out in turn."""

    def data(self, budget: Budget) -> Iterator[dict[str, Any]]:
        """Arguments of the data set; one for each domain that is held out, if any."""
        same = dict(self.published) if budget == "paper" else {}
        held_out = self.domains[: 1 if budget == "smoke" else None]
        yield from ([same | {"test_environment": domain} for domain in held_out] if held_out else [same])

    def settings(self, budget: Budget) -> Settings:
        """Of SCBD."""
        model, training = generalization_settings(budget)
        if budget == "paper":
            model |= {"encoder": self.encoder, "standardize": self.standardize}
            training |= {"batch_size": self.batches[0]}
        return model, training | ({"max_steps": self.steps[budget]} if budget in self.steps else {})


_DOMAINBED: dict[str, Any] = {
    "seeds": (3, 3),
    "alphas": {"smoke": (0, 10), "small": (0, 3, 10, 30), "paper": PUBLISHED_ALPHAS},
    "tables": dict.fromkeys(("smoke", "small", "paper"), (0,)),
    "steps": {"smoke": 20, "small": 400},
    "encoder": "resnet50",
    "published": {"image_size": 224},
    "standardize": True,
    # the paper has 2,048 everywhere, which at 224 pixels no GPU holds
    "batches": (256, 96),
    "epoch": 300,
    "lengths": (5000 / 300,),
    "classifiers": ("ERM", "CORAL", "DANN", "IRM", "Group DRO"),
}
SPACES = {
    "colored_mnist": Space(
        "colored_mnist",
        {"smoke": (0, 10, 192), "small": (0, 1, 3, 10, 30, 64, 128, 192), "paper": PUBLISHED_ALPHAS},
        {"smoke": (), "small": (), "paper": (0, 192)},
        seeds=(5, 10),
    ),
    "camelyon17": Space(
        "camelyon17",
        {"smoke": (0, 10), "small": (0, 3, 10, 30, 192), "paper": PUBLISHED_ALPHAS},
        {"smoke": (0,), "small": (0, 192), "paper": (0, 192)},
        encoder="densenet121",
        epoch=9452,  # of 302,436 patches
        lengths=(5,),
    ),
    "rxrx1": Space("rxrx1", {"smoke": (0, 1), "small": (0, 1, 10), "paper": (0, 1, 10, 64)}, {}, seeds=(3, 3)),
    "pacs": Space("pacs", domains=PACS_DOMAINS, **_DOMAINBED),
    "vlcs": Space("vlcs", domains=VLCS_DOMAINS, **_DOMAINBED),
}


def sweep(space: Space, budget: Budget, n_seeds: int | None, *, erm: bool = True) -> list[Trial]:
    """SCBD at several alphas; as controls the pixels, and an encoder never trained; ERM for the paper's assumption."""
    seeds = range(seeds_of(n_seeds, budget, *space.seeds))
    trials = []
    for data in space.data(budget):
        for seed in seeds:
            trials.append(pixel_control(space.dataset, budget, seed, **data))
            trials += published(space, budget, seed, space.alphas[budget], data)
        trials += _cloud(space, budget, n_seeds, data) if erm else []
    return trials


def systems(space: Space, budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Every system of the paper's table of a data set over the paper's space, beside SCBD and the controls."""
    seeds = range(seeds_of(n_seeds, budget, 3, space.seeds[1]))
    trials = []
    for data, seed in product(space.data(budget), seeds):
        trials += [trial for name in space.classifiers for trial in classifiers(space, budget, name, seed, data)]
        trials += _ivae(space, budget, seed, data) if "Fish" in space.classifiers else []
        if space.tables[budget]:
            trials += published(space, budget, seed, space.tables[budget], data)
        trials += _ours(space, budget, seed, data)
        trials.append(pixel_control(space.dataset, budget, seed, **data))
    return trials


def published(space: Space, budget: Budget, seed: int, alphas: Sequence[float], data: dict[str, Any]) -> list[Trial]:
    """SCBD in its published form, after an encoder that was never trained."""
    model, training = space.settings(budget)
    runs = [("random encoder", 0, training | UNTRAINED), *(("SCBD", alpha, training) for alpha in alphas)]
    return [
        generalization_trial(space.dataset, budget, seed, model | {"alpha": float(alpha)}, how, name, **data)
        for name, alpha, how in runs
    ]


def classifiers(space: Space, budget: Budget, system: str, seed: int, data: dict[str, Any]) -> list[Trial]:
    """A classifier over the paper's space; below that budget over a coarser one, in runs shorter than its warm-ups."""
    if budget == "paper":
        lengths = [round(n * space.epoch) for n in space.lengths]
        pairs = product(settings_of(MODEL_SPACE[system]), settings_of(TRAINING_SPACE), lengths)
        return [_classifier(space, budget, system, seed, model, how, n, data) for model, how, n in pairs]
    steps = {"smoke": 30, "small": 1500}[budget]
    model = dict(MODEL_SPACE[system])
    if system == "Fish":
        model = {"pretrain_steps": (steps // 3,), "meta_lr": (0.01, 0.1)}
    if system == "IRM":
        model["anneal_steps"] = (steps // 3,)
    if budget == "smoke":
        model = {name: values[:1] for name, values in model.items()}
    training = {"lr": (1e-4, 1e-3) if budget == "small" else (1e-3,), "weight_decay": (0.01,)}
    pairs = product(settings_of(model), settings_of(training))
    return [_classifier(space, budget, system, seed, m, how, steps, data) for m, how in pairs]


def _cloud(space: Space, budget: Budget, n_seeds: int | None, data: dict[str, Any]) -> list[Trial]:
    """ERM over learning rate, weight decay and length (paper, search space): a cloud to correlate over."""
    if budget == "paper":
        seeds = range(seeds_of(n_seeds, budget, 2, space.seeds[1]))
        return [trial for seed in seeds for trial in classifiers(space, budget, "ERM", seed, data)]
    lengths, decays, n = {"smoke": ((50,), (0.0,), 1), "small": ((150, 1500), (0.0, 0.01), 2)}[budget]
    return [
        _classifier(space, budget, "ERM", seed, {}, {"lr": lr, "weight_decay": decay}, steps, data)
        for seed, lr, decay, steps in product(range(n), TRAINING_SPACE["lr"], decays, lengths)
    ]


def _classifier(
    space: Space,
    budget: Budget,
    system: str,
    seed: int,
    model: dict[str, Any],
    training: dict[str, Any],
    steps: int,
    data: dict[str, Any],
) -> Trial:
    how = training | {"max_steps": steps, "batch_size": 32, "split": "split", "load_best": True}
    settings = {"encoder": SIZES[budget][0]["encoder"], "standardize": False}
    if budget == "paper":
        settings = {"encoder": space.encoder, "standardize": space.standardize}
        # steps before the first round of Fish come in addition; every epoch may be the best
        how |= {"max_steps": steps + model.get("pretrain_steps", 0), "validate_every": space.epoch}
        how |= {"batch_size": space.batches[1]}
    return generalization_trial(space.dataset, budget, seed, model | settings, how, system, **data)


def _ivae(space: Space, budget: Budget, seed: int, data: dict[str, Any]) -> list[Trial]:
    """At the one rate and decay that the paper has for latent-variable models; below its budget at two rates."""
    steps, size = {"smoke": (30, 128), "small": (500, 256), "paper": (50_000, 1024)}[budget]
    rates = {"smoke": (1e-3,), "small": (1e-4, 1e-3), "paper": (1e-4,)}[budget]
    how = {"weight_decay": 0.01, "max_steps": steps, "batch_size": size, "split": "split", "load_best": True}
    model = {"n_latent": 64, "standardize": False}
    return [generalization_trial(space.dataset, budget, seed, model, how | {"lr": lr}, "iVAE", **data) for lr in rates]


def _ours(space: Space, budget: Budget, seed: int, data: dict[str, Any]) -> list[Trial]:
    """SCBD in our form; of Colored MNIST as its own experiment has it."""
    if space.dataset == "colored_mnist":
        names = {"SCBD"} if space.tables[budget] else {"SCBD", "random encoder"}
        return [t for t in cmnist_variance(budget, seed + 1) if t.seed == seed and t.system in names]
    model, training = space.settings(budget)
    how = training | {"load_best": False}
    return [generalization_trial(space.dataset, budget, seed, model | OURS | {"alpha": "auto"}, how, **data)]
