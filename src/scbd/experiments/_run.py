"""The main job: cells in, both embeddings, the model, a table and pictures out."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._keys import CONTENT_KEY, IMAGE_KEY, STYLE_KEY
from scbd._labels import CROSS, as_columns, label_values
from scbd.baselines import pixel_pca
from scbd.experiments._files import save_figure, write_table, write_text
from scbd.experiments._seeding import seed_everything
from scbd.metrics import label_probe
from scbd.metrics._table import check_keys
from scbd.model import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)

PCA_KEY = "X_pixel_pca"
_PROBE_CELLS = 100_000
# with fewer, a score on cells that were not trained on is mostly noise
_HELD_OUT_CELLS = 50
_EMBEDDINGS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY, "pixel PCA": PCA_KEY}


def run(
    adata: AnnData,
    *,
    y_key: str,
    e_key: str | Sequence[str],
    out: str | os.PathLike[str],
    image_key: str = IMAGE_KEY,
    model_kwargs: dict[str, Any] | None = None,
    train_kwargs: dict[str, Any] | None = None,
    resume: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """Train SCBD, embed all cells, evaluate, and write everything to a directory.

    Writes ``cells.h5ad`` (all of ``adata`` but the images, with ``obsm["X_scbd_c"]``, ``obsm["X_scbd_s"]``, the PCA of
    the pixels and the UMAPs), ``model/``, ``metrics.csv``, ``history.csv``, ``training_curves.png``, ``umap.png``,
    ``settings.json``, and ``checkpoints/``, which an interrupted run goes on from and a finished one can do without.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key, image_key
        Where perturbation, environment and images are.
    out
        Directory to make.
    model_kwargs, train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``.
    resume
        Go on with an interrupted run in ``out``.
    seed
        Seed of weights, split, batches, probes and UMAPs.

    Returns
    -------
    The metrics table: one row an embedding and label, with the scores of :func:`scbd.metrics.label_probe`.

    Raises
    ------
    FileExistsError
        If ``out`` holds files and ``resume`` is false.
    KeyError, TypeError, ValueError
        If ``adata`` or a setting is not fit for training; before anything is written.

    Examples
    --------
    >>> model_kwargs, train_kwargs = {"encoder": "small"}, {"max_steps": 2000}
    >>> report = scbd.experiments.run(
    ...     adata, y_key="gene", e_key="well", out="results", model_kwargs=model_kwargs, train_kwargs=train_kwargs
    ... )  # doctest: +SKIP
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()) and not resume:
        msg = f"{out} already holds files: choose another directory, or go on with an interrupted run (resume)."
        raise FileExistsError(msg)
    model_kwargs, train_kwargs = dict(model_kwargs or {}), dict(train_kwargs or {})
    columns = as_columns(e_key)
    seed_everything(seed)
    SCBDModel.setup_anndata(adata, y_key=y_key, e_key=e_key, image_key=image_key)
    model = SCBDModel(adata, **model_kwargs)
    checkpoints = out / "checkpoints"
    resumable = resume and (checkpoints / "last.ckpt").is_file()
    model.train(checkpoint_dir=checkpoints, ckpt_path="last" if resumable else None, **{"seed": seed} | train_kwargs)
    adata.obsm[CONTENT_KEY] = model.get_latent_representation(block="c")
    adata.obsm[STYLE_KEY] = model.get_latent_representation(block="s")
    adata.obsm[PCA_KEY] = pixel_pca(adata, image_key=image_key, seed=seed)
    e_column = CROSS.join(columns)
    adata.obs[e_column] = label_values(adata.obs, columns)
    table = evaluate(adata, [y_key, e_column], train_indices=model.train_indices, seed=seed)
    model.save(str(out / "model"), overwrite=True)
    write_table(table, out / "metrics.csv")
    write_table(pd.read_csv(checkpoints / "history.csv", index_col="step"), out / "history.csv", index=True)
    _pictures(adata, model, [y_key, e_column], out, seed)
    write_text(json.dumps(_settings(model, y_key, columns, image_key, seed), indent=2), out / "settings.json")
    _write_cells(adata, image_key, out / "cells.h5ad")
    return table


