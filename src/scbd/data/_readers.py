"""Crops from what people have: AnnData, arrays, image files with their table, the LMDB of a published screen."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np
import pandas as pd

from scbd._anndata import CONTENT_KEY, IMAGE_KEY
from scbd._checks import counted, head
from scbd._files import local_path, say
from scbd.data._formats import IMAGE_FILES, image_columns, kind_of, read_frame, taken_elsewhere, walked
from scbd.data._image_files import FileSource, centred, fitted_size
from scbd.data._inputs import Inputs, chosen_channels, numbered, say_masks, taken_channels
from scbd.data._sources import (
    ArraySource,
    HDF5Source,
    ZarrSource,
    check_images,
    columns_of,
    mapped,
    numbers_of,
    open_h5,
    target_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import zarr
    from anndata import AnnData
    from zarr.abc.store import Store

    from scbd.data._image_files import Fit
    from scbd.data._inputs import Channels
    from scbd.data._sources import ImageSource

    Images: TypeAlias = np.ndarray | h5py.Dataset | zarr.Array

# beside images, what of an AnnData is read
TABLES = ("obs", "var", "uns")
# bytes from which a Zarr array of ``obsm`` stays on the disk: beside 26 million cells, features fill any memory
_LARGE = 2**30
# what pandas calls the first column of a file that gives it no name
_NAMELESS = "Unnamed: 0"


@dataclass(frozen=True, eq=False)
class Crops:
    """Images that are read by row, and what is known of each.

    Attributes
    ----------
    images
        Source of images ``(N, C, H, W)``.
    obs
        Table of the cells, N rows.
    channels
        Names of the channels.
    name
        What errors and progress call them.

    Raises
    ------
    ValueError
        If table and images, or names and channels, differ in number.

    Examples
    --------
    >>> images = scbd.data.ArraySource(adata.obsm["single_cell_images"])
    >>> crops = scbd.data.Crops(images, adata.obs, channels=["DNA damage", "F-actin", "DNA", "microtubules"])
    >>> crops
    Crops 'cells': 240 of 4 × 32 × 32 uint8 (DNA damage, F-actin, DNA, microtubules)
    >>> screen = scbd.data.write_screen("screen.zarr", crops, y_key="gene")
    """

    images: ImageSource
    obs: pd.DataFrame
    channels: list[str]
    name: str = "cells"

    def __post_init__(self) -> None:
        n, n_channels = self.images.shape[:2]
        if len(self.obs) != n:
            msg = f"{self.name}: the table has {len(self.obs)} rows, there are {n} images."
            raise ValueError(msg)
        if len(self.channels) != n_channels:
            msg = f"{self.name}: {len(self.channels)} names for {n_channels} channels ({', '.join(self.channels)})."
            raise ValueError(msg)

    def to_memory(self, image_key: str = IMAGE_KEY) -> AnnData:
        """All images read into an AnnData, for as few as memory holds; :func:`write_screen` takes any number.

        Parameters
        ----------
        image_key
            Where in ``obsm`` they are put.

        Returns
        -------
        AnnData with the table, the names of the channels in ``var``, and the images.
        """
        from anndata import AnnData

        images = self.images.read(slice(None))
        obs = self.obs.set_axis(self.obs.index.astype(str))  # AnnData warns of numbers, as pandas makes
        return AnnData(obs=obs, var=channel_table(self.channels), obsm={image_key: images})

    def __repr__(self) -> str:
        """Shape and channels, for a person."""
        n, *shape = self.images.shape
        size = " × ".join(map(str, shape))
        return f"Crops {self.name!r}: {n:,} of {size} {self.images.dtype} ({', '.join(self.channels)})"


def channel_table(channels: Sequence[str]) -> pd.DataFrame:
    """``var`` of an AnnData with images: the names of their channels."""
    return pd.DataFrame({"channels": channels}, index=pd.Index(channels).astype(str))


def crops_of(adata: AnnData, image_key: str, name: str = "cells", channels: Channels | None = None) -> Crops:
    """Crops of an AnnData.

    Raises
    ------
    KeyError, TypeError, ValueError
        If there are no images at ``obsm[image_key]``, no such channel, or ``var`` has fewer names than channels.
    """
    stored = Inputs(image_key=image_key).stored(adata)
    return _crops_from(stored, adata.obs, adata.var, image_key, name, channels)


def _crops_from(
    stored: ImageSource, obs: pd.DataFrame, var: pd.DataFrame, image_key: str, name: str, channels: Channels | None
) -> Crops:
    say_masks(var, stored.shape[1], image_key, channels)
    places, names = taken_channels(var, stored.shape[1], image_key, channels)
    return Crops(columns_of(stored, places), obs, names, name)


def some_channels(crops: Crops, channels: Channels | None) -> Crops:
    """Crops with those channels alone, see :func:`chosen_channels`; all of them by default."""
    if channels is None:
        return crops
    places, names = chosen_channels(crops.channels, channels, crops.name)
    return replace(crops, images=columns_of(crops.images, places), channels=names)


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
          ``folder_1``, …; names of files become names of cells; hidden folders are left out;
        - a folder with ``data.mdb``: the LMDB of Funk et al. (2022), see :func:`scbd.datasets.funk22`.
    table
        A frame, or file of one, with a row for each image, in place of the file's own. Where images have names (those
        of an AnnData's cells, of a folder's files, the UIDs of an LMDB), rows are found by them, in the index or in any
        column; arrays have none, and rows are in their order. A table without names is that of an AnnData in its
        order, with a message.
    image_key
        Where the images are.
    file_columns
        Columns with the paths of a table's images; several are stacked as channels.
    channels
        Which are taken, by name or number, in this order; a mapping gives them new names. By default all but masks,
        which scPortrait's files tell. Channels without names get those of a list that is as long.
    root
        Folder that a table's paths are relative to, by default the one where the table lies. A path that leaves it by
        name is refused, so that a table from elsewhere cannot name any file of this machine; ``"/"`` allows all.
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
    kind, path = kind_of(path), local_path(path)
    columns = [file_columns] if isinstance(file_columns, str) else list(file_columns)
    if kind.name == "anndata":
        crops = _anndata(path, image_key, channels)
    elif kind.name == "arrays":
        crops = _arrays(path, image_key)
    elif kind.name in ("image_table", "profiles"):
        crops = _files(path, columns, path.parent if root is None else local_path(root), fit)
    elif kind.name == "image_folder":
        crops = _folder(path, fit)
    elif kind.name == "lmdb":
        keys = lmdb_keys(path)
        source = LMDBSource(path, keys)
        crops = Crops(source, parsed_keys(keys), numbered(source.shape[1]))
    else:
        raise ValueError(taken_elsewhere(path, kind))
    crops = replace(crops, name=str(path))
    if table is not None:
        crops = _labelled(crops, _table(table), kind.name)
    if fit is not None and not isinstance(crops.images, FileSource):
        size = fitted_size(fit, [crops.images.shape[2:]])  # type: ignore[list-item]
        crops = replace(crops, images=CentredSource(crops.images, size))
    return crops if kind.name == "anndata" else some_channels(crops, channels)


class CentredSource:
    """Images on a canvas of another size: padded with zeros, cut, or both.

    Parameters
    ----------
    source
        Images.
    size
        Height and width.
    """

    def __init__(self, source: ImageSource, size: tuple[int, int]) -> None:
        self.source = source
        self.shape = (*source.shape[:2], *size)
        self.dtype, self.in_memory = source.dtype, source.in_memory
        self.concurrent = getattr(source, "concurrent", False)
        self.chunk_rows = getattr(source, "chunk_rows", 1)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order, free to change."""
        out = target_of(self, rows, out)
        out[...] = centred(self.source.read(rows), self.shape[2:])
        return out


