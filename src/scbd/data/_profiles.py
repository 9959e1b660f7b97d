"""Tables of features, whoever has measured them: which columns are features, and what becomes of missing values."""

from __future__ import annotations

import logging
import os
import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import anndata
import numpy as np
import pandas as pd

from scbd._checks import head
from scbd.data._formats import kind_of, read_frame, taken_elsewhere

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

Missing: TypeAlias = Literal["drop", "median", "keep"]

# CellProfiler's compartments, and what features of DeepProfiler are called here
COMPARTMENTS = ("Cells_", "Cytoplasm_", "Nuclei_", "feature_")
_PLATE = re.compile(r"^(Image_)?(Metadata_)?plate$", re.IGNORECASE)
# features that are missing in more of the rows are left out, rather than the rows
_MOSTLY_THERE = 0.05
# where DeepProfiler's files lie
_FOLDERS = ("Metadata_Plate", "Metadata_Well", "Metadata_Site")


def read_profiles(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    features: str | Sequence[str] = COMPARTMENTS,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    missing: Missing = "drop",
) -> anndata.AnnData:
    """Features of cells or wells, as pycytominer, CytoTable, DeepProfiler and others write them.

    A column is a feature if its name begins with one of ``features``; all others go to ``obs``. Features of one value
    stay; :meth:`~scbd.SCBDModel.setup_anndata` leaves them out, and says so.

    Parameters
    ----------
    path
        ``.parquet``, ``.csv``, ``.tsv`` (also ``.csv.gz``, ``.tsv.gz``) with a cell or well a row; ``.h5ad`` or
        ``.zarr`` of an AnnData, whose ``X`` are the features; an ``.npz`` of DeepProfiler, or the folder of them, where
        folders are called by plate and well. Several, such as a file for each plate, are put together.
    features
        Beginnings of the names of features, or whole names. By default those of CellProfiler's compartments, and
        ``feature_``, as those of DeepProfiler are called here.
    table
        What else is known, such as a plate map: a frame or a file, joined by the columns that both have. None of its
        columns is a feature.
    missing
        Of missing and infinite values. Features that lack more than 5 % of their values are left out, as are those
        without any value in one of several files; then ``"drop"`` leaves out rows that still have some, and
        ``"median"`` fills in the feature's median. ``"keep"`` does neither: models refuse such features.

    Returns
    -------
    AnnData with float32 ``X``, cells or wells by features, ready for ``setup_anndata(…, layer="X")``.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    KeyError
        If ``table`` shares no column.
    TypeError, ValueError
        If it is of another kind, truncated, or has no feature; if a feature is no number, or two have one name; if
        ``table`` has several rows for one, or none.

    Warns
    -----
    UserWarning
        If features or rows are left out, or values filled in: how many, and the plates or files that are lost.

    References
    ----------
    Serrano et al. (2025), Reproducible image-based profiling with Pycytominer. Moshkov et al. (2024), Learning
    representations for image-based profiling of perturbations.

    Examples
    --------
    >>> wells = pd.DataFrame({"Metadata_Plate": ["P1", "P1"], "Metadata_Well": ["A01", "A02"], "dose": [1, 10]})
    >>> wells = wells.assign(Cells_AreaShape_Area=[410.0, 392.0], Nuclei_Texture_Contrast_DNA=[0.2, 0.4])
    >>> wells.to_csv("plate_1.csv.gz", index=False)
    >>> profiles = scbd.data.read_profiles("plate_1.csv.gz")
    >>> profiles.shape, list(profiles.obs)
    ((2, 2), ['Metadata_Plate', 'Metadata_Well', 'dose'])
    """
    if missing not in get_args(Missing):
        msg = f"missing={missing!r} is not known: use {', '.join(map(repr, get_args(Missing)))}."
        raise ValueError(msg)
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(one) for one in path]
    if not paths:
        msg = "There is no file to read: give at least one."
        raise ValueError(msg)
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} others"
    read = [_read(one) for one in paths]
    found = pd.concat([frame for frame, _ in read], ignore_index=len(paths) > 1)
    beginnings = (features,) if isinstance(features, str) else tuple(features)
    known = {name for _, names in read for name in names}
    names = [column for column in found if column in known or str(column).startswith(beginnings)]
    _check(found, names, beginnings, where)
    obs = found.drop(columns=names)
    if table is not None:
        obs = _joined(obs, table if isinstance(table, pd.DataFrame) else read_frame(table), where)
    logger.info("%s: %d features; in obs: %s.", where, len(names), head(obs.columns, 20))
    groups = {str(column): obs[column].to_numpy() for column in obs if _PLATE.search(str(column))}
    if len(paths) > 1:
        groups["file"] = np.repeat(np.array(list(map(str, paths)), dtype=object), [len(frame) for frame, _ in read])
    values = found[names].to_numpy(np.float32, copy=True, na_value=np.nan)  # what pandas hands out may be read-only
    values[~np.isfinite(values)] = np.nan
    rows, kept = np.ones(len(values), dtype=bool), np.ones(len(names), dtype=bool)
    if missing != "keep":
        rows, kept = _mended(values, pd.Index(names), missing, where, groups)
    cells = anndata.AnnData(X=values[np.ix_(rows, kept)], obs=_tidy(obs[rows]))
    cells.var_names = np.array(names, dtype=object)[kept]
    return cells


