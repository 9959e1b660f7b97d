"""Choose alpha after a sweep, from what can be seen without a test environment."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scbd._labels import label_values
from scbd._outputs import save_figure, write_table
from scbd.workflows._alpha_rule import AlphaSelection, Criterion, check_criterion, choose_alpha
from scbd.workflows._cells import UserCells

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from matplotlib.figure import Figure

# each form of the loss has a scale of its own
_ALPHAS = {"variance": (0.0, 0.003, 0.01, 0.03, 0.1), "listing": (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)}


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
    """Train at several alphas, and choose one without looking at any test environment.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`. Give a subset if they are many: what is wanted is one number.
    y_key, e_key
        Columns of perturbation and environment, one or several each.
    setup_kwargs
        Further arguments of ``setup_anndata``: where images or features are, which cells are controls.
    alphas
        To try, at least two. By default five between 0 and 0.1, or six between 0 and 100 for the contrastive forms of
        invariance.
    criterion
        ``"kept"``: the largest alpha that keeps the accuracy of the perturbation on validation cells, see
        :func:`choose_alpha`. ``"unseen"``: each environment is held out in turn, and accuracy is that on its cells;
        takes at least three environments, and as many times the runs as there are folds.
    n_folds
        For ``"unseen"``: hold out environments in so many groups, rather than one by one.
    n_seeds
        Runs of each alpha (and fold) with different weights and batches.
    out
        Directory to keep finished runs in: called again with the same cells and arguments, it goes on. Runs of other
        cells (other labels, or other pixels in a sample of 64) stay there and are not used. It also gets ``runs.csv``,
        ``curve.csv`` and ``curve.png`` of the last call.
    model_kwargs, **train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``. z_s, which leaves z_c as it is, is left out unless
        ``style_target`` asks for it.

    Returns
    -------
    The choice, the curve, and all runs.

    Raises
    ------
    ValueError
        If there is nothing to choose from, or a setting is not known; before anything is trained.
    KeyError
        If a column is not there.
    KeyboardInterrupt
        If interrupted; with ``out``, finished runs are kept.

    Warns
    -----
    UserWarning
        If ``out`` holds finished runs of other cells, or of systems that have since been changed: they are not used.

    Examples
    --------
    >>> found = scbd.select_alpha(adata, y_key="gene", e_key="well", max_steps=2000)
    >>> ax = found.plot()
    >>> model = scbd.SCBDModel(adata, alpha=found.alpha)
    """
    model = {"style_target": None} | dict(model_kwargs or {})
    alphas = _alphas(alphas, model.get("invariance", "variance"))
    check_criterion(criterion)
    if n_folds is not None and criterion != "unseen":
        msg = "n_folds is for criterion='unseen', which holds environments out."
        raise ValueError(msg)
    cells = UserCells(adata, y_key, e_key, setup_kwargs or {})
    held_out = criterion == "unseen"
    cells.check(model, train_kwargs, n_seeds, varied=["alpha"], held_out=held_out)
    names = np.unique(label_values(adata.obs, e_key).astype(str))
    folds = _folds(names, n_folds) if held_out else [[]]
    trials = [
        cells.trial("SCBD", seed, model | {"alpha": alpha}, train_kwargs, held_out=fold)
        for seed in range(n_seeds)
        for fold in folds
        for alpha in alphas
    ]
    found = choose_alpha(cells.run(trials, out), criterion=criterion)
    if out:
        write_table(found.curve, Path(out) / "curve.csv", index=True)
        save_figure(cast("Figure", found.plot().figure), Path(out) / "curve.png")
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
