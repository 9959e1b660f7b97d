"""The systems of the experiments: from a trial to a trained model."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd import baselines
from scbd.metrics import stored_embedding
from scbd.model import SCBDModel, TrainingDiverged
from scbd.workflows._known import known_of
from scbd.workflows._seeding import seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from anndata import AnnData

    from scbd.model import ImageModel
    from scbd.workflows._datasets import Dataset
    from scbd.workflows._trials import Trial

# never trained: BatchNorm sees the data, weights stay as they are
UNTRAINED: dict[str, Any] = {"max_steps": 40, "lr": 0.0, "weight_decay": 0.0, "load_best": False}

SYSTEMS: dict[str, type[ImageModel]] = {
    "SCBD": SCBDModel,
    "random encoder": SCBDModel,
    "oracle": SCBDModel,
    "ERM": baselines.ERMModel,
    "CORAL": baselines.CORALModel,
    "DANN": baselines.DANNModel,
    "IRM": baselines.IRMModel,
    "Fish": baselines.FishModel,
    "Group DRO": baselines.GroupDROModel,
    "VAE": baselines.VAEModel,
    "iVAE": baselines.IVAEModel,
    "mcVAE": baselines.MCVAEModel,
}


def _stored(adata: AnnData, *, obsm_key: str) -> np.ndarray:
    """An embedding of any origin, which the table holds."""
    return np.asarray(stored_embedding(adata, obsm_key))


# embeddings that are computed, not learned
FEATURES: dict[str, Callable[..., np.ndarray]] = {
    "pixel PCA": baselines.pixel_pca,
    "CellProfiler": baselines.cellprofiler_pca,
    "obsm": _stored,
}

# What the rows of a system mean. Raise it where the same settings would now train, or score, otherwise: rows of another
# meaning are kept and not used, and their trials are run again. Rows that name none have the first.
MEANINGS: dict[str, int] = dict.fromkeys([*SYSTEMS, *FEATURES], 1) | {
    "Fish": 2,  # a round that is not finished changes nothing
    "mcVAE": 2,  # the loss of pairs of a control and a perturbed cell
    "pixel PCA": 2,  # channels count alike
    "pixel PCA, TVN": 3,  # at 2, wells were centred before controls are whitened, and units did not matter any more
}
# How often the rule behind ``alpha="auto"`` has changed: what a number trains has not.
RULES_OF_ALPHA = 1  # a tenth of it where environments shift all cells alike
# the same where models are told of controls
RULES_OF_ALPHA_WITH_CONTROLS = 1  # what was learned is asked of the other cells
# how often the way to score has changed, of protocols where it has
CHANGED_SCORES = {
    "counterfactuals": 1,  # a reader of digits that errs on one original in a hundred, not one in twenty
    "new environments": 1,  # few cells change little, and plates are read from wells that were not learned from
    "selection": 1,  # the environment is read from cells that were not learned from
}
# the same of features alone
CHANGED_FEATURES = {"batch correction of new cells": 1}  # they learn from training cells, not from those scored


def meaning(system: str, model: Mapping[str, Any], protocol: str = "", *, told_controls: bool = False) -> int:
    """What a row of this system with these arguments of its model means today.

    Parameters
    ----------
    system, model, protocol
        Of the trial.
    told_controls
        Whether models are told which cells are controls.
    """
    rules = RULES_OF_ALPHA + RULES_OF_ALPHA_WITH_CONTROLS * told_controls
    by_rule = system == "SCBD" and model.get("alpha", "auto") == "auto"
    changed = CHANGED_SCORES.get(protocol, 0) + CHANGED_FEATURES.get(protocol, 0) * is_computed(system)
    return MEANINGS.get(system, MEANINGS.get(parts_of(system)[0], 1)) + rules * by_rule + changed


def parts_of(system: str) -> tuple[str, list[str]]:
    """Embedding and corrections, in turn, of a name such as ``"pixel PCA, standardised, LDA"``."""
    embedding, *corrections = system.split(", ")
    return embedding, corrections


def is_computed(system: str) -> bool:
    """Whether a system is features, or features followed by corrections."""
    embedding, corrections = parts_of(system)
    return embedding in FEATURES and all(correction in baselines.CORRECTIONS for correction in corrections)


def computed(trial: Trial, adata: AnnData, dataset: Dataset, fit: np.ndarray | None = None) -> np.ndarray:
    """The features that a trial's system names, corrected as it says.

    Parameters
    ----------
    trial
        Its arguments of the model are those of the features, and under the name of a correction those of the
        correction. Columns that the features do not ask for are told to corrections, in place of the data set's.
    adata, dataset
        The cells, and their columns.
    fit
        Mask of cells that may be learned from, ``(N,)``; all by default. ComBat and Harmony see all by construction,
        CellProfiler's features too.

    Returns
    -------
    ``(N, D)``.
    """
    embedding, corrections = parts_of(trial.system)
    function, settings = FEATURES[embedding], dict(trial.model)
    asks, how = signature(function).parameters, {name: settings.pop(name, {}) for name in corrections}
    columns = {name: settings.pop(name) for name in dataset.label_keys if name in settings and name not in asks}
    settings |= {name: value for name, value in {"seed": trial.seed, "fit": fit}.items() if name in asks}
    z = function(adata, **settings)
    known = known_of(adata, fit=fit, **dataset.label_keys | columns) if corrections else {}
    for correction in corrections:
        z = baselines.correct(z, correction, **known, **how[correction])
    return z


def with_head(training: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``train`` with a head beside the encoder, which changes nothing else: trials do not name it.

    At a rate of 0 it would be as untrained as the encoder that serves as a control.
    """
    return {"online_head": training.get("lr") != 0} | dict(training)


def trained(trial: Trial, adata: AnnData, dataset: Dataset, checkpoints: Path, **training: Any) -> ImageModel:
    """Train the trial's system; goes on where an interrupted run stopped.

    Parameters
    ----------
    trial
        What to train.
    adata
        On what.
    dataset
        Its columns.
    checkpoints
        Directory of the run's state.
    **training
        In place of the trial's arguments of ``train``.

    Raises
    ------
    scbd.model.TrainingDiverged
        If training diverged before any weights were found good.

    Warns
    -----
    UserWarning
        If it diverged later: the last good weights are scored, and the row says so.
    """
    seed_everything(trial.seed)
    system = SYSTEMS[trial.system]
    system.setup_anndata(adata, **dataset.columns)
    model = system(adata, **trial.model)
    resume = "last" if (checkpoints / "last.ckpt").is_file() else None
    try:
        model.train(checkpoint_dir=checkpoints, ckpt_path=resume, seed=trial.seed, **(training or trial.training))
    except TrainingDiverged as error:  # a setting that does not work is a result, and no reason to stop a sweep
        if not model.is_trained:
            raise
        warnings.warn(str(error), UserWarning, stacklevel=2)
    return model
