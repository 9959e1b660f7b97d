"""Readers of images of single cells (crops) in AnnData files, numpy arrays, image files and LMDB databases."""

from __future__ import annotations

import logging
import os
import re
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np
import pandas as pd

from scbd._shared.checks import format_count, inflect, join_first
from scbd._shared.files import local_path
from scbd._shared.keys import CONTENT_KEY, IMAGE_KEY
from scbd._shared.messages import warn_user
from scbd._shared.progress import print_above_bar
from scbd.data._channels import default_channel_names, log_excluded_masks, resolve_channels, taken_channels
from scbd.data._formats import IMAGE_ENDINGS, describe_reader, detect_kind, image_columns, walk_folders
from scbd.data._hdf5_source import HDF5Source, memory_map_dataset, open_h5
from scbd.data._image_files import FileSource, pad_or_crop, target_size
from scbd.data._input_location import InputLocation
from scbd.data._lmdb import LMDBSource, parse_keys, read_lmdb_keys
from scbd.data._sources import ArraySource, allocate_output, select_columns
from scbd.data._tables import read_table_file
from scbd.data._zarr_source import ZarrSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import zarr
    from anndata import AnnData
    from zarr.abc.store import Store

    from scbd.data._channels import Channels
    from scbd.data._image_files import Fit
    from scbd.data._sources import ImageSource

    Images: TypeAlias = np.ndarray | h5py.Dataset | zarr.Array

logger = logging.getLogger(__name__)

# names of the parts of an AnnData file that are read in addition to its images
ANNDATA_TABLES = ("obs", "var", "uns")
# Maximum size, in bytes, of a Zarr array in ``obsm`` that is loaded into memory. Larger arrays, such as the features of
# 26 million cells, may not fit into memory.
_MAX_LOADED_BYTES = 2**30
# Words in names of files and folders that programs write next to images: segmentation masks, and pictures of them.
_MASK_WORD = re.compile(
    r"masks?(?![a-z])"
    r"|(?<![a-z])((label|outline|overlay|contour|segmentation|annotation)s?|boundar(y|ies)|masked|segmented)(?![a-z])"
    r"|(?<![a-z])segm?(?![a-z0-9])"  # not the genes SEG1 and SEG2
)