def _read(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """A row a cell or well, and names of columns that are features whatever they begin with."""
    kind = kind_of(path)
    if kind.name in ("profiles", "image_table"):
        table = read_frame(path).rename(columns=str)
        # levels of an index are columns like others; the name of a row is none
        return (table if table.index.names == [None] else table.reset_index(allow_duplicates=True)), []
    if kind.name == "anndata":
        cells = (anndata.read_zarr if path.is_dir() else anndata.read_h5ad)(path)
        return cells.obs.join(cells.to_df()), cells.var_names.tolist()
    if kind.name == "deepprofiler":
        return _deepprofiler(path), []
    raise ValueError(taken_elsewhere(path, kind))


def _check(table: pd.DataFrame, features: list[str], beginnings: tuple[str, ...], where: str) -> None:
    if table.empty:
        msg = f"{where} has no row: there is nothing to read."
        raise ValueError(msg)
    if not table.columns.is_unique:
        msg = f"{where} has columns whose name is there twice ({head(table.columns[table.columns.duplicated()])})."
        raise ValueError(msg)
    if not features:
        msg = (
            f"{where} has no feature, which is a column that begins with {' or '.join(beginnings)}; it has: "
            f"{head(table.columns, 8)}. Name features, or how they begin, with features=…."
        )
        raise ValueError(msg)
    text = [column for column in features if table[column].dtype.kind not in "fiub"]
    if text:
        msg = f"{where} has features that are no numbers ({head(text)}): name the others alone with features=…."
        raise TypeError(msg)


def _mended(
    values: np.ndarray, features: pd.Index, missing: Missing, where: str, groups: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows and features are kept; what is missing in those is filled in place where that was asked for."""
    absent = np.isnan(values)
    lacked = np.zeros(len(features), dtype=bool)
    for name in np.unique(groups.get("file", [])):  # to keep what a file lacks would cost all of its rows
        lacked |= absent[groups["file"] == name].all(axis=0)
    kept = ~lacked & (absent.mean(axis=0) <= _MOSTLY_THERE)
    said = []
    if not kept.all():
        said.append(
            f"{(~kept).sum()} of {len(features)} features are missing in more than {_MOSTLY_THERE:.0%} of the rows or "
            f"in a whole file, and are left out ({head(features[~kept])})"
        )
    holes = absent[:, kept]
    rows = ~holes.any(axis=1)
    if missing == "median" and not rows.all():
        said.append(f"{holes.sum():,} missing values in {(~rows).sum():,} rows are replaced by the feature's median")
        for column in np.flatnonzero(kept)[holes.any(axis=0)]:
            values[absent[:, column], column] = np.nanmedian(values[:, column])
        rows[:] = True
    elif not rows.all():
        whole = {kind: pd.Series(rows).groupby(names).any() for kind, names in groups.items()}
        lost = [f"{kind} {head(left.index[~left])}" for kind, left in whole.items() if not left.all()]
        said.append(
            f"{(~rows).sum():,} of {len(rows):,} rows have missing or infinite values, and are left out"
            + (f", among them all of {' and of '.join(lost)}" if lost else "")
            + "; missing='median' keeps them"
        )
    if not (kept.any() and rows.any()):
        msg = f"{where}: {'; '.join(said)}. Nothing is left: look at it with missing='keep'."
        raise ValueError(msg)
    if said:
        warnings.warn(f"{where}: {'; '.join(said)}.", UserWarning, stacklevel=3)
    return rows, kept


def _tidy(obs: pd.DataFrame) -> pd.DataFrame:
    """Text as categories, which can be written to any file."""
    text = [column for column in obs if obs[column].dtype.kind == "O"]
    obs = obs.assign(**{column: obs[column].map(str, na_action="ignore").astype("category") for column in text})
    return obs.set_axis(obs.index.astype(str))


def _joined(obs: pd.DataFrame, table: pd.DataFrame, where: str) -> pd.DataFrame:
    """Rows with what a table knows of them; numbers and text are the same name."""
    table = table.rename(columns=str)
    shared = [column for column in table if column in obs]
    if not shared:
        msg = f"{where} and the table share no column ({', '.join(map(str, table))}): name them alike."
        raise KeyError(msg)
    left, right = obs[shared].astype(str), table[shared].astype(str)
    if right.duplicated().any():
        first = " ".join(right[right.duplicated()].iloc[0])
        msg = f"The table has several rows for one {', '.join(map(str, shared))} (such as {first}): keep one of each."
        raise ValueError(msg)
    rows = left.merge(right.assign(row=range(len(right))), how="left", on=shared)["row"]
    if rows.isna().any():
        first = " ".join(left[rows.isna().to_numpy()].iloc[0])
        msg = f"{rows.isna().sum():,} rows of {where} are not in the table (such as {', '.join(shared)} {first})."
        raise ValueError(msg)
    new = table.drop(columns=shared).iloc[rows.astype(int)].set_axis(obs.index)
    return pd.concat([obs, new], axis=1)


def _deepprofiler(path: Path) -> pd.DataFrame:
    """A row a cell: features, ``Location_Center_X`` and ``_Y`` in pixels, plate, well and site by the names of folders.

    What the files say themselves of a field (their ``metadata``) is a pickled object, which could run code, and is not
    read.
    """
    files, root = ([path], path.parent) if path.is_file() else (sorted(path.rglob("*.npz")), path)
    tables = [table for table in (_deepprofiler_field(file, file.relative_to(root)) for file in files) if len(table)]
    if not tables:
        msg = f"{path}: none of {len(files)} files of DeepProfiler (.npz) has a cell."
        raise ValueError(msg)
    return pd.concat(tables, ignore_index=True)


def _deepprofiler_field(file: Path, name: Path) -> pd.DataFrame:
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
    # plate/well/site.npz, as it writes them, or plate/well_site.npz, as it did before
    parts = [*name.parent.parts, *([name.stem] if len(name.parts) > 2 else name.stem.rsplit("_", 1))]
    folders = dict(zip(_FOLDERS, parts[-3:], strict=True)) if len(parts) >= 3 else {}
    return table.assign(Metadata_File=name.as_posix(), **folders)
