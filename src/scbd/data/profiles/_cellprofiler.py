"""CellProfiler's output: a table of images and one for each kind of object, as CSV files or in SQLite."""

from __future__ import annotations

import os
import sqlite3
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import pandas as pd

from scbd._messages import head, missing_key
from scbd.data._formats import kind_of, taken_elsewhere
from scbd.data._frames import head_of, read_frame
from scbd.data.profiles._features import Missing, profiles_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anndata import AnnData

# which objects are the cells, where nobody says
_CELLS = ("Nuclei", "Cells", "Object")
# a table of ExportToDatabase that has all objects side by side, under their names
_TOGETHER = "Object"


class _Export(NamedTuple):
    """What one run has written: tables, by the names of their objects, that are read when they are needed."""

    name: str
    image: Callable[[], pd.DataFrame]
    objects: Mapping[str, Callable[[], pd.DataFrame]]


def read_cellprofiler(
    path: str | os.PathLike[str],
    *,
    objects: str | Sequence[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    missing: Missing = "drop",
) -> AnnData:
    """Cells as CellProfiler has measured them: features in ``X``, and in ``obs`` where each lies in which images.

    Parameters
    ----------
    path
        Folder with the CSV files of ExportToSpreadsheet, or with folders of them (one a plate or site, each with its
        own ``Image.csv``); or the SQLite file of ExportToDatabase, or of cytominer-database.
    objects
        Kinds of objects whose features are taken. The first is the cell, whose centre is that of the crop; of others,
        each cell has the one that CellProfiler names as its parent or child. By default ``Nuclei``, or else ``Cells``,
        and all that are so linked to it.
    root
        Folder where the images lie now, where CellProfiler saw them elsewhere: what ``PathName_…`` says is looked for
        below, by the end of it.
    missing
        What becomes of missing and infinite values, see :func:`read_profiles`. A cell that lacks one of the objects
        has missing values.

    Returns
    -------
    AnnData of cells. ``X`` is float32, by features that are called ``Nuclei_AreaShape_Area`` and the like. ``obs`` has
    ``field`` (folder and ``ImageNumber``), ``y`` and ``x`` of the centre in pixels (0 is the middle of the first
    pixel), ``path_<channel>`` of each image, the image table's ``Metadata_…``, and the numbers of the object.

    Raises
    ------
    FileNotFoundError
        If there is nothing, or no image table.
    KeyError
        If there are no such objects.
    ValueError
        If it is of another kind (which, and what takes it), a table is truncated, objects lie in images that are not in
        the image table, two images or two cells have one number (tables of several runs in one file), or nothing says
        which objects are the cells.

    Warns
    -----
    UserWarning
        If objects cannot be linked to the cells, or there are several of a cell; and as :func:`read_profiles` does.

    References
    ----------
    Stirling et al. (2021), CellProfiler 4: improvements in speed, utility and usability.

    Examples
    --------
    >>> images = pd.DataFrame({"ImageNumber": [1], "Metadata_Well": ["A01"]})
    >>> images.assign(FileName_DNA="A01_dna.tif", PathName_DNA="/data/plate_1").to_csv("MyExpt_Image.csv", index=False)
    >>> nuclei = pd.DataFrame({"ImageNumber": [1, 1], "ObjectNumber": [1, 2], "AreaShape_Area": [410.0, 392.0]})
    >>> nuclei = nuclei.assign(Location_Center_X=[17.5, 80], Location_Center_Y=[30, 5.25])
    >>> nuclei.to_csv("MyExpt_Nuclei.csv", index=False)
    >>> cells = scbd.data.read_cellprofiler(".")
    >>> cells.var_names.tolist(), cells.obs["path_DNA"].iloc[0]
    (['Nuclei_AreaShape_Area'], '/data/plate_1/A01_dna.tif')
    >>> cells.obs[["y", "x"]].to_numpy().tolist()
    [[30.0, 17.5], [5.25, 80.0]]
    """
    return profiles_of(cellprofiler_table(path, objects, root), (), missing, str(path))


def cellprofiler_table(
    path: str | os.PathLike[str],
    objects: str | Sequence[str] | None = None,
    root: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """The same as one table, a row a cell."""
    where, kind = Path(path), kind_of(path)
    if where.is_file() and kind.name != "cellprofiler":
        raise ValueError(taken_elsewhere(path, kind))
    exports = list(_folders(where) if where.is_dir() else [_database(where)])
    if not exports:
        msg = f"{path} has no image table (such as MyExpt_Image.csv): let ExportToSpreadsheet write it, beside objects."
        raise FileNotFoundError(msg)
    wanted = [objects] if isinstance(objects, str) else None if objects is None else list(objects)
    tables = [_cells(export, wanted, None if root is None else Path(root)) for export in exports]
    table = pd.concat(tables)
    return table.set_axis(table["field"] + "_" + table["ObjectNumber"].astype(str))


def _folders(folder: Path) -> Iterator[_Export]:
    """Exports to CSV files, one for each folder that has an image table."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        files = {Path(place, name).stem: Path(place, name) for name in sorted(names) if name.endswith((".csv", ".tsv"))}
        image = next((stem for stem in files if stem.endswith("Image")), None)
        if image is None:
            continue
        prefix = image.removesuffix("Image")
        numbered = {stem: file for stem, file in files.items() if "ObjectNumber" in head_of(file)}
        found = {stem.removeprefix(prefix): partial(read_frame, file) for stem, file in numbered.items()}
        where = Path(place).relative_to(folder).as_posix()
        yield _Export("" if where == "." else where, partial(read_frame, files[image]), found)


def _database(path: Path) -> _Export:
    """An export to SQLite."""

    def query(text: str) -> pd.DataFrame:
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as database:
                return pd.read_sql_query(text, database)
        except (sqlite3.Error, pd.errors.DatabaseError) as error:
            msg = f"{path} is no SQLite file of CellProfiler, or is damaged ({error})."
            raise ValueError(msg) from error

    def columns(table: str) -> list[str]:
        return list(query(f"SELECT * FROM {_quoted(table)} LIMIT 0"))

    tables = query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name")["name"]
    image = next((name for name in tables if name.endswith("Image") and "ImageNumber" in columns(name)), None)
    if image is None:
        msg = f"{path} has no table of images that ends in 'Image' (its tables: {head(tables, 10) or 'none'})."
        raise FileNotFoundError(msg)
    prefix = image.removesuffix("Image")
    of_objects = [name for name in tables if name.startswith(prefix) and _number(name, prefix, columns(name))]

    def table(name: str) -> pd.DataFrame:
        found = query(f"SELECT * FROM {_quoted(name)}")
        return found.rename(columns={_number(name, prefix, list(found)): "ObjectNumber"})

    objects = {name.removeprefix(prefix): partial(table, name) for name in of_objects}
    return _Export("", partial(query, f"SELECT * FROM {_quoted(image)}"), objects)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _number(table: str, prefix: str, columns: list[str]) -> str | None:
    """Column with the number of the object, in a table of objects."""
    own = f"{table.removeprefix(prefix)}_"
    names = ("ObjectNumber", f"{own}ObjectNumber", f"{own}Number_Object_Number")
    return next((name for name in names if name in columns), None) if "ImageNumber" in columns else None


def _cells(export: _Export, wanted: list[str] | None, root: Path | None) -> pd.DataFrame:
    """A row a cell: features of all its objects, and what the image table knows."""
    names = wanted or [next((name for name in _CELLS if name in export.objects), "")]
    if not export.objects or names == [""]:
        msg = (
            f"{export.name or 'The export'} has the objects {', '.join(export.objects) or 'none'}, and nothing says "
            "which are the cells: name them with objects=…."
        )
        raise ValueError(msg)
    for name in names:
        if name not in export.objects:
            raise KeyError(missing_key("CellProfiler's output", name, export.objects, "objects"))
    images = _images(export, root)
    cells = _named(export.objects[names[0]](), names[0])
    keys = _keys(cells, images)
    where = export.name or "The export"
    _check_numbers(images, keys, "images", where)
    _check_numbers(cells, [*keys, "ObjectNumber"], names[0], where)
    others = names[1:] if wanted else [name for name in export.objects if name != names[0]]
    for other in others:
        cells = _linked(cells, names[0], _named(export.objects[other](), other), other, said=wanted is not None)
    lost = ~pd.MultiIndex.from_frame(cells[keys]).isin(pd.MultiIndex.from_frame(images[keys]))
    if lost.any():
        first = cells.loc[lost, "ImageNumber"].iloc[0]
        msg = (
            f"{lost.sum():,} of {len(cells):,} {names[0]} lie in images that the image table does not have "
            f"(ImageNumber {first}): these tables are of different runs."
        )
        raise ValueError(msg)
    own = cells.drop(columns=[column for column in images if column in cells and column not in keys])
    return _placed(own.merge(images, on=keys), names[0])


def _check_numbers(table: pd.DataFrame, keys: list[str], what: str, where: str) -> None:
    """One row for each number: runs count from 1 each, and in one file every cell would lie in the images of all."""
    twice = table[table.duplicated(keys)]
    if len(twice):
        first = ", ".join(f"{key} {twice[key].iloc[0]}" for key in keys)
        msg = (
            f"{where} has several {what} of one number ({first}): tables of several runs were put into one. Read the "
            "folder of each run by itself, or put all of these folders into one and give that; or number the runs in a "
            "column TableNumber of all tables."
        )
        raise ValueError(msg)


def _keys(*tables: pd.DataFrame) -> list[str]:
    """What says which image a row is about: SQLite files of many exports number their tables."""
    return [key for key in ("TableNumber", "ImageNumber") if all(key in table for table in tables)]


def _named(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Features under the name of their object, as ExportToDatabase calls them already."""
    kept = ("Metadata_", "Image_", "ImageNumber", "ObjectNumber", "TableNumber", f"{name}_")
    if name == _TOGETHER:
        return table
    return table.rename(columns={column: f"{name}_{column}" for column in table if not column.startswith(kept)})


def _linked(cells: pd.DataFrame, name: str, table: pd.DataFrame, other: str, *, said: bool) -> pd.DataFrame:
    """Cells with the one object of another kind that is their parent or child."""
    keys = _keys(cells, table)
    up, down = f"{name}_Parent_{other}", f"{other}_Parent_{name}"
    left, right = (up, "ObjectNumber") if up in cells else ("ObjectNumber", down)
    if right not in table:
        why = f"neither has a column that links them ({up} or {down})"
    else:
        table = table.loc[table[right] > 0, [c for c in table if c in (*keys, right) or c.startswith(f"{other}_")]]
        if not table.duplicated([*keys, right]).any():
            linked = cells.assign(_link=cells[left]).merge(
                table.rename(columns={right: "_link"}), how="left", on=[*keys, "_link"]
            )
            return linked.drop(columns="_link")
        why = f"there are several of one of {name}"
    msg = f"{other} are left out: {why}."
    if said:
        raise ValueError(msg)
    warnings.warn(msg, UserWarning, stacklevel=5)
    return cells


def _images(export: _Export, root: Path | None) -> pd.DataFrame:
    """Of each image its numbers, what was said of it, and the paths of its channels."""
    table = export.image().rename(columns=lambda column: str(column).removeprefix("Image_"))
    kept = [column for column in table if column.startswith("Metadata_")]
    images = table[[*_keys(table), *kept]].copy()
    for column in [column for column in table if column.startswith("FileName_")]:
        channel = column.removeprefix("FileName_")
        folders = table.get(f"PathName_{channel}", pd.Series("", index=table.index)).fillna("").astype(str)
        places = {folder: _found(folder, root) for folder in folders.unique()}
        files = table[column]
        images[f"path_{channel}"] = (folders.map(places) + files.astype(str)).where(files.notna())
    number = images[_keys(images)].astype(str).agg("_".join, axis=1)
    return images.assign(field=f"{export.name}/" + number if export.name else number)


def _found(folder: str, root: Path | None) -> str:
    """A folder as it was called, with the separator behind it; below another root what its name ends in."""
    parts = (PureWindowsPath(folder) if "\\" in folder else Path(folder)).parts
    if root is None:
        return f"{folder.rstrip('/')}/" if folder else ""
    ends = (root.joinpath(*parts[start:]) for start in range(1, len(parts)))
    return f"{next((end for end in ends if end.is_dir()), root)}/"


def _placed(cells: pd.DataFrame, name: str) -> pd.DataFrame:
    """With the centre in pixels, where it was measured."""
    ends = ("Location_Center_", "AreaShape_Center_")
    owners = (name,) if name != _TOGETHER else _CELLS
    names = [f"{owner}_{end}" for owner in owners for end in ends]
    found = next((start for start in names if f"{start}X" in cells and f"{start}Y" in cells), None)
    return cells if found is None else cells.assign(y=cells[f"{found}Y"], x=cells[f"{found}X"])
