"""Embeddings of all perturbations by models that were not trained on them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._anndata import CONTENT_KEY, FOLD_KEY, SPLIT_KEY, as_columns, control_names
from scbd._checks import check_count
from scbd._files import check_directory
from scbd._run import check_repeatable, inputs_of, seed_everything, trained, what_is_learned_from
from scbd.data._screens import storable
from scbd.data._splits import Split, stratified_split
from scbd.metrics._table import label_names
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)

# a model learns to tell perturbations from controls, and from each other
_LEAST = 2


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
    """Embed each perturbation by a model that was not trained on it, for q values that mean what they say.

    Training pulls cells of a perturbation together, whether or not it does anything, and cells of the controls, too.
    So perturbations are dealt to folds, and half of the controls are kept out of all training. For each fold, a model
    is trained on the perturbations of the other folds and the other half of the controls; it embeds the fold and the
    controls that were kept out. A perturbation that does nothing is then one that differs from these by chance alone.

    Parameters
    ----------
    adata
        Cells or wells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key
        Columns of perturbation and environment, one or several each.
    control
        Value or values of ``y_key`` for what was not perturbed.
    position_key
        Column of ``obs`` with the position on the plate (the well), or several. Controls are then kept out by
        position, as perturbations are. Give it for all but pooled screens.
    n_folds
        So many models are trained, each without one part of the perturbations.
    out
        Directory for the models with their checkpoints: called again with the same cells and arguments, it goes on.
    setup_kwargs
        Further arguments of ``setup_anndata``: where images or features are.
    model_kwargs, **train_kwargs
        Arguments of :class:`scbd.SCBDModel` and of its ``train``. z_s, which leaves z_c as it is, is left out unless
        ``style_target`` asks for it.
    seed
        Seed of folds, controls, weights and batches.

    Returns
    -------
    New AnnData with ``obsm["X_scbd_c"]`` float32 ``(M, D)``: all cells of perturbations, and for each fold the controls
    that were kept out. ``obs`` is that of ``adata`` with ``scbd_fold``: models of different folds have different
    spaces, so put it beside the environment (and the position), and only cells of one fold are compared.
    ``obs["scbd_split"]`` is ``"test"``.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If no row is a control, there are too few perturbations or controls, or a setting cannot be used, before
        anything is trained; or if ``out`` holds models of other cells or settings.

    Examples
    --------
    >>> keys = {"y_key": "gene", "control": "nontargeting"}
    >>> cells = scbd.cross_fit(adata, **keys, e_key="well", n_folds=2, max_steps=2000)
    >>> effects = scbd.metrics.perturbation_effects(cells, "X_scbd_c", **keys, e_key=["scbd_fold", "well"])
    >>> effects["magnitude_q"].size  # of all perturbations together
    4
    """
    settings = {"style_target": None} | dict(model_kwargs or {})
    check_repeatable(settings, train_kwargs, ("split", "train_size", "validation_size"))
    check_count("n_folds", n_folds, 2)
    y, e = (label_names(adata, key) for key in (y_key, e_key))
    is_control = np.isin(y, control_names(control, y, y_key))
    folds = _folds(np.unique(y[~is_control]), n_folds, seed)
    unit = np.arange(adata.n_obs) if position_key is None else label_names(adata, position_key)
    kept_out = _half(is_control, unit, e, by_position=position_key is not None, seed=seed)
    taken = {"y_key": y_key, "e_key": as_columns(e_key), "control": control}
    if position_key is not None and inputs_of(adata, setup_kwargs or {}).image_key is None:
        taken["position_key"] = position_key
    setup = {**(setup_kwargs or {}), **taken}
    about = what_is_learned_from(adata, setup)
    directory = check_directory(out) if out else None
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
        with tempfile.TemporaryDirectory() as nowhere:
            kept = Path(nowhere) if directory is None else directory / f"fold-{fold}"
            model = trained(model, asked, kept, resume=directory is not None, seed=seed, **training)
        rows.append(np.flatnonzero(scored))
        fold_of.append(np.full(len(rows[-1]), str(fold)))
        z.append(model.get_latent_representation(indices=rows[-1]))
    return _together(adata, np.concatenate(rows), np.concatenate(fold_of), np.concatenate(z), is_control)


def _folds(names: np.ndarray, n_folds: int, seed: int) -> list[np.ndarray]:
    most = -(-len(names) // n_folds)
    if n_folds > len(names) or len(names) - most < _LEAST:
        msg = (
            f"n_folds={n_folds}, {len(names)} perturbations beside the controls: each fold needs one, and {_LEAST} "
            "others to train on."
        )
        raise ValueError(msg)
    return [np.sort(part) for part in np.array_split(np.random.default_rng(seed).permutation(names), n_folds)]


def _half(is_control: np.ndarray, unit: np.ndarray, e: np.ndarray, *, by_position: bool, seed: int) -> np.ndarray:
    """Controls that no model is trained on: half of those of each environment, or of all positions, a mask ``(N,)``."""
    names, first = np.unique(unit[is_control], return_index=True)
    strata = np.zeros(len(names), dtype=int) if by_position else e[is_control][first]
    if len(names) < 2 * _LEAST:
        what = "positions of controls" if by_position else "controls"
        msg = f"There are {len(names)} {what}: one half is trained on, the other compared with, each {_LEAST} or more."
        raise ValueError(msg)
    return is_control & np.isin(unit, names[stratified_split([strata], train_size=0.5, seed=seed).validation])


def _together(adata: AnnData, rows: np.ndarray, fold: np.ndarray, z: np.ndarray, is_control: np.ndarray) -> AnnData:
    """Embeddings of all folds with the labels of their cells; controls, which are in each fold, are named by it."""
    import pandas as pd
    from anndata import AnnData

    obs = adata.obs.iloc[rows].copy()
    names = obs.index.astype(str)
    obs.index = pd.Index(np.where(is_control[rows], names + " fold " + fold, names))
    obs[FOLD_KEY], obs[SPLIT_KEY] = pd.Categorical(fold), "test"
    return AnnData(obs=storable(obs), obsm={CONTENT_KEY: z})
