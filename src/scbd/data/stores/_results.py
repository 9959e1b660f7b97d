"""Results beside a screen: files of their own, which opening the screen joins to its tables."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import zarr

from scbd.data._digests import digest_cells
from scbd.data.sources import ArraySource, ImageSource, SlicedSource, ZarrSource
from scbd.data.stores._hdf5 import mapped, open_h5
from scbd.data.stores._tables import STORE_KEY

if TYPE_CHECKING:
    import pandas as pd

CELLS_KEY = "cells"


def results_folder(path: Any) -> Path | None:
    """Where results of a screen lie; `None` for what is not on a disk of this machine."""
    if isinstance(path, os.PathLike) or (isinstance(path, str) and "://" not in path):
        path = Path(path)
        return path.with_name(f"{path.name}.results")
    return None


def result_files(folder: Path) -> list[Path]:
    """Files of results, the latest last; what a later one holds replaces what an earlier one does."""
    return sorted(file for file in folder.glob("*.h5ad") if not file.name.startswith("."))


def with_results(path: Any, parts: dict[str, Any], images: Any) -> dict[str, Any]:
    """Parts of an AnnData with what was added; columns in memory, arrays memory-mapped.

    Warns
    -----
    UserWarning
        If results are those of other cells; these are left out.
    """
    from anndata.io import read_elem

    files, others = results_of(path, parts["obs"], images)
    for other in others:
        warnings.warn(other, UserWarning, stacklevel=3)
    obs, obsm = parts["obs"], dict(parts["obsm"])
    for file in files:
        obs = obs.assign(**{key: read_elem(file["obs"][key]) for slot, key in keys_of(file) if slot == "obs"})
        obsm |= {key: mapped(file["obsm"][key]) for slot, key in keys_of(file) if slot == "obsm"}
    return parts | {"obs": obs, "obsm": obsm}


def results_of(path: Any, obs: pd.DataFrame, images: Any) -> tuple[list[h5py.File], list[str]]:
    """Open files of results of these cells, the latest last; and of each that is of other cells, a sentence."""
    folder = results_folder(path)
    if folder is None or not folder.is_dir():
        return [], []
    while True:
        try:
            opened = [open_h5(file) for file in result_files(folder)]
            break
        except FileNotFoundError:  # replaced by a later one in this moment
            continue
    cells = cells_digest(images, obs) if opened else ""
    same = [file[f"uns/{STORE_KEY}/{CELLS_KEY}"].asstr()[()] == cells for file in opened]
    others = [
        f"{file.filename} holds results of other cells than those of {path}, and is left out: move it away."
        for file, is_same in zip(opened, same, strict=True)
        if not is_same
    ]
    return [file for file, is_same in zip(opened, same, strict=True) if is_same], others


def keys_of(file: h5py.File) -> list[tuple[str, str]]:
    """Slot and name of what a file holds."""
    return [*(("obs", str(key)) for key in file["obs"].attrs["column-order"]), *(("obsm", key) for key in file["obsm"])]


def cells_digest(images: Any, obs: pd.DataFrame) -> str:
    """What results belong to: the cells as the screen holds them, without results."""
    return digest_cells(_source(images), obs)


def _source(images: Any) -> ImageSource:
    if isinstance(images, np.ndarray):
        return ArraySource(images)
    if isinstance(images, zarr.Array):
        try:
            return ZarrSource(images)
        except ValueError:  # cut into parts of images
            pass
    return SlicedSource(images, "images")
