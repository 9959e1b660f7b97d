"""The grids of the paper's experiments, at three budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd.experiments._systems import UNTRAINED
from scbd.experiments._trials import Trial

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGETS = ("smoke", "small", "paper")

# what the paper holds fixed for domain generalisation; images in [0, 1], as its own loader leaves them
_MODEL: dict[str, Any] = {"n_latent": 128, "style_target": "ye", "standardize": False}
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smoke": ({"encoder": "small"}, {"max_steps": 40, "batch_size": 256, "lr": 1e-3}),
    "small": ({"encoder": "small"}, {"max_steps": 1000, "batch_size": 512, "lr": 1e-3}),
    "paper": ({"encoder": "resnet18"}, {"max_steps": 25_000, "batch_size": 2048, "lr": 1e-4}),
}
_ALPHAS = {"smoke": (0, 10, 192), "small": (0, 1, 3, 10, 30, 64, 128, 192), "paper": (0, 64, 128, 192)}
_SEEDS = {"smoke": 1, "small": 5, "paper": 10}


def cmnist(budget: str, n_seeds: int | None = None) -> list[Trial]:
    """Colored MNIST: alpha against accuracy (paper, table 1 and figure 3)."""
    data = {"n_train": 4000, "n_test": 1000} if budget == "smoke" else {}
    return [
        trial
        for seed in range(n_seeds or _SEEDS[budget])
        for trial in alpha_sweep("colored_mnist", budget, seed, _ALPHAS[budget], data)
    ]


def alpha_sweep(
    dataset: str, budget: str, seed: int, alphas: tuple[float, ...], data: dict[str, Any], **model: Any
) -> list[Trial]:
    """SCBD at several alphas, and the encoder that was never trained as their control."""
    settings, training = _SIZES[budget]
    shared: dict[str, Any] = {"protocol": "domain generalization", "dataset": dataset, "seed": seed, "data": data}
    shared_model = _MODEL | settings | model
    training = training | {"weight_decay": 0.01, "split": "split"}
    control = Trial(
        **shared, system="random encoder", model=shared_model | {"alpha": 0.0}, training=training | UNTRAINED
    )
    return [
        control,
        *(Trial(**shared, system="SCBD", model=shared_model | {"alpha": float(a)}, training=training) for a in alphas),
    ]


EXPERIMENTS: dict[str, Callable[..., list[Trial]]] = {"cmnist": cmnist}
