"""The main job: cells in, both embeddings, the model, a table and pictures out."""

from __future__ import annotations

import json
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._anndata import (
    BEST_KEY,
    CONTENT_KEY,
    CROSS,
    FEATURE_PCA_KEY,
    LEFT_OUT,
    PIXEL_PCA_KEY,
    SPLIT_KEY,
    STYLE_KEY,
    as_columns,
    control_names,
    label_values,
    likely_controls,
)
from scbd._checks import check_count
from scbd._compare import evaluated, known_of, verdict
from scbd._files import check_directory, named_when_whole, save_figure, write_table, write_text
from scbd.baselines._corrections import standardize_by_environment, wccn
from scbd.baselines._pixel_pca import pixel_pca
from scbd.data._inputs import Inputs
from scbd.data._screens import storable
from scbd.data._sources import digest_cells
from scbd.data._splits import Split, hold_out_perturbations, stratified_split
from scbd.metrics._table import label_names
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)

_BLOCKS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY}
# what a run leaves, and the state that it goes on from: neither is written over
_STATE = ("settings.json", "checkpoints/last.ckpt")
_OUTPUTS = (
    "cells.h5ad",
    "history.csv",
    "metrics.csv",
    "model",
    "training_curves.png",
    "umap.png",
    "verdict.txt",
    *_STATE,
)
# of the cells, and of the perturbations where there are so many, what is kept for the table; and what chooses them
_HELD_OUT, _MANY, _SPLITS = 0.2, 30, ("split", "train_size", "validation_size")
_COMPONENTS, _PCA_CELLS = 50, 20_000
# controls that are enough to correct by
_CONTROLS = 16
# features of larger tables are read by their components alone: 200 MB, of which a probe takes a multiple
_MOST_VALUES = 50_000_000


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
    """Train SCBD, embed all cells, score embeddings on new cells, name the best, and write everything to a directory.

    For the scores a fifth of the cells is held out, drawn from each perturbation in each environment, and where there
    are 30 perturbations or more, a fifth of these (never the controls) with all of their cells. To choose what is held
    out, give ``split`` or ``train_size`` in ``train_kwargs``; ``train_size=1.0`` trains on all cells, and then no score
    is honest, and no embedding is called best.

    The best has the highest F1 of the perturbation on cells that were not trained on, among z_c, the inputs as they
    are, standardised, and corrected, as far as they tell of the environment at most half as much beyond chance as the
    inputs as they are; where intervals cannot tell embeddings apart, it is the one that tells least of the
    environment, or else the simplest. Where none tells the perturbation beyond chance, none is called best.

    Writes ``model/`` and ``settings.json`` as soon as the model is trained; then ``cells.h5ad``, all of ``adata`` but
    the inputs, with ``obsm["X_scbd_c"]``, ``obsm["X_scbd_s"]`` where the model has a z_s, a PCA of the
    inputs (``obsm["X_pixel_pca"]`` or ``obsm["X_feature_pca"]``), the best in ``obsm["X_scbd_best"]``, and
    ``obs["scbd_split"]``, the part of the split that a cell is in; ``metrics.csv``, ``verdict.txt``, ``history.csv``,
    ``training_curves.png``, ``umap.png``; and ``checkpoints/``, which an interrupted run goes on from and a finished
    one can do without.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key
        Columns of perturbation and environment, one or several each.
    out
        Directory to make.
    setup_kwargs
        Further arguments of ``setup_anndata``: where images or features are, which cells are controls.
    model_kwargs, train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``.
    resume
        Go on with a run in ``out`` that was interrupted, or failed: called with the same arguments, it trains what is
        missing of the steps, and nothing again.
    seed
        Seed of weights, split, batches, probes and UMAPs.

    Returns
    -------
    The table of :func:`scbd.evaluate`: of both blocks, and of the inputs (of images 50 principal components; of tables
    of more than 50 million values, too) as they are, standardised by environment, and these corrected by
    :func:`scbd.baselines.wccn`; what is learned for that is learned from the training cells. ``attrs["verdict"]`` is
    the sentence of ``verdict.txt``: which is best, and by how much.

    Raises
    ------
    FileExistsError
        If ``out`` holds a run and ``resume`` is false, or a ``cells.h5ad`` of no run, or is a file.
    PermissionError
        If nothing may be written to ``out``.
    KeyError, TypeError, ValueError
        If ``adata`` or a setting is not fit for training, or a part of ``adata`` cannot be written; before anything is
        written.

    Examples
    --------
    >>> model_kwargs, train_kwargs = {"encoder": "small"}, {"max_steps": 2000}
    >>> report = scbd.run(
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
    columns, training = as_columns(e_key), train_kwargs or {}
    seed_everything(seed)
    setup = {"y_key": y_key, "e_key": columns, **(setup_kwargs or {})}
    SCBDModel.setup_anndata(adata, **setup)
    model = SCBDModel(adata, **(model_kwargs or {}))
    inputs = inputs_of(adata, setup)
    data = what_is_learned_from(adata, setup, training.get("split"))
    _check_writable(_cells(adata, inputs))
    asked = {"data": data, "asked": {"model": model_kwargs or {}, "training": training}, "seed": seed}
    if all(training.get(name) is None for name in _SPLITS):
        held_out = _held_out(adata, y_key, columns, setup.get("control"), model._train_size, seed)
        training = {**training, "split": held_out}
    model = trained(model, asked, out, resume=resume, **{"seed": seed} | training)
    blocks = {name: key for name, key in _BLOCKS.items() if name == "z_c" or model.module.style is not None}
    for key in (*_BLOCKS.values(), BEST_KEY):  # what an earlier model left would be taken for this one's
        adata.obsm.pop(key, None)
    for name, key in blocks.items():
        adata.obsm[key] = model.get_latent_representation(block=name[-1])
    components = input_pca(adata, inputs, seed)
    adata.obsm[PIXEL_PCA_KEY if inputs.image_key else FEATURE_PCA_KEY] = components
    _mark_trained(adata.obs, model)
    environments = [columns] if model.module.covariates is None else [(column,) for column in columns]
    crosses = {CROSS.join(several): several for several in (as_columns(y_key), *environments)}
    for label, several in crosses.items():
        if len(several) > 1:  # a column of its own stays what it is
            adata.obs[label] = label_values(adata.obs, several)
    labels = list(crosses)
    known = known_of(
        adata,
        y_key=y_key,
        e_key=environments[0],
        control=setup.get("control"),
        position_key=setup.get("position_key"),
        fit=np.isin(np.arange(adata.n_obs), model.train_indices),
    )
    simple = simple_embeddings(adata, inputs, components, environments[0], known)
    spaces = {name: adata.obsm[key] for name, key in blocks.items()} | simple
    found = evaluated(adata, labels, spaces, model.train_indices, seed)
    table, (best, sentence) = found.table, verdict(found, labels[0], labels[1:], [*simple, "z_c"])
    if best is not None:
        adata.obsm[BEST_KEY] = spaces[best]
    if best not in (None, "z_c"):
        blocks = {f"best: {best}": BEST_KEY, **blocks}
    write_table(table, out / "metrics.csv")
    write_table(pd.concat(model.history.values(), axis=1), out / "history.csv", index=True)
    write_text(sentence + "\n", out / "verdict.txt")
    _pictures(adata, model, labels, blocks, out, seed)
    _write_cells(_cells(adata, inputs), out / "cells.h5ad")
    table.attrs["verdict"] = sentence
    return table


def _held_out(
    adata: AnnData,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    control: Any,
    train_size: float,
    seed: int,
) -> Split:
    """Test cells for the table; of the others, the share ``train_size`` is trained on, the rest for validation."""
    names = label_names(adata, y_key)
    each = pd.unique(names)
    kept = likely_controls(each) if control is None else control_names(control, each, y_key)
    rows, unseen = np.arange(adata.n_obs), np.empty(0, dtype=np.int64)
    if len(each) - len(kept) >= _MANY:
        apart = hold_out_perturbations(names, share=_HELD_OUT, validation_share=0, keep=kept, seed=seed)
        rows, unseen = apart.train, apart.test
    sizes = {"train_size": (1 - _HELD_OUT) * train_size, "validation_size": (1 - _HELD_OUT) * (1 - train_size)}
    inside = stratified_split([names, label_names(adata, e_key)], **sizes, seed=seed, rows=rows)
    return Split(inside.train, inside.validation, np.concatenate([inside.test, unseen]))


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch as scvi-tools does, without its line in the log.

    Raises
    ------
    ValueError
        If the seed is no whole number, or negative.
    """
    import scvi

    check_count("seed", seed, 0)
    note = logging.getLogger("lightning.fabric.utilities.seed")
    level = note.level
    note.setLevel(logging.WARNING)
    try:
        scvi.settings.seed = seed
    finally:
        note.setLevel(level)