def _anndata(path: Path, image_key: str, channels: Channels | None) -> Crops:
    """Memory-mapped or by the offsets of its chunks where that can be done, else read through the library."""
    import zarr

    group = opened(path)
    images, where = images_of(group, path, image_key), f"obsm[{image_key!r}] of {path}"
    kinds = {np.ndarray: ArraySource, h5py.Dataset: HDF5Source, zarr.Array: ZarrSource}
    source = next(source(images, where) for kind, source in kinds.items() if isinstance(images, kind))
    parts = tables_of(group, image_key)
    return _crops_from(source, parts["obs"], parts.get("var", pd.DataFrame()), image_key, str(path), channels)


def opened(path: str | os.PathLike[str] | Store) -> h5py.File | zarr.Group:
    """An AnnData in HDF5 or Zarr as it is stored.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is none; if it is truncated, or of another kind.
    """
    if isinstance(path, (str, os.PathLike)) and "://" not in str(path):
        path = local_path(path)
        if path.exists() and (kind := kind_of(path)).name not in ("anndata", "unknown"):
            raise ValueError(taken_elsewhere(path, kind))
        if not path.is_dir():
            return open_h5(path)
    import zarr

    try:
        return zarr.open_group(path, mode="r", zarr_format=3)
    except (FileNotFoundError, ValueError) as error:
        msg = (
            f"{path} is no Zarr store of format 3 ({error}). AnnData before 0.13 writes format 2 by default: write it "
            "again, after anndata.settings.zarr_write_format = 3."
        )
        raise ValueError(msg) from error


