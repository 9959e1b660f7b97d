"""The systems of the experiments: from a trial to a trained model, or to features that are corrected."""

from __future__ import annotations

import warnings
from functools import partial
from inspect import signature
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler

from scbd import baselines
from scbd._shared.labels import label_values
from scbd._shared.linear_maps import ROWS_PER_BLOCK, column_means, covariance, principal_components_map
from scbd._workflows.compare import correction_arguments
from scbd._workflows.training_runs import seed_everything
from scbd.corrections import correct
from scbd.corrections._correct import CORRECTIONS
from scbd.metrics._arguments import get_embedding
from scbd.model import SCBDModel, TrainingDiverged
from scbd.nn import FeatureScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData

    from paper.datasets import Dataset
    from paper.trials import Trial
    from scbd.model import ImageModel

# what every system is searched over (paper, appendix: table of the search space)
TRAINING_SPACE: Mapping[str, Sequence[float]] = MappingProxyType(
    {"lr": (1e-4, 1e-3, 1e-2), "weight_decay": (0.0, 0.001, 0.01)}
)
# and what each has of its own
MODEL_SPACE: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType(
    {
        "ERM": {},
        "CORAL": {"penalty": (0.1, 1.0, 10.0)},
        "DANN": {"penalty": (0.1, 1.0, 10.0)},
        "IRM": {"penalty": (1.0, 10.0, 100.0, 1000.0)},
        "Fish": {"pretrain_steps": (1000, 10_000), "meta_lr": (0.001, 0.01, 0.1)},
        "Group DRO": {"step_size": (0.01,)},
        "iVAE": {},
    }
)

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
    return np.asarray(get_embedding(adata, obsm_key))


class _OnControls:
    """Features standardised on each well's controls, and clipped at ten standard deviations; computed as they are read.

    A feature that is missing in a cell, or has no two values among a well's controls, is typical there, which is 0.

    Parameters
    ----------
    features
        ``(N, F)``, an array or what can be cut into slices of rows.
    wells
        Code of each cell's well, ``(N,)``.
    is_control
        Boolean ``(N,)``.
    """

    def __init__(self, features: Any, wells: np.ndarray, is_control: np.ndarray) -> None:
        self._features, self._wells, self.shape = features, wells, features.shape
        of_wells = int(wells.max()) + 1, self.shape[1]
        n, total, squares = np.zeros(of_wells), np.zeros(of_wells), np.zeros(of_wells)
        origin = np.full(of_wells, np.nan)  # a value there: what is constant has no rounding
        for start in range(0, len(self), ROWS_PER_BLOCK):
            rows = np.flatnonzero(is_control[start : start + ROWS_PER_BLOCK])
            values, codes = self._read(slice(start, start + ROWS_PER_BLOCK))[rows], wells[start + rows]
            for well in np.unique(codes):
                own = values[codes == well]
                there = np.isfinite(own)
                one = np.take_along_axis(own, there.argmax(0)[None], axis=0)[0]
                origin[well] = np.where(np.isnan(origin[well]), one, origin[well])
                own -= origin[well]
                n[well] += there.sum(0)
                total[well] += np.nansum(own, axis=0)
                squares[well] += np.nansum(own**2, axis=0)
        self._mean = origin + total / np.maximum(n, 1)
        variance = (squares - total**2 / np.maximum(n, 1)) / np.maximum(n - 1, 1)
        self._sd = np.where(variance > 0, np.sqrt(variance.clip(0)), np.inf)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        codes, values = self._wells[rows], self._read(rows)
        values -= self._mean[codes]
        values /= self._sd[codes]
        return np.nan_to_num(values, copy=False).clip(-10, 10, out=values)

    def _read(self, rows: slice) -> np.ndarray:
        """float64, free to change, NaN where a value is missing."""
        values = np.array(self._features[rows], dtype=np.float64)
        values[~np.isfinite(values)] = np.nan
        return values


def _cellprofiler(adata: AnnData, *, y_key: str, e_key: str, control: str, n_components: int) -> np.ndarray:
    """Principal components of CellProfiler's features, standardised on each well's controls (paper, section 4.2).

    Of any number of cells, on disk or in memory: beside the components, it holds some blocks of rows.
    """
    wells, genes = (label_values(adata.obs, key).cat for key in (e_key, y_key))
    is_control = (genes.categories.astype(str) == control)[genes.codes]
    features: Any = _OnControls(get_embedding(adata, "X_cellprofiler"), wells.codes.to_numpy(), is_control)
    mean = column_means(features)
    spread = covariance(features, mean)
    n_components = min(n_components, len(features), int(np.count_nonzero(spread.diagonal())))
    return principal_components_map(mean, np.ones(len(mean)), spread, n_components)(features)


