"""Choosing alpha without looking at a test environment, and whether invariance will help at all."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pandas as pd

from scbd._anndata import as_columns, check_anndata, label_values
from scbd._checks import check_choice, check_count
from scbd._files import check_directory, save_figure, write_table
from scbd._run import check_repeatable, seed_everything, trained, what_is_learned_from
from scbd.baselines._classifiers import ERMModel
from scbd.data._splits import hold_out_environments, split_by_column
from scbd.metrics._probes import label_probe, predict_labels
from scbd.model._scbd import SCBDModel
from scbd.model._train import TrainingDiverged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Criterion = Literal["kept", "unseen"]

# each form of the loss has a scale of its own
_ALPHAS = {"variance": (0.0, 0.003, 0.01, 0.03, 0.1), "listing": (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)}
# share of the accuracy above chance that invariance may not cost
_KEEP = 0.97
# some cells are left to choose by, be it an encoder that would train on all of them
_TRAIN_SIZE = 0.9
# of an accuracy that alpha is chosen by, and of the probes of the environment beside it
_CELLS, _PROBE_CELLS = 100_000, 20_000


@dataclass(frozen=True)
class AlphaSelection:
    """What :func:`select_alpha` found.

    Attributes
    ----------
    alpha
        The choice.
    criterion
        How it was chosen.
    threshold
        Accuracy that the choice had to reach.
    curve
        One row an alpha: ``accuracy`` of the perturbation, its standard deviation ``sd`` over runs, accuracy of the
        environment (``"e from z_c"``, ``"e from r_c"``), number of ``runs``, the ``threshold``, and whether it is
        ``kept`` (reaches that).
    runs
        One row a run: ``seed``, ``held_out`` environments, ``alpha``; ``accuracy``, ``chance``, and how many ``cells``
        they are of; the probes of the environment with ``"e chance"``; and ``model.health``.

    Examples
    --------
    >>> found = scbd.select_alpha(adata, y_key="gene", e_key="well", max_steps=2000)
    >>> found.curve.index.tolist()
    [0.0, 0.003, 0.01, 0.03, 0.1]
    """

    alpha: float
    criterion: Criterion
    threshold: float
    curve: pd.DataFrame
    runs: pd.DataFrame

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the curve, with standard deviations over runs, the threshold and the choice."""
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(4.6, 3.4), layout="constrained")
        shown = {"accuracy": "perturbation from $z_c$", "e from z_c": "environment from $z_c$"}
        shown |= {"e from r_c": "environment from $r_c$"}
        groups, places = self.runs.groupby("alpha"), np.arange(len(self.curve))
        for (column, name), marker in zip(shown.items(), "os^", strict=True):
            if column in self.runs:
                mean, sd = groups[column].mean(), groups[column].std().fillna(0)
                ax.errorbar(places, mean, yerr=sd, marker=marker, ms=5, capsize=3, label=name)
        ax.plot(places, self.curve["threshold"], color="0.5", ls=":", lw=0.8)
        ax.axvline(places[self.curve.index == self.alpha][0], color="0.5", lw=0.8)
        ax.set_xticks(places, [f"{alpha:g}" for alpha in self.curve.index])
        ax.set(xlabel="alpha", ylabel="accuracy", ylim=(0, 1.02), title=f"chosen: alpha {self.alpha:g}")
        ax.legend(frameon=False, fontsize="small")
        return ax

    def __repr__(self) -> str:
        """The choice and the curve, for a person."""
        return f"alpha {self.alpha:g} ({self.criterion}: accuracy of at least {self.threshold:.3f})\n{self.curve}"


