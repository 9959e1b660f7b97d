"""Detection of the kind of data that a file or folder holds, and readers of tables."""

from __future__ import annotations

import json
import os
import re
import zipfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._shared.files import check_file, existing_path, local_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# name of the column that states from which file each row was read, if a table is read from several files
SOURCE_COLUMN = "source"
IMAGE_ENDINGS = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp")
HDF5_ENDINGS = (".h5ad", ".h5sc", ".h5", ".hdf5")
_SQLITE_ENDINGS = (".sqlite", ".sqlite3", ".db")
_ZARR_FILES = ("zarr.json", ".zattrs", ".zgroup", ".zarray")
_SEPARATORS = {".csv": ",", ".tsv": "\t", ".csv.gz": ",", ".tsv.gz": "\t"}
TABLE_ENDINGS = (*_SEPARATORS, ".parquet")
# number of rows at the top of a table that are read to detect what the table holds, such as features
_N_HEAD_ROWS = 5
# Columns that hold numbers with leading zeros, such as plate 0012, are read as text. Such columns are found by a search
# of the rows at the top of a table.
# _N_SEARCHED_ROWS: number of rows that are searched when a whole table is read.
# _N_SEARCHED_OF_HEAD: number of rows that are searched when only the first rows of a table are read.
_N_SEARCHED_ROWS, _N_SEARCHED_OF_HEAD = 1_000, 100
_LEADING_ZERO = re.compile(r"^0\d+$", re.MULTILINE)
# names of folders that macOS adds to archives; they hold no data
_IGNORED_FOLDERS = ("__MACOSX",)


class DataKind(NamedTuple):
    """Kind of data that a file or folder holds, such as a table of features, with advice on how to read it."""

    name: str
    about: str
    """Description of this kind of data that completes the sentence "x is …"."""
    advice: str
    """Advice on how to read this kind of data, in the imperative."""


_KINDS = {
    name: DataKind(name, about, advice)
    for name, about, advice in [
        ("anndata", "an AnnData", "open it with scbd.data.open_screen; where it has no images, with layer='X'"),
        ("arrays", "a file of numpy arrays", "read crops from it with scbd.data.read_crops"),
        ("lmdb", "the LMDB of a screen", "read crops from it with scbd.data.read_crops"),
        ("image_table", "a table that names image files", "read crops with scbd.data.read_crops(path, file_columns=…)"),
        ("image_folder", "a folder of images", "read it with scbd.data.read_crops, if each is a crop of one cell"),
        ("profiles", "a table of features", "read it with scbd.data.read_profiles"),
        ("tables", "a folder of tables", "read it with scbd.data.read_profiles, if they are of features"),
        ("deepprofiler", "features of DeepProfiler", "read them with scbd.data.read_profiles"),
        (
            "cellprofiler",
            "the output of CellProfiler",
            "make one table of it with CytoTable",
        ),
        (
            "cellprofiler_table",
            "one of CellProfiler's tables",
            "make one table of all of them with CytoTable",
        ),
        ("field", "an image", "read it as an array, and cut crops of its cells with scbd.data.crop_cells"),
        ("ome_image", "an OME-Zarr image", "read it with ome-zarr, and cut crops with scbd.data.crop_cells"),
        ("ome_plate", "an OME-Zarr plate", "read its fields with ome-zarr, and cut crops with scbd.data.crop_cells"),
        ("spatialdata", "a SpatialData store", "read it with spatialdata, and cut crops with scbd.data.crop_cells"),
        (
            "unknown",
            "of no known kind",
            f"give {', '.join(HDF5_ENDINGS)}, .zarr, .npz, .npy, a table (.csv, .tsv, .parquet) of image files or "
            "features, a folder of images, of tables or of DeepProfiler, or that of an LMDB",
        ),
    ]
}


def detect_kind(path: str | os.PathLike[str]) -> DataKind:
    """Detect the kind of data that a file or folder holds, such as an AnnData or a table of features.

    The kind is determined from the names of files and, where necessary, from a part of their content: the first rows of
    a table, the names of the arrays in an ``.npz`` file, or the attributes of a Zarr store.

    Parameters
    ----------
    path
        File or folder on this machine, or address of a Zarr store.

    Raises
    ------
    FileNotFoundError
        If nothing exists at ``path``.
    ValueError
        If ``path`` is a table that cannot be read, a placeholder of Git LFS, or an address that does not end with
        ``.zarr``.
    """
    if "://" in os.fspath(path) and os.fspath(path).rstrip("/").endswith(".zarr"):
        return _KINDS["anndata"]
    where = existing_path(path)
    return _KINDS[_detect_folder_kind(where) if where.is_dir() else _detect_file_kind(check_file(where))]