# embeddings that are computed, not learned
FEATURES: dict[str, Callable[..., np.ndarray]] = {
    "pixel PCA": baselines.pixel_pca,
    "CellProfiler": _cellprofiler,
    "obsm": _stored,
}

# Of what the rows of a system say. Raise it where the same settings would now train, or score, otherwise: rows of
# another version are kept and not used, and their trials are run again. Systems that are not here have the first.
VERSIONS = {
    "CellProfiler": 2,  # components are exact, where they were approximate
    "Fish": 2,  # a round that is not finished changes nothing
    "mcVAE": 2,  # the loss of pairs of a control and a perturbed cell
    "pixel PCA": 2,  # channels count alike
    "pixel PCA, TVN": 3,  # at 2, wells were centred before controls are whitened, and units did not matter any more
}
# How often the rule behind ``alpha="auto"`` has changed: what a number trains has not.
RULES_OF_ALPHA = 1  # a tenth of it where environments shift all cells alike
# the same where models know controls
RULES_OF_ALPHA_WITH_CONTROLS = 1  # what was learned is asked of the other cells
# how often the way to score has changed, of protocols where it has
CHANGED_SCORES = {
    "counterfactuals": 1,  # a reader of digits that errs on one original in a hundred, not one in twenty
    "new environments": 2,  # they are standardised by their own controls, and no longer adapted to
}
# the same of some systems: a classifier met few labels in a batch, and meets what shuffling gives; Fish, validating
CHANGED_BATCHES = {
    "domain generalization": ("ERM", "Fish"),
    **dict.fromkeys(("unseen perturbations", "labels across environments"), ("ERM",)),
}
# the same of features alone
CHANGED_FEATURES = {"batch correction of new cells": 1}  # they learn from training cells, not from those scored


def version_of(system: str, model: Mapping[str, Any], protocol: str = "", *, knows_controls: bool = False) -> int:
    """Of what a row of this system says, with these arguments of its model, by this protocol."""
    rules = RULES_OF_ALPHA + RULES_OF_ALPHA_WITH_CONTROLS * knows_controls
    by_rule = system == "SCBD" and model.get("alpha", "auto") == "auto"
    changed = CHANGED_SCORES.get(protocol, 0) + CHANGED_FEATURES.get(protocol, 0) * is_computed(system)
    changed += system in CHANGED_BATCHES.get(protocol, ())
    return VERSIONS.get(system, VERSIONS.get(parts_of(system)[0], 1)) + rules * by_rule + changed


def parts_of(system: str) -> tuple[str, list[str]]:
    """Embedding and corrections, in turn, of a name such as ``"pixel PCA, standardised, LDA"``."""
    embedding, *corrections = system.split(", ")
    return embedding, corrections


def is_computed(system: str) -> bool:
    """Whether a system is features, or features followed by corrections."""
    embedding, corrections = parts_of(system)
    return embedding in FEATURES and all(correction in CORRECTIONS for correction in corrections)


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
    known = correction_arguments(adata, fit=fit, **dataset.label_keys | columns) if corrections else {}
    for correction in corrections:
        z = correct(z, correction, **known | how[correction])
    return z


