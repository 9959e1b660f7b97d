"""What lies at a path, told without reading much of it, and which function takes it."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from scbd.data._frames import head_of, is_table
from scbd.data._walking import walked

IMAGE_FILES = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp")
HDF5 = (".h5ad", ".h5sc", ".h5", ".hdf5")
_SQLITE = (".sqlite", ".sqlite3", ".db")
_ZARR = ("zarr.json", ".zattrs", ".zgroup", ".zarray")


class Kind(NamedTuple):
    """One of the things that people have."""

    name: str
    about: str
    """What it is, as in "x is …"."""
    remedy: str
    """How to take it, as in "…: do this"."""


_KINDS = {
    name: Kind(name, about, remedy)
    for name, about, remedy in [
        ("anndata", "an AnnData", "open it with scbd.data.open_screen; where it has no images, with layer='X'"),
        ("arrays", "a file of numpy arrays", "read crops from it with scbd.data.read_crops"),
        ("lmdb", "the LMDB of a screen", "read crops from it with scbd.data.read_crops"),
        ("image_table", "a table that names image files", "read crops with scbd.data.read_crops(path, file_columns=…)"),
        ("image_folder", "a folder of images", "read it with scbd.data.read_crops, if each is a crop of one cell"),
        ("profiles", "a table of features", "read it with scbd.data.read_profiles"),
        ("deepprofiler", "features of DeepProfiler", "read them with scbd.data.read_profiles"),
        ("cellprofiler", "the output of CellProfiler", "read it with scbd.data.read_cellprofiler"),
        (
            "cellprofiler_table",
            "one of CellProfiler's tables",
            "give the folder of all of them to scbd.data.read_cellprofiler",
        ),
        ("field", "an image", "cut crops of its cells with scbd.data.crop_cells"),
        ("ome_image", "an OME-Zarr image", "cut crops of its cells with scbd.data.crop_cells"),
        ("ome_plate", "an OME-Zarr plate", "list its fields with scbd.data.read_plate, for scbd.data.crop_cells"),
        (
            "spatialdata",
            "a SpatialData store",
            "read it with spatialdata, and cut crops with scbd.data.from_spatialdata",
        ),
        (
            "unknown",
            "of no known kind",
            f"give {', '.join(HDF5)}, .zarr, .npz, .npy, a table (.csv, .tsv, .parquet) of image files or features, a "
            "folder of images, of CellProfiler or DeepProfiler, or that of an LMDB",
        ),
    ]
}


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """What lies there.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    ValueError
        If it is a table that cannot be read.
    """
    where = Path(path)
    if not where.exists():
        msg = f"There is nothing at {path}."
        raise FileNotFoundError(msg)
    return _KINDS[_folder(where) if where.is_dir() else _file(where)]


def taken_elsewhere(path: str | os.PathLike[str], kind: Kind) -> str:
    """That this is something else, and which function takes it."""
    return f"{path} is {kind.about}: {kind.remedy}."


def _file(path: Path) -> str:
    ending = path.suffix.lower()
    if ending == ".npz":
        return "deepprofiler" if _has_features(path) else "arrays"
    if is_table(path):
        return _table(path)
    kinds = {HDF5: "anndata", (".npy",): "arrays", _SQLITE: "cellprofiler", IMAGE_FILES: "field"}
    return next((name for endings, name in kinds.items() if ending in endings), "unknown")


def _table(path: Path) -> str:
    columns = set(map(str, head_of(path)))
    if "ImageNumber" in columns and ("ObjectNumber" in columns or path.stem.endswith("Image")):
        return "cellprofiler_table"
    return "image_table" if image_columns(path) else "profiles"


def image_columns(path: str | os.PathLike[str]) -> list[str]:
    """Columns of a table that name image files, by its first rows."""
    text = head_of(path).select_dtypes(exclude=["number", "bool"]).astype(str)
    names_images = text.map(lambda value: value.lower().endswith(IMAGE_FILES)).any()
    return [str(column) for column in text.columns[names_images.to_numpy(bool)]]


def _folder(path: Path) -> str:
    if (path / "data.mdb").is_file():
        return "lmdb"
    if path.suffix == ".zarr" or any((path / name).is_file() for name in _ZARR):
        return _zarr(path)
    for place, files in walked(path):
        for name in files:
            if name.endswith(("Image.csv", "Image.tsv")):
                return "cellprofiler"
            if name.endswith(".npz") and _has_features(Path(place, name)):
                return "deepprofiler"
            if name.lower().endswith(IMAGE_FILES):
                return "image_folder"
    return "unknown"


def _zarr(path: Path) -> str:
    """By the attributes of the store's root, of either format; what says nothing is taken for an AnnData."""
    attributes: dict[str, Any] = {}
    for name, place in {"zarr.json": "attributes", ".zattrs": None}.items():
        found = _json(path / name)
        attributes |= found if place is None else _mapping(found.get(place))
    attributes |= _mapping(attributes.get("ome"))
    marks = {"spatialdata_attrs": "spatialdata", "plate": "ome_plate", "multiscales": "ome_image"}
    return next((name for mark, name in marks.items() if mark in attributes), "anndata")


def _json(path: Path) -> dict[str, Any]:
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _has_features(path: Path) -> bool:
    """Whether an archive of arrays has those of DeepProfiler."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"features.npy", "locations.npy"} <= set(archive.namelist())