def evaluate(
    adata: AnnData, label_keys: Sequence[str], *, train_indices: np.ndarray | None = None, seed: int = 0
) -> pd.DataFrame:
    """How well z_c, z_s and a PCA of the pixels predict each label, one row an embedding and label.

    Parameters
    ----------
    adata
        Embedded cells, with ``X_scbd_c``, ``X_scbd_s`` and ``X_pixel_pca`` in ``obsm``.
    label_keys
        Columns of ``obs``.
    train_indices
        Cells the encoders were trained on: probes learn from these and are tested on all others. Without them, or
        where they leave too few others, probes split all cells at random.
    seed
        Seed of the probes.

    Returns
    -------
    The scores of :func:`scbd.metrics.label_probe`, and ``tested_on``: ``"held-out cells"`` or ``"all cells"``.

    Raises
    ------
    KeyError
        If an embedding or a column is missing.

    Examples
    --------
    >>> adata.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(adata, n_components=16)
    >>> report = scbd.experiments.evaluate(adata, ["gene", "well"], train_indices=model.train_indices)
    >>> len(report)  # three embeddings, two labels
    6
    """
    check_keys(adata, _EMBEDDINGS.values(), label_keys)
    train = None
    if train_indices is not None and adata.n_obs - len(train_indices) >= _HELD_OUT_CELLS:
        train = np.isin(np.arange(adata.n_obs), train_indices)
    rows = []
    for label in label_keys:
        for name, key in _EMBEDDINGS.items():
            scores: dict[str, Any] = {"tested_on": "all cells" if train is None else "held-out cells"}
            scores |= label_probe(adata.obsm[key], adata.obs[label], train=train, max_cells=_PROBE_CELLS, seed=seed)
            rows.append({"embedding": name, "label": label, **scores})
    return pd.DataFrame(rows)


def _pictures(adata: AnnData, model: SCBDModel, labels: Sequence[str], out: Path, seed: int) -> None:
    from scbd import pl

    save_figure(pl.history(model.history, ceiling=model.health["ceiling"])[0].figure, out / "training_curves.png")
    if adata.n_obs <= 10_000:
        for key in (CONTENT_KEY, STYLE_KEY):
            adata.obsm[f"{key}_umap"] = pl.umap(adata.obsm[key], seed=seed)
    save_figure(pl.umap_blocks(adata, labels, seed=seed)[0, 0].figure, out / "umap.png")


def _write_cells(adata: AnnData, image_key: str, path: Path) -> None:
    from anndata import AnnData

    obsm = {key: value for key, value in adata.obsm.items() if key != image_key}
    uns = {key: value for key, value in adata.uns.items() if not key.startswith("_scvi")}
    partial = path.with_name(f".{path.name}")
    AnnData(obs=adata.obs, var=adata.var, uns=uns, obsm=obsm).write_h5ad(partial)
    os.replace(partial, path)


def _settings(model: SCBDModel, y_key: str, e_key: Sequence[str], image_key: str, seed: int) -> dict[str, Any]:
    """Everything needed to run it again, as plain values."""
    from importlib.metadata import version

    settings = {
        "versions": {name: version(name) for name in ("scbd", "torch", "scvi-tools", "anndata")},
        "data": {"y_key": y_key, "e_key": list(e_key), "image_key": image_key, "n_cells": model.adata.n_obs},
        "model": model.init_params_["non_kwargs"],
        "training": model.training_settings_,
        "health": model.health,
        "device": str(model.device),
        "seed": seed,
    }
    return json.loads(
        json.dumps(settings, default=lambda value: value.item() if isinstance(value, np.generic) else str(value))
    )