def inputs_of(adata: AnnData, setup: Mapping[str, Any]) -> Inputs:
    """Where in a table the images, or the features, are that ``setup_anndata`` is told of."""
    return Inputs.found(adata, *(setup.get(name) for name in Inputs._fields))


def what_is_learned_from(adata: AnnData, setup: Mapping[str, Any], split: Any = None) -> dict[str, Any]:
    """Arguments of ``setup_anndata``, where the inputs are, and a digest of all that a run looks at, for its settings.

    Raises
    ------
    KeyError, ValueError
        If inputs or a label are missing, or a cell has no label.
    """
    inputs = inputs_of(adata, setup)
    names = ("y_key", "e_key", "position_key", "continuous_covariate_keys")
    keys = [column for name in names if setup.get(name) is not None for column in as_columns(setup[name])]
    looked_at = {key: label_values(adata.obs, key) for key in keys}
    if isinstance(split, str) and split in adata.obs:
        looked_at[split] = adata.obs[split]
    where = {name: key for name, key in inputs._asdict().items() if key is not None}
    digest = digest_cells(inputs.source(adata), pd.DataFrame(looked_at))
    return {**setup, **where, "n_cells": adata.n_obs, "digest": digest}


def check_repeatable(model: Mapping[str, Any], training: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raise if several runs could not share these arguments, of which those ``taken`` are of each run."""
    set_here = {"checkpoint_dir", "resume", *taken} & {*model, *training}
    if set_here:
        msg = f"{min(set_here)} is set for each run here: leave it out."
        raise ValueError(msg)
    if not isinstance(model.get("encoder", ""), str):
        msg = "Every run makes a new model: give encoder by name, a module would be trained on and on."
        raise ValueError(msg)


def trained(model: SCBDModel, asked: Mapping[str, Any], out: Path, *, resume: bool, **training: Any) -> SCBDModel:
    """Train and save, or load what a run that asked for the same has trained and saved.

    Parameters
    ----------
    model
        As it begins.
    asked
        What decides the result: two runs that ask for the same train the same.
    out
        Directory of the run, for ``model/``, ``settings.json`` and ``checkpoints/``.
    resume
        Go on with what is there.
    **training
        Arguments of ``train``.
    """
    if resume and _is_trained(out, asked):
        accelerator = training.get("accelerator", "auto")
        return SCBDModel.load(str(out / "model"), model.adata, accelerator=accelerator)
    checkpoints = out / "checkpoints"
    model.train(checkpoint_dir=checkpoints, resume=resume, **training)
    model.save(str(out / "model"), overwrite=True)
    write_text(json.dumps(_settings(model, asked), indent=2), out / "settings.json")
    return model


def input_pca(adata: AnnData, inputs: Inputs, seed: int) -> np.ndarray:
    """Principal components of pixels, or of features that are standardised, float32 ``(N, 50)`` or fewer."""
    if inputs.image_key is not None:
        return pixel_pca(adata, image_key=inputs.image_key, channels=inputs.channels, seed=seed)
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    source = inputs.source(adata)
    scaler, n = StandardScaler(), source.shape[0]
    rows = np.sort(np.random.default_rng(seed).permutation(n)[:_PCA_CELLS])
    sample = scaler.fit_transform(source.read(rows))
    pca = PCA(min(_COMPONENTS, *sample.shape), svd_solver="randomized", random_state=seed).fit(sample)
    parts = (slice(start, start + _PCA_CELLS) for start in range(0, n, _PCA_CELLS))
    return np.concatenate([pca.transform(scaler.transform(source.read(part))) for part in parts]).astype(np.float32)


def simple_embeddings(
    adata: AnnData, inputs: Inputs, components: np.ndarray, e_key: str | Sequence[str], known: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """What costs next to nothing, by name, the simplest first: features, or components where these are too many.

    The same standardised by environment, and then corrected by :func:`scbd.baselines.wccn`; where that cannot be, it is
    left out. Both learn from training cells, or from all cells of an environment that has fewer than two of them.
    float32 ``(N, D)`` each.

    Parameters
    ----------
    adata, inputs
        Cells, and where their inputs are.
    components
        Of :func:`input_pca`.
    e_key
        Column or columns of the environment.
    known
        Of all cells, see :func:`known_of`.
    """
    source = inputs.source(adata)
    name, values = f"{'pixel' if inputs.image_key else 'feature'} PCA", components
    if not inputs.image_key and source.shape[0] * source.shape[1] <= _MOST_VALUES:
        name, values = "features", np.asarray(source.read(slice(0, source.shape[0])), dtype=np.float32)
    found = {name: values}
    standardised = f"{name}, standardised by {CROSS.join(as_columns(e_key))}"
    corrected, fit = f"{standardised}, WCCN", known["fit"]
    codes = pd.factorize(known["environments"])[0]
    strange = np.bincount(codes, weights=fit)[codes] < 2
    controls = known.get("controls")
    of_controls = {}
    if controls is not None and (controls & fit).sum() >= _CONTROLS:
        of_controls = {key: known[key] for key in ("controls", "positions") if key in known}
    try:
        found[standardised] = standardize_by_environment(values, codes, fit=fit | strange)
        found[corrected] = wccn(found[standardised], known["labels"], fit=fit, **of_controls)
    except ValueError as error:
        logger.info("%s is left out: %s", corrected if standardised in found else standardised, error)
    return found


def _mark_trained(obs: pd.DataFrame, model: SCBDModel) -> None:
    """Say which cells were trained on: scores of their perturbations' replicates mean nothing."""
    part = np.full(len(obs), LEFT_OUT, dtype=object)
    for name in ("train", "validation", "test"):
        part[getattr(model, f"{name}_indices")] = name
    obs[SPLIT_KEY] = pd.Categorical(part)


def _pictures(
    adata: AnnData, model: SCBDModel, labels: Sequence[str], blocks: Mapping[str, str], out: Path, seed: int
) -> None:
    from scbd import pl

    # of controls, which share no direction, the loss of a good z_c may lie above that of a collapsed one
    ceiling = None if model.registry_["setup_args"].get("control") is not None else model.health["ceiling"]
    save_figure(pl.history(model.history, ceiling=ceiling)[0].figure, out / "training_curves.png")
    axes = pl.umap_blocks(adata, labels, blocks=blocks, seed=seed)
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
                    f"{slot}[{key!r}] ({type(value).__name__}) cannot be written to cells.h5ad: remove it, with "
                    f"del adata.{slot}[{key!r}]."
                )
                raise ValueError(msg) from error


def _write_cells(cells: AnnData, path: Path) -> None:
    with named_when_whole(path) as partial:
        cells.write_h5ad(partial)


def _settings(model: SCBDModel, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Everything needed to run it again, as plain values: what was asked for, and what came of it."""
    settings = {
        **asked,
        "versions": {name: version(name) for name in ("scbd", "torch", "scvi-tools", "anndata")},
        "model": model.init_params_["non_kwargs"] | model.init_params_["kwargs"]["module_kwargs"],
        "training": model.training_settings_,
        "health": model.health,
        "device": str(model.device),
    }
    return json.loads(json.dumps(settings, default=lambda value: _number(value, str)))


def _is_trained(out: Path, asked: Mapping[str, Any]) -> bool:
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