def images_of(group: h5py.File | zarr.Group, path: Any, image_key: str) -> Images:
    """The images of a store; of HDF5 memory-mapped, where that can be done.

    Raises
    ------
    KeyError
        If there are none.
    """
    obsm: Any = group["obsm"] if "obsm" in group else {}
    if "obs" not in group or not hasattr(obsm.get(image_key), "shape"):
        msg = f"{path} has no images at obsm[{image_key!r}]; its obsm keys are: {', '.join(obsm) or 'none'}."
        others = [key for key in obsm if len(getattr(obsm[key], "shape", ())) == 4]
        if others:
            msg += f" They may be at {' or '.join(f'image_key={key!r}' for key in others)}."
        elif CONTENT_KEY in obsm:
            msg += " It has embeddings: give the file that these were made of."
        elif "X" in group:
            msg += " Features are read with layer='X' (on the command line, --layer X)."
        raise KeyError(msg)
    images = obsm[image_key]
    if isinstance(images, h5py.Dataset):
        in_place = mapped(images)
        return images if in_place is None else in_place
    return images


def tables_of(group: h5py.File | zarr.Group, *on_disk: str) -> dict[str, Any]:
    """Parts of an AnnData; of ``obsm`` but what is asked for elsewhere, and large Zarr arrays where they lie."""
    import zarr
    from anndata.io import read_elem

    parts = {name: read_elem(group[name]) for name in TABLES if name in group}
    obsm: Any = group["obsm"] if "obsm" in group else {}
    others = {key: obsm[key] for key in obsm if key not in on_disk}
    large = {key for key, part in others.items() if isinstance(part, zarr.Array) and part.nbytes > _LARGE}
    return parts | {"obsm": {key: part if key in large else read_elem(part) for key, part in others.items()}}


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
        return Crops(ArraySource(images, str(path)), _unnamed(len(images)), numbered(images.shape[1]))
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
    return Crops(source, pd.DataFrame(columns, index=_unnamed(n).index), channels)


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
            f"{path} names the files of {counted(twice.size, 'row')} again (the first is row "
            f"{twice[0]}): these cells are there twice, perhaps in training and in validation; drop what is too much."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    names = columns if len(columns) == source.shape[1] else numbered(source.shape[1])
    return Crops(source, table.drop(columns=columns), names)


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
        several = head(sorted(depths.values()))
        msg = f"{path} has images in folders of different depth, such as {several}: give one of them."
        raise ValueError(msg)
    folders = np.array([file.parts[:-1] for file in found], dtype=object).reshape(len(found), -1)
    names = [*(f"folder_{i + 1}" for i in range(folders.shape[1] - 1)), "label"][-folders.shape[1] :]
    index = [file.as_posix() for file in found]
    obs = pd.DataFrame(folders, index=index, columns=names if folders.shape[1] else []).astype("category")
    source = FileSource(path, [[name] for name in index], fit)
    return Crops(source, obs, numbered(source.shape[1]))


def _table(table: str | os.PathLike[str] | pd.DataFrame) -> pd.DataFrame:
    if isinstance(table, pd.DataFrame):
        return table
    found = read_frame(table)
    if len(found.columns) and found.columns[0] == _NAMELESS:  # obs.to_csv() writes names of cells there
        found = found.set_index(_NAMELESS).rename_axis(None)
    return found.set_axis(found.index.astype(str))


def _unnamed(n: int) -> pd.DataFrame:
    return pd.DataFrame(index=pd.RangeIndex(n).astype(str))


