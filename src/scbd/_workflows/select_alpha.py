"""Choose alpha, the weight of the invariance loss, and test in advance whether invariance can help on a data set.

Alpha is chosen without a test environment.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pandas as pd

from scbd._shared.checks import check_choice, check_count
from scbd._shared.files import check_output_directory, save_figure, write_table
from scbd._shared.keys import SPLIT_ARGUMENTS
from scbd._shared.labels import as_columns, check_anndata, label_values
from scbd._shared.messages import warn_user
from scbd._workflows.training_runs import (
    check_repeatable,
    describe_training_data,
    merge_setup_arguments,
    seed_everything,
    train_or_load,
)
from scbd.baselines._classifiers import ERMModel
from scbd.data._splits import hold_out_environments, split_by_column
from scbd.metrics._probes import label_probe, predict_labels
from scbd.model._callbacks import TrainingDiverged
from scbd.model._presets import with_preset
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Criterion = Literal["kept", "unseen"]

# Values of alpha that are tried by default. The values under "variance" are for the form "variance" of the invariance
# loss, and the values under "listing" are for all other forms. These values differ because the scale of alpha depends
# on the form.
_DEFAULT_ALPHAS = {"variance": (0.0, 0.003, 0.01, 0.03, 0.1), "listing": (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)}
# With each criterion, the chosen alpha must reach this fraction of the highest accuracy above chance.
_KEPT_FRACTION: dict[Criterion, float] = {"kept": 0.97, "unseen": 1.0}
# Default fraction of the cells that are trained on. Alpha is chosen on all other cells. The default also holds for
# encoders that would otherwise be trained on all cells by default.
_DEFAULT_TRAIN_SIZE = 0.9
# _MAX_ASSUMPTION_CELLS: maximum number of cells on which the accuracy of a trained model is computed.
# _MAX_CELLS_PER_PROBE: maximum number of cells for classifiers (probes) that predict the environment.
_MAX_ASSUMPTION_CELLS, _MAX_CELLS_PER_PROBE = 100_000, 20_000
# error message, raised before training where possible
_NO_VALIDATION_CELLS = "There are no validation cells to choose by: lower train_size, or mark some in the split column."


@dataclass(frozen=True)
class AlphaSelection:
    """Choice of alpha, the weight of the invariance loss, by :func:`select_alpha`, with the scores behind it.

    Attributes
    ----------
    alpha
        The chosen value of alpha.
    criterion
        The criterion by which alpha was chosen, ``"kept"`` or ``"unseen"``.
    threshold
        Accuracy of the perturbation that the chosen alpha had to reach.
    curve
        Table with one row per alpha: ``accuracy``, the mean accuracy with which the perturbation is predicted, and its
        standard deviation ``sd`` over runs; ``"e from z_c"`` and ``"e from r_c"``, the mean accuracies with which
        linear classifiers predict the environment from z_c and from the intermediate representation r_c; the number of
        ``runs``; ``threshold``; and ``kept``, whether the accuracy reaches the threshold.
    runs
        Table with one row per trained model: ``seed``, ``held_out`` environments and ``alpha``; ``accuracy`` of the
        perturbation, its ``chance`` level and the number of ``cells`` on which it was computed; the accuracies of the
        environment, ``"e from z_c"`` and ``"e from r_c"``, and their chance level ``"e chance"``; and the diagnostics
        in ``model.health``.

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
        """Plot the accuracies of perturbation and environment against alpha.

        Error bars are standard deviations over runs. A dotted line is the accuracy that alpha has to reach, and a
        vertical line is the chosen alpha.
        """
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
        """Return a text with the chosen alpha and the table :attr:`curve`."""
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
    r"""Train at several alphas, and choose the largest alpha that costs no accuracy, without using a test environment.

    Alpha is the weight of the invariance loss. The accuracy is that with which the perturbation is predicted from z_c.
    Let :math:`a` be the highest mean accuracy over all alphas, which is reached at the best alpha, :math:`c` the
    accuracy of always predicting the most frequent perturbation, and :math:`s` a standard error. An alpha is acceptable
    if its mean accuracy is at least

    .. math:: c + \kappa\,(a - c) - s.

    The choice is the largest alpha such that all alphas from the best one up to the choice are acceptable.

    The standard error :math:`s` is the larger of two: the standard error of the best alpha's accuracy as a proportion
    of cells, and the standard error over runs. If all alphas have runs with the same seeds and held-out environments,
    the standard error over runs is that of the *differences* in accuracy between an alpha and the best alpha, paired by
    run. Otherwise, it is that of the accuracies of the best alpha's runs.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`. If there are many cells, a subset is enough to choose alpha.
    y_key, e_key
        Columns of perturbation and environment, one or several each.
    alphas
        Values of alpha to try, at least two. By default five values between 0 and 0.1, or for the contrastive forms of
        the invariance loss six values between 0 and 100.
    criterion
        ``"kept"``: accuracy is measured on validation cells, and :math:`\kappa` is 0.97.

        ``"unseen"``: environments are held out in turn, accuracy is measured on their cells, and :math:`\kappa` is 1.
        This needs at least three environments, and multiplies the number of runs by the number of folds.
    n_folds
        Number of folds for ``criterion="unseen"``: groups of environments, which are held out in turn. By default, each
        environment is a group.
    n_seeds
        Number of runs of each alpha (and fold), with different initial weights and batches.
    out
        Directory for ``runs.csv``, ``curve.csv``, ``curve.png``, and ``runs/`` with the models and their checkpoints.
        If the function is called again with the same cells and arguments, an interrupted sweep continues.
    setup_kwargs
        Further arguments of ``setup_anndata``, such as the keys of images or features, or the controls.
    model_kwargs, **train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``. By default there is no z_s (``style_target=None``),
        because z_s has no influence on z_c.

    Returns
    -------
    The chosen alpha, with tables of the accuracies of each alpha and of each run.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If there are too few alphas, environments or validation cells, or if a setting cannot be used; this is checked
        before any training. Also if ``out`` holds runs of other cells or settings, or if each alpha has a run whose
        training diverged.

    Warns
    -----
    UserWarning
        If the training of a run diverged. The alpha of this run cannot be chosen.

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
    alphas = _check_alphas(alphas, with_preset(settings).get("invariance", "variance"))
    check_choice("criterion", criterion, Criterion)
    check_anndata(adata)
    check_count("n_seeds", n_seeds)
    setup = merge_setup_arguments(setup_kwargs, y_key=y_key, e_key=as_columns(e_key))
    y, e = (label_values(adata.obs, key).to_numpy() for key in (y_key, e_key))
    environments = label_values(adata.obs, as_columns(e_key)).astype(str)
    folds: list[list[str]] = [[]]
    if criterion == "unseen":
        folds = _split_environments(np.unique(environments), n_folds)
    elif n_folds is not None:
        msg = "n_folds is for criterion='unseen', which holds environments out."
        raise ValueError(msg)
    _check_settings(adata, settings, train_kwargs, unseen=criterion == "unseen")
    about = describe_training_data(adata, setup, train_kwargs.get("split"))
    directory = check_output_directory(out) if out else None
    SCBDModel.setup_anndata(adata, **setup)
    rows: list[dict[str, Any]] = []
    for seed, (fold, held_out), alpha in product(range(n_seeds), enumerate(folds), alphas):
        logger.info("Run %d of %d: alpha %g, seed %d", len(rows) + 1, n_seeds * len(folds) * len(alphas), alpha, seed)
        training = dict(train_kwargs)
        if held_out:
            training["split"] = hold_out_environments(environments, held_out, strata=[y.astype(str)], seed=seed)
        elif all(training.get(name) is None for name in SPLIT_ARGUMENTS):
            training["train_size"] = _DEFAULT_TRAIN_SIZE
        seed_everything(seed)
        model = SCBDModel(adata, **settings | {"alpha": alpha})
        asked = {
            "data": about | {"held_out": held_out},
            "asked": {"model": settings | {"alpha": alpha}, "training": train_kwargs},
            "seed": seed,
        }
        name = f"alpha-{alpha:g}-seed-{seed}" + f"-fold-{fold}" * bool(held_out)
        try:
            model = train_or_load(model, asked, directory and directory / "runs" / name, seed=seed, **training)
            scored = model.test_indices if held_out else model.validation_indices
            scores = _score_run(model, scored, y, e)
        except TrainingDiverged as error:
            warn_user(f"alpha={alpha:g}: {error}")
            scores = dict.fromkeys(("accuracy", "chance", "cells"), math.nan)
        rows.append({"seed": seed, "held_out": held_out, "alpha": alpha, **scores})
    runs = pd.DataFrame(rows)
    found = choose_alpha(runs, criterion=criterion)
    if directory is not None:
        write_table(runs, directory / "runs.csv")
        write_table(found.curve, directory / "curve.csv", index=True)
        save_figure(cast("Figure", found.plot().figure), directory / "curve.png")
    return found


def _check_alphas(alphas: Sequence[float] | None, invariance: str) -> list[float]:
    """Check the values of alpha that the user gave, and return them sorted, without duplicates.

    If the user gave no values, the default values for the form of the invariance loss (``invariance``) are returned.
    """
    if alphas is None:
        alphas = _DEFAULT_ALPHAS["variance" if invariance == "variance" else "listing"]
    if any(isinstance(alpha, str) for alpha in alphas):
        msg = "alphas must be numbers: alpha='auto' finds its own, in one run."
        raise ValueError(msg)
    chosen = sorted({float(alpha) for alpha in alphas})
    if len(chosen) < 2 or not all(0 <= alpha < math.inf for alpha in chosen):
        msg = f"alphas={list(alphas)}: give at least two different ones, none negative, infinite or not a number."
        raise ValueError(msg)
    return chosen


def _split_environments(names: np.ndarray, n_folds: int | None) -> list[list[str]]:
    """Divide the names of environments at random into ``n_folds`` groups, which are held out of training in turn."""
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
    """Raise ``ValueError`` if the settings cannot be used for all runs of :func:`select_alpha`.

    Such settings are an alpha or a seed, because these differ between runs; and, for the criterion "kept", a split
    without validation cells, because this criterion measures the accuracy on validation cells.
    """
    split = training.get("split")
    taken = {"alpha", "seed"} | ({"split"} if unseen and split is not None else set())
    check_repeatable(model, training, taken)
    split = split_by_column(adata.obs, split) if isinstance(split, str) else split
    train, size = training.get("train_size"), training.get("validation_size")
    size = 1 - (_DEFAULT_TRAIN_SIZE if train is None else train) if size is None else size
    if not (unseen or (size > 0 if split is None else len(split.validation))):
        raise ValueError(_NO_VALIDATION_CELLS)


def _score_run(model: SCBDModel, scored: np.ndarray, y: np.ndarray, e: np.ndarray) -> dict[str, float]:
    """Compute the scores of a trained model, one row of the table :attr:`AlphaSelection.runs`.

    The scores are:

    - the accuracy with which the perturbation ``y`` of the cells ``scored`` is predicted from z_c, by the nearest mean
      of the training cells of a perturbation, with its chance level;
    - the accuracies with which a linear classifier (probe) predicts the environment ``e`` of validation cells from z_c
      and from the intermediate representation r_c, with their chance level;
    - the diagnostics ``model.health``.
    """
    learned, scored, new = map(_subsample, (model.train_indices, scored, model.validation_indices))
    if not len(scored):
        raise ValueError(_NO_VALIDATION_CELLS)
    z = [model.get_latent_representation(indices=rows) for rows in (learned, scored)]
    predicted = predict_labels(z[0], y[learned], z[1], classifier="nearest_mean")
    scores = {
        "accuracy": float(np.mean(predicted == y[scored])),
        "chance": _majority_accuracy(y[scored]),
        "cells": float(len(scored)),
        "e chance": _majority_accuracy(e[new]),
    }
    told_apart = (np.unique(e[new].astype(str), return_counts=True)[1] > 1).sum() > 1
    for name, representation in {"r_c": "intermediate", "z_c": "embedding"}.items():
        space = model.get_latent_representation(indices=new, representation=representation)
        probe = label_probe(space, e[new], max_cells=_MAX_CELLS_PER_PROBE) if told_apart else {"accuracy": math.nan}
        scores[f"e from {name}"] = probe["accuracy"]
    return scores | dict(model.health)


def _subsample(rows: np.ndarray) -> np.ndarray:
    if len(rows) <= _MAX_ASSUMPTION_CELLS:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, _MAX_ASSUMPTION_CELLS, replace=False))


def _majority_accuracy(labels: np.ndarray) -> float:
    """Return the accuracy of always predicting the most frequent label, the chance level; NaN if there are no cells."""
    return float(pd.Series(labels).value_counts(normalize=True).max()) if len(labels) else math.nan


def choose_alpha(runs: pd.DataFrame, *, criterion: Criterion = "kept") -> AlphaSelection:
    r"""Choose alpha, the weight of the invariance loss, from models trained at several alphas.

    The rule is that of :func:`select_alpha`.

    Parameters
    ----------
    runs
        Table with one row per trained model and the columns ``alpha``; ``accuracy``, the accuracy of the predicted
        perturbation; ``chance``, its chance level; and ``cells``, the number of cells on which it was computed. If
        there are columns ``seed`` and ``held_out``, runs of different alphas with equal values in these columns are
        compared in pairs.
    criterion
        Criterion that was used in the runs, ``"kept"`` or ``"unseen"``, see :func:`select_alpha`.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If there are fewer than two alphas, if each alpha has a run whose accuracy is NaN, or if the criterion does not
        exist.
    """
    check_choice("criterion", criterion, Criterion)
    missing = [column for column in ("alpha", "accuracy", "chance", "cells") if column not in runs]
    if missing:
        msg = f"The runs have no column {missing[0]!r}; choose_alpha takes those of select_alpha."
        raise KeyError(msg)
    if runs["alpha"].nunique() < 2:
        msg = "There is nothing to choose from: give the runs of at least two alphas."
        raise ValueError(msg)
    groups = runs.groupby("alpha")
    probes = [column for column in ("e from z_c", "e from r_c") if column in runs]
    curve = groups[["accuracy", *probes]].mean()
    curve.insert(1, "sd", groups["accuracy"].std())
    curve["runs"] = groups.size()
    # If the training of one run of an alpha diverged, the accuracy of this alpha is NaN. The mean accuracy over its
    # other runs would be too high.
    curve["accuracy"] = curve["accuracy"].where(groups["accuracy"].count() == curve["runs"])
    if curve["accuracy"].isna().all():
        msg = "Each alpha has a run whose accuracy is NaN: there is nothing to choose by."
        raise ValueError(msg)
    best = curve["accuracy"].idxmax()
    highest, chance = curve.loc[best, "accuracy"], runs["chance"].mean()
    of_cells = np.sqrt(highest * (1 - highest) / runs.loc[runs["alpha"] == best, "cells"].sum())
    error = np.fmax(_standard_error_over_runs(runs, best), of_cells)
    curve["threshold"] = chance + _KEPT_FRACTION[criterion] * (highest - chance) - error
    curve["kept"] = curve["accuracy"] >= curve["threshold"]
    alpha = curve.index[(curve["kept"] | (curve.index <= best)).cummin()][-1]
    return AlphaSelection(float(alpha), criterion, float(curve.loc[alpha, "threshold"]), curve, runs)


def _standard_error_over_runs(runs: pd.DataFrame, best: float) -> pd.Series | float:
    """Compute the standard error, over runs, of the difference in accuracy between each alpha and the best alpha.

    Differences are taken between runs with the same seed and held-out environments. If not all alphas have such paired
    runs, the standard error of the accuracy of the best alpha is returned. Standard errors are NaN for a single run.
    """
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
    """Test in advance whether invariance can help, that is, whether more accurate classifiers generalise worse.

    SCBD removes features that distinguish environments. This helps if such features mislead a classifier in new
    environments. Plain classifiers (empirical risk minimisation, ERM) are therefore trained with many settings. The
    accuracy of each is measured in distribution (new cells of the training environments) and in held-out environments.
    If the two accuracies are *negatively* correlated over classifiers, invariance can help. If they are positively
    correlated, as on PACS and VLCS, there is no trade-off to exploit (paper, section 4.1; Teney et al., 2024).

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key
        Columns of the label to predict (the perturbation) and of the environment.
    setup_kwargs
        Further arguments of ``setup_anndata``, such as the keys of images or features, or the controls.
    held_out
        Environments to test on. All other environments are used for training and validation.
    lrs, weight_decays, max_steps
        Learning rates, weight decays and numbers of training steps to try. One classifier is trained for each
        combination.
    batch_size
        Number of cells per batch.
    validation_size
        Fraction of the cells outside the held-out environments that is used for validation.
    seed
        Seed of the split, the initial weights and the batches.
    model_kwargs, **train_kwargs
        Further arguments of :class:`scbd.baselines.ERMModel` and of its ``train``.

    Returns
    -------
    Table with one row per classifier and the columns ``lr``, ``weight_decay`` and ``max_steps``; ``own in``, its
    accuracy in distribution, on validation cells; and ``own out``, its accuracy on the cells of held-out environments.

    To interpret the table, correlate the two accuracies over the better half of the classifiers by ``own in``, because
    classifiers with a low accuracy are not informative about misleading features.

    Raises
    ------
    ValueError
        If an environment does not exist, or no environment remains for training.

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
    ERMModel.setup_anndata(adata, **merge_setup_arguments(setup_kwargs, y_key=y_key, e_key=e_key))
    rows = []
    for lr, decay, steps in product(lrs, weight_decays, max_steps):
        seed_everything(seed)
        model = ERMModel(adata, **(model_kwargs or {}))
        settings = {"lr": lr, "weight_decay": decay, "max_steps": steps}
        # Each classifier is scored with its weights at the step of its lowest validation loss. Validation cells are
        # cells of the training environments (in distribution).
        how = {"batch_size": batch_size, "seed": seed, "load_best": True} | settings
        model.train(split=split, **how | train_kwargs)
        parts = {"own in": split.validation, "own out": split.test}
        accuracy = {
            name: float(np.mean(model.predict(indices=part).astype(str) == y[part])) for name, part in parts.items()
        }
        rows.append(settings | accuracy)
    return pd.DataFrame(rows)