@dataclass(frozen=True, eq=False)
class Crops:
    """Images of cells that are read row by row, with a table that describes each cell.

    Attributes
    ----------
    images
        Source from which images are read, with shape ``(N, C, H, W)``.
    obs
        Table of the cells, with N rows in the order of the images.
    channels
        Names of the C channels.
    name
        Name of the crops in error messages and progress bars. Default: ``"cells"``.

    Raises
    ------
    ValueError
        If ``obs`` does not have one row per image, or ``channels`` not one name per channel.

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
        """Load all images into an AnnData.

        All images must fit into memory. For larger data, use :func:`write_screen`, which has no such limit.

        Parameters
        ----------
        image_key
            Key of ``obsm`` at which the images are stored.

        Returns
        -------
        AnnData with the table in ``obs``, the names of the channels in ``var``, and the images in ``obsm[image_key]``.
        """
        from anndata import AnnData

        images = self.images.read(slice(None))
        obs = self.obs.set_axis(self.obs.index.astype(str))  # AnnData warns if the index is not text
        return AnnData(obs=obs, var=channel_table(self.channels), obsm={image_key: images})

    def __repr__(self) -> str:
        """Return a summary: number, shape and dtype of the images, and names of the channels."""
        n, *shape = self.images.shape
        size = " × ".join(map(str, shape))
        return f"Crops {self.name!r}: {n:,} of {size} {self.images.dtype} ({', '.join(self.channels)})"


def channel_table(channels: Sequence[str]) -> pd.DataFrame:
    """Return the table ``var`` for an AnnData with images, which has one row per channel with its name."""
    return pd.DataFrame({"channels": channels}, index=pd.Index(channels).astype(str))


def crops_from_anndata(adata: AnnData, image_key: str, name: str = "cells", channels: Channels | None = None) -> Crops:
    """Return :class:`Crops` with the images of an AnnData and its table of cells, ``obs``.

    Parameters
    ----------
    adata
        Cells with images.
    image_key
        Key of ``obsm`` with the images.
    name
        Name of the crops in error messages.
    channels
        Channels to use, by name or number. Default: all channels that scPortrait does not mark as segmentation masks.

    Raises
    ------
    KeyError, TypeError, ValueError
        If ``obsm[image_key]`` does not exist or does not hold images, if a channel does not exist, or if ``var`` has
        fewer names than the images have channels.
    """
    stored = InputLocation(image_key=image_key).stored(adata)
    return _crops_from_source(stored, adata.obs, adata.var, image_key, name, channels)


def _crops_from_source(
    stored: ImageSource, obs: pd.DataFrame, var: pd.DataFrame, image_key: str, name: str, channels: Channels | None
) -> Crops:
    log_excluded_masks(var, stored.shape[1], image_key, channels)
    places, names = taken_channels(var, stored.shape[1], image_key, channels)
    return Crops(select_columns(stored, places), obs, names, name)


def select_channels(crops: Crops, channels: Channels | None) -> Crops:
    """Return crops with only the requested image channels (default: all), see :func:`resolve_channels`."""
    if channels is None:
        return crops
    places, names = resolve_channels(crops.channels, channels, crops.name)
    return replace(crops, images=select_columns(crops.images, places), channels=names)


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
    """Read crops from a file or folder, ready for :func:`write_screen`.

    Images are read from disk when they are needed, with one exception: the arrays of an ``.npz`` file are loaded into
    memory immediately.

    Parameters
    ----------
    path
        File or folder. Its name and content determine how it is read:

        - ``.h5ad``, or ``.h5sc`` of scPortrait: images at ``obsm[image_key]``, of any chunks and compression;
        - ``.zarr``: an AnnData with images at ``obsm[image_key]``;
        - ``.npz``: images at ``image_key`` (or the only array of four dimensions); arrays of shape ``(N,)`` or
          ``(N, 1)`` become columns of the table, and an array ``channels`` names the channels. A message names all
          other arrays, which are not read;
        - ``.npy``: images, memory-mapped; pass their table as ``table``;
        - ``.csv``, ``.tsv`` or ``.parquet``: a table with columns of paths of image files, TIFF or PNG. JPEG and BMP
          are read, too, but the lossy compression of JPEG changes the measured pixels;
        - a folder of images, one file per cell: the folder that contains an image becomes ``obs["label"]``, the folders
          above it become ``folder_1``, and so on, and paths of files become names of cells. Hidden files and folders
          are skipped. Segmentation masks must not lie in the folder, because each would become a cell;
        - a folder with ``data.mdb``: the LMDB of Funk et al. (2022), see :func:`scbd.datasets.funk22`.
    table
        Table with one row per image, or the path of its file. It replaces the table that was read from ``path``. The
        way in which rows are matched to images depends on the images:

        - images with names (names of the cells of an AnnData, paths of the files of a folder, UIDs of an LMDB): rows
          are matched by name, which may be in the index or in any column;
        - images of an AnnData and a table without names: row i describes image i, and a message states this;
        - images of ``.npy`` and ``.npz`` files, which have no names: row i describes image i.
    image_key
        Key of the images in an AnnData or ``.npz``.
    file_columns
        Columns of the table with paths of image files. The files of several columns are stacked as channels.
    channels
        Channels to use and their order, by name or number. A mapping ``{new name: name or number}`` renames them. If
        channels have no names, a list with one name per channel names them. Default: all channels except those that
        scPortrait marks as masks.
    root
        Folder to which paths in the table are relative. Default: the folder of the table. A path outside of ``root`` is
        refused, so that a table from an unknown source cannot open arbitrary files of this machine. ``"/"`` allows all
        paths.
    fit
        Rule by which images of different sizes, or images that are not square, get one size. They are padded with zeros
        or cut around their centre:

        - ``"pad"``: to the smallest square that contains every image;
        - ``"crop"``: to the largest square that is contained in every image;
        - a number, or ``(height, width)``: to this size in pixels.

        By default, sizes are not changed, and images must all have the same size.

    Returns
    -------
    :class:`Crops`

    Raises
    ------
    FileNotFoundError
        If ``path``, or an image file that a table names, does not exist.
    ImportError
        If the format requires a package that is not installed (``lmdb``, ``pyarrow`` or ``hdf5plugin``).
    KeyError, TypeError, ValueError
        If the file holds data other than crops (the message names the function that reads such data), if it is
        truncated, or if images and table do not match. Also if a folder holds masks next to images, two images whose
        names differ in the ending only, or a name that is not UTF-8.

    Warns
    -----
    UserWarning
        If a table names the same files in several rows; if some images of a folder have the name of another image and
        an addition, such as ``0 copy`` (for most images, this is an error); or if row i of the table is taken to
        describe image i, although the numbers in names of rows are not in order.

    Examples
    --------
    >>> np.save("crops.npy", adata.obsm["single_cell_images"])
    >>> crops = scbd.data.read_crops("crops.npy", table=adata.obs)
    >>> crops.images.shape, list(crops.obs.columns[:2])
    ((240, 4, 32, 32), ['gene', 'sgRNA'])
    """
    kind, path = detect_kind(path), local_path(path)
    columns = [file_columns] if isinstance(file_columns, str) else list(file_columns)
    if kind.name == "anndata":
        crops = _read_anndata(path, image_key, channels)
    elif kind.name == "arrays":
        crops = _read_arrays(path, image_key)
    elif kind.name in ("image_table", "profiles"):
        crops = _read_image_table(path, columns, path.parent if root is None else local_path(root), fit)
    elif kind.name == "image_folder":
        crops = _read_image_folder(path, fit)
    elif kind.name == "lmdb":
        keys = read_lmdb_keys(path)
        source = LMDBSource(path, keys)
        crops = Crops(source, parse_keys(keys), default_channel_names(source.shape[1]))
    else:
        raise ValueError(describe_reader(path, kind))
    crops = replace(crops, name=str(path))
    if table is not None:
        crops = _replace_table(crops, _load_table(table), kind.name)
    if fit is not None and not isinstance(crops.images, FileSource):
        size = target_size(fit, [crops.images.shape[2:]])  # type: ignore[list-item]
        crops = replace(crops, images=CentredSource(crops.images, size))
    return crops if kind.name == "anndata" else select_channels(crops, channels)


class CentredSource:
    """Source of images that pads the images of another source with zeros, or cuts them around their centre.

    All images get the given size.

    Parameters
    ----------
    source
        Source of the original images, with shape ``(N, C, h, w)``.
    size
        Height and width after padding or cutting, in pixels.
    """

    def __init__(self, source: ImageSource, size: tuple[int, int]) -> None:
        self.source = source
        self.shape = (*source.shape[:2], *size)
        self.dtype, self.in_memory = source.dtype, source.in_memory
        self.concurrent = getattr(source, "concurrent", False)
        self.chunk_rows = getattr(source, "chunk_rows", 1)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Return the images of the cells in the given rows, in the order of these rows.

        The caller may modify the array.
        """
        out = allocate_output(self, rows, out)
        out[...] = pad_or_crop(self.source.read(rows), self.shape[2:])
        return out


