"""Detection of the kind of data that a file or folder holds."""

from __future__ import annotations

import json
import os
import zipfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scbd._shared.files import check_file, existing_path, local_path
from scbd._shared.numeric_tables import is_number_dtype
from scbd.data._tables import (
    COMPRESSIONS,
    N_HEAD_ROWS,
    is_partitioned_table,
    is_table,
    read_first_rows,
    read_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd

# Default prefixes of the names of feature columns. "Cells_", "Cytoplasm_" and "Nuclei_" are the compartments of
# CellProfiler. "feature_" is the prefix that this package adds to the numbered features of DeepProfiler.
FEATURE_PREFIXES = ("Cells_", "Cytoplasm_", "Nuclei_", "feature_")
# name of the column that states from which file each row was read, if a table is read from several files
SOURCE_COLUMN = "source"
IMAGE_ENDINGS = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp")
HDF5_ENDINGS = (".h5ad", ".h5sc", ".h5", ".hdf5")
_SQLITE_ENDINGS = (".sqlite", ".sqlite3", ".db")
_ZARR_FILES = ("zarr.json", ".zattrs", ".zgroup", ".zarray")
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

    A table holds output of CellProfiler; features, if numeric columns begin with one of :data:`FEATURE_PREFIXES`, even
    next to names of image files; names of image files; or features of other names.
    """
    # only columns with the default prefixes are tested for numbers, since there may be thousands of columns
    first_rows = read_table(path, begin_like_features, N_HEAD_ROWS).frame
    if "ImageNumber" in first_rows and ("ObjectNumber" in first_rows or path.stem.endswith("Image")):
        return "cellprofiler_table"
    has_features = any(is_number_dtype(first_rows[name].dtype) for name in begin_like_features(list(first_rows)))
    return "image_table" if _image_columns(first_rows) and not has_features else "profiles"


def begin_like_features(names: Sequence[str]) -> list[str]:
    """Return the names of columns that begin with one of :data:`FEATURE_PREFIXES`."""
    return [name for name in names if name.startswith(FEATURE_PREFIXES)]


def image_columns(path: str | os.PathLike[str]) -> list[str]:
    """Return the columns of a table file that hold names of image files in the first rows."""
    return _image_columns(read_first_rows(path))


def _image_columns(first_rows: pd.DataFrame) -> list[str]:
    """Return the columns of a table in which any value ends like the name of an image file, such as ``.png``."""
    text = first_rows.select_dtypes(exclude=["number", "bool"])
    return [name for name in text if any(str(value).lower().endswith(IMAGE_ENDINGS) for value in text[name])]


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


def list_tables(path: Path) -> list[Path]:
    """Return the paths of all tables in a folder of tables. For any other path, return a list of only this path."""
    if not path.is_dir() or is_partitioned_table(path) or detect_kind(path).name != "tables":
        return [path]
    return [Path(place, name) for place, names in walk_folders(path) for name in names if is_table(name)]


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
    stems = [path.with_suffix("").stem if path.suffix.lower() in COMPRESSIONS else path.stem for path in paths]
    depth = max(len(path.parts) for path in paths)
    for names in [stems, *(["/".join(path.parts[-n:]) for path in paths] for n in range(1, depth + 1))]:
        if len({*names, *taken}) == len(names) + len(taken):
            return names
    numbers = count(len(taken))
    return [next(name for n in numbers if (name := f"{stem} {n}") not in taken) for stem in stems]
