"""Tables of features, whoever has measured them."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._messages import head
from scbd.data._formats import kind_of, taken_elsewhere
from scbd.data._frames import read_frame
from scbd.data.profiles._cellprofiler import cellprofiler_table
from scbd.data.profiles._deepprofiler import deepprofiler_table
from scbd.data.profiles._features import Missing, odd_names, profiles_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# of so many columns a message can be typed
_TYPED = 10


def read_profiles(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    obs_columns: str | Sequence[str] = (),
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    missing: Missing = "drop",
) -> AnnData:
    """Features of cells or wells, as they come from CellProfiler, pycytominer, CytoTable, DeepProfiler and others.

    Numbers are features, unless their column names or places something: ``Metadata_…``, ``Image_…``, ``…Location_…``,
    ``…Parent_…``, ``ImageNumber`` and the like, ``plate``, ``well``, ``site``, ``x``, ``y``. Those go to ``obs``, as
    all columns of text and of ``table`` do. Name other numbers that are no measurements, such as doses, in
    ``obs_columns``: as features they would give the answer away. Features of one value stay;
    :meth:`~scbd.SCBDModel.setup_anndata` leaves them out, and says so.

    Parameters
    ----------
    path
        ``.parquet``, ``.csv``, ``.tsv`` (also ``.csv.gz``, ``.tsv.gz``) with a cell or well a row; a folder or
        ``.sqlite`` of CellProfiler (:func:`read_cellprofiler`); an ``.npz`` of DeepProfiler, or the folder of them,
        where folders are called by plate and well. Several, such as a file for each plate, are put together.
    obs_columns
        Columns of numbers that are no features either: one name or several.
    table
        What else is known, such as a plate map: a frame or a file, joined by the columns that both have. None of its
        columns is a feature.
    missing
        Of missing and infinite values. Features that lack more than 5 % of their values are left out, as are those
        without any value in one of several files, which would cost all rows of that file; then ``"drop"``
        leaves out rows that still have some, and ``"median"`` fills in the feature's median. ``"keep"`` does neither:
        models refuse such features, :func:`scbd.baselines.cellprofiler_pca` takes them.

    Returns
    -------
    AnnData with float32 ``X``, cells or wells by features, ready for ``setup_anndata(…, layer="X")``.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    KeyError
        If a column of ``obs_columns`` is missing, or ``table`` shares no column.
    ValueError
        If it is of another kind (which, and what takes it), truncated, has no feature, or has another separator than
        its name says; or if ``table`` has several rows for one.

    Warns
    -----
    UserWarning
        If features or rows are left out, or values filled in: how many, which, and of which plates or files if these
        have most of them. If features may be no measurements by their names: named unlike most of them, or like a dose
        or a label.

    References
    ----------
    Serrano et al. (2025), Reproducible image-based profiling with Pycytominer. Moshkov et al. (2024), Learning
    representations for image-based profiling of perturbations.

    Examples
    --------
    >>> wells = pd.DataFrame({"Metadata_Plate": ["P1", "P1"], "Metadata_Well": ["A01", "A02"]})
    >>> wells = wells.assign(Cells_AreaShape_Area=[410.0, 392.0], Nuclei_Texture_Contrast_DNA=[0.2, 0.4])
    >>> wells.to_csv("plate_1.csv.gz", index=False)
    >>> profiles = scbd.data.read_profiles("plate_1.csv.gz")
    >>> profiles.shape, list(profiles.obs)
    ((2, 2), ['Metadata_Plate', 'Metadata_Well'])
    """
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(one) for one in path]
    if not paths:
        msg = "There is no file to read: give at least one."
        raise ValueError(msg)
    found, levels, files = _put_together(paths)
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} others"
    about = [*_listed(obs_columns), *levels]
    if table is not None:
        known = (table if isinstance(table, pd.DataFrame) else _frame(Path(table))).rename(columns=str)
        found = _joined(found, known, where)
        about += list(known)
    cells = profiles_of(found, about, missing, where, files)
    _warn_of_odd(cells.var_names, where)
    return cells


def read_features(
    path: str | os.PathLike[str],
    *,
    obs_columns: str | Sequence[str] = (),
    labels: Sequence[str] = (),
    missing: Missing = "drop",
) -> AnnData:
    """Features of one path, where it is known which columns are used as labels.

    Parameters
    ----------
    path, obs_columns, missing
        See :func:`read_profiles`.
    labels
        Columns that are no features either. If there is no such column, that is for those to say who use it.

    Raises
    ------
    FileNotFoundError, KeyError, ValueError
        As :func:`read_profiles` does.
    """
    found, levels, _ = _put_together([Path(path)])
    about = [*_listed(obs_columns), *(name for name in labels if name in found), *levels]
    cells = profiles_of(found, about, missing, str(path))
    _warn_of_odd(cells.var_names, str(path))
    return cells


def _listed(columns: str | Sequence[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def _put_together(paths: Sequence[Path]) -> tuple[pd.DataFrame, list[str], np.ndarray | None]:
    """Rows of all files, the columns that were levels of an index, and of each row its file if there are several."""
    read = [_read(path) for path in paths]
    levels = [_levels(one, len(paths) > 1) for one in read]
    tables = [
        one.reset_index(names=names, allow_duplicates=True) if names else one
        for one, names in zip(read, levels, strict=True)
    ]
    found = pd.concat(tables, ignore_index=len(paths) > 1).rename(columns=str)
    files = np.repeat(np.array(list(map(str, paths)), dtype=object), [len(one) for one in tables])
    return found, [name for names in levels for name in names], files if len(paths) > 1 else None


def _warn_of_odd(features: pd.Index, where: str) -> None:
    """Numbers in a table of measurements that may be doses, donors or counts."""
    odd = odd_names(features)
    if odd:
        mended = odd if len(odd) <= _TYPED else "…"
        msg = (
            f"{where}: {len(odd)} of {len(features)} features may be no measurements, by their names "
            f"({head(odd, _TYPED)}). If they say which cell or well it is, or how it was treated, they give the answer "
            f"away: leave them out with obs_columns={mended}."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def _frame(path: Path) -> pd.DataFrame:
    """A table whose columns are told apart: Excel writes semicolons in half of Europe."""
    table = read_frame(path)
    name = str(table.columns[0]) if len(table.columns) == 1 and path.suffix.lower() != ".parquet" else ""
    mark = next((mark for mark in ";\t|," if mark in name), None)
    if mark is not None:
        other = re.sub(r"\.(csv|tsv)(\.gz)?$", ".parquet", str(path), flags=re.IGNORECASE)
        msg = (
            f"{path} has one column, and its separator looks like {mark!r}. Write it anew: pandas.read_csv("
            f"{str(path)!r}, sep={mark!r}).to_parquet({other!r}), with decimal=',' too if its numbers have commas."
        )
        raise ValueError(msg)
    return table


_READERS = {
    "cellprofiler": cellprofiler_table,
    "deepprofiler": deepprofiler_table,
    "image_table": _frame,
    "profiles": _frame,
}


def _read(path: Path) -> pd.DataFrame:
    kind = kind_of(path)
    if kind.name not in _READERS:
        raise ValueError(taken_elsewhere(path, kind))
    return _READERS[kind.name](path)


def _levels(table: pd.DataFrame, several: bool) -> list[str]:
    """Columns for what the index says and names of rows cannot: levels, and its name where rows are numbered anew."""
    names = table.index.names
    if len(names) == 1 and (names[0] is None or not several):
        return []
    return [f"level_{number}" if name is None else str(name) for number, name in enumerate(names)]


def _joined(found: pd.DataFrame, table: pd.DataFrame, where: str) -> pd.DataFrame:
    """Rows with what a table knows of them."""
    shared = [column for column in table if column in found]
    if not shared:
        msg = f"{where} and the table share no column ({', '.join(map(str, table))}): name them alike."
        raise KeyError(msg)
    left, right = found[shared].astype(str), table[shared].astype(str)
    if right.duplicated().any():
        first = " ".join(right[right.duplicated()].iloc[0])
        msg = f"The table has several rows for one {', '.join(map(str, shared))} (such as {first}): keep one of each."
        raise ValueError(msg)
    rows = left.merge(right.assign(row=range(len(right))), how="left", on=shared)["row"]
    if rows.isna().any():
        first = " ".join(left[rows.isna().to_numpy()].iloc[0])
        msg = f"{rows.isna().sum():,} rows of {where} are not in the table (such as {', '.join(shared)} {first})."
        raise ValueError(msg)
    new = table.drop(columns=shared).iloc[rows.astype(int)].set_axis(found.index)
    return pd.concat([found, new], axis=1)
