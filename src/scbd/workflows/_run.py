"""The main job: cells in, both embeddings, the model, a table and pictures out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from scbd._files import named_when_whole
from scbd._keys import CONTENT_KEY, LEFT_OUT, SPLIT_KEY, STYLE_KEY
from scbd._labels import CROSS, as_columns, label_values
from scbd._outputs import check_directory, save_figure, write_table, write_text
from scbd._seen import mark_seen
from scbd.data.stores import storable
from scbd.model import SCBDModel
from scbd.workflows._datasets import Dataset
from scbd.workflows._evaluate import evaluate
from scbd.workflows._provenance import digest_of, versions
from scbd.workflows._seeding import seed_everything
from scbd.workflows._simple import FEATURE_PCA_KEY, PIXEL_PCA_KEY, input_pca, simple_embeddings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anndata import AnnData

    from scbd.data import Inputs

_BLOCKS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY}
# what a run leaves, and the state that it goes on from: neither is written over
_STATE = ("settings.json", "checkpoints/last.ckpt")
_OUTPUTS = ("cells.h5ad", "history.csv", "metrics.csv", "model", "training_curves.png", "umap.png", *_STATE)


def run(
    adata: AnnData,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    out: str | os.PathLike[str],
    setup_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    train_kwargs: dict[str, Any] | None = None,
    resume: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """Train SCBD, embed all cells, evaluate, and write everything to a directory.

    Writes ``model/`` and ``settings.json`` as soon as the model is trained, then ``cells.h5ad`` (all of ``adata`` but
    the inputs, with ``obsm["X_scbd_c"]``, ``obsm["X_scbd_s"]`` where the model has a z_s, UMAPs of both, and a PCA of
    the inputs, ``obsm["X_pixel_pca"]`` or ``obsm["X_feature_pca"]``; ``obs["scbd_split"]``, the part of the split that
    a cell is in, and ``obs["scbd_seen"]``, whether its perturbation was trained on (of the z_c whose first component is
    ``obs["scbd_seen_of"]``); columns of dates, intervals or mixed values are written as text), ``metrics.csv``,
    ``history.csv``, ``training_curves.png``, ``umap.png``, and ``checkpoints/``, which an interrupted run goes on from
    and a finished one can do without.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key
        Columns of perturbation and environment, one or several each.
    setup_kwargs
        Further arguments of ``setup_anndata``: where images or features are, which cells are controls.
    out
        Directory to make.
    model_kwargs, train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``.
    resume
        Go on with a run in ``out`` that was interrupted, or failed: called with the same arguments, it trains what is
        missing of the steps, and nothing again.
    seed
        Seed of weights, split, batches, probes and UMAPs.

    Returns
    -------
    The metrics table: one row an embedding and label, with the scores of :func:`scbd.metrics.label_probe`; of both
    blocks and of the inputs, as they are (images: 50 principal components; tables of more than 50 million values, too)
    and standardised by environment.

    Raises
    ------
    FileExistsError
        If ``out`` holds a run and ``resume`` is false, or a ``cells.h5ad`` of no run, or is a file.
    KeyError, TypeError, ValueError
        If ``adata`` or a setting is not fit for training, or a part of ``adata`` cannot be written; before anything is
        written.

    Examples
    --------
    >>> model_kwargs, train_kwargs = {"encoder": "small"}, {"max_steps": 2000}
    >>> report = scbd.workflows.run(
    ...     adata, y_key="gene", e_key="well", out="results", model_kwargs=model_kwargs, train_kwargs=train_kwargs
    ... )  # doctest: +SKIP
    """
    out = check_directory(out)
    if not resume and any((out / name).exists() for name in _OUTPUTS):
        msg = f"{out} already holds files of a run: choose another directory, or go on with that run (resume=True)."
        raise FileExistsError(msg)
    if (out / "cells.h5ad").exists() and not any((out / name).exists() for name in _STATE):
        msg = f"{out}/cells.h5ad is of no run that could go on, and would be written over: choose another directory."
        raise FileExistsError(msg)
    columns = as_columns(e_key)
    seed_everything(seed)
    dataset = Dataset(lambda **_: adata, y_key, columns, setup=setup_kwargs or {})
    SCBDModel.setup_anndata(adata, **dataset.columns)
    model = SCBDModel(adata, **(model_kwargs or {}))
    training = train_kwargs or {}
    split = training.get("split") if isinstance(training.get("split"), str) else None
    inputs = dataset.inputs(adata)
    where = {name: key for name, key in inputs._asdict().items() if key is not None}
    data = dataset.columns | where | {"n_cells": adata.n_obs}
    data |= {"digest": digest_of(adata, dataset.label_columns, inputs, split)}
    _check_writable(_cells(adata, inputs))
    asked = {"data": data, "asked": {"model": model_kwargs or {}, "training": training}, "seed": seed}
    model = _trained(model, asked, out, resume)
    blocks = {name: key for name, key in _BLOCKS.items() if name == "z_c" or model.module.style is not None}
    for key in _BLOCKS.values():  # what an earlier model left would be taken for this one's
        for name in (key, f"{key}_umap"):
            adata.obsm.pop(name, None)
        adata.uns.pop(f"{key}_umap_of", None)
    for name, key in blocks.items():
        adata.obsm[key] = model.get_latent_representation(block=name[-1])
    components = input_pca(adata, inputs, seed)
    adata.obsm[PIXEL_PCA_KEY if inputs.image_key else FEATURE_PCA_KEY] = components
    _mark_trained(adata.obs, model, label_values(adata.obs, y_key), adata.obsm[CONTENT_KEY])
    environments = [columns] if model.module.covariates is None else [(column,) for column in columns]
    crosses = {CROSS.join(several): several for several in (as_columns(y_key), *environments)}
    for label, several in crosses.items():
        if len(several) > 1:  # a column of its own stays what it is
            adata.obs[label] = label_values(adata.obs, several)
    labels = list(crosses)
    simple = simple_embeddings(adata, inputs, components, environments[0])
    table = evaluate(adata, labels, embeddings={**blocks, **simple}, train_indices=model.train_indices, seed=seed)
    write_table(table, out / "metrics.csv")
    write_table(pd.read_csv(out / "checkpoints" / "history.csv", index_col="step"), out / "history.csv", index=True)
    _pictures(adata, model, labels, blocks, out, seed)
    _write_cells(_cells(adata, inputs), out / "cells.h5ad")
    return table


def _trained(model: SCBDModel, asked: dict[str, Any], out: Path, resume: bool) -> SCBDModel:
    """Train and save, or load what a run that asked for the same has trained and saved."""
    training = asked["asked"]["training"]
    if resume and _is_trained(out, asked):
        accelerator = training.get("accelerator", "auto")
        return cast("SCBDModel", SCBDModel.load(str(out / "model"), model.adata, accelerator=accelerator))
    checkpoints = out / "checkpoints"
    resumable = resume and (checkpoints / "last.ckpt").is_file()
    how = {"seed": asked["seed"]} | training
    model.train(checkpoint_dir=checkpoints, ckpt_path="last" if resumable else None, **how)
    model.save(str(out / "model"), overwrite=True)
    write_text(json.dumps(_settings(model, asked), indent=2), out / "settings.json")
    return model


def _mark_trained(obs: pd.DataFrame, model: SCBDModel, y: pd.Series, z_c: np.ndarray) -> None:
    """Say which cells were trained on, and which perturbations: scores of replicates mean nothing for these."""
    part = np.full(len(obs), LEFT_OUT, dtype=object)
    for name in ("train", "validation", "test"):
        part[getattr(model, f"{name}_indices")] = name
    obs[SPLIT_KEY] = pd.Categorical(part)
    mark_seen(obs, y.isin(y.iloc[model.train_indices].unique()).to_numpy(), z_c)


def _pictures(
    adata: AnnData, model: SCBDModel, labels: Sequence[str], blocks: Mapping[str, str], out: Path, seed: int
) -> None:
    from scbd import pl

    save_figure(pl.history(model.history, ceiling=model.health["ceiling"])[0].figure, out / "training_curves.png")
    axes = pl.umap_blocks(adata, labels, blocks=blocks, seed=seed, keep=adata.n_obs <= 10_000)
    save_figure(axes[0, 0].figure, out / "umap.png")


def _cells(adata: AnnData, inputs: Inputs) -> AnnData:
    """All but the inputs, in types that a file has."""
    from anndata import AnnData

    obsm = {
        key: storable(value, f"obsm[{key!r}]") if isinstance(value, pd.DataFrame) else value
        for key, value in adata.obsm.items()
        if key not in (inputs.image_key, inputs.obsm_key)
    }
    uns = {key: value for key, value in adata.uns.items() if not key.startswith("_scvi")}
    return AnnData(obs=storable(adata.obs), var=storable(adata.var, "var"), uns=uns, obsm=obsm)


def _check_writable(cells: AnnData) -> None:
    """Raise if a part of the cells could not be written; tables can (:func:`storable`)."""
    import h5py
    from anndata.io import write_elem

    # of arrays the type counts, which the first row has
    rows = {key: value[:1] for key, value in cells.obsm.items() if not isinstance(value, pd.DataFrame)}
    parts = [("uns", key, value) for key, value in cells.uns.items()]
    parts += [("obsm", key, value) for key, value in rows.items()]
    with h5py.File("cells.h5ad", "w", driver="core", backing_store=False) as file:
        for number, (slot, key, value) in enumerate(parts):
            try:
                write_elem(file, str(number), {key: value})
            except Exception as error:
                msg = (
                    f"{slot}[{key!r}] ({type(value).__name__}) cannot be written to cells.h5ad, which has all but the "
                    f"inputs ({str(error).splitlines()[0]}): remove it, with del adata.{slot}[{key!r}]."
                )
                raise ValueError(msg) from error


def _write_cells(cells: AnnData, path: Path) -> None:
    with named_when_whole(path) as partial:
        cells.write_h5ad(partial)


def _settings(model: SCBDModel, asked: dict[str, Any]) -> dict[str, Any]:
    """Everything needed to run it again, as plain values: what was asked for, and what came of it."""
    settings = asked | {
        "versions": versions("scvi-tools", "anndata"),
        "model": model.init_params_["non_kwargs"],
        "training": model.training_settings_,
        "health": model.health,
        "device": str(model.device),
    }
    return json.loads(json.dumps(settings, default=lambda value: _number(value, str)))


def _is_trained(out: Path, asked: dict[str, Any]) -> bool:
    """Whether a run that asked for the same has left a model; objects cannot be compared, and are not the same."""
    settings, model = out / "settings.json", out / "model" / "model.pt"
    if not (settings.is_file() and model.is_file()):
        return False
    try:
        wanted = json.loads(json.dumps(asked, default=_number))
    except TypeError:
        return False
    there = json.loads(settings.read_text(encoding="utf-8"))
    return all(there.get(key) == value for key, value in wanted.items())


def _number(value: Any, otherwise: Callable[[Any], Any] | None = None) -> Any:
    """A number of numpy's as one of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if otherwise is None:
        raise TypeError(value)
    return otherwise(value)
