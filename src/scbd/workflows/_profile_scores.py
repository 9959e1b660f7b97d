"""Scores of profiles on what was held out: replicates beside their floor, mechanisms and targets, environments."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scbd._labels import label_values
from scbd.metrics import label_probe, predict_labels, replicate_retrieval, retrieval

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.workflows._datasets import Dataset

# of p values, which no table shows
_PERMUTATIONS = 100
_KINDS: tuple[Literal["linear", "quadratic", "neighbours"], ...] = ("linear", "quadratic", "neighbours")


def profile_scores(adata: AnnData, embedding: np.ndarray, dataset: Dataset) -> dict[str, float]:
    """Retrieval of replicates, mechanisms and targets, and how far the environment can be read.

    Controls at positions that were learned from are no negatives, be it on new plates, and take no part.

    Parameters
    ----------
    adata
        Wells, with the columns of :func:`cpjump1_fold`.
    embedding
        ``(N, D)``.
    dataset
        Its columns.

    Returns
    -------
    ``replicates seen``, ``unseen`` (perturbations on new plates) and ``unseen, all plates``: mean average precision;
    ``floor`` of the last, and ``floor-corrected``; ``across positions``; ``mechanism``, ``target``: of unseen
    perturbations among all; and probes of the plate in wells that were not learned from, ``e, linear, new`` and so on,
    see :func:`environment_scores`: of its training wells an encoder knows the compound by heart, and hides the plate.
    """
    control, kept = dataset.setup["control"], ~adata.obs["known_position"].to_numpy()
    wells, z = adata[kept], np.asarray(embedding)[kept]
    unseen, new = wells.obs["unseen"].to_numpy(), wells.obs["new_plate"].to_numpy()
    keys: dict[str, Any] = {"y_key": dataset.y_key, "control": control}
    how = keys | {"e_key": dataset.e_key, "n_permutations": _PERMUTATIONS}
    with warnings.catch_warnings():  # one layout: that is what the floor is for
        warnings.filterwarnings("ignore", ".*position", UserWarning)
        everywhere = replicate_retrieval(
            wells, z, queries=unseen, position_key=dataset.setup.get("position_key"), **how
        )
        scores: dict[str, float] = {}
        if wells.obs.loc[new, dataset.e_key].nunique() > 1:  # of a single plate there are no replicates
            for name, queries in {"seen": ~unseen, "unseen": unseen}.items():
                found = replicate_retrieval(wells[new], z[new], queries=queries[new], **how)
                scores[f"replicates {name}"] = found.mean_average_precision
    scores |= {
        "replicates unseen, all plates": everywhere.mean_average_precision,
        "floor": everywhere.floor,
        "floor-corrected": everywhere.floor_corrected,
        "across positions": everywhere.cross_position,
    }
    for name, column in dataset.labels.items():
        among = retrieval(wells, z, label_key=column, queries=unseen, n_permutations=_PERMUTATIONS, **keys)
        scores[name] = among.mean_average_precision
    not_learned = (wells.obs["split"] != "train").to_numpy()
    plates = label_values(wells.obs, dataset.e_key).astype(str).to_numpy()[not_learned]
    return scores | {f"{name}, new": score for name, score in environment_scores(z[not_learned], plates).items()}


def environment_scores(embedding: np.ndarray, environments: np.ndarray) -> dict[str, float]:
    """Accuracy with which probes of three kinds read the environment."""
    return {f"e, {kind}": label_probe(embedding, environments, kind=kind)["accuracy"] for kind in _KINDS}


def across_environments(adata: AnnData, embedding: np.ndarray, dataset: Dataset) -> dict[str, float]:
    """How well a label is read in the second environment by what was learned of it in the first, on new cells.

    Parameters
    ----------
    adata
        Cells of two environments, with ``obs["split"]``.
    embedding
        ``(N, D)``.
    dataset
        Its columns.

    Returns
    -------
    ``y across e``: balanced accuracy; ``y chance``; and probes of the environment.
    """
    new = (adata.obs["split"] == "test").to_numpy()
    z = np.asarray(embedding)[new]
    y, e = (label_values(adata.obs[new], key).astype(str).to_numpy() for key in (dataset.y_key, dataset.e_key))
    first = e == np.unique(e)[0]
    predicted = predict_labels(z[first], y[first], z[~first], classifier="linear")
    truth = y[~first]
    recalls = [float(np.mean(predicted[truth == label] == label)) for label in np.unique(truth)]
    scores = {"y across e": float(np.mean(recalls)), "y chance": 1 / len(recalls)}
    return scores | environment_scores(z, e)
