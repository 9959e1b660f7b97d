"""The protocols of the paper and ours: train a trial's system, and score it."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.metrics import adjusted_mutual_info_score

from paper.datasets import in_part
from paper.held_out_scores import held_out_scores
from paper.picture_scores import PICTURES, counterfactual_pictures, counterfactual_scores, effect_picture_scores
from paper.scores import (
    AS_IT_IS,
    across_environments,
    blocks_of,
    correction_scores,
    embedding_scores,
    generalization_scores,
    health_scores,
    new_environment_scores,
    of_variant,
    plate_map_scores,
    profile_scores,
    representations_of,
    side_by_side,
    without_scored_controls,
)
from paper.systems import TABLES, Table, computed, is_computed, parts_of, trained, with_head
from paper.well_scores import control_week_scores, gene_scores, mechanism_scores
from scbd._shared.labels import label_values
from scbd._workflows.compare import compare, correction_arguments
from scbd.corrections import correct
from scbd.corrections._correct import CORRECTIONS
from scbd.data import stratified_split
from scbd.data._inferred import INFERRED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anndata import AnnData

    from paper.datasets import Dataset
    from paper.trials import Trial
    from scbd.model import ImageModel

    Scored = tuple[dict[str, Any], ImageModel | None]
    Protocol = Callable[[Trial, AnnData, Dataset, Path], Scored]

# some cells are left to choose by, be it an encoder that would train on all of them
_TRAIN_SIZE = 0.9


def domain_generalization(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Learn y in some environments, predict it in one that was never seen (paper, section 4.1).

    Whatever was chosen was chosen in distribution; the test environment is looked at once, here. Every system has a
    head that learned with it, as the paper's authors report it, and one that is fitted afterwards.
    """
    if is_computed(trial.system):
        embedding = computed(trial, adata, dataset, in_part(adata, "train"))
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
        train_size = trial.training.get("train_size", _TRAIN_SIZE)
        learned = stratified_split(labels, train_size=train_size, seed=trial.seed).train
        fit = np.isin(np.arange(adata.n_obs), learned)
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
    blocks, model = _blocks(trial, adata, dataset, directory, in_part(adata, "train"))
    corrections: tuple[str | None, ...] = (None, "standardised")
    if model is None and any("environments" in CORRECTIONS[name].needs for name in parts_of(trial.system)[1]):
        corrections = (None,)
    # models are chosen by validation cells
    kept = ~in_part(adata, "validation")
    how: dict[str, Any] = dataset.label_keys | {"guide_key": dataset.guide_key, "group_key": dataset.group_key}
    how["net"] = None if dataset.relations is None else dataset.relations(adata)
    embeddings = {name: z[kept] for name, z in blocks.items()}
    frame = compare(adata[kept], embeddings, trained_on="split", corrections=corrections, **how)
    return side_by_side(frame) | health_scores(model), model