def _read_anndata(path: Path, image_key: str, channels: Channels | None) -> Crops:
    """Read crops from an AnnData file, without loading the images.

    Images in a contiguous HDF5 dataset are memory-mapped. Other images are read from disk by row.
    """
    import zarr

    group = open_store(path)
    images, where = find_images(group, path, image_key), f"obsm[{image_key!r}] of {path}"
    kinds = {np.ndarray: ArraySource, h5py.Dataset: HDF5Source, zarr.Array: ZarrSource}
    source = next(source(images, where) for kind, source in kinds.items() if isinstance(images, kind))
    parts = read_tables(group, image_key)
    return _crops_from_source(source, parts["obs"], parts.get("var", pd.DataFrame()), image_key, str(path), channels)


def open_store(path: str | os.PathLike[str] | Store) -> h5py.File | zarr.Group:
    """Open an AnnData file in HDF5 or Zarr for reading, without loading its content.

    Parameters
    ----------
    path
        Path of the file or folder, address of a Zarr store, or an open Zarr store.

    Raises
    ------
    FileNotFoundError, ValueError
        If nothing exists at ``path``, or if the file is truncated or no AnnData.
    """
    if isinstance(path, (str, os.PathLike)) and "://" not in str(path):
        path = local_path(path)
        if path.exists() and (kind := detect_kind(path)).name not in ("anndata", "unknown"):
            raise ValueError(describe_reader(path, kind))
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


