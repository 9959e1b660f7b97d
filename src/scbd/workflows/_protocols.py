"""The paper's protocols: train a trial's system, and score it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._labels import label_values
from scbd.baselines import CORRECTIONS
from scbd.data import hold_out_environments, stratified_split
from scbd.workflows._compare import compare
from scbd.workflows._counterfactual_scores import counterfactual_scores
from scbd.workflows._effect_picture_scores import effect_picture_scores
from scbd.workflows._hidden import told_of_agreement
from scbd.workflows._new_environments import new_environment_scores
from scbd.workflows._profile_scores import across_environments, profile_scores
from scbd.workflows._rivals import RIVALS, Table
from scbd.workflows._scores import (
    correction_scores,
    embedding_scores,
    generalization_scores,
    health_scores,
    selection_scores,
)
from scbd.workflows._systems import computed, is_computed, parts_of, trained, with_head
from scbd.workflows._variants import AS_IT_IS, blocks_of, of_variant, side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anndata import AnnData

    from scbd.model import ImageModel
    from scbd.workflows._datasets import Dataset
    from scbd.workflows._trials import Trial

    Scored = tuple[dict[str, Any], ImageModel | None]

# some cells are left to choose by, be it an encoder that would train on all of them
_TRAIN_SIZE = 0.9


def domain_generalization(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Learn y in some environments, predict it in one that was never seen (paper, section 4.1).

    Whatever was chosen was chosen in distribution; the test environment is looked at once, here. Every system has a
    head that learned with it, as the paper's authors report it, and one that is fitted afterwards.
    """
    if is_computed(trial.system):
        embedding = computed(trial, adata, dataset, (adata.obs["split"] == "train").to_numpy())
        return embedding_scores(adata, embedding, y_key=dataset.y_key, e_key=dataset.e_key), None
    model = trained(trial, adata, dataset, directory, **with_head({"split": "split"} | dict(trial.training)))
    return generalization_scores(adata, model, y_key=dataset.y_key, e_key=dataset.e_key), model


