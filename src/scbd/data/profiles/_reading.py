"""Tables of features, whoever has measured them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from scbd.data._formats import kind_of, taken_elsewhere
from scbd.data._frames import read_frame
from scbd.data.profiles._cellprofiler import cellprofiler_table
from scbd.data.profiles._deepprofiler import deepprofiler_table
from scbd.data.profiles._features import Missing, profiles_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

_READERS = {
    "cellprofiler": cellprofiler_table,
    "deepprofiler": deepprofiler_table,
    "image_table": read_frame,
    "profiles": read_frame,
}


def read_profiles(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    obs_columns: Sequence[str] = (),
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    missing: Missing = "drop",
) -> AnnData:
    """Features of cells or wells, as they come from CellProfiler, pycytominer, CytoTable, DeepProfiler and others.

    Numbers are features, unless their column names or places something: ``Metadata_…``, ``Image_…``, ``…Location_…``,
    ``…Parent_…``, ``ImageNumber`` and the like, ``plate``, ``well``, ``site``, ``x``, ``y``. Those go to ``obs``, as
    all columns of text do. Features of one value stay; :meth:`~scbd.SCBDModel.setup_anndata` leaves them out, and says
    so.

    Parameters
    ----------
    path
        ``.parquet``, ``.csv``, ``.tsv`` (also ``.csv.gz``, ``.tsv.gz``) with a cell or well a row; a folder or
        ``.sqlite`` of CellProfiler (:func:`read_cellprofiler`); an ``.npz`` of DeepProfiler, or the folder of them,
        where folders are called by plate and well. Several, such as a file for each plate, are put together.
    obs_columns
        Columns of numbers that are no features either.
    table
        What else is known, such as a plate map: a frame or a file, joined by the columns that both have.
    missing
        Of missing and infinite values. Features that lack more than 5 % of their values are left out; then ``"drop"``
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
        If it is of another kind (which, and what takes it), truncated, or has no feature; or if ``table`` has several
        rows for one.

    Warns
    -----
    UserWarning
        If features or rows are left out, or values filled in: how many, and which.

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
    found = pd.concat([_read(one) for one in paths], ignore_index=len(paths) > 1)
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} others"
    if table is not None:
        found = _joined(found, table if isinstance(table, pd.DataFrame) else read_frame(table), where)
    return profiles_of(found, obs_columns, missing, where)


def _read(path: Path) -> pd.DataFrame:
    kind = kind_of(path)
    if kind.name not in _READERS:
        raise ValueError(taken_elsewhere(path, kind))
    return _READERS[kind.name](path)


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