def find_images(group: h5py.File | zarr.Group, path: Any, image_key: str) -> Images:
    """Return the images of an opened AnnData file, without loading them.

    Images in a contiguous HDF5 dataset are memory-mapped.

    Raises
    ------
    KeyError
        If ``obsm`` has no images at ``image_key``. The message suggests other keys that hold images.
    """
    obsm: Any = group.get("obsm", {})
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
        in_place = memory_map_dataset(images)
        return images if in_place is None else in_place
    return images


def read_tables(group: h5py.File | zarr.Group, *on_disk: str) -> dict[str, Any]:
    """Read ``obs``, ``var``, ``uns`` and ``obsm`` of an opened AnnData file.

    Entries of ``obsm`` whose key is in ``on_disk`` are skipped. Zarr arrays in ``obsm`` that are larger than 1 GiB are
    returned without loading them.
    """
    import zarr
    from anndata.io import read_elem

    parts = {name: read_elem(group[name]) for name in ANNDATA_TABLES if name in group}
    obsm: Any = group.get("obsm", {})
    others = {key: obsm[key] for key in obsm if key not in on_disk}
    large = {key for key, part in others.items() if isinstance(part, zarr.Array) and part.nbytes > _MAX_LOADED_BYTES}
    return parts | {"obsm": {key: part if key in large else read_elem(part) for key, part in others.items()}}


def _read_arrays(path: Path, image_key: str) -> Crops:
    """Read crops from the numpy arrays in a ``.npy`` or ``.npz`` file."""
    arrays: dict[str, np.ndarray] = {}
    where, is_single = "", path.suffix.lower() == ".npy"
    try:
        if is_single:
            images = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                for key in archive.files:
                    where = f"{key!r}: "
                    values = archive[key]
                    arrays[key] = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        msg = (
            f"{path} cannot be read as numpy arrays ({where}{error}): it is truncated, foreign, or holds Python "
            "objects (save text as values.astype(str))."
        )
        raise ValueError(msg) from error
    if is_single:
        return Crops(
            ArraySource(images, str(path)), _table_without_names(len(images)), default_channel_names(images.shape[1])
        )
    candidates = [key for key, values in arrays.items() if values.ndim == 4]
    key = image_key if image_key in arrays else candidates[0] if len(candidates) == 1 else None
    if key is None:
        msg = f"{path} has no array {image_key!r} (it has: {', '.join(arrays)}): name the images with image_key."
        raise KeyError(msg)
    source = ArraySource(arrays.pop(key), f"{key!r} of {path}")
    n, n_channels = source.shape[:2]
    channels = default_channel_names(n_channels)
    if "channels" in arrays and arrays["channels"].shape in ((n_channels,), (n_channels, 1), (1, n_channels)):
        channels = arrays.pop("channels").ravel().astype(str).tolist()
    flat = {key: values.ravel() for key, values in arrays.items() if values.shape in ((n,), (n, 1), (1, n))}
    columns = {key: values for key, values in flat.items() if values.dtype.names is None}
    if others := [f"{key!r} {values.shape}" for key, values in arrays.items() if key not in columns]:
        logger.warning(
            "%s: these arrays are not read, because they are not columns of one value per image (%d): %s.",
            path,
            n,
            ", ".join(others),
        )
    return Crops(source, pd.DataFrame(columns, index=_table_without_names(n).index), channels)


