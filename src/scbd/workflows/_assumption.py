"""Will invariance help on these data? The paper's test, which needs no SCBD (section 4.1)."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._labels import as_columns, label_values
from scbd.baselines import ERMModel
from scbd.data import hold_out_environments
from scbd.workflows._seeding import seed_everything

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData


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
    One row a run: ``lr``, ``weight_decay``, ``max_steps``, ``own in``, ``own out`` (accuracies); for
    :func:`in_out_correlation` and :func:`scbd.pl.in_against_out`.

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
    >>> runs = scbd.workflows.check_assumption(adata, y_key="gene", e_key="well", held_out=["P1_W1"], **how)
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


def in_out_correlation(frame: pd.DataFrame, *, ins: str = "own in", outs: str = "own out") -> dict[str, float]:
    """Correlation over runs of accuracy in distribution with accuracy out of it.

    Parameters
    ----------
    frame
        From :func:`check_assumption`, or rows of an experiment.
    ins, outs
        Columns.

    Returns
    -------
    ``pearson`` and ``spearman`` over all runs; ``strong``, Pearson's over the better half in distribution, since what
    bad runs do says nothing about spurious features; and ``n``. NaN where there is no variation.

    Raises
    ------
    ValueError
        If there are fewer than three runs.

    Examples
    --------
    >>> runs = pd.DataFrame({"own in": [0.7, 0.8, 0.9], "own out": [0.6, 0.5, 0.4]})
    >>> round(scbd.workflows.in_out_correlation(runs)["pearson"], 3)
    -1.0
    """
    if len(frame) < 3:
        msg = f"A correlation needs at least three runs, there are {len(frame)}."
        raise ValueError(msg)
    strong = frame[frame[ins] >= frame[ins].median()]
    return {
        "pearson": _correlation(frame[ins], frame[outs]),
        "spearman": _correlation(frame[ins].rank(), frame[outs].rank()),
        "strong": _correlation(strong[ins], strong[outs]),
        "n": float(len(frame)),
    }


def _correlation(x: pd.Series, y: pd.Series) -> float:
    if x.nunique() < 2 or y.nunique() < 2:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