def describe_reader(path: str | os.PathLike[str], kind: DataKind) -> str:
    """Return a message that names the kind of data at a path and advises how to read this kind."""
    return f"{path} is {kind.about}: {kind.advice}."


def _detect_file_kind(path: Path) -> str:
    """Return the name of the kind of data that a file holds."""
    ending = path.suffix.lower()
    if ending == ".npz":
        return "deepprofiler" if _has_deepprofiler_features(path) else "arrays"
    if is_table(path):
        return _detect_table_kind(path)
    kinds = {HDF5_ENDINGS: "anndata", (".npy",): "arrays", _SQLITE_ENDINGS: "cellprofiler", IMAGE_ENDINGS: "field"}
    return next((name for endings, name in kinds.items() if ending in endings), "unknown")


def _detect_table_kind(path: Path) -> str:
    """Return the name of the kind of data that a table holds, from its first rows.

    A table holds output of CellProfiler, the names of image files, or features.
    """
    first_rows = read_first_rows(path)
    columns = set(map(str, first_rows))
    if "ImageNumber" in columns and ("ObjectNumber" in columns or path.stem.endswith("Image")):
        return "cellprofiler_table"
    return "image_table" if _image_columns(first_rows) else "profiles"


def image_columns(path: str | os.PathLike[str]) -> list[str]:
    """Return the columns of a table file that hold names of image files in the first rows."""
    return _image_columns(read_first_rows(path))


def _image_columns(first_rows: pd.DataFrame) -> list[str]:
    """Return the columns of a table in which any value ends like the name of an image file, such as ``.png``."""
    text = first_rows.select_dtypes(exclude=["number", "bool"]).astype(str)
    names_images = text.map(lambda value: str(value).lower().endswith(IMAGE_ENDINGS)).any()
    return [str(column) for column in text.columns[names_images.to_numpy(bool)]]


def _detect_folder_kind(path: Path) -> str:
    """Return the name of the kind of data that a folder holds."""
    if (path / "data.mdb").is_file():
        return "lmdb"
    if path.suffix == ".zarr" or any((path / name).is_file() for name in _ZARR_FILES):
        return _detect_zarr_kind(path)
    found = "unknown"
    for place, files in walk_folders(path):
        # tables of CellProfiler and features of DeepProfiler are searched before images, which may lie in the same
        # folder
        if any(name.endswith(("Image.csv", "Image.tsv")) for name in files):
            return "cellprofiler"
        if any(name.endswith(".npz") and _has_deepprofiler_features(Path(place, name)) for name in files):
            return "deepprofiler"
        if any(name.lower().endswith(IMAGE_ENDINGS) for name in files):
            return "image_folder"
        found = "tables" if any(map(is_table, files)) else found
    return found


