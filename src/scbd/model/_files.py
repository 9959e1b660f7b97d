"""Read what torch saved, without running any of it; or say in a sentence why not."""

from __future__ import annotations

import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from scvi.data._constants import _MODEL_NAME_KEY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_UNREADABLE = (
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
)
_FRAME = "scbd.frame"
# beside tensors and plain values, what may be in a file: numbers and containers, nothing that could act
_SAFE: list[Any] = [
    bytes,
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__ if name not in ("ObjectDType", "VoidDType")),
]


class DamagedFile(ValueError):
    """A checkpoint, or a model, that is not as it was written."""


def read_header(path: Path, wanted: Callable[[Any], Any], what: str, *, allow_pickle: bool = False) -> Any:
    """Part of a file that :func:`torch.save` wrote; tensors stay on disk.

    Parameters
    ----------
    path
        An existing file.
    wanted
        Takes the part out of the whole.
    what
        How an error calls such a file.
    allow_pickle
        Make Python objects of any kind, which can run any code.

    Raises
    ------
    ValueError
        If the file is truncated, foreign, holds no such part, or holds Python objects that are not allowed.
    """
    try:
        if not allow_pickle:
            _check_safe(path, what)
        with torch.serialization.safe_globals(_SAFE):
            return wanted(torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=True))
    except _UnsafeFile as error:
        raise ValueError(str(error)) from None
    except _UNREADABLE as error:
        msg = f"{path} is no {what}, or is truncated ({type(error).__name__}): use another copy of it."
        raise ValueError(msg) from error


def check_whole(path: Path, what: str) -> None:
    """Compare each part of a file that :func:`torch.save` wrote with its checksum.

    Raises
    ------
    DamagedFile
        If one is not what was written, or it is no such file.
    """
    try:
        with zipfile.ZipFile(path) as parts:
            broken = parts.testzip()
    except zipfile.BadZipFile:
        msg = f"{path} is no {what}, or is truncated: use another copy of it."
        raise DamagedFile(msg) from None
    if broken:
        msg = f"{path} is damaged (its part {broken} is not what was written): use another copy of it."
        raise DamagedFile(msg)


def check_saved_model(path: Path, class_name: str, newest: int, *, allow_pickle: bool) -> None:
    """Say what is wrong with a saved model before anything is built from it.

    Parameters
    ----------
    path
        Of the file.
    class_name
        Of the model that is to be loaded.
    newest
        Format that this version reads, and all before.
    allow_pickle
        See :func:`read_header`.

    Raises
    ------
    FileNotFoundError
        If nothing is saved there.
    ValueError
        If the file is damaged, truncated, foreign, of another class, or written by a newer scbd.
    """
    if not path.is_file():
        msg = f"There is no saved model at {path}."
        raise FileNotFoundError(msg)
    check_whole(path, "saved scbd model")
    attributes = read_header(path, lambda saved: saved["attr_dict"], "saved scbd model", allow_pickle=allow_pickle)
    name = attributes.get("registry_", {}).get(_MODEL_NAME_KEY, "model of another package")
    if name != class_name:
        msg = f"{path} holds a {name}, not a {class_name}: load it with {name}.load."
        raise ValueError(msg)
    theirs = attributes.get("format_", 0)
    if theirs > newest:
        msg = f"{path} was saved by a newer scbd (format {theirs}, this one reads {newest}): upgrade scbd."
        raise ValueError(msg)


class _UnsafeFile(Exception):
    pass


def _check_safe(path: Path, what: str) -> None:
    with torch.serialization.safe_globals(_SAFE):
        objects = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    if objects:
        msg = (
            f"{path} holds Python objects ({', '.join(sorted(objects)[:3])}), and making them could run any code. If "
            f"you know where this {what} comes from, load a model with allow_pickle=True."
        )
        raise _UnsafeFile(msg)


def plain(value: Any) -> Any:
    """Dictionaries of any kind as plain ones, frames as their columns: saved without pickling an object."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, pd.DataFrame):
        columns = {str(name): _values(value[name]) for name in value}
        return {_FRAME: {"index": _values(value.index), "name": value.index.name, "columns": columns}}
    return value


def restored(value: Any) -> Any:
    """What :func:`plain` was made of."""
    if not isinstance(value, dict):
        return value
    if set(value) == {_FRAME}:
        saved = value[_FRAME]
        return pd.DataFrame(saved["columns"], index=pd.Index(saved["index"], name=saved["name"]))
    return {key: restored(part) for key, part in value.items()}


def _values(column: pd.Series | pd.Index) -> Any:
    return column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).tolist()
