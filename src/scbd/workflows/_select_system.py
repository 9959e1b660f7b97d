"""The paper's search space for the other systems, and choosing from it without the test environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd.workflows._cells import UserCells
from scbd.workflows._selection_rule import best_setting
from scbd.workflows._systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

# what every system is searched over (paper, appendix: table of the search space)
TRAINING_SPACE: Mapping[str, Sequence[float]] = MappingProxyType(
    {"lr": (1e-4, 1e-3, 1e-2), "weight_decay": (0.0, 0.001, 0.01)}
)
# and what each has of its own
MODEL_SPACE: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType(
    {
        "ERM": {},
        "CORAL": {"penalty": (0.1, 1.0, 10.0)},
        "DANN": {"penalty": (0.1, 1.0, 10.0)},
        "IRM": {"penalty": (1.0, 10.0, 100.0, 1000.0)},
        "Fish": {"pretrain_steps": (1000, 10_000), "meta_lr": (0.001, 0.01, 0.1)},
        "Group DRO": {"step_size": (0.01,)},
        "iVAE": {},
    }
)


@dataclass(frozen=True)
class Selection:
    """What :func:`select` found.

    Attributes
    ----------
    model, training
        The settings chosen: arguments of the model and of its ``train``.
    accuracy
        Their mean accuracy on validation cells, over seeds.
    runs
        One row a run, as :meth:`scbd.workflows.Results.frame` has them.

    Examples
    --------
    >>> space = {"lr": (1e-3, 1e-4), "weight_decay": (0.0,)}
    >>> found = scbd.workflows.select(
    ...     adata, "ERM", y_key="gene", e_key="well", training_space=space, max_steps=500
    ... )
    >>> model = scbd.baselines.ERMModel(adata, **found.model)
    >>> model.train(**found.training)
    """

    model: dict[str, Any]
    training: dict[str, Any]
    accuracy: float
    runs: pd.DataFrame

    def __repr__(self) -> str:
        """The choice, for a person."""
        chosen = ", ".join(f"{name}={value!r}" for name, value in (self.model | self.training).items())
        return f"{chosen}\naccuracy on validation cells {self.accuracy:.3f}, the best of {len(self.runs):,} runs"


def settings_of(space: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of a space of settings."""
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def select(
    adata: AnnData,
    system: str,
    *,
    y_key: str,
    e_key: str | Sequence[str],
    model_space: Mapping[str, Sequence[Any]] | None = None,
    training_space: Mapping[str, Sequence[Any]] | None = None,
    n_trials: int | None = None,
    n_seeds: int = 1,
    out: str | os.PathLike[str] | None = None,
    setup_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **train_kwargs: Any,
) -> Selection:
    """Search the settings of a system by its accuracy on validation cells, as the paper does.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    system
        Name, see ``scbd.workflows.SYSTEMS``.
    y_key, e_key
        Columns of perturbation and environment.
    setup_kwargs
        Further arguments of ``setup_anndata``: where images or features are, which cells are controls.
    model_space, training_space
        Values to try of the model's arguments and of those of ``train``; the paper's by default,
        ``scbd.workflows.MODEL_SPACE`` and ``scbd.workflows.TRAINING_SPACE``.
    n_trials
        Try so many combinations, at random; all by default.
    n_seeds
        Runs of each combination.
    out
        Directory to keep finished runs in: called again with the same cells and arguments, it goes on. Runs of other
        cells stay there and are not used.
    model_kwargs, **train_kwargs
        Further arguments of the model and of ``train``, the same in all runs.

    Returns
    -------
    The settings of the highest mean accuracy over seeds, which is how tables of experiments choose them, too, and all
    runs. Of a classifier it is its own accuracy, of others that of the nearest class mean on z_c.

    Raises
    ------
    ValueError
        If the system is not known, a setting cannot be used, or there is nothing to search; before anything is trained.
        Or, after that, if each combination has a run whose accuracy is NaN.

    Warns
    -----
    UserWarning
        If ``out`` holds finished runs of other cells, or of systems that have since been changed: they are not used.

    Examples
    --------
    >>> found = scbd.workflows.select(
    ...     adata,
    ...     "CORAL",
    ...     y_key="gene",
    ...     e_key="well",
    ...     model_space={"penalty": (0.1, 1.0)},
    ...     training_space={"lr": (1e-3,)},
    ...     model_kwargs={"encoder": "small"},
    ...     max_steps=2000,
    ... )
    >>> len(found.runs), found.training["max_steps"]
    (2, 2000)
    """
    if system not in SYSTEMS:
        msg = f"There is no system {system!r}: use one of {', '.join(SYSTEMS)}."
        raise ValueError(msg)
    models = settings_of(MODEL_SPACE.get(system, {}) if model_space is None else model_space)
    trainings = settings_of(TRAINING_SPACE if training_space is None else training_space)
    pairs = list(product(models, trainings))
    if not pairs or (n_trials is not None and n_trials < 1):
        msg = "There is nothing to search: every setting needs a value, and n_trials is at least 1."
        raise ValueError(msg)
    if n_trials is not None and n_trials < len(pairs):
        chosen = np.random.default_rng(0).choice(len(pairs), n_trials, replace=False)
        pairs = [pairs[i] for i in np.sort(chosen)]
    fixed = model_kwargs or {}
    cells = UserCells(adata, y_key, e_key, setup_kwargs or {})
    cells.check(fixed, train_kwargs, n_seeds)
    candidates = [[cells.trial(system, seed, fixed | m, train_kwargs | t) for seed in range(n_seeds)] for m, t in pairs]
    runs = cells.run([trial for candidate in candidates for trial in candidate], out)
    number = pd.Series(np.repeat(np.arange(len(candidates)), n_seeds))
    best = best_setting(runs["accuracy"], number)
    trial, accuracy = candidates[best][0], float(runs.loc[number == best, "accuracy"].mean())
    return Selection(dict(trial.model), dict(trial.training), accuracy, runs)