def _detect_zarr_kind(path: Path) -> str:
    """Return the name of the kind of data that a Zarr store (format 2 or 3) holds.

    The kind is read from the attributes of the root of the store. A store without attributes of SpatialData or OME-Zarr
    is taken for an AnnData.
    """
    attributes: dict[str, Any] = {}
    for name, place in {"zarr.json": "attributes", ".zattrs": None}.items():
        found = _read_json(path / name)
        attributes |= found if place is None else _dict_or_empty(found.get(place))
    attributes |= _dict_or_empty(attributes.get("ome"))
    marks = {"spatialdata_attrs": "spatialdata", "plate": "ome_plate", "multiscales": "ome_image"}
    return next((name for mark, name in marks.items() if mark in attributes), "anndata")


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file as a dictionary, which is empty if the file is missing or invalid."""
    try:
        return _dict_or_empty(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _has_deepprofiler_features(path: Path) -> bool:
    """Return whether an ``.npz`` file holds an array with features of cells, as written by DeepProfiler."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "features.npy" in archive.namelist()


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether the name of a file ends like that of a table, such as ``.csv`` or ``.parquet``."""
    return str(path).lower().endswith(TABLE_ENDINGS)


def is_partitioned_table(path: Path) -> bool:
    """Return whether a folder holds a single table that is split into several files.

    The name of such a folder ends with ``.parquet``, or its subfolders are named by a column and its value, such as
    ``plate=P1``.
    """
    return path.is_dir() and (path.suffix.lower() == ".parquet" or any(path.glob("*=*/")))


def list_tables(path: Path) -> list[Path]:
    """Return the paths of all tables in a folder of tables. For any other path, return a list of only this path."""
    if not path.is_dir() or is_partitioned_table(path) or detect_kind(path).name != "tables":
        return [path]
    return [Path(place, name) for place, names in walk_folders(path) for name in names if is_table(name)]


def read_table_file(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a table from a file, or from a folder of parts as written by Spark and pandas.

    A column of a ``.csv`` or ``.tsv`` file is read as text if one of its first 1,000 values is a number with leading
    zeros, such as plate ``0012``. In columns of text, words such as ``None`` and ``NA`` are kept as text, and only
    empty fields are missing values.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ImportError
        If the table is in Parquet format and pyarrow is not installed.
    ValueError
        If the file is not a table, is not encoded as UTF-8, has a separator other than commas (tabs for ``.tsv``), has
        two header rows, is empty, or is truncated.
    """
    return _read_table_of_kind(path, None)


