"""Crops from what people have: AnnData, arrays, image files with their table, the LMDB of a published screen."""

from __future__ import annotations

import os
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._keys import IMAGE_KEY
from scbd._messages import head
from scbd.data._channels import numbered
from scbd.data._formats import HDF5, IMAGE_FILES, image_columns, kind_of, taken_elsewhere
from scbd.data._frames import read_frame
from scbd.data._inputs import Inputs
from scbd.data._walking import walked
from scbd.data.sources import ArraySource, CentredSource, FileSource, LMDBSource, SlicedSource, fitted_size
from scbd.data.sources._lmdb_crops import lmdb_keys, parsed_keys
from scbd.data.stores._crops import Crops, crops_from, some_channels
from scbd.data.stores._naming import in_order_of, is_numbered
from scbd.data.stores._opening import open_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data._channels import Channels
    from scbd.data.sources import Fit


# what pandas calls the first column of a file that gives it no name
_NAMELESS = "Unnamed: 0"


def read_crops(
    path: str | os.PathLike[str],
    *,
    table: str | os.PathLike[str] | pd.DataFrame | None = None,
    image_key: str = IMAGE_KEY,
    file_columns: str | Sequence[str] = "path",
    channels: Channels | None = None,
    root: str | os.PathLike[str] | None = None,
    fit: Fit | None = None,
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
        - ``.csv``, ``.tsv`` or ``.parquet``: a table whose columns name files of images, TIFF or PNG (JPEG and BMP are
          read, too, but JPEG does not have the pixels that were measured);
        - a folder of images, one a cell: the folder that an image lies in becomes ``obs["label"]``, those above it
          ``folder_1``, …; what is in the names of the files is in the names of the cells; links to folders are
          followed, hidden folders left out;
        - a folder with ``data.mdb``: the LMDB of Funk et al. (2022), see :func:`scbd.datasets.funk22`.
    table
        A frame, or file of one, with a row for each image, in place of the file's own. Where images have names (those
        of an AnnData's cells, of a folder's files, the UIDs of an LMDB), rows are found by them, in the index or in any
        column; arrays have none, and rows are in their order. A first column without a name, which
        ``obs.to_csv(path)`` writes, is the index. A table without names is that of an AnnData in its order, with a
        message.
    image_key
        Where the images are.
    file_columns
        Columns with the paths of a table's images; several are stacked as channels.
    channels
        Which are taken, by name or number, in this order; a mapping gives them new names. By default all but masks,
        which scPortrait's files tell. Channels without names get those of a list that is as long.
    root
        Folder that a table's paths are relative to, by default the one where the table lies. Paths may be absolute, and
        folders in there may be links to others; a path that leaves it by name is refused, so that a table from
        elsewhere cannot name any file of this machine. Where yours names files all over it, give ``"/"``.
    fit
        Crops of different sizes, or that are not square, are padded with zeros or cut about their middle: ``"pad"`` to
        a square that holds the largest, ``"crop"`` to one that lies in the smallest, a number or ``(height, width)``
        to so many pixels. By default they must be alike, and stay as they are.

    Returns
    -------
    :class:`Crops`

    Raises
    ------
    FileNotFoundError
        If there is nothing at ``path``.
    KeyError, TypeError, ValueError
        If it is of another kind (which, and what takes it), truncated, or holds no images and table that fit.

    Warns
    -----
    UserWarning
        If a table names the same files in several rows.

    Examples
    --------
    >>> np.save("crops.npy", adata.obsm["single_cell_images"])
    >>> crops = scbd.data.read_crops("crops.npy", table=adata.obs)
    >>> crops.images.shape, list(crops.obs.columns[:2])
    ((240, 4, 32, 32), ['gene', 'sgRNA'])
    """
    path, kind = Path(path), kind_of(path)
    columns = [file_columns] if isinstance(file_columns, str) else list(file_columns)
    if kind.name == "anndata":
        crops = (_hdf5 if path.suffix in HDF5 else _zarr)(path, image_key, channels)
    elif kind.name == "arrays":
        crops = _arrays(path, image_key)
    elif kind.name in ("image_table", "profiles"):
        crops = _files(path, columns, path.parent if root is None else Path(root), fit)
    elif kind.name == "image_folder":
        crops = _folder(path, fit)
    elif kind.name == "lmdb":
        crops = _lmdb(path)
    else:
        raise ValueError(taken_elsewhere(path, kind))
    crops = replace(crops, name=str(path))
    if table is not None:
        crops = _labelled(crops, _table(table), kind.name)
    crops = _fitted(crops, fit)
    return crops if kind.name == "anndata" else some_channels(crops, channels)


def _labelled(crops: Crops, table: pd.DataFrame, kind: str) -> Crops:
    """With the table in place of their own; arrays have no names, and tables of image files may have none."""
    found, names = replace(crops, obs=table), crops.obs.index
    named = kind in ("anndata", "image_folder", "lmdb") or not is_numbered(names)
    if not named:
        return found
    # files are listed in an order of their own, which nobody knows
    ordered = kind not in ("image_folder", "lmdb")
    return replace(found, obs=in_order_of(names, table, crops.name, ordered=ordered))


def _fitted(crops: Crops, fit: Fit | None) -> Crops:
    """Images of one size on another canvas; those in files have it already."""
    if fit is None or isinstance(crops.images, FileSource):
        return crops
    size, stored = fitted_size(fit, [crops.images.shape[2:]]), crops.images.shape[2:]  # type: ignore[list-item]
    return crops if size == stored else replace(crops, images=CentredSource(crops.images, size))


def _hdf5(path: Path, image_key: str, channels: Channels | None) -> Crops:
    """Memory-mapped where that can be done, else read through the library."""
    parts, images = open_tables(path, image_key)
    if isinstance(images, h5py.Dataset):
        source: Any = SlicedSource(images, f"obsm[{image_key!r}] of {path}")
    else:
        source = ArraySource(images, f"obsm[{image_key!r}] of {path}")
    return crops_from(source, parts["obs"], parts.get("var", pd.DataFrame()), image_key, str(path), channels)


def _zarr(path: Path, image_key: str, channels: Channels | None) -> Crops:
    """By the offsets of its chunks where that can be done, else through the library."""
    parts, images = open_tables(path, image_key)
    adata = AnnData(**parts | {"obsm": {image_key: images}})
    try:
        source: Any = Inputs(image_key=image_key).stored(adata)
    except ValueError:
        source = SlicedSource(images, f"obsm[{image_key!r}] of {path}")
    return crops_from(source, adata.obs, adata.var, image_key, str(path), channels)


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
        return Crops(ArraySource(images, str(path)), _unnamed(len(images)), numbered(images.shape[1]), str(path))
    candidates = [key for key, values in arrays.items() if values.ndim == 4]
    key = image_key if image_key in arrays else candidates[0] if len(candidates) == 1 else None
    if key is None:
        msg = f"{path} has no array {image_key!r} (it has: {', '.join(arrays)}): name the images with image_key."
        raise KeyError(msg)
    source = ArraySource(arrays.pop(key), f"{key!r} of {path}")
    n, n_channels = source.shape[:2]
    columns = {key: values for key, values in arrays.items() if values.shape == (n,)}
    names = arrays.get("channels", np.empty(0))
    channels = names.astype(str).tolist() if names.shape == (n_channels,) else numbered(n_channels)
    return Crops(source, pd.DataFrame(columns, index=_unnamed(n).index), channels, str(path))


def _files(path: Path, columns: list[str], root: Path, fit: Fit | None) -> Crops:
    table = _table(path)
    missing = [column for column in columns if column not in table]
    if missing:
        found = image_columns(path)
        msg = (
            f"{path} has no column {missing[0]!r} (it has: {head(table, 12)}): name the columns of image files with "
            f"file_columns={found or '…'}; a table of features is read by scbd.data.read_profiles."
        )
        raise KeyError(msg)
    unnamed = np.flatnonzero((table[columns].isna() | (table[columns] == "")).any(axis=1).to_numpy())
    if unnamed.size:
        msg = f"{path} names no file in {unnamed.size} of {len(table)} rows (the first is row {unnamed[0]}): drop them."
        raise ValueError(msg)
    source = FileSource(root, table[columns].astype(str).to_numpy(), fit)
    twice = np.flatnonzero(table.duplicated(columns))
    if twice.size:
        msg = (
            f"{path} names the files of {twice.size} rows again (the first is row {twice[0]}): these cells are there "
            "twice, perhaps in training and in validation; drop what is too much."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    names = columns if len(columns) == source.shape[1] else numbered(source.shape[1])
    return Crops(source, table.drop(columns=columns), names, str(path))


def _folder(path: Path, fit: Fit | None) -> Crops:
    """Each image is a cell, the folder that it lies in its label, those above, if any, further columns."""
    found = sorted(
        Path(place, name).relative_to(path)
        for place, names in walked(path)
        for name in names
        if name.lower().endswith(IMAGE_FILES)
    )
    depths = {len(file.parts): file for file in reversed(found)}
    if len(depths) > 1:
        told = head(sorted(depths.values()))
        msg = f"{path} has images in folders of different depth, such as {told}: give one of them."
        raise ValueError(msg)
    folders = np.array([file.parts[:-1] for file in found], dtype=object).reshape(len(found), -1)
    names = [*(f"folder_{i + 1}" for i in range(folders.shape[1] - 1)), "label"][-folders.shape[1] :]
    index = [file.as_posix() for file in found]
    obs = pd.DataFrame(folders, index=index, columns=names if folders.shape[1] else []).astype("category")
    source = FileSource(path, [[name] for name in index], fit)
    return Crops(source, obs, numbered(source.shape[1]), str(path))


def _lmdb(path: Path) -> Crops:
    keys = lmdb_keys(path)
    source = LMDBSource(path, keys)
    return Crops(source, parsed_keys(keys), numbered(source.shape[1]), str(path))


def _table(table: str | os.PathLike[str] | pd.DataFrame) -> pd.DataFrame:
    if isinstance(table, pd.DataFrame):
        return table
    found = read_frame(table)
    if len(found.columns) and found.columns[0] == _NAMELESS:  # obs.to_csv() writes names of cells there
        found = found.set_index(_NAMELESS).rename_axis(None)
    return found.set_axis(found.index.astype(str))


def _unnamed(n: int) -> pd.DataFrame:
    return pd.DataFrame(index=pd.RangeIndex(n).astype(str))
