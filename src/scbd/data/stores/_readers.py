"""Crops from what people have: AnnData, arrays, image files with their table, the LMDB of a published screen."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._files import check_file
from scbd._keys import IMAGE_KEY
from scbd.data.sources import ArraySource
from scbd.data.sources._image_files import FileSource
from scbd.data.sources._lmdb_crops import LMDBSource, lmdb_keys, parsed_keys
from scbd.data.sources._sliced import SlicedSource
from scbd.data.stores._crops import Crops, crops_of, names_for
from scbd.data.stores._opening import open_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

_HDF5 = (".h5ad", ".h5sc", ".h5", ".hdf5")


def read_crops(
    path: str | os.PathLike[str],
    *,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    image_key: str = IMAGE_KEY,
    file_columns: str | Sequence[str] = "path",
    channels: Sequence[str] | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Crops:
    """Crops of a file or folder, for :func:`write_screen`. Images are not loaded but where the format leaves no choice.

    Parameters
    ----------
    path
        What it is, is told by its name:

        - ``.h5ad``, or scPortrait's ``.h5sc``: images at ``obsm[image_key]``, of any chunks and compression;
        - ``.zarr``: an AnnData with images there;
        - ``.npz``: images at ``image_key`` (or the one array of four dimensions), columns of the table at other keys;
        - ``.npy``: images, memory-mapped, with ``table``;
        - ``.csv`` or ``.parquet``: a table whose columns name files of images, TIFF or PNG;
        - a folder with ``data.mdb``: the LMDB of Funk et al. (2022), see :func:`scbd.datasets.funk22`.
    table
        A frame, ``.csv`` or ``.parquet`` with a row for each image, in place of the file's own.
    image_key
        Where the images are.
    file_columns
        Columns with the paths of a table's images; several are stacked as channels.
    channels
        Names of the channels, in place of the file's own, or numbers.
    root
        Folder that a table's paths are relative to, by default the one where the table lies. Paths may be absolute, and
        folders in there may be links to others; a path that leaves it by name is refused, so that a table from
        elsewhere cannot name any file of this machine. Where yours names files all over it, give ``"/"``.

    Returns
    -------
    :class:`Crops`

    Raises
    ------
    FileNotFoundError
        If there is nothing at ``path``.
    KeyError, TypeError, ValueError
        If it is of another kind, truncated, or holds no images and table that fit.

    Examples
    --------
    >>> np.save("crops.npy", adata.obsm["single_cell_images"])
    >>> crops = scbd.data.read_crops("crops.npy", table=adata.obs)
    >>> crops.images.shape, list(crops.obs.columns[:2])
    ((240, 4, 32, 32), ['gene', 'sgRNA'])
    """
    path = Path(path)
    if not path.exists():
        msg = f"There is nothing at {path}."
        raise FileNotFoundError(msg)
    if (path / "data.mdb").is_file():
        crops = _lmdb(path)
    elif path.suffix in _HDF5:
        crops = _hdf5(path, image_key)
    elif path.suffix == ".zarr":
        crops = _zarr(path, image_key)
    elif path.suffix in (".npz", ".npy"):
        crops = _arrays(path, image_key)
    elif path.suffix in (".csv", ".parquet"):
        columns = [file_columns] if isinstance(file_columns, str) else list(file_columns)
        crops = _files(path, columns, path.parent if root is None else Path(root))
    else:
        msg = (
            f"{path} is of no known kind: give .h5ad, .h5sc, .zarr, .npz, .npy, a .csv or .parquet that names files of "
            "images, or the folder of an LMDB."
        )
        raise ValueError(msg)
    obs = crops.obs if table is None else _table(table)
    return Crops(crops.images, obs, crops.channels if channels is None else list(channels), str(path))


def _hdf5(path: Path, image_key: str) -> Crops:
    """Memory-mapped where that can be done, else read through the library."""
    parts, images = open_tables(path, image_key)
    if isinstance(images, h5py.Dataset):
        source: Any = SlicedSource(images, f"obsm[{image_key!r}] of {path}")
    else:
        source = ArraySource(images, f"obsm[{image_key!r}] of {path}")
    names = names_for(parts.get("var", pd.DataFrame()), source, image_key)
    return Crops(source, parts["obs"], names, str(path))


def _zarr(path: Path, image_key: str) -> Crops:
    """By the offsets of its chunks where that can be done, else through the library."""
    parts, images = open_tables(path, image_key)
    adata = AnnData(**parts | {"obsm": {image_key: images}})
    try:
        return crops_of(adata, image_key, str(path))
    except ValueError:
        source = SlicedSource(images, f"obsm[{image_key!r}] of {path}")
        return Crops(source, adata.obs, names_for(adata.var, source, image_key), str(path))


def _arrays(path: Path, image_key: str) -> Crops:
    try:
        if path.suffix == ".npy":
            images = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        msg = f"{path} cannot be read as numpy arrays ({error}): it is truncated, foreign, or holds Python objects."
        raise ValueError(msg) from error
    if path.suffix == ".npy":
        return Crops(ArraySource(images, str(path)), _unnamed(len(images)), _numbered(images.shape[1]), str(path))
    candidates = [key for key, values in arrays.items() if values.ndim == 4]
    key = image_key if image_key in arrays else candidates[0] if len(candidates) == 1 else None
    if key is None:
        msg = f"{path} has no array {image_key!r} (it has: {', '.join(arrays)}): name the images with image_key."
        raise KeyError(msg)
    source = ArraySource(arrays.pop(key), f"{key!r} of {path}")
    n, n_channels = source.shape[:2]
    columns = {key: values for key, values in arrays.items() if values.shape == (n,)}
    names = arrays.get("channels", np.empty(0))
    channels = names.astype(str).tolist() if names.shape == (n_channels,) else _numbered(n_channels)
    return Crops(source, pd.DataFrame(columns, index=_unnamed(n).index), channels, str(path))


def _files(path: Path, columns: list[str], root: Path) -> Crops:
    table = _table(path)
    missing = [column for column in columns if column not in table]
    if missing:
        msg = f"{path} has no column {missing[0]!r} (it has: {', '.join(map(str, table))}): name it with file_columns."
        raise KeyError(msg)
    unnamed = np.flatnonzero((table[columns].isna() | (table[columns] == "")).any(axis=1).to_numpy())
    if unnamed.size:
        msg = f"{path} names no file in {unnamed.size} of {len(table)} rows (the first is row {unnamed[0]}): drop them."
        raise ValueError(msg)
    source = FileSource(root, table[columns].astype(str).to_numpy())
    names = columns if len(columns) == source.shape[1] else _numbered(source.shape[1])
    return Crops(source, table.drop(columns=columns), names, str(path))


def _lmdb(path: Path) -> Crops:
    keys = lmdb_keys(path)
    source = LMDBSource(path, keys)
    return Crops(source, parsed_keys(keys), _numbered(source.shape[1]), str(path))


def _table(table: str | os.PathLike[str] | pd.DataFrame) -> pd.DataFrame:
    if isinstance(table, pd.DataFrame):
        return table
    path = Path(table)
    readers: dict[str, Any] = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
    if path.suffix not in readers:
        msg = f"{path} is neither .csv nor .parquet."
        raise ValueError(msg)
    check_file(path)
    try:
        found = readers[path.suffix](path)
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read, or is truncated ({error})."
        raise ValueError(msg) from error
    return found.set_axis(found.index.astype(str))


def _unnamed(n: int) -> pd.DataFrame:
    return pd.DataFrame(index=pd.RangeIndex(n).astype(str))


def _numbered(n: int) -> list[str]:
    return [f"channel_{i}" for i in range(n)]
