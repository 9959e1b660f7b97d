"""Cross-fitting: embed the cells of each perturbation with a model that was not trained on this perturbation."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._shared.checks import check_count
from scbd._shared.files import check_output_directory
from scbd._shared.keys import CONTENT_KEY, FOLD_KEY, SPLIT_KEY
from scbd._shared.labels import as_columns, check_control_labels
from scbd._workflows.training_runs import (
    check_repeatable,
    describe_training_data,
    locate_inputs,
    merge_setup_arguments,
    seed_everything,
    train_or_load,
)
from scbd.data._splits import Split, stratified_split
from scbd.data._storable import as_storable
from scbd.metrics._arguments import get_label_texts
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

# Minimum number of perturbations that each model is trained on. Also the minimum number of controls (or of plate
# positions of controls) in each of the two halves of the controls, one for training and one held out. With fewer, a
# model cannot learn to distinguish perturbations from each other and from controls.
_MIN_GROUP_SIZE = 2


def cross_fit(
    adata: AnnData,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    control: object | Sequence[object],
    position_key: str | Sequence[str] | None = None,
    n_folds: int = 5,
    out: str | os.PathLike[str] | None = None,
    setup_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    **train_kwargs: Any,
) -> AnnData:
    """Embed each perturbation with a model that was not trained on it, so that q values of its effect are valid.

    Training pulls the cells of each perturbation together in the embedding, even if the perturbation has no effect. It
    also pulls the controls together. Tests of effects on training cells are therefore not valid. Cross-fitting embeds
    each cell with a model that was not trained on it:

    1. Perturbations are divided at random into folds, and half of the controls are held out of all training.
    2. For each fold, a model is trained on the perturbations of the other folds and on the other half of the controls.
    3. This model embeds the perturbations of the fold and the held-out controls.

    A perturbation without effect then differs from the held-out controls by chance alone.

    Parameters
    ----------
    adata
        Cells or profiles of wells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key
        Columns of perturbation and environment, one or several each.
    control
        Value or values of ``y_key`` that mark the controls.
    position_key
        Column of ``obs`` with the position on the plate (the well), or several columns. If given, half of the positions
        that hold controls are drawn, and all controls at these positions are held out; otherwise, single controls are
        drawn. Give this column for all screens except pooled ones. For features, the function also gives the column to
        ``setup_anndata``.
    n_folds
        Number of folds, which is the number of models to train.
    out
        Directory for the models and their checkpoints. If the function is called again with the same directory, cells
        and arguments, it continues after an interruption. By default, the models are not kept.
    setup_kwargs
        Further arguments of ``setup_anndata``, such as the keys of images or features.
    model_kwargs, **train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``. By default there is no z_s (``style_target=None``),
        because z_s has no influence on z_c.
    seed
        Seed of the folds, the held-out controls, the initial weights and the batches.

    Returns
    -------
    New AnnData with the embedding z_c in ``obsm["X_scbd_c"]``, float32 ``(M, D)``. It contains each perturbed cell
    once, and each held-out control once per fold. ``obs`` has the columns of ``adata.obs`` and two further ones:
    ``scbd_fold``, the number of the fold, and ``scbd_split``, which is ``"test"`` for all cells.

    The embeddings of different models, and thus of different folds, cannot be compared. In later analyses, add
    ``scbd_fold`` to the columns of the environment (and of the position), so that only cells of the same fold are
    compared.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If no cell is a control, if there are too few perturbations or controls, or if a setting cannot be used; all of
        this is checked before any training. Also if ``out`` holds models of other cells or settings.

    Examples
    --------
    >>> keys = {"y_key": "gene", "control": "nontargeting"}
    >>> cells = scbd.cross_fit(adata, **keys, e_key="well", n_folds=2, max_steps=2000)
    >>> effects = scbd.metrics.perturbation_effects(cells, "X_scbd_c", **keys, e_key=["scbd_fold", "well"])
    >>> effects["magnitude_q"].size  # one q value for each of the four perturbations
    4
    """
    settings = {"style_target": None} | dict(model_kwargs or {})
    check_repeatable(settings, train_kwargs, ("split", "train_size", "validation_size"))
    check_count("n_folds", n_folds, 2)
    y, e = (get_label_texts(adata, key) for key in (y_key, e_key))
    is_control = np.isin(y, check_control_labels(control, y, y_key))
    folds = _split_perturbations(np.unique(y[~is_control]), n_folds, seed)
    unit = np.arange(adata.n_obs) if position_key is None else get_label_texts(adata, position_key)
    kept_out = _held_out_controls(is_control, unit, e, by_position=position_key is not None, seed=seed)
    taken = {"y_key": y_key, "e_key": as_columns(e_key), "control": control}
    if position_key is not None and locate_inputs(adata, setup_kwargs or {}).image_key is None:
        taken["position_key"] = position_key
    setup = merge_setup_arguments(setup_kwargs, **taken)
    about = describe_training_data(adata, setup)
    directory = check_output_directory(out) if out else None
    SCBDModel.setup_anndata(adata, **setup)
    rows, fold_of, z = [], [], []
    for fold, held_out in enumerate(folds):
        logger.info("Fold %d of %d: %d perturbations are held out", fold + 1, n_folds, len(held_out))
        seed_everything(seed)
        model = SCBDModel(adata, **settings)
        scored = np.isin(y, held_out) | kept_out
        others = stratified_split([y, e], train_size=model._train_size, seed=seed, rows=np.flatnonzero(~scored))
        training = train_kwargs | {"split": Split(others.train, others.validation, np.flatnonzero(scored))}
        asked = {
            "data": about | {"held_out": list(held_out), "controls kept out": np.flatnonzero(kept_out).tolist()},
            "asked": {"model": settings, "training": train_kwargs},
            "seed": seed,
        }
        model = train_or_load(model, asked, directory and directory / f"fold-{fold}", seed=seed, **training)
        rows.append(np.flatnonzero(scored))
        fold_of.append(np.full(len(rows[-1]), str(fold)))
        z.append(model.get_latent_representation(indices=rows[-1]))
    embedded, fold_names = np.concatenate(rows), np.concatenate(fold_of)
    obs = adata.obs.iloc[embedded].copy()
    # A held-out control is embedded once per fold. The number of the fold is appended to its name, so that names of
    # cells are unique.
    names = obs.index.astype(str)
    obs.index = pd.Index(np.where(is_control[embedded], names + " fold " + fold_names, names))
    obs[FOLD_KEY], obs[SPLIT_KEY] = pd.Categorical(fold_names), "test"
    return AnnData(obs=as_storable(obs), obsm={CONTENT_KEY: np.concatenate(z)})


def _split_perturbations(names: np.ndarray, n_folds: int, seed: int) -> list[np.ndarray]:
    """Divide the names of perturbations at random into folds; raise ``ValueError`` if there are too few."""
    most = -(-len(names) // n_folds)
    if n_folds > len(names) or len(names) - most < _MIN_GROUP_SIZE:
        msg = (
            f"n_folds={n_folds}, {len(names)} perturbations in addition to the controls: each fold needs one "
            f"perturbation to test, and {_MIN_GROUP_SIZE} others to train on."
        )
        raise ValueError(msg)
    return [np.sort(part) for part in np.array_split(np.random.default_rng(seed).permutation(names), n_folds)]


def _held_out_controls(
    is_control: np.ndarray, unit: np.ndarray, e: np.ndarray, *, by_position: bool, seed: int
) -> np.ndarray:
    """Draw the control cells that are held out of the training of all models, and return a boolean mask ``(N,)``.

    By default, half of the controls of each environment are drawn. With ``by_position``, half of the plate positions
    that hold controls are drawn, and all controls at these positions are held out. The array ``unit`` holds the plate
    position of each cell with ``by_position``, and otherwise the row number of each cell.
    """
    names, first = np.unique(unit[is_control], return_index=True)
    strata = np.zeros(len(names), dtype=int) if by_position else e[is_control][first]
    if len(names) < 2 * _MIN_GROUP_SIZE:
        what = "positions of controls" if by_position else "controls"
        msg = (
            f"There are {len(names)} {what}: one half is trained on, the other compared with, each {_MIN_GROUP_SIZE} "
            "or more."
        )
        raise ValueError(msg)
    return is_control & np.isin(unit, names[stratified_split([strata], train_size=0.5, seed=seed).validation])