def _labelled(crops: Crops, table: pd.DataFrame, kind: str) -> Crops:
    """With the table in place of their own; arrays have no names, and tables of image files may have none."""
    found, names = replace(crops, obs=table), crops.obs.index
    named = kind in ("anndata", "image_folder", "lmdb") or not _is_numbered(names)
    if not named:
        return found
    # files are listed in an order of their own, which nobody knows
    ordered = kind not in ("image_folder", "lmdb")
    return replace(found, obs=_in_order_of(names, table, crops.name, ordered=ordered))


def _is_numbered(names: pd.Index) -> bool:
    """Whether rows have no names, but their numbers."""
    return bool((names.astype(str) == np.arange(len(names)).astype(str)).all())


def _in_order_of(names: pd.Index, table: pd.DataFrame, path: str, *, ordered: bool) -> pd.DataFrame:
    """The table's rows in the order of images, and under their names, which its index or a column of it holds.

    Parameters
    ----------
    names
        Of the images.
    table
        As many rows.
    path
        Where the images are.
    ordered
        Whether images have an order that whoever wrote the table knows: a table that has no names is then taken in it,
        and a sentence says so.

    Raises
    ------
    ValueError
        If the table has other names, if two of its columns have them in different orders, or if it has none and images
        are not ordered.
    """
    names = names.astype(str)
    if names.equals(table.index.astype(str)):
        return table
    found = {place: rows for place, values in _places(table) if (rows := _rows(names, values)) is not None}
    if len(found) > 1 and _is_numbered(table.index):  # which pandas has made
        found.pop("the index", None)
    if found:
        (first, rows), *others = found.items()
        for other, rows_too in others:
            if not np.array_equal(rows, rows_too):
                msg = f"{first} and {other} of the table have the names in {path} in different orders: drop one."
                raise ValueError(msg)
        return table.iloc[rows].set_axis(names)
    if ordered and _is_numbered(table.index):
        say(f"{path}: the table names no cell ({head(names, 3)}), and so is taken to have the same order.")
        return table
    msg = (
        f"The table does not say which row is which image of {path}: no column has each of the names {head(names, 3)} "
        "once; add one, or read a table that names image files in place of them (file_columns=…)."
    )
    raise ValueError(msg)


def _places(table: pd.DataFrame) -> Iterator[tuple[str, pd.Index]]:
    """What may hold names, as text."""
    yield "the index", table.index.astype(str)
    for number, column in enumerate(table):
        if table.dtypes.iloc[number].kind not in "fbmM":
            yield f"column {column!r}", pd.Index(table.iloc[:, number].astype(str))


def _rows(names: pd.Index, values: pd.Index) -> np.ndarray | None:
    """Of each name its row, if each has one."""
    if not names.is_unique or values[0] not in names:
        return None
    places = names.get_indexer(values)
    rows = np.full(len(names), -1)
    rows[places] = np.arange(len(places))
    return rows if (places >= 0).all() and (rows >= 0).all() else None


# crops of Funk et al. (2022), and what parts of a key stand between where it names the guide
_PUBLISHED: tuple[tuple[int, int, int], str] = ((4, 100, 100), "uint16")
_SEPARATOR = b";"