def batch_correction(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Embed all cells; find known relations between genes, and fail to find the well (paper, section 4.2)."""
    if is_computed(trial.system):
        return _correction(adata, computed(trial, adata, dataset), dataset), None
    model = trained(trial, adata, dataset, directory)
    return _correction_of_blocks(adata, model, dataset) | health_scores(model), model


def batch_correction_of_new_cells(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """The same on cells that were not learned from.

    Of its training cells an encoder may know the perturbation by heart: a gene is then easy to read from them, and the
    well is not, whatever it makes of new ones.
    """
    if is_computed(trial.system):
        labels = [label_values(adata.obs, key).to_numpy() for key in (dataset.y_key, dataset.e_key)]
        learned = stratified_split(
            labels, train_size=trial.training.get("train_size", _TRAIN_SIZE), seed=trial.seed
        ).train
        fit = np.zeros(adata.n_obs, dtype=bool)
        fit[learned] = True
        new = np.flatnonzero(~fit)
        return _correction(adata[new], computed(trial, adata, dataset, fit)[new], dataset), None
    model = trained(trial, adata, dataset, directory)
    new = np.setdiff1d(np.arange(adata.n_obs), model.train_indices)
    return _correction_of_blocks(adata, model, dataset, new) | health_scores(model), model


def new_cells_and_perturbations(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """The same, where of some perturbations no cell was learned from; each embedding as it is, and standardised.

    Standardised by environment, with what is typical of the cells that were learned from: one training, both scores.
    What moves environments onto each other by itself is scored as it is.
    """
    corrections: tuple[str | None, ...] = (None, "standardised")
    model = None
    if is_computed(trial.system):
        blocks = {AS_IT_IS: computed(trial, adata, dataset, (adata.obs["split"] == "train").to_numpy())}
        if any("environments" in CORRECTIONS[name].needs for name in parts_of(trial.system)[1]):
            corrections = (None,)
    else:
        model = trained(trial, adata, dataset, directory, **{"split": "split"} | dict(trial.training))
        blocks = blocks_of(model)
    # models are chosen by validation cells
    kept = (adata.obs["split"] != "validation").to_numpy()
    how: dict[str, Any] = dataset.label_keys | {"guide_key": dataset.guide_key, "group_key": dataset.group_key}
    how["net"] = None if dataset.relations is None else dataset.relations(adata)
    embeddings = {name: z[kept] for name, z in blocks.items()}
    frame = compare(adata[kept], embeddings, trained_on="split", corrections=corrections, **how)
    return side_by_side(frame) | ({} if model is None else health_scores(model)), model


def new_environments(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Embed cells of environments that were not learned from, in every way there is to do so."""
    model = trained(trial, adata, dataset, directory, **{"split": "split"} | dict(trial.training))
    return new_environment_scores(adata, model, dataset) | health_scores(model), model


def counterfactuals(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Exchange blocks between coloured digits, and read digit and colour of what is decoded (paper, figure 2b)."""
    training = {"split": "split"} | dict(trial.training)
    decoder = training.pop("decoder")
    model = trained(trial, adata, dataset, directory, **with_head(training))
    model.train_decoder(seed=trial.seed, **decoder)
    scores = generalization_scores(adata, model, y_key=dataset.y_key, e_key=dataset.e_key)
    return scores | counterfactual_scores(adata, model, seed=trial.seed), model


def effect_pictures(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Draw what genes do to control cells of a well, and compare with the truth of a simulated screen."""
    training = dict(trial.training)
    decoder = training.pop("decoder")
    model = trained(trial, adata, dataset, directory, **training)
    model.train_decoder(seed=trial.seed, **decoder)
    return health_scores(model) | effect_picture_scores(adata, model, seed=trial.seed), model


def selection(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Score what can be seen without a test environment, to choose a setting by."""
    training, held_out = dict(trial.training), trial.data["held_out"]
    if held_out:
        environments = label_values(adata.obs, dataset.e_key).astype(str)
        y = label_values(adata.obs, dataset.y_key).astype(str).to_numpy()
        training["split"] = hold_out_environments(environments, held_out, strata=[y], seed=trial.seed)
    elif training.get("split") is None and not {"train_size", "validation_size"} & set(training):
        training["train_size"] = _TRAIN_SIZE
    model = trained(trial, adata, dataset, directory, **training)
    scored = model.test_indices if held_out else model.validation_indices
    return selection_scores(adata, model, scored, y_key=dataset.y_key, e_key=dataset.e_key), model


def unseen_perturbations(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Retrieve replicates, mechanisms and targets of perturbations, and on plates, that were never learned from."""
    embedding, model = _embedded(trial, adata, dataset, directory)
    return profile_scores(adata, embedding, dataset), model


def labels_across_environments(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Read labels of new cells in one environment by what was learned of them in another."""
    embedding, model = _embedded(trial, adata, dataset, directory)
    return across_environments(adata, embedding, dataset), model


def _embedded(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> tuple[np.ndarray, ImageModel | None]:
    """A table corrected in closed form, or what a model has learned, from the training rows of ``obs["split"]``."""
    if trial.system in RIVALS:
        fit = (adata.obs["split"] == "train").to_numpy()
        return RIVALS[trial.system](Table(adata, dataset, fit), **trial.model), None
    model = trained(trial, adata, dataset, directory, **{"split": "split"} | dict(trial.training))
    return model.get_latent_representation(), model


def _correction_of_blocks(
    adata: AnnData, model: ImageModel, dataset: Dataset, rows: np.ndarray | None = None
) -> dict[str, Any]:
    """Of each block that is scored, in these cells; all by default."""
    rows = np.arange(adata.n_obs) if rows is None else rows
    scores: dict[str, Any] = {}
    for name, z in blocks_of(model, rows).items():
        scores |= of_variant(name, _correction(adata[rows], z, dataset))
    return scores


def _correction(adata: AnnData, embedding: np.ndarray, dataset: Dataset) -> dict[str, Any]:
    net = None if dataset.relations is None else dataset.relations(adata)
    return correction_scores(
        adata, embedding, y_key=dataset.y_key, e_key=dataset.e_key, guide_key=dataset.guide_key, net=net
    )


PROTOCOLS: dict[str, Callable[[Trial, AnnData, Dataset, Path], Scored]] = {
    "domain generalization": domain_generalization,
    **{
        f"{name}, environments hidden": told_of_agreement(protocol)
        for name, protocol in {
            "domain generalization": domain_generalization,
            "new cells and perturbations": new_cells_and_perturbations,
            "unseen perturbations": unseen_perturbations,
        }.items()
    },
    "batch correction": batch_correction,
    "batch correction of new cells": batch_correction_of_new_cells,
    "counterfactuals": counterfactuals,
    "effect pictures": effect_pictures,
    "new environments": new_environments,
    "new cells and perturbations": new_cells_and_perturbations,
    "labels across environments": labels_across_environments,
    "selection": selection,
    "unseen perturbations": unseen_perturbations,
}