def with_head(training: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``train`` with a head beside the encoder, which changes nothing else: trials do not name it.

    At a rate of 0 it would be as untrained as the encoder that serves as a control.
    """
    return {"online_head": training.get("lr") != 0} | dict(training)


# how protocols are called that test in an environment of which nothing may be learned, be it how bright its images are
_UNSEEN = ("domain generalization", "counterfactuals")
# rows of features from which an encoder was a network, and cells of a batch
_MANY_ROWS, _CELLS = 10_000, 2_048


def as_measured(trial: Trial, training: Mapping[str, Any], adata: AnnData) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a trial's model, and of its ``train``.

    A trial that does not say by which cells inputs are standardised is of a time when that was by all, and other
    defaults were others, too: its row says what it said then. Where the test environment is unseen this is what is
    asked, whatever the default: nothing of its inputs may be learned, and digits and photographs are not turned.
    A trial that names a preset has the defaults of that preset.
    """
    model, how, of_images = dict(trial.model), dict(training), "single_cell_images" in adata.obsm
    if "preset" in model or ("standardize_by" in model and not trial.protocol.startswith(_UNSEEN)):
        return model, how
    model = {"standardize_by": None} | ({"augment": False} if of_images else {}) | model
    if trial.system == "SCBD":
        model = {"set_size": 1, "include_self": True, "smoothing": 2 / 3 if of_images else 0.0} | model
    how["plan_kwargs"] = {"lr_decay": False} | dict(how.get("plan_kwargs") or {})
    encoder = model.get("encoder", "linear" if adata.n_obs < _MANY_ROWS else "mlp")
    if not of_images and encoder == "linear":
        how = {"max_steps": 50, "lr": 1e-4, "batch_size": min(_CELLS, int((adata.obs["split"] == "train").sum()))} | how
    elif not of_images:
        model, how = {"whitening": None} | model, {"max_steps": 400} | how
    return model, how


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
    arguments, how = as_measured(trial, training or trial.training, adata)
    model = system(adata, **arguments)
    # trials are known by what they say, and keep the names that rows were made under
    for group, names in {"batch_kwargs": ("neighbours", "preload"), "plan_kwargs": ("encoder_lr",)}.items():
        if moved := {name: how.pop(name) for name in names if name in how}:
            how[group] = how.get(group, {}) | moved
    try:
        model.train(checkpoint_dir=checkpoints, resume=True, seed=trial.seed, **how)
    except TrainingDiverged as error:  # a setting that does not work is a result, and no reason to stop a sweep
        if not model.is_trained:
            raise
        warnings.warn(str(error), UserWarning, stacklevel=2)
    return model


class Table:
    """Features of a data set with what corrections know of its rows.

    Features are scaled and clipped as those of a model are, by the same rows: what is compared is what comes after.

    Parameters
    ----------
    adata
        Its table.
    dataset
        Its columns.
    fit
        Rows that may be learned from, boolean ``(N,)``.
    """

    def __init__(self, adata: AnnData, dataset: Dataset, fit: np.ndarray) -> None:
        self.fit = fit
        self.stored = dataset.inputs(adata).source(adata).read(slice(None))
        columns = dataset.label_keys | {"position_key": dataset.setup.get("position_key")}
        self.known = correction_arguments(adata, fit=fit, **columns)
        # controls that may be learned from on new plates as well, where plates are moved onto each other
        self.known_controls = fit | np.asarray(adata.obs.get("known_position", False))
        scaling, controls = FeatureScaling(self.stored.shape[1]), self.known.get("controls")
        scaling.fit([torch.from_numpy(self.stored[fit])], None if controls is None else controls[fit])
        self.features = scaling(torch.from_numpy(self.stored)).numpy()


def _corrected(
    table: Table,
    *,
    correction: str,
    on_controls: bool = False,
    by_position: bool = False,
    on: str | None = None,
    **settings: Any,
) -> np.ndarray:
    """Features, or what another correction made of them, corrected.

    What moves plates onto each other needs rows of all of them: on controls those at known positions, else all rows.
    """
    features = table.features if on is None else TABLES[on](table)
    correction += " on controls" if on_controls else ""
    needs, known = CORRECTIONS[correction].needs, dict(table.known)
    if "environments" in needs:
        known["fit"] = table.known_controls if "controls" in needs else None
    if not by_position:
        known.pop("positions", None)
    return correct(features, correction, **known, **settings)


# packages that are not installed with scbd
NEEDED = {"Harmony": "harmonypy"}

# corrections of feature tables, which learn in closed form: rows beside what is trained
TABLES: dict[str, Callable[..., np.ndarray]] = {
    "features": lambda table: table.stored,
    "scaled": lambda table: table.features,
    "scaled over all wells": lambda table: StandardScaler().fit(table.stored[table.fit]).transform(table.stored),
    **{name: partial(_corrected, correction=name) for name in CORRECTIONS},
}


def settings_of(space: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of a space of settings."""
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def best_setting(accuracy: pd.Series, setting: pd.Series) -> Any:
    """One setting for all seeds: the one whose mean accuracy in distribution is highest.

    Chosen seed by seed, a mean over seeds would be that of a mixture, which nobody could train again.

    Parameters
    ----------
    accuracy
        Of each run, ``(N,)``, on cells like those that were learned from.
    setting
        What was tried in each run, ``(N,)``, anything but its seed.

    Returns
    -------
    The setting; of several that are equally good, the one that was tried first. One with a run whose accuracy is NaN is
    none of them, whatever its other runs do.

    Raises
    ------
    ValueError
        If each setting has a run whose accuracy is NaN.
    """
    of_setting = accuracy.groupby(setting.to_numpy(), sort=False)
    # those runs of a setting that were not lost are the lucky ones
    mean = of_setting.mean().where(of_setting.count() == of_setting.size())
    if mean.isna().all():
        msg = f"Each of {len(mean)} settings has a run whose accuracy is NaN: there is nothing to choose by."
        raise ValueError(msg)
    return mean.idxmax()