def read_first_rows(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read only the first five rows of a table; errors are those of :func:`read_table_file`."""
    return _read_table_of_kind(path, _N_HEAD_ROWS)


def _read_table_of_kind(path: str | os.PathLike[str], n_rows: int | None) -> pd.DataFrame:
    """Read a table from a text or Parquet file; if ``n_rows`` is given, read only its first ``n_rows`` rows."""
    where = local_path(path)
    if not (is_table(where) or is_partitioned_table(where)):
        msg = f"{where} is no table: give one of {', '.join(TABLE_ENDINGS)}."
        raise ValueError(msg)
    if not is_partitioned_table(where):
        check_file(where)
    try:
        if where.suffix.lower() == ".parquet" or is_partitioned_table(where):
            return _read_parquet(where, n_rows)
        name = where.name.lower()
        separator = next(mark for ending, mark in _SEPARATORS.items() if name.endswith(ending))
        n_searched = _N_SEARCHED_ROWS if n_rows is None else _N_SEARCHED_OF_HEAD
        rows = pd.read_csv(where, sep=separator, nrows=n_searched, dtype=str, keep_default_na=False)
        as_text = dict.fromkeys(_columns_with_leading_zeros(rows), str)
        table = pd.read_csv(where, sep=separator, nrows=n_rows, low_memory=False, dtype=as_text)
        table = _restore_words(table, where, separator, n_rows)
    except UnicodeDecodeError as error:
        msg = (
            f"{where} is text of another encoding than UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8. "
            "pandas reads it with encoding='cp1252', or 'utf-16' where a spreadsheet wrote Unicode text."
        )
        raise ValueError(msg) from error
    except (OSError, EOFError, ValueError) as error:
        msg = f"{where} cannot be read as a table, is empty, or truncated ({error})."
        raise ValueError(msg) from error
    if rows.shape[1] == 1 and (other := next((mark for mark in ";\t|," if mark in rows.columns[0]), None)):
        msg = (
            f"{where} is separated by {other!r}: pandas reads it with sep={other!r} (and decimal=',', if numbers are "
            "written so); save it with commas, or tabs as .tsv."
        )
        raise ValueError(msg)
    if _has_two_rows_of_names(rows):
        msg = (
            f"{where} has two rows of names: make one of them, table = pandas.read_csv(…, header=[0, 1]), "
            "table.columns = ['_'.join(name) for name in table.columns], and save it again."
        )
        raise ValueError(msg)
    return table


def _read_parquet(path: Path, n_rows: int | None) -> pd.DataFrame:
    """Read a table in Parquet format. Of a single file, read only the first ``n_rows`` rows, if this is given.

    A folder of Parquet files is always read completely.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        msg = f"{path} is read by pyarrow: pip install pyarrow, or save the table as .csv."
        raise ImportError(msg) from error
    if n_rows is None or path.is_dir():
        return pd.read_parquet(path)
    with pyarrow.parquet.ParquetFile(path) as file:
        return next(file.iter_batches(n_rows), file.schema_arrow.empty_table()).to_pandas()


def _columns_with_leading_zeros(rows: pd.DataFrame) -> list[str]:
    """Return the columns of a table that hold numbers with leading zeros, such as ``0012``.

    Such numbers are names, for example of plates and wells. Without the zeros, different names could become equal.
    """
    # Join all values of a column, which are text, and search them once. This is a hundred times faster than one search
    # per value.
    return [name for name in rows if _LEADING_ZERO.search("\n".join(rows[name]))]


def _restore_words(table: pd.DataFrame, path: Path, separator: str, n_rows: int | None) -> pd.DataFrame:
    """Restore words in the text columns of a table, such as ``None``, that pandas has replaced by missing values.

    Parameters
    ----------
    table
        Table that pandas has read from ``path``. Its columns are replaced in place.
    path
        File of the table, which is read again.
    separator
        Separator of the columns in the file.
    n_rows
        Number of rows of the file that were read. `None`: all rows.
    """
    is_missing, kinds = table.isna(), table.dtypes
    places = [
        place
        for place in np.flatnonzero(is_missing.any())
        if kinds.iloc[place].kind == "O" or is_missing.iloc[:, place].all()
    ]
    if places:
        how = {"keep_default_na": False, "na_values": [""], "dtype": str}
        text = pd.read_csv(path, sep=separator, nrows=n_rows, usecols=places, **how)
        for place, (_, words) in zip(places, text.items(), strict=True):
            # a column without values stays numeric, since the same column may hold numbers in other files
            if words.notna().any():
                table[table.columns[place]] = words
    return table


def _has_two_rows_of_names(rows: pd.DataFrame) -> bool:
    """Return whether a table has a second row of column names below its header.

    This is assumed if at least half of the columns (and at least two) have a word in their first row and only numbers
    below it.
    """
    if len(rows) < 2:
        return False
    first, below, least = rows.iloc[0], rows.iloc[1:], max(2, rows.shape[1] / 2)
    is_word = pd.to_numeric(first, errors="coerce").isna() & (first != "")
    # in nearly all tables, the first row holds few words, and no column need be converted to numbers
    if is_word.sum() < least:
        return False
    is_number = below.apply(lambda column: pd.to_numeric(column, errors="coerce")).notna()
    words_above = is_word & (is_number | (below == "")).all() & is_number.any()
    return int(words_above.sum()) >= least


def walk_folders(folder: str | os.PathLike[str], above: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Iterate over a folder and all its subfolders, and yield the path of each with the names of its files.

    Folders are visited from top to bottom, in alphabetical order. Links to folders are followed, except links to a
    folder that contains the link. Hidden files and folders (names with a leading dot) are skipped.

    Parameters
    ----------
    folder
        Folder in which to begin.
    above
        Resolved paths of the folders that contain ``folder``. Links to these folders are not followed.

    Raises
    ------
    OSError
        If a folder cannot be listed.
    """
    place = os.path.realpath(folder)
    if place in above:
        return
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    yield os.fspath(folder), [name for name, is_folder in found if not is_folder]
    for name, is_folder in found:
        if is_folder and name not in _IGNORED_FOLDERS:
            yield from walk_folders(os.path.join(folder, name), (*above, place))


def unique_file_names(plates: Sequence[str], taken: set[str]) -> list[str]:
    """Return a unique name for each of several files, such as the tables of several plates.

    The name is that of the file without its ending. If names are not unique, each file is named by the end of its path
    instead (folders and file name), with no more folders than necessary. If this is not sufficient, a number is
    appended to the name of the file.

    Parameters
    ----------
    plates
        Paths of the files.
    taken
        Names that are already in use for other files.
    """
    paths = [local_path(plate) for plate in plates]
    stems = [Path(path.name.removesuffix(".gz")).stem for path in paths]
    depth = max(len(path.parts) for path in paths)
    for names in [stems, *(["/".join(path.parts[-n:]) for path in paths] for n in range(1, depth + 1))]:
        if len({*names, *taken}) == len(names) + len(taken):
            return names
    numbers = count(len(taken))
    return [next(name for n in numbers if (name := f"{stem} {n}") not in taken) for stem in stems]
