"""Collect the contents of the report of ``scbd.run`` from the model, the embedded cells and the verdict."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._shared.keys import BEST_KEY, CONTENT_KEY, SPLIT_ARGUMENTS
from scbd._shared.linear_maps import label_means
from scbd._workflows.report import CROPS_PER_ROW, MAX_CROP_PERTURBATIONS, Report
from scbd._workflows.verdict import MARGIN
from scbd.model._base import encoder_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from scbd._workflows.candidates import CellLabels, ReferenceCells
    from scbd._workflows.verdict import Verdict
    from scbd.data._input_location import InputLocation
    from scbd.model._scbd import SCBDModel

# number of perturbations with the strongest effects that are coloured in UMAPs
N_STRONGEST = 10
# explanations, for readers of the report, of terms that occur in the names of embeddings
TERMS = {
    "pixel PCA": "principal components of the pixels, without any training",
    "feature PCA": "principal components of the features, without any training",
    "features": "the features as given, each scaled to variance 1",
    "standardised by": "mean 0 and variance 1 in each environment, estimated from the cells listed under “Automatic "
    "decisions”",
    "sphered": "rotated and scaled so that controls vary equally in all directions",
    "WCCN": "within-class covariance normalisation: scaled so that cells of one perturbation vary equally in all "
    "directions",
    "ERM": "empirical risk minimisation: the encoder of z_c, trained as a plain classifier of the perturbation",
    "z_c": "the embedding of scbd that should carry the perturbation and not the environment",
}
# description, for readers of the report, of each file that scbd.run writes
FILES = {
    "report.html": "this page",
    "verdict.txt, verdict.csv": "the verdict, and the scores it rests on",
    "replicates.csv": "average precision of each perturbation, one column per embedding",
    "cells.h5ad": "all cells with labels and embeddings, without the inputs",
    "metrics.csv": "linear probes of single cells",
    "model/": "the trained model, for SCBDModel.load",
    "settings.json": "settings, versions and warnings of the training",
    "history.csv, training_curves.png": "losses by step",
    "umap.png": "UMAPs of all embedded cells",
    "checkpoints/": "states that an interrupted run continues from; a finished run can do without",
}


def collect_report(
    adata: AnnData,
    model: SCBDModel,
    labels: CellLabels,
    judged: Verdict,
    *,
    inputs: InputLocation,
    input_embedding: tuple[str, str],
    reference: ReferenceCells | None,
    settings: Mapping[str, Any],
    warnings: Sequence[str],
    out: Path,
) -> Report:
    """Collect the contents of the report, which is written to ``report.html``.

    Parameters
    ----------
    adata
        All cells, with their embeddings in ``obsm``.
    model
        The trained model.
    labels
        Labels of all cells.
    judged
        The verdict: the best embedding and the scores behind this choice.
    inputs
        Location of the images or features in ``adata``.
    input_embedding
        Name and ``obsm`` key of the embedding that represents the inputs in UMAPs (principal components of images or
        features).
    reference
        Reference cells from which the mean and deviation of each environment were estimated, to standardise embeddings;
        `None` if there are none.
    settings
        Contents of ``settings.json``.
    warnings
        Warnings of the run.
    out
        Directory of the run.
    """
    held_out = np.flatnonzero(~labels.is_train)
    embeddings = dict([input_embedding, ("z_c", CONTENT_KEY)])
    if judged.best not in (None, "z_c"):
        embeddings[f"best: {judged.best}"] = BEST_KEY
    name, key = ("z_c", CONTENT_KEY) if judged.best is None else (judged.best, BEST_KEY)
    y, z = labels.y[held_out], np.asarray(adata.obsm[key])[held_out]
    profiles = pd.DataFrame(label_means(z, y)[1], index=np.unique(y))
    is_control = profiles.index.isin(labels.control_names)
    # Profiles are relative to the mean profile of the controls, or of all perturbations if there are no controls.
    profiles = profiles - profiles[is_control if is_control.any() else ~is_control].mean()
    profiles.columns.name = name
    strength = profiles[~is_control].pow(2).sum(axis=1)
    strongest = list(strength.sort_values(ascending=False).index[:N_STRONGEST])
    e_keys = list(labels.environments)
    obs = pd.DataFrame({labels.y_name: labels.y, **labels.environments}).iloc[held_out].astype("category")
    obs.index = obs.index.astype(str)
    return Report(
        verdict=judged.text,
        next_step=_next_step(judged, has_warnings=bool(judged.notes or warnings)),
        best=judged.best,
        best_rule=f"the first in the table (the simplest) whose score is within {MARGIN:g} of the highest",
        scores=judged.scores,
        terms={term: text for term, text in TERMS.items() if any(term in name for name in judged.scores["embedding"])},
        cells=AnnData(obs=obs, obsm={key: np.asarray(adata.obsm[key])[held_out] for key in embeddings.values()}),
        embeddings=embeddings,
        y_key=labels.y_name,
        e_keys=e_keys,
        controls=labels.control_names,
        strongest=strongest,
        history=model.history or {},
        ceiling=None if labels.is_control.any() else model.health["ceiling"],
        crops=_read_crops(adata, inputs, labels, held_out, strongest),
        profiles=profiles,
        decisions=_list_decisions(model, labels, reference, settings),
        warnings=[*judged.notes, *warnings],
        settings={name: value for name, value in settings.items() if name != "warnings"},
        versions={name: version(name) for name in ("scbd", "torch", "scvi-tools", "anndata", "scanpy")},
        code=_continuation_code(judged, labels, out),
        files=FILES,
    )


def _read_crops(
    adata: AnnData, inputs: InputLocation, labels: CellLabels, held_out: np.ndarray, strongest: Sequence[str]
) -> tuple[np.ndarray, Sequence[str], Sequence[str]] | None:
    """Read images of a few held-out cells of the controls and of each of the strongest perturbations.

    Returns
    -------
    Images ``(N, C, H, W)``, the perturbation of each image, and the names of the channels; `None` if the model takes
    features and not images.
    """
    if inputs.image_key is None:
        return None
    y = labels.y[held_out]
    groups = [np.isin(y, labels.control_names), *(y == name for name in strongest[:MAX_CROP_PERTURBATIONS])]
    rows = np.concatenate([held_out[group][:CROPS_PER_ROW] for group in groups])
    images = inputs.source(adata).read(np.sort(rows))
    names = list(inputs.channels or adata.var_names)
    if len(names) != images.shape[1]:
        names = [f"channel {number}" for number in range(images.shape[1])]
    return images, list(labels.y[np.sort(rows)]), list(map(str, names))


def _next_step(judged: Verdict, *, has_warnings: bool) -> str:
    """Word the sentence of the report that advises the user how to continue after reading the verdict."""
    read = "Read the warnings, then" if has_warnings else "Next,"
    if judged.best is None:
        return (
            f"{read} inspect the training curves. If they are flat, more cells per perturbation or more replicates in "
            "other environments are needed before an embedding can be chosen."
        )
    return (
        f'{read} continue with obsm["{BEST_KEY}"] of cells.h5ad, which holds {judged.best}: the last section has the '
        "lines of Python."
    )


def _list_decisions(
    model: SCBDModel, labels: CellLabels, reference: ReferenceCells | None, settings: Mapping[str, Any]
) -> pd.DataFrame:
    """List the settings of the run that were chosen automatically, such as the encoder and alpha, with reasons.

    Settings that the user gave are not listed.

    Returns
    -------
    Table with one row per setting: ``decision`` (the setting), ``value``, ``n_cells`` (number of cells on which the
    choice is based, may be missing) and ``why``.
    """
    n_train, n_held_out = int(labels.is_train.sum()), int((~labels.is_train).sum())
    n_unseen = len(set(labels.y[labels.is_unseen]))
    training, health, given = settings["training"], settings["health"], settings["asked"]
    rows: list[tuple[str, str, int | None, str]] = []
    if all(given["training"].get(name) is None for name in SPLIT_ARGUMENTS):
        unseen = f"all cells of {n_unseen} perturbations, and " if n_unseen else ""
        share = f"{unseen}a part of the cells of each {'other ' if n_unseen else ''}perturbation in each environment"
        rows.append(("held-out cells", f"{n_held_out:,} of {len(labels.y):,}", n_held_out, share))
    if not any(given["training"].get(name) for name in ("max_steps", "max_epochs", "early_stopping")):
        length = f"{training['steps']:,} steps of {training['batch_size']:,} cells, learning rate {training['lr']:g}"
        preset = given["model"].get("preset", "screen")
        why = f"by the preset {preset}" if preset != "screen" else "by the encoder and the number of training cells"
        rows.append(("length of training", length, n_train, why))
    if "encoder" not in given["model"]:
        encoder = encoder_name(model._encoder(model.init_params_["non_kwargs"]["encoder"]))
        rows.append(("encoder", encoder, None, "by the kind and the size of the inputs"))
    if given["model"].get("alpha", "auto") == "auto":
        alpha = f"{health['final_alpha']:.3g} at the end"
        why = "the largest weight that keeps the supervised information of z_c"
        rows.append(("weight of the invariance loss (alpha)", alpha, n_train, why))
    if reference is None:
        how = ("corrected inputs", "not standardised by environment", None)
        rows.append((*how, "no cells of an environment differ from others by the environment alone"))
    else:
        n = int(reference.rows.sum())
        why = "controls are the same perturbation in all environments"
        if reference.kind == "cells":
            why = "environments contain the same perturbations; their means can therefore be compared"
        rows.append((f"standardised by {reference.column}", f"by its {reference.kind}", n, why))
    return pd.DataFrame(rows, columns=["decision", "value", "n_cells", "why"])


def _continuation_code(judged: Verdict, labels: CellLabels, out: Path) -> str:
    """Return lines of Python with which the user can read the embedded cells and draw a UMAP of the best embedding."""
    key = CONTENT_KEY if judged.best is None else BEST_KEY
    what = "z_c" if judged.best is None else f"the best embedding: {judged.best}"
    return (
        "import anndata, scanpy as sc\n"
        f'adata = anndata.read_h5ad(r"{out / "cells.h5ad"}")\n'
        'adata = adata[adata.obs["scbd_split"] != "train"].copy()  # cells that were not trained on\n'
        f'sc.pp.neighbors(adata, use_rep="{key}")  # {what}\n'
        "sc.tl.umap(adata)\n"
        f"sc.pl.umap(adata, color={[labels.y_name, *labels.environments]})\n"
    )