def map_of_new_plates(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Score genes and guides on plates that were not learned from, but for their controls (Yao et al., 2024).

    Each embedding as it is, and standardised on the controls of each well, as theirs is.
    """
    test = in_part(adata, "test")
    known = correction_arguments(adata, **dataset.label_keys)
    fit = in_part(adata, "train") | known["controls"]
    blocks, model = _blocks(trial, adata, dataset, directory, fit)
    scores: dict[str, Any] = {}
    for name, z in blocks.items():
        scores |= of_variant(name, plate_map_scores(adata[test], z[test], dataset))
        variant = (f"{name}, " if name != AS_IT_IS else "") + "standardised on controls"
        standardised = correct(z, "standardised on controls", **known, fit=fit)
        scores |= of_variant(variant, plate_map_scores(adata[test], standardised[test], dataset))
    return scores | health_scores(model), model


def new_environments(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Embed cells of environments that were not learned from, in every way there is to do so."""
    model = _trained_on_split(trial, adata, dataset, directory)
    return new_environment_scores(adata, model, dataset) | health_scores(model), model


def counterfactuals(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Exchange blocks between coloured digits, and read digit and colour of what is decoded (paper, figure 2b).

    Some pictures are kept in the directory, beside the history.
    """
    training = {"split": "split"} | dict(trial.training)
    decoder = training.pop("decoder", None)
    model = trained(trial, adata, dataset, directory, **with_head(training))
    if decoder is not None:  # others learn with the encoders
        model.train_decoder(seed=trial.seed, **decoder)
    pictures: dict[str, Any] = counterfactual_pictures(adata, model)
    np.savez_compressed(directory / PICTURES, **pictures)
    scores = generalization_scores(adata, model, y_key=dataset.y_key, e_key=dataset.e_key)
    return scores | counterfactual_scores(adata, model, seed=trial.seed), model


def effect_pictures(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Draw what genes do to control cells of a well, and compare with the truth of a simulated screen."""
    training = dict(trial.training)
    decoder = training.pop("decoder")
    model = trained(trial, adata, dataset, directory, **training)
    model.train_decoder(seed=trial.seed, **decoder)
    return health_scores(model) | effect_picture_scores(adata, model, seed=trial.seed), model


def unseen_perturbations(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Retrieve replicates, mechanisms and targets of perturbations, and on plates, that were never learned from."""
    embedding, model = _embedded(trial, adata, dataset, directory)
    return profile_scores(adata, embedding, dataset), model


def labels_across_environments(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Read labels of new cells in one environment by what was learned of them in another."""
    embedding, model = _embedded(trial, adata, dataset, directory)
    return across_environments(adata, embedding, dataset), model


def mechanisms_of_wells(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Find the mechanism of a treatment among other compounds and weeks; predict the week of DMSO wells."""
    embedding, model = _embedded(trial, adata, dataset, directory)
    return mechanism_scores(adata, embedding) | control_week_scores(adata, embedding), model


def genes_across_screens(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Find a gene again in another siRNA library, and at the same position in another cell line."""
    embedding, model = _embedded(trial, adata, dataset, directory)
    return gene_scores(adata, embedding), model


def held_out_environments(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
    """Predict labels in environments that were held out, and the environments of new cells, from r_c and z_c."""
    if is_computed(trial.system):
        return held_out_scores(adata, computed(trial, adata, dataset, in_part(adata, "train")), dataset, "r_c"), None
    model = _trained_on_split(trial, adata, dataset, directory)
    scores = health_scores(model)
    for name, representation, _ in representations_of(model):
        z = model.get_latent_representation(representation=representation)
        scores |= held_out_scores(adata, z, dataset, name)
    return scores, model


def _embedded(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> tuple[np.ndarray, ImageModel | None]:
    """A table corrected in closed form, or what a model has learned, from the training rows of ``obs["split"]``."""
    if trial.system in TABLES:
        fit = in_part(adata, "train")
        return TABLES[trial.system](Table(adata, dataset, fit), **trial.model), None
    model = _trained_on_split(trial, adata, dataset, directory)
    return model.get_latent_representation(without_scored_controls(adata, dataset)), model


def _blocks(
    trial: Trial, adata: AnnData, dataset: Dataset, directory: Path, fit: np.ndarray
) -> tuple[dict[str, np.ndarray], ImageModel | None]:
    """What is scored of all cells, by name: features that learned from the cells ``fit``, or the blocks of a model."""
    if is_computed(trial.system):
        return {AS_IT_IS: computed(trial, adata, dataset, fit)}, None
    model = _trained_on_split(trial, adata, dataset, directory)
    return blocks_of(model), model


def _trained_on_split(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> ImageModel:
    """The trial's system, trained on the training cells of ``obs["split"]``."""
    return trained(trial, adata, dataset, directory, **{"split": "split"} | dict(trial.training))


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


def with_agreement(protocol: Protocol) -> Protocol:
    """The same scores, and the adjusted mutual information of known and inferred environments, of training cells."""

    @wraps(protocol)
    def scored(trial: Trial, adata: AnnData, dataset: Dataset, directory: Path) -> Scored:
        scores, model = protocol(trial, adata, dataset, directory)
        if INFERRED in adata.obs:
            learned = adata.obs.loc[adata.obs["split"] == "train"]
            known = label_values(learned, dataset.e_key).astype(str)
            scores = scores | {"agreement": float(adjusted_mutual_info_score(known, learned[INFERRED].astype(str)))}
        return scores, model

    return scored


PROTOCOLS: dict[str, Protocol] = {
    "domain generalization": domain_generalization,
    **{
        f"{name}, environments hidden": with_agreement(protocol)
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
    "map of new plates": map_of_new_plates,
    "new cells and perturbations": new_cells_and_perturbations,
    "held-out environments": held_out_environments,
    "genes across screens": genes_across_screens,
    "labels across environments": labels_across_environments,
    "mechanisms of wells": mechanisms_of_wells,
    "unseen perturbations": unseen_perturbations,
}