def select_alpha(
    adata: AnnData,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    alphas: Sequence[float] | None = None,
    criterion: Criterion = "kept",
    n_folds: int | None = None,
    n_seeds: int = 1,
    out: str | os.PathLike[str] | None = None,
    setup_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **train_kwargs: Any,
) -> AlphaSelection:
    r"""Train at several alphas, and choose the largest that costs no accuracy, without looking at any test environment.

    Let :math:`a` be the best mean accuracy of the perturbation over all alphas, :math:`c` that of always naming the
    most frequent one, and :math:`s` a standard error. The choice is the largest alpha up to which, from the best one
    on, every mean accuracy is at least

    .. math:: c + \kappa\,(a - c) - s.

    The standard error is that of a proportion, or, where it is larger, that of runs: of the *differences* between an
    alpha and the best one, run by run, where each alpha has a run of the same seeds and held-out environments.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`. Give a subset if they are many: what is wanted is one number.
    y_key, e_key
        Columns of perturbation and environment, one or several each.
    alphas
        To try, at least two. By default five between 0 and 0.1, or six between 0 and 100 for the contrastive forms of
        invariance.
    criterion
        ``"kept"``: accuracy is that of validation cells, and :math:`\kappa` 0.97. ``"unseen"``: each environment is
        held out in turn, accuracy is that of its cells, and :math:`\kappa` 1; takes at least three environments, and as
        many times the runs as there are folds.
    n_folds
        For ``"unseen"``: hold out environments in so many groups, rather than one by one.
    n_seeds
        Runs of each alpha (and fold) with different weights and batches.
    out
        Directory for ``runs.csv``, ``curve.csv`` and ``curve.png``, and in ``runs/`` for each model with its
        checkpoints: called again with the same cells and arguments, a sweep that was interrupted goes on.
    setup_kwargs
        Further arguments of ``setup_anndata``: where images or features are, which cells are controls.
    model_kwargs, **train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``. z_s, which leaves z_c as it is, is left out unless
        ``style_target`` asks for it.

    Returns
    -------
    The choice, the curve, and all runs.

    Raises
    ------
    KeyError
        If a column is not there.
    ValueError
        If there is nothing to choose from, or a setting cannot be used, before anything is trained; if ``out`` holds
        runs of other cells or settings; or if each alpha has a run that diverged.

    Warns
    -----
    UserWarning
        If a run diverged: its alpha is not chosen.

    References
    ----------
    Breiman et al. (1984), Classification and regression trees: the one-standard-error rule.

    Examples
    --------
    >>> found = scbd.select_alpha(adata, y_key="gene", e_key="well", max_steps=2000)
    >>> ax = found.plot()
    >>> model = scbd.SCBDModel(adata, alpha=found.alpha)
    """
    settings = {"style_target": None} | dict(model_kwargs or {})
    alphas = _alphas(alphas, settings.get("invariance", "variance"))
    check_choice("criterion", criterion, Criterion)
    check_anndata(adata)
    check_count("n_seeds", n_seeds)
    setup = {"y_key": y_key, "e_key": as_columns(e_key), **(setup_kwargs or {})}
    y, e = (label_values(adata.obs, key).to_numpy() for key in (y_key, e_key))
    environments = label_values(adata.obs, as_columns(e_key)).astype(str)
    folds: list[list[str]] = [[]]
    if criterion == "unseen":
        folds = _folds(np.unique(environments), n_folds)
    elif n_folds is not None:
        msg = "n_folds is for criterion='unseen', which holds environments out."
        raise ValueError(msg)
    _check_settings(adata, settings, train_kwargs, unseen=criterion == "unseen")
    about = what_is_learned_from(adata, setup, train_kwargs.get("split"))
    directory = check_directory(out) if out else None
    SCBDModel.setup_anndata(adata, **setup)
    rows: list[dict[str, Any]] = []
    for seed, (fold, held_out), alpha in product(range(n_seeds), enumerate(folds), alphas):
        logger.info("Run %d of %d: alpha %g, seed %d", len(rows) + 1, n_seeds * len(folds) * len(alphas), alpha, seed)
        training = dict(train_kwargs)
        if held_out:
            training["split"] = hold_out_environments(environments, held_out, strata=[y.astype(str)], seed=seed)
        elif all(training.get(name) is None for name in ("split", "train_size", "validation_size")):
            training["train_size"] = _TRAIN_SIZE
        seed_everything(seed)
        model = SCBDModel(adata, **settings | {"alpha": alpha})
        asked = {
            "data": about | {"held_out": held_out},
            "asked": {"model": settings | {"alpha": alpha}, "training": train_kwargs},
            "seed": seed,
        }
        with tempfile.TemporaryDirectory() as nowhere:
            name = f"alpha-{alpha:g}-seed-{seed}" + f"-fold-{fold}" * bool(held_out)
            kept = Path(nowhere) if directory is None else directory / "runs" / name
            try:
                model = trained(model, asked, kept, resume=directory is not None, seed=seed, **training)
                scored = model.test_indices if held_out else model.validation_indices
                scores = _scores(model, scored, y, e)
            except TrainingDiverged as error:
                warnings.warn(f"alpha={alpha:g}: {error}", UserWarning, stacklevel=2)
                scores = {"accuracy": math.nan, "chance": math.nan, "cells": math.nan}
        rows.append({"seed": seed, "held_out": held_out, "alpha": alpha, **scores})
    runs = pd.DataFrame(rows)
    found = choose_alpha(runs, criterion=criterion)
    if directory is not None:
        write_table(runs, directory / "runs.csv")
        write_table(found.curve, directory / "curve.csv", index=True)
        save_figure(cast("Figure", found.plot().figure), directory / "curve.png")
    return found


