"""Reading the files of saved models without executing code in them, and checking a file before a model is loaded."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from scvi.data._constants import _MODEL_NAME_KEY, _SETUP_ARGS_KEY

from scbd.model._arguments import LEVELS_OF_A_NUMBER
from scbd.model._environment_alignment import EnvironmentAlignment, ResidualOffsets
from scbd.model._interfaces import TrainingResults
from scbd.model._training_cells import column_values_or_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# errors that torch.load raises for a file that it cannot read
_READ_ERRORS = (
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
)
# only key of a dictionary to which a DataFrame is converted for saving; it marks the dictionary as a DataFrame
_FRAME_KEY = "scbd.frame"
# types that a saved file may hold in addition to tensors and plain Python values: bytes, and numbers and arrays of
# numpy, which cannot run code when they are loaded
_SAFE_TYPES: list[Any] = [
    bytes,
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__ if name not in ("ObjectDType", "VoidDType")),
]


def read_part_of_saved_file(path: Path, wanted: Callable[[Any], Any], what: str, *, allow_pickle: bool = False) -> Any:
    """Return a part of the content of a file that was written by :func:`torch.save`.

    No code in the file is run, unless ``allow_pickle`` is true. Tensors stay on disk (memory-mapped).

    Parameters
    ----------
    path
        Path of an existing file.
    wanted
        Function that takes the content of the file, and returns the wanted part.
    what
        Kind of the file in error messages, for example ``"checkpoint"``.
    allow_pickle
        Whether to load Python objects of any kind, which can run any code.

    Raises
    ------
    ValueError
        If the file is damaged or truncated, was not written by :func:`torch.save`, lacks the wanted part, or holds
        Python objects without ``allow_pickle=True``.
    """
    try:
        with zipfile.ZipFile(path) as parts:
            broken = parts.testzip()  # compares each file in the zip archive with its checksum; None if all agree
    except zipfile.BadZipFile:
        msg = f"{path} is no {what}, or is truncated: use another copy of it."
        raise ValueError(msg) from None
    if broken:
        msg = f"{path} is damaged (its part {broken} is not what was written): use another copy of it."
        raise ValueError(msg)
    with torch.serialization.safe_globals(_SAFE_TYPES):
        try:
            objects = [] if allow_pickle else torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            content = None
            if not objects:
                content = wanted(torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=True))
        except _READ_ERRORS as error:
            msg = f"{path} is no {what}, or is truncated ({type(error).__name__}): use another copy of it."
            raise ValueError(msg) from error
    if objects:
        msg = (
            f"{path} holds Python objects ({', '.join(sorted(objects)[:3])}), and making them could run any code. If "
            f"you know where this {what} comes from, load a model with allow_pickle=True."
        )
        raise ValueError(msg)
    return content


def check_saved_model(path: Path, class_name: str, newest: int, *, allow_pickle: bool) -> None:
    """Check that a file holds a saved model that can be loaded, before the model is loaded from it.

    Parameters
    ----------
    path
        Path of the file.
    class_name
        Name of the model class that is to be loaded.
    newest
        Number of the newest file format that this version of scbd can read; it can read all older formats.
    allow_pickle
        See :func:`read_part_of_saved_file`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is damaged or truncated, is not a saved scbd model, holds a model of another class, holds Python
        objects without ``allow_pickle=True``, was written by a newer version of scbd, or was trained with continuous
        covariates, which only earlier versions support.
    """
    if not path.is_file():
        msg = f"There is no saved model at {path}."
        raise FileNotFoundError(msg)
    attributes = read_part_of_saved_file(
        path, lambda saved: saved["attr_dict"], "saved scbd model", allow_pickle=allow_pickle
    )
    name = attributes.get("registry_", {}).get(_MODEL_NAME_KEY, "model of another package")
    if name != class_name:
        msg = f"{path} holds a {name}, not a {class_name}: load it with {name}.load."
        raise ValueError(msg)
    if numbers := attributes["registry_"].get(_SETUP_ARGS_KEY, {}).get("continuous_covariate_keys"):
        msg = (
            f"{path} was trained with continuous_covariate_keys={numbers!r}, which this version of scbd does not have: "
            f"train a new model. In setup_anndata, {LEVELS_OF_A_NUMBER}"
        )
        raise ValueError(msg)
    theirs = attributes.get("format_", 0)
    if theirs > newest:
        msg = f"{path} was saved by a newer scbd (format {theirs}, this one reads {newest}): upgrade scbd."
        raise ValueError(msg)


def to_plain_values(value: Any) -> Any:
    """Convert an attribute of a model so that it can be saved without pickling.

    Dictionaries of any class, dataclasses and named tuples become plain dictionaries, with converted values. A
    DataFrame becomes a dictionary of its index and columns. Values of other types are returned unmodified.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: to_plain_values(part) for key, part in value.items()}
    if isinstance(value, pd.DataFrame):
        columns = {str(name): column_values_or_text(value[name]) for name in value}
        return {_FRAME_KEY: {"index": column_values_or_text(value.index), "name": value.index.name, "columns": columns}}
    return value


# attributes of models saved in format 0 or 1, with the names that their values have in EnvironmentAlignment
_ALIGNMENT_OF_FORMAT_1 = {
    "standardized_by_": "kinds",
    "could_be_known_by_": "alternative_kinds",
    "label_shares_": "label_frequencies",
    "in_common_": "overlaps",
}


def restore_attributes(model: Any) -> None:
    """Restore the attributes of a loaded model that :func:`to_plain_values` had converted, also of earlier formats.

    Parameters
    ----------
    model
        Model with the attributes that were read from a file. Formats 0 and 1 stored each value of ``alignment_`` and
        ``results_`` as a separate attribute.
    """
    state = vars(model)
    for name, value in list(state.items()):
        if name.endswith("_"):
            state[name] = from_plain_values(value)
    if isinstance(state["results_"], dict):
        model.alignment_ = EnvironmentAlignment(**state["alignment_"])
        offsets = state["results_"].pop("offsets")
        model.results_ = TrainingResults(offsets=offsets and ResidualOffsets(**offsets), **state["results_"])
        return
    for old, new in _ALIGNMENT_OF_FORMAT_1.items():
        if old in state:
            setattr(model.alignment_, new, state.pop(old))
    kinds, offsets = state.pop("centered_by_", {}), state.pop("leftover_", {})
    diagnostics = [state.pop(name) for name in ("health_", "latent_health_") if name in state]
    model.results_ = TrainingResults(
        state.pop("centers_", {}), ResidualOffsets(kinds, offsets) if offsets else None, *diagnostics
    )


def from_plain_values(value: Any) -> Any:
    """Restore an attribute of a model that was converted by :func:`to_plain_values`, including its DataFrames."""
    if not isinstance(value, dict):
        return value
    if set(value) == {_FRAME_KEY}:
        saved = value[_FRAME_KEY]
        return pd.DataFrame(saved["columns"], index=pd.Index(saved["index"], name=saved["name"]))
    return {key: from_plain_values(part) for key, part in value.items()}