def _read_image_table(path: Path, columns: list[str], root: Path, fit: Fit | None) -> Crops:
    """Read crops from image files whose paths are in columns of a table. The remaining columns become ``obs``."""
    table = _load_table(path)
    missing = [column for column in columns if column not in table]
    if missing:
        found = image_columns(path)
        msg = (
            f"{path} has no column {missing[0]!r} (it has: {join_first(table, 12)}): name the columns of image files "
            f"with file_columns={found or '…'}; a table of features is read by scbd.data.read_profiles."
        )
        raise KeyError(msg)
    unnamed = np.flatnonzero((table[columns].isna() | (table[columns] == "")).any(axis=1).to_numpy())
    if unnamed.size:
        msg = f"{path} names no file in {unnamed.size} of {len(table)} rows (the first is row {unnamed[0]}): drop them."
        raise ValueError(msg)
    source = FileSource(root, table[columns].astype(str).to_numpy(), fit)
    warn_if_repeated(pd.Series(source.files()).duplicated(), str(path))
    names = columns if len(columns) == source.shape[1] else default_channel_names(source.shape[1])
    return Crops(source, table.drop(columns=columns), names)


def warn_if_repeated(is_repeated: pd.Series, where: str) -> None:
    """Warn if rows of a table describe the same cell as an earlier row; ``where`` is the name of the table."""
    rows = np.flatnonzero(is_repeated)
    if rows.size:
        msg = (
            f"{format_count(rows.size, 'row')} of {where} {inflect(rows.size, 'repeats', 'repeat')} the cell of an "
            f"earlier row (the first is row {rows[0]}). The same cell may then be in training and in validation: drop "
            "these rows."
        )
        warn_user(msg)


def _read_image_folder(path: Path, fit: Fit | None) -> Crops:
    """Read crops from a folder of images, one file per cell.

    The name of the folder that contains an image becomes the label of the cell. Names of the folders above it, if any,
    become further columns of ``obs``.
    """
    found = sorted(
        Path(place, name).relative_to(path)
        for place, names in walk_folders(path)
        for name in names
        if name.lower().endswith(IMAGE_ENDINGS)
    )
    _check_image_names(path, found)
    depths = {len(file.parts): file for file in reversed(found)}
    if len(depths) > 1:
        several = join_first(sorted(depths.values()))
        msg = f"{path} has images in folders of different depth, such as {several}: give one of them."
        raise ValueError(msg)
    folders = np.array([file.parts[:-1] for file in found], dtype=object).reshape(len(found), -1)
    names = [*(f"folder_{i + 1}" for i in range(folders.shape[1] - 1)), "label"][-folders.shape[1] :]
    index = [file.as_posix() for file in found]
    obs = pd.DataFrame(folders, index=index, columns=names if folders.shape[1] else []).astype("category")
    source = FileSource(path, [[name] for name in index], fit)
    return Crops(source, obs, default_channel_names(source.shape[1]))


