"""Features by DeepProfiler: an ``.npz`` a field, in folders of plate and well."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pandas as pd

_NAMES = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")


def deepprofiler_table(path: Path) -> pd.DataFrame:
    """A row a cell: features, ``Location_Center_X`` and ``_Y`` in pixels, plate, well and site by the names of folders.

    What the files say themselves of a field (their ``metadata``) is a pickled object, which could run code, and is not
    read.

    Raises
    ------
    ValueError
        If a file is truncated, or features and locations differ in number.
    """
    files = _files(path) if path.is_dir() else [path]
    root = path if path.is_dir() else path.parent
    tables = [table for table in (_field(file, file.relative_to(root)) for file in files) if len(table)]
    if not tables:
        msg = f"{path}: none of {len(files)} files has a cell."
        raise ValueError(msg)
    return pd.concat(tables, ignore_index=True)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.npz"))


def _field(file: Path, name: Path) -> pd.DataFrame:
    try:
        with np.load(file, allow_pickle=False) as archive:
            features = archive["features"]
            locations = archive["locations"] if "locations" in archive.files else np.empty((len(features), 0))
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        msg = f"{file} cannot be read as features of DeepProfiler ({error}): it is truncated, or foreign."
        raise ValueError(msg) from error
    if features.ndim != 2 or len(locations) != len(features):
        msg = f"{file} has features {features.shape} and locations {locations.shape}: they must have a row a cell each."
        raise ValueError(msg)
    table = pd.DataFrame(features).add_prefix("feature_")
    if locations.shape[1] >= 2:
        table = table.assign(Location_Center_X=locations[:, 0], Location_Center_Y=locations[:, 1])
    return table.assign(Metadata_File=name.as_posix(), **_told_by_name(name))


def _told_by_name(name: Path) -> dict[str, str]:
    """``plate/well/site.npz``, as DeepProfiler writes them, or ``plate/well_site.npz``, as it did before."""
    parts = [*name.parent.parts, *([name.stem] if len(name.parts) > 2 else name.stem.rsplit("_", 1))]
    return dict(zip(_NAMES, parts[-3:], strict=True)) if len(parts) >= 3 else {}
