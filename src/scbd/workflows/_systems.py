"""The systems of the experiments: from a trial to a trained model."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from scbd import baselines
from scbd.baselines import standardize_by_environment, tvn
from scbd.model import SCBDModel, TrainingDiverged
from scbd.workflows._seeding import seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy as np
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


def _corrected_pixels(
    adata: AnnData, *, correct: Callable[..., np.ndarray], y_key: str, e_key: str, control: str, **settings: Any
) -> np.ndarray:
    """Principal components of the pixels, corrected on the controls of each environment."""
    controls = adata.obs[y_key].to_numpy() == control
    return correct(baselines.pixel_pca(adata, **settings), adata.obs[e_key].to_numpy(), controls=controls)


# embeddings that are computed, not learned
FEATURES: dict[str, Callable[..., np.ndarray]] = {
    "pixel PCA": baselines.pixel_pca,
    "pixel PCA, centred": partial(_corrected_pixels, correct=partial(standardize_by_environment, scale=False)),
    "pixel PCA, TVN": partial(_corrected_pixels, correct=tvn),
    "CellProfiler": baselines.cellprofiler_pca,
}

# What the rows of a system mean. Raise it where the same settings would now train, or score, otherwise: rows of another
# meaning are kept and not used, and their trials are run again. Rows that name none have the first.
MEANINGS: dict[str, int] = dict.fromkeys([*SYSTEMS, *FEATURES], 1) | {
    "Fish": 2,  # a round that is not finished changes nothing
    "mcVAE": 2,  # the loss of pairs of a control and a perturbed cell
    # channels count alike
    "pixel PCA": 2,
    "pixel PCA, centred": 2,
    "pixel PCA, TVN": 3,  # at 2, wells were centred before controls are whitened, and units did not matter any more
}
# How often the rule behind ``alpha="auto"`` has changed: what a number trains has not.
RULES_OF_ALPHA = 1  # a tenth of it where environments shift all cells alike


def meaning(system: str, model: Mapping[str, Any]) -> int:
    """What a row of this system with these arguments of its model means today."""
    by_rule = system == "SCBD" and model.get("alpha", "auto") == "auto"
    return MEANINGS.get(system, 1) + RULES_OF_ALPHA * by_rule


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