def _check_image_names(path: Path, images: list[Path]) -> None:
    """Check that each image in a folder can be a crop of another cell, and that names can be stored.

    Parameters
    ----------
    path
        The folder.
    images
        Path of each image, relative to the folder.

    Raises
    ------
    ValueError
        If the name of a file or folder is not UTF-8; if the names of some images are those of segmentation masks, or of
        pictures of them; if two images have names that differ in the ending only; or if at least half of the crops
        have a second image whose name is that of the crop and an addition, such as ``0_binary`` next to ``0``
        (otherwise a warning).
    """
    foreign = [ascii(str(image)) for image in images if not _is_utf8(str(image))]
    if foreign:
        msg = (
            f"{path} has names that are not UTF-8 ({join_first(foreign, 3)}), so that they cannot be stored: rename "
            "these files or folders."
        )
        raise ValueError(msg)
    stems = [os.path.splitext(image)[0] for image in images]
    masks = [image for image, stem in zip(images, stems, strict=True) if has_mask_word(stem)]
    if masks and len(masks) < len(images):
        msg = (
            f"{path} has {len(masks)} images among {len(images)} whose names are those of masks "
            f"({join_first(masks, 3)}), and each would become a cell: move masks to another folder, or name the images "
            "of cells in a table (file_columns=…)."
        )
        raise ValueError(msg)
    first = dict(zip(stems[::-1], images[::-1], strict=True))
    derived: dict[Path, Path] = {}
    for image, stem in zip(images, stems, strict=True):
        ends = [*(separator.start() for separator in re.finditer(r"_|[^\w/\\]", stem)), len(stem)]
        # a number is no addition: 0_1.png may be another cell than 0.png
        others = [first.get(stem[:end]) for end in ends if not re.fullmatch(r"([\W_]\d+)+", stem[end:])]
        if other := next((other for other in others if other not in (None, image)), None):
            derived[image] = other
    if derived:
        pairs = join_first((f"{image} next to {other}" for image, other in derived.items()), 3)
        msg = (
            f"{path} has {len(derived)} images among {len(images)} named like another image and an addition ({pairs}), "
            "and each would become a cell: move masks and copies to another folder, or rename the images of cells."
        )
        if len(first) < len(images) or 2 * len(set(derived.values())) >= len(images) - len(derived):
            raise ValueError(msg)
        warn_user(msg)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_mask_word(name: str) -> bool:
    """Return whether a name has a word for segmentation masks, such as ``"0_mask"`` and ``"cellMasks/0"``."""
    return _MASK_WORD.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None


def _load_table(table: str | os.PathLike[str] | pd.DataFrame) -> pd.DataFrame:
    """Return a table of cells. If it is read from a file, its index holds the names of the cells as text."""
    if isinstance(table, pd.DataFrame):
        return table
    found = read_table_file(table)
    return found.set_axis(found.index.astype(str))


def _table_without_names(n: int) -> pd.DataFrame:
    """Return a table without columns for ``n`` cells, whose names are the row numbers as text."""
    return pd.DataFrame(index=pd.RangeIndex(n).astype(str))


def _replace_table(crops: Crops, table: pd.DataFrame, kind: str) -> Crops:
    """Replace the table of crops by a table from the user.

    If the images have names, rows of the new table are matched to images by name. Otherwise, row i of the new table
    describes image i.
    """
    table = table.reset_index() if table.index.nlevels > 1 else table
    found, names = replace(crops, obs=table), crops.obs.index
    named = kind in ("anndata", "image_folder", "lmdb") or not _has_default_names(names)
    if not named:
        _check_order(table, crops.name)
        return found
    # the author of a table may know the order of the cells in an AnnData, but not the order in which files of a folder
    # or keys of a database are listed
    ordered = kind not in ("image_folder", "lmdb")
    return replace(found, obs=_match_rows(names, table, crops.name, ordered=ordered))