class LMDBSource:
    """Images in an LMDB, as optical pooled screens are published: raw bytes, or ``.npy``, one value a cell.

    Parameters
    ----------
    path
        Folder with ``data.mdb``.
    keys
        Key of each cell.

    Raises
    ------
    ImportError
        If ``lmdb`` is not installed.
    FileNotFoundError, ValueError
        If there is no database, or it is none.
    """

    in_memory = False
    concurrent = True

    def __init__(self, path: Path, keys: Sequence[bytes] | np.ndarray) -> None:
        self._path, self._keys = path, keys
        self._database = open_lmdb(path)
        shape, dtype = self._with_guides() if len(keys) and _SEPARATOR in bytes(keys[0]) else _PUBLISHED
        self.shape, self.dtype = (len(keys), *shape), np.dtype(dtype)
        check_images(self.shape, self.dtype, str(path))

    def _with_guides(self) -> tuple[tuple[int, int, int], str]:
        """Form of the crops of the other layout."""
        channels, dtype = _PUBLISHED[0][0], "float32"
        with self._database.begin(buffers=True) as transaction:
            n_bytes = len(transaction.get(bytes(self._keys[0])) or b"")
        side = math.isqrt(n_bytes // (channels * np.dtype(dtype).itemsize))
        return (channels, side, side), dtype

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order.

        Raises
        ------
        IndexError
            If there is no such row.
        KeyError, ValueError
            If a key is missing, or its value no crop (which).
        """
        out = target_of(self, rows, out)
        with self._database.begin(buffers=True) as transaction:
            for place, row in enumerate(numbers_of(rows, self.shape[0]).tolist()):
                key = bytes(self._keys[row])
                out[place] = self._crop(transaction.get(key), key)
        return out

    def _crop(self, value: Any, key: bytes) -> np.ndarray:
        shape = self.shape[1:]
        if value is None:
            msg = f"{self._path} has no key {key!r}."
            raise KeyError(msg)
        if len(value) == math.prod(shape) * self.dtype.itemsize:
            return np.frombuffer(value, self.dtype).reshape(shape)
        try:
            crop = np.load(io.BytesIO(value), allow_pickle=False)
        except (ValueError, EOFError, OSError):
            crop = np.empty(0)
        if crop.shape != shape or crop.dtype != self.dtype:
            wanted = f"{' × '.join(map(str, shape))} {self.dtype}"
            msg = f"{self._path}: the value of {key!r} is no crop of {wanted} ({len(value)} bytes)."
            raise ValueError(msg)
        return crop


def open_lmdb(path: Path) -> Any:
    """Open a database for reading.

    Raises
    ------
    ImportError
        If ``lmdb`` is not installed.
    FileNotFoundError, ValueError
        If there is none, or it is foreign or truncated.
    """
    if not (path / "data.mdb").is_file():
        msg = f"There is no LMDB at {path}: give the folder that holds data.mdb."
        raise FileNotFoundError(msg)
    try:
        import lmdb
    except ImportError as error:
        msg = "Crops in an LMDB need one more package: pip install lmdb."
        raise ImportError(msg) from error
    try:
        return lmdb.open(str(path), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        msg = f"{path} is no LMDB, or is truncated ({error})."
        raise ValueError(msg) from error


def lmdb_keys(path: Path) -> np.ndarray:
    """All keys of a database, in its order, which is the one that disks like: bytes, ``(N,)``.

    Raises
    ------
    ImportError, FileNotFoundError, ValueError
        See :func:`open_lmdb`; or if it is empty.
    """
    with open_lmdb(path) as database, database.begin() as transaction:
        keys = np.array(list(transaction.cursor().iternext(keys=True, values=False)))
    if not len(keys):
        msg = f"{path} has no cell."
        raise ValueError(msg)
    return keys


def parsed_keys(keys: Sequence[bytes] | np.ndarray) -> pd.DataFrame:
    """What keys say of their cells: ``plate``, ``well`` (plate and well), ``tile``, ``gene``, under the cell's UID.

    And the guide, ``sgRNA``, where they name it; the UID is then the row of the table beside the database.

    Raises
    ------
    ValueError
        If a key is of neither form, see :func:`parsed_key`.
    """
    found = pd.DataFrame(map(parsed_key, keys), columns=["uid", "plate", "well", "tile", "gene", "sgRNA"], dtype=str)
    found["well"] = found["plate"] + "_" + found["well"]
    named = [] if found["sgRNA"].eq("").all() else ["sgRNA"]
    obs = found[["plate", "well", "tile", "gene", *named]].astype("category")
    return obs.set_axis(pd.Index(found["uid"], dtype=str, name=None))


def parsed_key(key: bytes) -> list[str]:
    """UID, plate, well, tile, gene, and the guide or an empty word; a plate's name may hold underscores.

    Raises
    ------
    ValueError
        If the key is neither ``UID_plate_well_tile_gene_index``, as Funk et al. publish their cells, nor
        ``gene;guide;plate;well;tile;UID``, as the code of Yao et al. (2024) takes them.
    """
    text = key.decode(errors="replace")
    if _SEPARATOR.decode() in text:
        parts = text.split(_SEPARATOR.decode())
        if len(parts) == 6:
            gene, guide, plate, well, tile, uid = parts
            return [uid, plate, well, tile, gene, guide]
    elif len(parts := text.split("_")) > 5:
        return [parts[0], "_".join(parts[1:-4]), *parts[-4:-1], ""]
    msg = f"The key {key!r} is neither UID_plate_well_tile_gene_index nor gene;guide;plate;well;tile;UID."
    raise ValueError(msg)
