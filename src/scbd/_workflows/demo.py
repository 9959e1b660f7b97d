"""Demonstrations of SCBD, started by the command ``scbd demo``.

One demonstration analyses a simulated screen, from images of cells to the report. The second demonstration trains on
coloured digits, where the colour predicts the digit, and tests on white digits.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd import pl
from scbd._shared.files import check_output_directory, save_figure, write_table
from scbd._shared.keys import CONTENT_KEY, IMAGE_KEY, STYLE_KEY
from scbd._workflows.run import run
from scbd._workflows.training_runs import seed_everything
from scbd.baselines._pixel_pca import pixel_pca
from scbd.data._readers import read_crops
from scbd.data._screens import open_screen, write_screen
from scbd.datasets._digits import colored_digits
from scbd.datasets._simulated import simulated_screen
from scbd.metrics._probes import label_probe, predict_labels
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

    from scbd.metrics._probes import Classifier
    from scbd.model._interfaces import Alpha

logger = logging.getLogger(__name__)

DIGITS_KEYS: dict[str, Any] = {"y_key": "digit", "e_key": "environment"}
DIGITS_MODEL: dict[str, Any] = {
    **{"encoder": "small", "n_latent": 128, "style_target": "ye", "include_self": True},
    # Images of digits are not standardised, because standardisation would change the colours. They are not augmented
    # either, because rotating and flipping would change the digits.
    **{"standardize": False, "augment": False},
}
DIGITS_TRAINING: dict[str, Any] = {
    **{"lr": 3e-4, "batch_size": 256, "split": "split", "load_best": False},
    # The learning rate is constant, so that the invariance loss still changes the encoder at the end of training.
    "plan_kwargs": {"lr_decay": False},
}
# Training settings of the random encoder, with which trained encoders are compared. With a learning rate of 0, training
# steps update the statistics of batch normalisation, but not the weights.
RANDOM_ENCODER_TRAINING: dict[str, Any] = {"max_steps": 40, "lr": 0.0, "weight_decay": 0.0}


# Settings of the simulated screen. The wells of this screen are the environments, and differ in the intensity of the
# stain and in the camera.
SCREEN_SIMULATION: dict[str, Any] = {
    **{"n_cells": 1_600, "n_complexes": 5, "genes_per_complex": 2, "guides_per_gene": 2, "n_wells": 8},
    **{"image_size": 32, "effect_size": 0.7, "camera_effect": 0.5},
}
# Settings of the training on the simulated screen. The training takes two minutes on two processor cores.
SCREEN_TRAINING: dict[str, Any] = {"max_steps": 160, "batch_size": 256}


def demo_screen(
    out: str | os.PathLike[str] = "results/demo", *, alpha: Alpha = "auto", seed: int = 0, max_steps: int | None = None
) -> pd.DataFrame:
    """Simulate a screen and analyse it as a user would: write images, convert them, train, and report.

    The function writes, in this order:

    1. the folder ``crops/`` with one image file per cell and channel, and the table ``crops.csv`` with the labels of
       the cells and the names of their image files;
    2. ``screen.zarr``, all images and labels in one file of the format from which models are trained;
    3. the results of :func:`scbd.run`, such as ``report.html``.

    The log contains the commands ``scbd convert`` and ``scbd run`` with which a user would do the same. If the function
    is called again after an interruption, it continues.

    Parameters
    ----------
    out
        Directory of the results.
    alpha
        Weight of the invariance loss.
    seed
        Seed of the simulation and of the run.
    max_steps
        Number of training steps. Default: 160.

    Returns
    -------
    Table that :func:`scbd.run` returns, with the scores of each embedding.
    """
    out = check_output_directory(out)
    channels = write_crops(simulated_screen(**SCREEN_SIMULATION, seed=seed), out)
    logger.info(
        "scbd convert %s/crops.csv --file-columns %s --y-key gene --out %s/screen.zarr", out, " ".join(channels), out
    )
    # If screen.zarr exists, it is complete, because an incomplete screen is written under a temporary name.
    if not (out / "screen.zarr").exists():
        write_screen(out / "screen.zarr", [read_crops(out / "crops.csv", file_columns=channels)], y_key="gene")
    training = SCREEN_TRAINING | ({} if max_steps is None else {"max_steps": max_steps})
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in training.items())
    logger.info(
        "scbd run %s/screen.zarr --y-key gene --e-key well --control nontargeting %s --out %s", out, options, out
    )
    return run(
        open_screen(out / "screen.zarr"),
        y_key="gene",
        e_key="well",
        out=out,
        setup_kwargs={"control": "nontargeting"},
        model_kwargs={"alpha": alpha},
        train_kwargs=training,
        resume=True,
        seed=seed,
    )


def write_crops(cells: AnnData, out: Path) -> list[str]:
    """Write the images of cells as one grey PNG file per cell and channel, and a table of the cells.

    The table, ``crops.csv``, has one row per cell, with its labels and the names of its image files.

    Returns
    -------
    Names of the channels. The table has one column of this name per channel, with the names of the image files.
    """
    from PIL import Image

    (out / "crops").mkdir(parents=True, exist_ok=True)
    table = cells.obs[["gene", "sgRNA", "well"]].reset_index(drop=True)
    channels = [name.replace(" ", "_") for name in cells.var_names]
    for place, channel in enumerate(channels):
        table[channel] = [f"crops/{cell}_{channel}.png" for cell in range(cells.n_obs)]
        for name, image in zip(table[channel], cells.obsm[IMAGE_KEY][:, place], strict=True):
            Image.fromarray(image).save(out / name)
    write_table(table, out / "crops.csv")
    return channels


def demo_digits(
    out: str | os.PathLike[str] = "results/demo", *, alpha: Alpha = "auto", seed: int = 0, max_steps: int = 600
) -> pd.DataFrame:
    """Train on coloured digits with and without the invariance loss, and test on white digits.

    Among the training digits, the colour predicts the digit. White digits test whether a model relies on the colour.
    Four systems are compared:

    - principal components of the pixels, and a random (untrained) encoder: they show which accuracy a linear classifier
      reaches on representations that were computed without labels;
    - two trained models: one with alpha 0, that is, without the invariance loss, and one with the given ``alpha``.

    The function writes ``metrics.csv``, ``digits.png``, ``training_curves.png``, ``umap.png`` and ``model/``, and
    replaces files of an earlier demonstration.

    Parameters
    ----------
    out
        Directory of the results.
    alpha
        Weight of the invariance loss of the second trained model.
    seed
        Seed of the split, the colours, the weights, the batches and the UMAP.
    max_steps
        Number of training steps per model. The random encoder has 40 steps with a learning rate of 0.

    Returns
    -------
    Table with one row per system. Columns are the accuracies of :func:`score_embedding`, and for the three encoders
    also the diagnostics of the training in ``model.health``.
    """
    out = check_output_directory(out)
    out.mkdir(parents=True, exist_ok=True)
    adata = colored_digits(seed=seed)
    save_figure(pl.cells(adata, label="environment", seed=seed)[0, 0].figure, out / "digits.png")
    pixels = pixel_pca(adata, n_components=64, fit=(adata.obs["split"] == "train").to_numpy(), seed=seed)
    rows = {"pixel PCA": score_embedding(adata, pixels, "r_c", "linear")}
    learned = {"max_steps": max_steps, "online_head": True}
    for name, its_alpha, training in (
        ("random encoder", 0.0, RANDOM_ENCODER_TRAINING),
        ("alpha = 0", 0.0, learned),
        (f"alpha = {alpha}", alpha, learned),
    ):
        seed_everything(seed)
        SCBDModel.setup_anndata(adata, **DIGITS_KEYS)
        model = SCBDModel(adata, alpha=its_alpha, **DIGITS_MODEL)
        model.train(seed=seed, **DIGITS_TRAINING | training)
        rows[name] = score_model(adata, model)
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("system")
    write_table(table.round(4), out / "metrics.csv", index=True)
    model.save(str(out / "model"), overwrite=True)
    save_figure(pl.history(model.history, ceiling=model.health["ceiling"])[0].figure, out / "training_curves.png")
    for key, block in ((CONTENT_KEY, "c"), (STYLE_KEY, "s")):
        adata.obsm[key] = model.get_latent_representation(block=block)
    save_figure(pl.umap_blocks(adata, list(DIGITS_KEYS.values()), seed=seed)[0, 0].figure, out / "umap.png")
    return table


def score_model(adata: AnnData, model: SCBDModel) -> dict[str, float]:
    """Compute the accuracies of a model trained on coloured digits, and add the diagnostics ``model.health``.

    The digit is predicted in three ways: from r_c, the output of the encoder's backbone, by a linear classifier that is
    fitted after training; from z_c, by the nearest class mean; and by the classifier that was trained jointly with the
    encoder, if the model has such a classifier.
    """
    scores = score_embedding(adata, model.get_latent_representation(representation="intermediate"), "r_c", "linear")
    scores |= score_embedding(adata, model.get_latent_representation(), "z_c", "nearest_mean")
    if model.can_predict:
        scores |= _accuracies(adata, model.predict(), "own")
    return scores | {name: value for name, value in model.health.items() if name != "collapsed"}


def score_embedding(adata: AnnData, z: np.ndarray, name: str, classifier: Classifier) -> dict[str, float]:
    """Compute the accuracies with which the digit and the environment are predicted from an embedding of digits.

    The digit is predicted by a classifier that is fitted to the embeddings of the training digits. The environment (the
    colour, red or green) is predicted by a linear probe, with a chance level of 0.5.

    Parameters
    ----------
    adata
        Images of digits, with their labels in ``obs``.
    z
        Embedding of the digits ``(N, D)``.
    name
        Name of the embedding, which becomes part of the names of the accuracies.
    classifier
        Kind of classifier that predicts the digit.

    Returns
    -------
    Four accuracies by name, here for an embedding with the name ``z_c``:

    - ``"z_c in"`` and ``"z_c white"``: accuracy of the digit, on held-out coloured digits and on white digits;
    - ``"e from z_c"`` and ``"e from z_c, new"``: accuracy of the environment, on all coloured digits and on held-out
      coloured digits only.
    """
    train, held_out = ((adata.obs["split"] == part).to_numpy() for part in ("train", "validation"))
    predicted = predict_labels(z[train], adata.obs["digit"].to_numpy()[train], z, classifier=classifier)
    scores, e = _accuracies(adata, predicted, name), adata.obs["environment"].to_numpy()
    for suffix, rows in {"": train | held_out, ", new": held_out}.items():
        scores[f"e from {name}{suffix}"] = label_probe(z[rows], e[rows], max_cells=20_000)["accuracy"]
    return scores


def _accuracies(adata: AnnData, predicted: np.ndarray, name: str) -> dict[str, float]:
    parts = {"in": "validation", "white": "test"}
    right = predicted == adata.obs["digit"].to_numpy()
    return {f"{name} {shown}": float(right[adata.obs["split"] == part].mean()) for shown, part in parts.items()}
