"""Cells of environments that were not learned from: as they are, adapted to, and corrected afterwards."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._labels import label_values
from scbd.baselines import CORRECTIONS, correct
from scbd.metrics import label_probe
from scbd.workflows._known import known_of
from scbd.workflows._profile_scores import profile_scores
from scbd.workflows._variants import AS_IT_IS, of_variant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anndata import AnnData

    from scbd.model import ImageModel
    from scbd.workflows._datasets import Dataset

_NEW = "new"
_ADAPTED: dict[str, dict[str, Any]] = {
    "adapted on controls": {"using": "controls"},
    "adapted on controls, with a map": {"using": "controls", "linear_map": True},
    "adapted on all cells": {"using": "all"},
}
# of z, by what may be learned from: all see cells of the new environments
_CORRECTED: dict[str, dict[str, Any]] = {
    "standardised on controls": {},
    "standardised": {},
    "Harmony": {"n_components": None},  # columns of z have one unit
}
_PROBE_CELLS = 20_000


def new_environment_scores(adata: AnnData, model: ImageModel, dataset: Dataset) -> dict[str, float]:
    """Scores of new environments by each way to embed them, side by side.

    Parameters
    ----------
    adata
        Cells with ``obs["split"]``: those of new environments are ``"test"``, and so may be others.
    model
        Trained on the ``"train"`` cells.
    dataset
        Its columns; environments are told apart by its ``group_key``, or without one by ``e_key``.

    Returns
    -------
    Under the name of each way (its plain name for z as it is): :func:`profile_scores` of wells that have mechanisms,
    else :func:`transfer_scores`.
    """
    key = dataset.group_key or dataset.e_key
    environments = label_values(adata.obs, key).astype(str).to_numpy()
    learned = (adata.obs["split"] == "train").to_numpy()
    new = ~np.isin(environments, environments[learned])
    scores: dict[str, float] = {}
    for name, z in _embeddings(adata, model, dataset, environments, new):
        found = profile_scores(adata, z, dataset) if dataset.labels else transfer_scores(adata, z, dataset, new)
        scores |= of_variant(name, found)
    return scores


def transfer_scores(adata: AnnData, embedding: np.ndarray, dataset: Dataset, new: np.ndarray) -> dict[str, float]:
    """How well labels of new environments are read by what was learned in the old, and how far the new stand apart.

    Parameters
    ----------
    adata
        Cells with ``obs["split"]``.
    embedding
        ``(N, D)``.
    dataset
        Its columns.
    new
        Which cells are of new environments, boolean ``(N,)``.

    Returns
    -------
    ``y AUROC``, ``y F1``: of a linear probe that learned from training cells, on cells of new environments; ``new or
    old``: balanced accuracy with which a linear probe tells controls (where they are known, else cells) of new
    environments from those of old ones, 0.5 by chance.
    """
    y = label_values(adata.obs, dataset.y_key).astype(str).to_numpy()
    learned = (adata.obs["split"] == "train").to_numpy()
    read = label_probe(embedding[learned | new], y[learned | new], train=learned[learned | new])
    compared = known_of(adata, **dataset.label_keys).get("controls", np.ones(len(y), dtype=bool))
    rng = np.random.default_rng(0)
    n = min((compared & new).sum(), (compared & ~new).sum(), _PROBE_CELLS // 2)
    rows = np.concatenate([rng.permutation(np.flatnonzero(compared & part))[:n] for part in (new, ~new)])
    apart = label_probe(embedding[rows], new[rows])
    return {"y AUROC": read["auroc"], "y F1": read["f1"], "new or old": apart["accuracy"]}


def _embeddings(
    adata: AnnData, model: ImageModel, dataset: Dataset, environments: np.ndarray, new: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and ``(N, D)`` of each way to embed all cells."""
    as_it_is = model.get_latent_representation()
    yield AS_IT_IS, as_it_is
    # controls that are scored are not learned from, be it without their labels
    known = known_of(adata, **dataset.label_keys) | {"environments": environments}
    usable = new & ~_scored_controls(adata, known)
    adapted = adata[usable].copy()
    adapted.obs[_NEW] = environments[usable]
    cells = adata[new].copy()
    cells.obs[_NEW] = environments[new]
    for name, how in _ADAPTED.items():
        if how["using"] == "controls" and dataset.setup.get("control") is None:
            continue
        model.adapt(adapted, _NEW, **how)
        z = as_it_is.copy()
        z[new] = model.get_latent_representation(cells, adapt_key=_NEW)
        yield name, z
    fit = (adata.obs["split"] == "train").to_numpy() | usable
    for name, how in _CORRECTED.items():
        if set(CORRECTIONS[name].needs) <= set(known) and (name != "Harmony" or find_spec("harmonypy")):
            yield f"z {name}", correct(as_it_is, name, **known, fit=fit, **how)


def _scored_controls(adata: AnnData, known: Mapping[str, Any]) -> np.ndarray:
    """Controls that are negatives of a score, boolean ``(N,)``: those at positions that are not learned from."""
    if "known_position" not in adata.obs:
        return np.zeros(adata.n_obs, dtype=bool)
    scored: np.ndarray = known["controls"] & ~adata.obs["known_position"].to_numpy()
    return scored
