"""Train one model and store it in a directory with its settings and warnings, or continue an interrupted training.

The functions are shared by all analyses that train models, such as ``scbd.run`` and ``scbd.select_alpha``.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.checks import check_count, inflect
from scbd._shared.files import write_text
from scbd._shared.keys import SPLIT_ARGUMENTS
from scbd._shared.labels import as_columns, label_values
from scbd.data._input_location import InputLocation
from scbd.data._sources import digest_cells
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from anndata import AnnData


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yield a list that collects the texts of all warnings in the ``with`` block, which are displayed as usual.

    The list collects warnings of the category ``UserWarning``, and messages that scbd logs at the level WARNING or
    above.
    """
    messages: list[str] = []
    show = warnings.showwarning

    def record_and_show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, UserWarning):
            messages.append(str(message))
        show(message, category, *where)

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    recorder = Recorder(logging.WARNING)
    logging.getLogger("scbd").addHandler(recorder)
    warnings.showwarning = record_and_show  # type: ignore[assignment]
    try:
        yield messages
    finally:
        warnings.showwarning = show
        logging.getLogger("scbd").removeHandler(recorder)


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Set the level of the logger ``name``, and restore its earlier level at the end of the ``with`` block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, numpy and torch with scvi-tools, without its log message.

    Raises
    ------
    ValueError
        If the seed is negative or not a whole number.
    """
    import scvi

    check_count("seed", seed, 0)
    with log_level("lightning.fabric.utilities.seed", logging.WARNING):
        scvi.settings.seed = seed


def locate_inputs(adata: AnnData, setup: Mapping[str, Any]) -> InputLocation:
    """Find where the images or features are stored in ``adata``, according to the arguments of ``setup_anndata``.

    ``setup`` holds these arguments by name.
    """
    return InputLocation.found(adata, *(setup.get(name) for name in InputLocation._fields))


def describe_training_data(adata: AnnData, setup: Mapping[str, Any], split: Any = None) -> dict[str, Any]:
    """Describe the training data, to recognise whether a later run with the same settings has the same data.

    Parameters
    ----------
    adata
        Cells.
    setup
        Arguments of ``setup_anndata`` by name.
    split
        Argument ``split`` of ``train``. If it is a column of ``obs``, its values are part of the digest.

    Returns
    -------
    Dictionary of the arguments of ``setup_anndata``, the location of the images or features in ``adata``, the number of
    cells ``n_cells``, and ``digest``, a hash of the labels and of a sample of the images or features
    (:func:`scbd.data._sources.digest_cells`).

    Raises
    ------
    KeyError, ValueError
        If the images or features or a column of labels are missing, or if a cell has no label.
    """
    inputs = locate_inputs(adata, setup)
    names = ("y_key", "e_key", "position_key")
    keys = [column for name in names if setup.get(name) is not None for column in as_columns(setup[name])]
    looked_at = {key: label_values(adata.obs, key) for key in keys}
    if isinstance(split, str) and split in adata.obs:
        looked_at[split] = adata.obs[split]
    where = {name: key for name, key in inputs._asdict().items() if key is not None}
    digest = digest_cells(inputs.source(adata), pd.DataFrame(looked_at))
    return {**setup, **where, "n_cells": adata.n_obs, "digest": digest}


def merge_setup_arguments(setup_kwargs: Mapping[str, Any] | None, **own: Any) -> dict[str, Any]:
    """Return the arguments of ``setup_anndata``: those that a function takes itself, and the user's ``setup_kwargs``.

    Raises
    ------
    ValueError
        If an argument that the function takes itself is in ``setup_kwargs``, too.
    """
    given = setup_kwargs or {}
    if repeated := [name for name in own if name in given]:
        names = " and ".join(repeated)
        msg = (
            f"setup_kwargs repeats {names}: give {names} as {inflect(len(repeated), 'an argument', 'arguments')} only."
        )
        raise ValueError(msg)
    return {**own, **given}


def check_repeatable(model: Mapping[str, Any], training: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raise ``ValueError`` if the user's arguments cannot be used to train several models, one after the other.

    Arguments that the caller sets itself for each model are refused, unless they are arguments of the split and `None`.
    The argument ``encoder`` must be a name, because an encoder given as a torch module would be trained further and
    further by each model.

    Parameters
    ----------
    model, training
        Arguments of :class:`scbd.SCBDModel` and of its ``train``, as given by the user.
    taken
        Names of the arguments that the caller sets for each model, in addition to ``checkpoint_dir`` and ``resume``.
    """
    by_default = {name for name in SPLIT_ARGUMENTS if training.get(name) is None}
    set_here = ({"checkpoint_dir", "resume", *taken} & {*model, *training}) - by_default
    if set_here:
        msg = f"{min(set_here)} is set for each run here: leave it out."
        raise ValueError(msg)
    if not isinstance(model.get("encoder", ""), str):
        msg = "Every run makes a new model: give encoder by name, a module would be trained on and on."
        raise ValueError(msg)


def train_or_load(
    model: SCBDModel, asked: Mapping[str, Any], out: Path | None, *, resume: bool = True, **training: Any
) -> SCBDModel:
    """Train and save a model, or load the model that an earlier run with the same data and settings has saved.

    Parameters
    ----------
    model
        The untrained model.
    asked
        Everything that determines the trained model: description of the data, settings and seed. It is stored in
        ``settings.json``, and compared with the file of an earlier run.
    out
        Directory of the run, to which ``model/``, ``settings.json`` and ``checkpoints/`` are written. `None` keeps no
        files.
    resume
        If true, load the trained model from ``out`` if an earlier run has saved it there, or continue its interrupted
        training.
    **training
        Arguments of ``train``.

    Returns
    -------
    The trained model.
    """
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return train_or_load(model, asked, Path(folder), resume=False, **training)
    if resume and _is_trained(out, asked):
        accelerator = training.get("accelerator", "auto")
        return SCBDModel.load(str(out / "model"), model.adata, accelerator=accelerator)
    with recorded_warnings() as messages:
        model.train(checkpoint_dir=out / "checkpoints", resume=resume, **training)
    model.save(str(out / "model"), overwrite=True)
    # settings.json holds all that is needed to repeat the run, including settings that were chosen automatically.
    settings = {
        **asked,
        "versions": {name: version(name) for name in ("scbd", "torch", "scvi-tools", "anndata")},
        "model": model.init_params_["non_kwargs"] | model.init_params_["kwargs"]["module_kwargs"],
        "training": model.training_settings_,
        "health": model.health,
        "device": str(model.device),
        "warnings": messages,
    }
    as_plain = lambda value: value.item() if isinstance(value, np.generic) else str(value)
    write_text(json.dumps(settings, indent=2, default=as_plain), out / "settings.json")
    return model


def _is_trained(out: Path, asked: Mapping[str, Any]) -> bool:
    """Return whether the directory ``out`` contains a trained model with the data, settings and seed in ``asked``.

    Settings that are Python objects, such as an encoder given as a torch module, cannot be compared with stored ones.
    The model in ``out`` then counts as a different one. A damaged ``settings.json`` raises ``ValueError``.
    """
    settings, model = out / "settings.json", out / "model" / "model.pt"
    if not (settings.is_file() and model.is_file()):
        return False
    try:
        wanted = json.loads(json.dumps(asked, default=np.generic.item))
    except TypeError:
        return False
    try:
        there = json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{settings} is damaged ({error}): restore it, or delete it to train the model again."
        raise ValueError(msg) from error
    return all(there.get(key) == value for key, value in wanted.items())