def _check_order(table: pd.DataFrame, path: str) -> None:
    """Raise ``ValueError`` if the row numbers that were saved with a table are not in order, because it was sorted.

    Row numbers are whole numbers in the index, or a first column that contains each number from 0 (or 1) upwards
    exactly once. They are in order if they increase, or begin again where tables were concatenated, in which case some
    numbers occur several times. For names with such numbers, as in ``cell_3``, a warning replaces the error.
    """
    first_column = [(f"column {name!r}", pd.Index(table.iloc[:, 0])) for name in table.columns[:1]]
    for place, values in [("the index", table.index), *first_column]:
        parts = values.astype(str).str.extract(r"^(.*?)(\d+)(?:\.0)?$")
        if parts.isna().any(axis=None) or parts[0].nunique() != 1:
            continue
        numbers, in_names = parts[1].map(int).to_numpy(), parts[0].iloc[0] != ""
        steps, of_rows = np.diff(numbers), np.arange(len(numbers)) + min(numbers.min(), 1)
        most = np.unique(numbers, return_counts=True)[1].max()
        if (steps > 0).all() or (most > 1 and (steps < 0).sum() <= max(most - 1, len(numbers) // 10)):
            continue
        if (place == "the index" and not in_names) or np.array_equal(np.sort(numbers), of_rows):
            msg = (
                f"The rows of the table are numbered {join_first(values)} ({place}), so they are probably not in the "
                f"order of the images of {path}: sort the table by these numbers, or drop the numbers if rows are in "
                "the order of the images (table.reset_index(drop=True), table.drop(columns=…))."
            )
            if not in_names:
                raise ValueError(msg)
            warn_user(msg)


def _has_default_names(names: pd.Index) -> bool:
    """Return whether the rows of a table are only named by their row numbers, counted from 0."""
    return bool((names.astype(str) == np.arange(len(names)).astype(str)).all())


def _match_rows(names: pd.Index, table: pd.DataFrame, path: str, *, ordered: bool) -> pd.DataFrame:
    """Sort the rows of a table into the order of the images, and name the rows like the images.

    Names of images are searched in the index of the table and in all columns of text or integers.

    Parameters
    ----------
    names
        Names of the N images.
    table
        Table with N rows, from the user.
    path
        File or folder of the images, for messages.
    ordered
        Whether the author of the table can know the order of the images. If so, and if the table does not hold the
        names of the images, its rows are taken to be in the order of the images, and a message states this.

    Raises
    ------
    ValueError
        If no column holds exactly the names of the images (unless rows are taken to be in the order of the images), or
        if two columns hold the names in different orders.
    """
    names = names.astype(str)
    if names.equals(table.index.astype(str)):
        return table
    found = {
        place: rows
        for place, values in _candidate_name_columns(table)
        if (rows := _rows_of_names(names, values)) is not None
    }
    if len(found) > 1 and _has_default_names(table.index):  # the index holds row numbers of pandas, not names of images
        found.pop("the index", None)
    if found:
        (first, rows), *others = found.items()
        for other, rows_too in others:
            if not np.array_equal(rows, rows_too):
                msg = f"{first} and {other} of the table have the names in {path} in different orders: drop one."
                raise ValueError(msg)
        return table.iloc[rows].set_axis(names)
    if ordered and _has_default_names(table.index):
        _check_order(table, path)
        print_above_bar(
            f"{path}: the table names no cell ({join_first(names, 3)}), and so is taken to have the same order."
        )
        return table
    msg = (
        f"The table does not say which row is which image of {path}: no column has each of the names "
        f"{join_first(names, 3)} "
        "once; add one, or read a table that names image files in place of them (file_columns=…)."
    )
    raise ValueError(msg)


def _candidate_name_columns(table: pd.DataFrame) -> Iterator[tuple[str, pd.Index]]:
    """Iterate over the index and the columns of a table that may hold names of images.

    Yield a description of the index or column, for messages, and its values as text.
    """
    yield "the index", table.index.astype(str)
    for number, column in enumerate(table):
        if table.dtypes.iloc[number].kind not in "fbmM":
            yield f"column {column!r}", pd.Index(table.iloc[:, number].astype(str))


def _rows_of_names(names: pd.Index, values: pd.Index) -> np.ndarray | None:
    """Return the position of each image name in ``values``.

    `None` is returned unless ``names`` and ``values`` hold the same names, each of them once.
    """
    if not names.is_unique or values[0] not in names:
        return None
    places = names.get_indexer(values)
    rows = np.full(len(names), -1)
    rows[places] = np.arange(len(places))
    return rows if (places >= 0).all() and (rows >= 0).all() else None