def _alphas(alphas: Sequence[float] | None, invariance: str) -> list[float]:
    if alphas is None:
        alphas = _ALPHAS["variance" if invariance == "variance" else "listing"]
    if any(isinstance(alpha, str) for alpha in alphas):
        msg = "alphas must be numbers: alpha='auto' finds its own, in one run."
        raise ValueError(msg)
    chosen = sorted({float(alpha) for alpha in alphas})
    if len(chosen) < 2 or not all(0 <= alpha < math.inf for alpha in chosen):
        msg = f"alphas={list(alphas)}: give at least two different ones, none negative, infinite or not a number."
        raise ValueError(msg)
    return chosen


def _folds(names: np.ndarray, n_folds: int | None) -> list[list[str]]:
    if len(names) < 3:
        msg = (
            f"criterion='unseen' holds environments out and learns invariance from the others: it needs three, there "
            f"are {len(names)}; use criterion='kept'."
        )
        raise ValueError(msg)
    n_folds = len(names) if n_folds is None else n_folds
    if not 2 <= n_folds <= len(names) or -(-len(names) // n_folds) > len(names) - 2:
        msg = f"n_folds={n_folds}, {len(names)} environments: hold out at least one at a time, and learn from two."
        raise ValueError(msg)
    order = np.random.default_rng(0).permutation(names)
    return [sorted(map(str, part)) for part in np.array_split(order, n_folds)]


def _check_settings(adata: AnnData, model: Mapping[str, Any], training: Mapping[str, Any], *, unseen: bool) -> None:
    """Raise if a setting cannot be the same in all runs of a sweep, or leaves nothing to score."""
    split = training.get("split")
    taken = {"alpha", "seed"} | ({"split"} if unseen and split is not None else set())
    check_repeatable(model, training, taken)
    split = split_by_column(adata.obs, split) if isinstance(split, str) else split
    train, size = training.get("train_size"), training.get("validation_size")
    size = 1 - (_TRAIN_SIZE if train is None else train) if size is None else size
    if not (unseen or (size > 0 if split is None else len(split.validation))):
        msg = "There are no validation cells to choose by: lower train_size, or mark some in the split column."
        raise ValueError(msg)


def _scores(model: SCBDModel, scored: np.ndarray, y: np.ndarray, e: np.ndarray) -> dict[str, float]:
    """Accuracy of y by the nearest class mean on z_c, probes of e on new cells of known environments, and health."""
    learned, scored, new = map(_some, (model.train_indices, scored, model.validation_indices))
    if not len(scored):
        msg = "There are no validation cells to choose by: lower train_size, or mark some in the split column."
        raise ValueError(msg)
    z = [model.get_latent_representation(indices=rows) for rows in (learned, scored)]
    predicted = predict_labels(z[0], y[learned], z[1], classifier="nearest_mean")
    scores = {
        "accuracy": float(np.mean(predicted == y[scored])),
        "chance": _largest_share(y[scored]),
        "cells": float(len(scored)),
        "e chance": _largest_share(e[new]),
    }
    told_apart = (np.unique(e[new].astype(str), return_counts=True)[1] > 1).sum() > 1
    for name, representation in {"r_c": "intermediate", "z_c": "embedding"}.items():
        space = model.get_latent_representation(indices=new, representation=representation)
        probe = label_probe(space, e[new], max_cells=_PROBE_CELLS) if told_apart else {"accuracy": math.nan}
        scores[f"e from {name}"] = probe["accuracy"]
    return scores | dict(model.health)


def _some(rows: np.ndarray) -> np.ndarray:
    return rows if len(rows) <= _CELLS else np.sort(np.random.default_rng(0).choice(rows, _CELLS, replace=False))


def _largest_share(labels: np.ndarray) -> float:
    """Accuracy of always naming the most frequent label; NaN without cells."""
    return float(pd.Series(labels).value_counts(normalize=True).max()) if len(labels) else math.nan


def choose_alpha(runs: pd.DataFrame, *, criterion: Criterion = "kept", keep: float | None = None) -> AlphaSelection:
    r"""Choose alpha from the runs of a sweep, as :func:`select_alpha` does.

    Parameters
    ----------
    runs
        One row a run: ``alpha``, ``accuracy``, ``chance``, ``cells`` (how many the accuracy is of); ``seed`` and
        ``held_out`` tell which are compared with each other.
    criterion
        See there.
    keep
        :math:`\kappa`, in place of the criterion's.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If there are fewer than two alphas, each has a run whose accuracy is NaN, the criterion is not known, or
        ``keep`` is no share.
    """
    check_choice("criterion", criterion, Criterion)
    missing = [column for column in ("alpha", "accuracy", "chance", "cells") if column not in runs]
    if missing:
        msg = f"The runs have no column {missing[0]!r}; choose_alpha takes those of select_alpha."
        raise KeyError(msg)
    if runs["alpha"].nunique() < 2:
        msg = "There is nothing to choose from: give the runs of at least two alphas."
        raise ValueError(msg)
    keep = {"kept": _KEEP, "unseen": 1.0}[criterion] if keep is None else keep
    if not 0 <= keep <= 1:
        msg = f"keep={keep} is the share of the best accuracy that has to be reached, between 0 and 1."
        raise ValueError(msg)
    groups = runs.groupby("alpha")
    probes = [column for column in ("e from z_c", "e from r_c") if column in runs]
    curve = groups[["accuracy", *probes]].mean()
    curve.insert(1, "sd", groups["accuracy"].std())
    curve["runs"] = groups.size()
    # those runs of an alpha that were not lost are the lucky ones
    curve["accuracy"] = curve["accuracy"].where(groups["accuracy"].count() == curve["runs"])
    if curve["accuracy"].isna().all():
        msg = "Each alpha has a run whose accuracy is NaN: there is nothing to choose by."
        raise ValueError(msg)
    best = curve["accuracy"].idxmax()
    highest, chance = curve.loc[best, "accuracy"], runs["chance"].mean()
    of_cells = np.sqrt(highest * (1 - highest) / runs.loc[runs["alpha"] == best, "cells"].sum())
    curve["threshold"] = chance + keep * (highest - chance) - np.fmax(_error_of_runs(runs, best), of_cells)
    curve["kept"] = curve["accuracy"] >= curve["threshold"]
    alpha = curve.index[(curve["kept"] | (curve.index <= best)).cummin()][-1]
    return AlphaSelection(float(alpha), criterion, float(curve.loc[alpha, "threshold"]), curve, runs)


def _error_of_runs(runs: pd.DataFrame, best: float) -> pd.Series | float:
    """Standard error of how far alphas lie below the best one, by alpha, or of the best one; NaN of a single run."""
    run = [runs[column].astype(str) for column in ("seed", "held_out") if column in runs]
    by_alpha = runs.set_index([*run, "alpha"])["accuracy"]
    if run and by_alpha.index.is_unique and (wide := by_alpha.unstack()).size == len(runs):
        return wide.rsub(wide[best], axis=0).sem()
    return float(runs.loc[runs["alpha"] == best, "accuracy"].sem())


def check_assumption(
    adata: AnnData,
    *,
    y_key: str,
    e_key: str | Sequence[str],
    held_out: Sequence[str],
    setup_kwargs: Mapping[str, Any] | None = None,
    lrs: Sequence[float] = (1e-4, 1e-3, 1e-2),
    weight_decays: Sequence[float] = (0.0, 0.01),
    max_steps: Sequence[int] = (150, 1500),
    batch_size: int = 32,
    validation_size: float = 0.1,
    seed: int = 0,
    model_kwargs: dict[str, Any] | None = None,
    **train_kwargs: Any,
) -> pd.DataFrame:
    """Train plain classifiers in many ways, to see if those that do better in distribution do worse out of it.

    SCBD removes what tells environments apart. That helps where such features mislead: where accuracy in distribution
    and in an unseen environment are *negatively* correlated over runs of empirical risk minimisation. Where they
    rise together, as on PACS and VLCS, there is nothing to trade (paper, section 4.1; Teney et al., 2024).

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key
        Columns of label and environment.
    setup_kwargs
        Further arguments of ``setup_anndata``: where images or features are, which cells are controls.
    held_out
        Environments to test on; the others train and validate.
    lrs, weight_decays, max_steps
        All combinations are trained.
    batch_size
        Cells a batch.
    validation_size
        Fraction of the other environments' cells.
    seed
        Seed of split, weights and batches.
    model_kwargs, **train_kwargs
        Further arguments of :class:`scbd.baselines.ERMModel` and of its ``train``.

    Returns
    -------
    One row a run: ``lr``, ``weight_decay``, ``max_steps``, and accuracies ``own in`` and ``own out``. Look at their
    correlation over the better half in distribution: what bad runs do says nothing about spurious features.

    Raises
    ------
    ValueError
        If an environment is not there, or none is left to train on.

    References
    ----------
    Teney et al. (2024), ID and OOD performance are sometimes inversely correlated on real-world datasets.

    Examples
    --------
    >>> how = {"lrs": (1e-3,), "weight_decays": (0.0,), "model_kwargs": {"encoder": "small"}}
    >>> runs = scbd.check_assumption(adata, y_key="gene", e_key="well", held_out=["P1_W1"], **how)
    >>> runs[["lr", "max_steps"]].to_numpy().tolist()
    [[0.001, 150.0], [0.001, 1500.0]]
    """
    y = label_values(adata.obs, y_key).astype(str).to_numpy()
    environment = label_values(adata.obs, as_columns(e_key))
    split = hold_out_environments(environment, held_out, strata=[y], validation_size=validation_size, seed=seed)
    ERMModel.setup_anndata(adata, y_key=y_key, e_key=e_key, **(setup_kwargs or {}))
    rows = []
    for lr, decay, steps in product(lrs, weight_decays, max_steps):
        seed_everything(seed)
        model = ERMModel(adata, **(model_kwargs or {}))
        settings = {"lr": lr, "weight_decay": decay, "max_steps": steps}
        # a classifier is worth what it was at its best, in distribution
        how = {"batch_size": batch_size, "seed": seed, "load_best": True} | settings
        model.train(split=split, **how | train_kwargs)
        parts = {"own in": split.validation, "own out": split.test}
        accuracy = {
            name: float(np.mean(model.predict(indices=part).astype(str) == y[part])) for name, part in parts.items()
        }
        rows.append(settings | accuracy)
    return pd.DataFrame(rows)
