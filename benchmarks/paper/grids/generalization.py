"""Domain generalisation: the paper's space, stated once, and what is run of it on digits, tissue, cell lines, pictures.

Colored MNIST and Camelyon17 are as the paper's appendix has them. Of PACS and VLCS it gives results alone, which for
the classifiers are DomainBed's: so are the settings here (224 pixels, ResNet-50, batches of 32 a training domain, 5,000
steps, a look at validation cells every 300), but for AdamW and for photographs that are neither cropped nor turned.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from paper import plots
from paper.grids.shared import (
    OUR_ALPHA,
    OUR_ALPHAS,
    OURS,
    PUBLISHED_ALPHAS,
    SIZES,
    Budget,
    Experiment,
    generalization_settings,
    generalization_trial,
    pixel_control,
    seeds_of,
)
from paper.loaders import PACS_DOMAINS, VLCS_DOMAINS
from paper.reports import (
    ACCURACIES,
    HEALTH,
    by_alpha,
    by_environment,
    chosen,
    cost_of_choosing,
    in_out_correlation,
    names_of,
    only,
    published_average,
    published_of,
    setting_of,
    table,
)
from paper.systems import MODEL_SPACE, TRAINING_SPACE, UNTRAINED, settings_of
from paper.trials import Trial
from scbd import pl
from scbd._shared.files import save_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


def cmnist_variance(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with our form of invariance, between a random encoder and an oracle."""
    model, training = generalization_settings(budget)
    model |= OURS
    training |= {"load_best": False}
    if budget == "small":  # the statistic is sharper in larger batches, at the same price
        training |= {"batch_size": 1024, "max_steps": 1500}
    trials = []
    for seed in range(seeds_of(n_seeds, budget, 10, 3)):
        trials.append(generalization_trial("colored_mnist", budget, seed, model | {"alpha": "auto"}, training))
        if seed < 3:
            ours, free = model | {"alpha": OUR_ALPHA}, model | {"alpha": 0.0}
            trials += [
                generalization_trial("colored_mnist", budget, seed, ours, training),
                generalization_trial("colored_mnist", budget, seed, free, training | UNTRAINED, "random encoder"),
                generalization_trial("colored_mnist", budget, seed, free, training, "oracle", colored=False),
            ]
    return trials


