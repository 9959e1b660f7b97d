"""Choose alpha from the runs of a sweep, and what the choice cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Criterion = Literal["kept", "unseen"]

# share of the accuracy above chance that invariance may not cost
_KEEP = 0.97


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
        One row a run, as :meth:`scbd.workflows.Results.frame` has them.

    Examples
    --------
    >>> runs = pd.DataFrame({"alpha": [0.0, 0.01, 0.1], "accuracy": [0.9, 0.89, 0.4], "chance": 0.1, "cells": 500})
    >>> scbd.workflows.choose_alpha(runs).alpha
    0.01
    """

    alpha: float
    criterion: Criterion
    threshold: float
    curve: pd.DataFrame
    runs: pd.DataFrame

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the curve, the threshold and the choice, see :func:`scbd.pl.alpha_curve`."""
        from scbd import pl

        return pl.alpha_curve(self.runs, self.alpha, self.curve["threshold"], ax=ax)

    def __repr__(self) -> str:
        """The choice and the curve, for a person."""
        return f"alpha {self.alpha:g} ({self.criterion}: accuracy of at least {self.threshold:.3f})\n{self.curve}"


def choose_alpha(runs: pd.DataFrame, *, criterion: Criterion = "kept", keep: float | None = None) -> AlphaSelection:
    r"""Choose alpha from the runs of a sweep: the largest that costs no accuracy.

    Let :math:`a` be the best mean accuracy of the perturbation over all alphas, :math:`c` that of always naming the
    most frequent one, and :math:`s` a standard error. The choice is the largest alpha up to which, from the best one
    on, every mean accuracy is at least

    .. math:: c + \kappa\,(a - c) - s.

    The standard error is that of a proportion, or, where it is larger, that of runs. Where each alpha has a run of the
    same seeds and held-out environments, the latter is of the *differences* between this alpha and the best one, run by
    run: environments that are hard at any alpha make none of them more uncertain. Otherwise it is that of :math:`a`.

    Beyond the first that is lower, another may reach it by luck. Below the best one, accuracy may be lower. An alpha
    with a run whose accuracy is NaN reaches nothing, whatever its other runs do.

    With ``"kept"``, accuracy is that of cells from the training environments and :math:`\kappa` is 0.97: as much
    invariance as costs nearly no accuracy.
    With ``"unseen"``, accuracy is that of held-out environments, which is what invariance is for; :math:`\kappa` is 1:
    the one-standard-error rule, in favour of invariance.

    Parameters
    ----------
    runs
        One row a run: ``alpha``, ``accuracy``, ``chance``, ``cells`` (how many the accuracy is of); ``seed`` and
        ``held_out`` tell which are compared with each other.
    criterion
        See above.
    keep
        :math:`\kappa`, in place of the criterion's.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If there are fewer than two alphas, each has a run whose accuracy is NaN, the criterion is not known, or
        ``keep`` is no share.

    References
    ----------
    Breiman et al. (1984), Classification and regression trees: the one-standard-error rule.

    Examples
    --------
    >>> runs = pd.DataFrame({"alpha": [0.0, 0.01, 0.1], "accuracy": [0.9, 0.89, 0.4], "chance": 0.1, "cells": 500})
    >>> scbd.workflows.choose_alpha(runs).alpha
    0.01
    """
    check_criterion(criterion)
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


def check_criterion(criterion: str) -> None:
    """Raise ``ValueError`` unless it is known."""
    if criterion not in get_args(Criterion):
        msg = f"criterion={criterion!r} is not known: use one of {', '.join(get_args(Criterion))}."
        raise ValueError(msg)


def selection_regret(frame: pd.DataFrame, *, ins: str = "z_c in", outs: str = "z_c out") -> pd.DataFrame:
    """What choosing alpha in distribution costs, seed by seed.

    Parameters
    ----------
    frame
        Rows of an experiment, one a run, with ``alpha`` and ``seed``.
    ins, outs
        Columns of the accuracy to choose by, and of the score that is wanted, the higher the better.

    Returns
    -------
    One row a seed: the ``alpha`` that :func:`choose_alpha` takes from that seed's runs alone; the ``best`` one, known
    afterwards; the ``regret``, by how much the score of the best is higher; and that of ``alpha="auto"``, where there
    is such a run: ``"auto, regret"``, below zero where it does better than the best number.

    Examples
    --------
    >>> frame = scbd.workflows.Results("docs/results/cmnist-alphas").frame()  # doctest: +SKIP
    >>> scbd.workflows.selection_regret(frame)  # doctest: +SKIP
    """
    rows = []
    for seed, part in frame.groupby("seed"):
        numbers = part[part["alpha"] != "auto"]
        numbers = numbers.assign(alpha=numbers["alpha"].astype(float), accuracy=numbers[ins], chance=0.0, cells=np.inf)
        score = numbers.set_index("alpha")[outs]
        alpha = choose_alpha(numbers).alpha
        row = {"seed": seed, "alpha": alpha, "best": score.idxmax(), "regret": score.max() - score[alpha]}
        auto = part.loc[part["alpha"] == "auto", outs]
        rows.append(row | ({"auto, regret": score.max() - auto.iloc[0]} if len(auto) else {}))
    return pd.DataFrame(rows)