def cmnist_preset(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST with `preset="domain_generalization"` and no other setting that z_c depends on."""
    # a model without z_s learns the same z_c, to the bit, in half of the time
    model = {"preset": "domain_generalization", "encoder": "small", "style_target": None}
    training = {"max_steps": 20} if budget == "smoke" else {}
    seeds = range(seeds_of(n_seeds, budget, 10, 10))
    return [generalization_trial("colored_mnist", budget, seed, model, training) for seed in seeds]


def bounded_report(frame: pd.DataFrame, out: Path) -> str:
    """Accuracy between the two: a table."""
    systems = ["random encoder", "SCBD", "oracle"]
    frame = frame.sort_values("system", key=lambda names: names.map(systems.index), kind="stable")
    return table(frame.assign(name=names_of(frame)), ["name"], ACCURACIES | HEALTH)


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

    def settings(self, budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of SCBD: arguments of the model and of its training."""
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
            trials += [pixel_control(space.dataset, budget, seed, **data), untrained(space, budget, seed, data)]
            trials += published(space, budget, seed, space.alphas[budget], data)
        trials += _cloud(space, budget, n_seeds, data) if erm else []
    return trials


def systems(space: Space, budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Every system of the paper's table of a data set over the paper's space, beside SCBD and the controls.

    SCBD as published, too, at the paper's budget: its section 4.1 says that rate and weight decay were selected (its
    appendix, that they were not tuned).
    """
    seeds = range(seeds_of(n_seeds, budget, 3, space.seeds[1]))
    trials = []
    for data, seed in product(space.data(budget), seeds):
        trials += [trial for name in space.classifiers for trial in classifiers(space, budget, name, seed, data)]
        trials += _ivae(space, budget, seed, data) if "Fish" in space.classifiers else []
        if alphas := space.tables[budget]:
            trials.append(untrained(space, budget, seed, data))
            for how in settings_of(TRAINING_SPACE if budget == "paper" else {}):
                trials += published(space, budget, seed, alphas, data, **how)
        trials += _ours(space, budget, seed, data)
        trials.append(pixel_control(space.dataset, budget, seed, **data))
    return trials


def published(
    space: Space, budget: Budget, seed: int, alphas: Sequence[float], data: dict[str, Any], **changes: Any
) -> list[Trial]:
    """SCBD in its published form, with other settings of its training if any."""
    model, training = space.settings(budget)
    return [
        generalization_trial(space.dataset, budget, seed, model | {"alpha": float(alpha)}, training | changes, **data)
        for alpha in alphas
    ]


def untrained(space: Space, budget: Budget, seed: int, data: dict[str, Any]) -> Trial:
    """The encoder of SCBD as it is before any training."""
    model, training = space.settings(budget)
    model, training = model | {"alpha": 0.0}, training | UNTRAINED
    return generalization_trial(space.dataset, budget, seed, model, training, "random encoder", **data)


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
    model: dict[str, Any] = {"n_latent": 64, "standardize": False}
    if budget == "paper":  # images as large as they have all but digits, divergences that warm up as on the screen
        model |= {"kl_warmup_steps": 4500}
        data = data | ({} if space.dataset == "colored_mnist" else {"image_size": 64})
    return [generalization_trial(space.dataset, budget, seed, model, how | {"lr": lr}, "iVAE", **data) for lr in rates]


def _ours(space: Space, budget: Budget, seed: int, data: dict[str, Any]) -> list[Trial]:
    """SCBD in our form; of Colored MNIST as its own experiment has it."""
    if space.dataset == "colored_mnist":
        names = {"SCBD"} if space.tables[budget] else {"SCBD", "random encoder"}
        return [t for t in cmnist_variance(budget, seed + 1) if t.seed == seed and t.system in names]
    model, training = space.settings(budget)
    how = training | {"load_best": False}
    return [generalization_trial(space.dataset, budget, seed, model | OURS | {"alpha": "auto"}, how, **data)]


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
        Rows of :class:`Results`.
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
        ax = plots.sweep(scbd, "alpha", shown, control=control[list(shown)].mean() if len(control) else None)
        ax.set(ylabel="accuracy", title=environment)
        plots.save_axes(ax, out / f"alpha{suffix}.png")
    text += cost_of_choosing(scbd, "z_c in", "z_c out", "accuracy of $z_c$ out of distribution")
    if len(erm) > 2:
        plots.save_axes(plots.in_against_out(erm), out / f"erm{suffix}.png")
        found = in_out_correlation(erm)
        text += (
            f"\n\nERM, {found['n']:.0f} runs: in- and out-of-distribution accuracy correlate with "
            f"{found['pearson']:.2f} (ranks {found['spearman']:.2f}; better half {found['strong']:.2f})."
        )
    return text


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
    """Each system at its best in distribution, beside the paper; every setting as a point of the trade-off.

    Of domains that were held out in turn, each and their average.
    """
    text = by_environment(frame, out, _systems_of)
    if "test_environment" not in frame or frame["test_environment"].nunique() < 2:
        return text
    named, published = frame.assign(name=names_of(frame)), published_average(str(frame["dataset"].iloc[0]))
    best = pd.concat([chosen(part, ["name"]) for _, part in named.groupby("test_environment")])
    of_seed = best.groupby(["name", "seed"], sort=False)
    whole = of_seed["test_environment"].transform("nunique") == frame["test_environment"].nunique()
    scores = [score for score in ACCURACIES if score in best]
    mean = best[whole].groupby(["name", "seed"], sort=False)[scores].mean().reset_index()
    return f"{text}\n\n### Average over domains\n\n{table(mean, ['name'], ACCURACIES, published=published)}"


def _systems_of(frame: pd.DataFrame, out: Path, environment: str) -> str:
    named = frame.assign(name=names_of(frame), setting=setting_of(frame))
    # drawn with the one head that all have
    drawn = named[named["system"] != "random encoder"]
    ax = plots.trade_off(drawn, "r_c in", "r_c out", setting="setting", traced=["SCBD"])
    ax.set(xlabel="accuracy in distribution", ylabel="accuracy out of distribution", title=environment)
    plots.save_axes(ax, out / f"trade_off{'_' * bool(environment)}{environment}.png")
    published = published_of(str(frame["dataset"].iloc[0]), environment)
    return table(chosen(named, ["name"]), ["name"], ACCURACIES, published=published)


_FACTORS = {"n_latent": "embedding size", "batch_size": "batch size", "weight_decay": "weight decay"}


def cmnist_ablations(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST: one setting changed at a time, and a single block, at alpha 10 (paper's budget: 192)."""
    return _ablations(SPACES["colored_mnist"], budget, n_seeds)


def camelyon17_ablations(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Camelyon17: one setting changed at a time, a single block, and ResNet-18 (paper, appendix)."""
    trials = _ablations(SPACES["camelyon17"], budget, n_seeds)
    if budget == "paper":
        smaller = SPACES["camelyon17"]._replace(encoder="resnet18")
        for seed, target in product(range(seeds_of(n_seeds, budget, 3, 10)), ("ye", None)):
            trials += _blocks(smaller, budget, seed, target, PUBLISHED_ALPHAS)
    return trials


def _ablations(space: Space, budget: Budget, n_seeds: int | None) -> list[Trial]:
    model, training = space.settings(budget)
    model |= {"alpha": 192.0 if budget == "paper" else 10.0}
    training |= {"max_steps": {"smoke": 20, "small": 500, "paper": 25_000}[budget]}
    batch = training["batch_size"]
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})]
    changed += [({"n_latent": n}, {}) for n in (32, 64, 256)]
    changed += [({}, {"batch_size": n}) for n in (batch // 4, batch // 2, batch * 2)]
    changed += [({}, {"weight_decay": decay}) for decay in (0.0, 0.001, 0.1)]
    changed += [({"style_target": "e"}, {})]
    alphas: Sequence[float] = {"smoke": (0.0,), "small": (model["alpha"], 0.0), "paper": PUBLISHED_ALPHAS}[budget]
    if budget == "smoke":
        changed = changed[:2]
    trials = []
    for seed in range(seeds_of(n_seeds, budget, 3, 10)):
        trials += [generalization_trial(space.dataset, budget, seed, model | m, training | t) for m, t in changed]
        trials += _blocks(space, budget, seed, None, alphas, max_steps=training["max_steps"])
    return trials


def _blocks(
    space: Space, budget: Budget, seed: int, target: str | None, alphas: Sequence[float], **training: Any
) -> list[Trial]:
    """SCBD as published at each alpha, with z_s or without."""
    return [
        replace(trial, model={**trial.model, "style_target": target})
        for trial in published(space, budget, seed, alphas, {}, **training)
    ]


def ablation_report(frame: pd.DataFrame, out: Path) -> str:
    """A table a setting and a figure of three panels; another of alpha with z_s and without, where it was swept."""
    import matplotlib.pyplot as plt

    every = frame.assign(style_target=frame["style_target"].fillna("none"))
    several = "encoder" in every and every["encoder"].nunique() > 1
    frame = every[every["encoder"] == every["encoder"].mode()[0]] if several else every
    base = {column: frame[column].mode()[0] for column in [*_FACTORS, "style_target", "alpha"]}
    tables, figure = [], plt.figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, len(_FACTORS))
    for ax, (factor, name) in zip(axes, _FACTORS.items(), strict=True):
        part = only(frame, {column: value for column, value in base.items() if column != factor})
        part = part.sort_values(factor, kind="stable")
        plots.sweep(part, factor, {"r_c in": "in distribution", "r_c out": "out of distribution"}, ax=ax).set(
            xlabel=name
        )
        tables.append(f"**{name}**\n\n" + table(part, [factor], ACCURACIES | HEALTH))
    save_figure(figure, out / "ablations.png")
    part = by_alpha(only(every, {column: base[column] for column in _FACTORS}))
    columns = [*(["encoder"] if several else []), "style_target"]
    part = part.sort_values(columns, ascending=[*([True] if several else []), False], kind="stable")
    tables.append("**style target** (none: a single block)\n\n" + table(part, [*columns, "alpha"], ACCURACIES))
    if part["alpha"].nunique() > 2:
        blocks = part["style_target"].map({"none": "$z_c$ alone", "ye": "$z_c$ and $z_s$"})
        lines = part.assign(line=blocks + (", " + part["encoder"] if several else ""))[blocks.notna()]
        figure = plt.figure(figsize=(9, 3.4), layout="constrained")
        for ax, score in zip(figure.subplots(1, 2, sharey=True), ("r_c in", "r_c out"), strict=True):
            plots.by_group(lines, "alpha", score, "line", ax=ax).set(ylabel=f"accuracy {ACCURACIES[score].name[:-3]}")
        save_figure(figure, out / "blocks.png")
    return "\n\n".join(tables)


def cmnist_long(budget: Budget, n_seeds: int | None) -> list[Trial]:
    """Colored MNIST at the published alpha for long, to see whether z_c ever learns."""
    model, training = generalization_settings(budget)
    training |= {"max_steps": {"smoke": 60, "small": 15_000, "paper": 100_000}[budget], "load_best": False}
    return [
        generalization_trial("colored_mnist", budget, seed, model | {"alpha": 192.0}, training)
        for seed in range(seeds_of(n_seeds, budget, 1, 1))
    ]


def long_report(frame: pd.DataFrame, out: Path) -> str:
    """The course of z_c over a long run; ``runs/`` has the histories."""
    text = table(frame.assign(name=names_of(frame)), ["name", "steps"], ACCURACIES | HEALTH)
    for key, ceiling in zip(frame["key"], frame["ceiling"], strict=True):
        path = out / "runs" / key / "history.csv"
        if path.is_file():
            history = pd.read_csv(path, index_col="step")
            frames = {name: history[[name]].dropna() for name in history}
            save_figure(pl.history(frames, ceiling=ceiling)[0].figure, out / f"{key}.png")
    return text


EXPERIMENTS = {
    "cmnist": Experiment(cmnist, generalization_report),
    "camelyon17": Experiment(camelyon17, generalization_report),
    "rxrx1": Experiment(rxrx1, generalization_report),
    "pacs": Experiment(pacs, generalization_report),
    "vlcs": Experiment(vlcs, generalization_report),
    "cmnist-alphas": Experiment(cmnist_alphas, generalization_report),
    "pacs-alphas": Experiment(pacs_alphas, generalization_report),
    "cmnist-variance": Experiment(cmnist_variance, bounded_report),
    "cmnist-preset": Experiment(cmnist_preset, bounded_report),
    "cmnist-ablations": Experiment(cmnist_ablations, ablation_report),
    "camelyon17-ablations": Experiment(camelyon17_ablations, ablation_report),
    "cmnist-long": Experiment(cmnist_long, long_report),
    "cmnist-systems": Experiment(cmnist_systems, systems_report),
    "camelyon17-systems": Experiment(camelyon17_systems, systems_report),
    "pacs-systems": Experiment(pacs_systems, systems_report),
    "vlcs-systems": Experiment(vlcs_systems, systems_report),
}
