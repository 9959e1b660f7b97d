"""Reading, writing and verification of whole screens.

A screen holds the images of all cells and a table with one row per cell. It is written once, in blocks of rows, as a
Zarr store with checksums, and is read row by row in training.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import shutil
import tempfile
import warnings
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import h5py
import numpy as np
import pandas as pd
import zarr
from anndata import AnnData
from anndata.utils import make_index_unique

from scbd._shared.checks import check_choice, format_count, inflect, join_first, size_after_resizing
from scbd._shared.files import check_plates_distinct, local_path, partial_path
from scbd._shared.keys import IMAGE_KEY
from scbd._shared.labels import as_columns, label_values
from scbd._shared.messages import warn_user
from scbd._shared.progress import progress_bar
from scbd.data._block_store import COMPRESSION_LEVELS, BlockStore, block_arrays, block_file, digest_of_tables
from scbd.data._formats import SOURCE_COLUMN, unique_file_names
from scbd.data._hdf5_source import memory_map_dataset
from scbd.data._image_files import FileSource
from scbd.data._intensity_range import check_finite, output_intensity_range
from scbd.data._opened_stores import keep_on_disk
from scbd.data._prefetch import map_in_threads
from scbd.data._readers import (
    Crops,
    channel_table,
    crops_from_anndata,
    find_images,
    open_store,
    read_crops,
    read_tables,
    select_channels,
)
from scbd.data._sources import (
    FEATURES,
    IMAGE_DTYPES,
    STORE_KEY,
    ArraySource,
    ColumnSource,
    digest_cells,
    iterate_blocks,
    rows_per_block,
)
from scbd.data._storable import as_storable, stored_names
from scbd.data._tables import concat_tables
from scbd.data._zarr_source import ZarrSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr.abc.store import Store

    from scbd._shared.checks import ImageSize
    from scbd.data._channels import Channels

    Plate: TypeAlias = Crops | AnnData | str | os.PathLike[str]

# Number of bytes, before compression, of the images in one file of a stored screen. Each file holds a block of
# consecutive rows.
_BLOCK_BYTES = 64 * 2**20
# Number of bytes of images that are read from a plate and converted at once. The number is small, so that the images
# fit into the caches of the CPU and take little memory.
_CONVERTED_BYTES = 8 * 2**20


def open_screen(
    path: str | os.PathLike[str] | Store,
    *,
    image_key: str = IMAGE_KEY,
    layer: str | None = None,
    obsm_key: str | None = None,
) -> AnnData:
    """Open a screen, that is, an ``.h5ad`` file or a Zarr store with the images or features of all cells.

    The screen may be larger than memory, since its images or features stay on disk if possible.
    The tables of cells and channels are loaded into memory. The images, or the features if requested, are opened
    according to the file:

    - ``.h5ad`` file that stores them without compression and chunks: memory-mapped (:class:`numpy.memmap`).
    - Zarr store: not loaded, but kept as a :class:`zarr.Array`, which models read with :class:`ZarrSource`.
    - ``.h5ad`` file that stores them with compression or in chunks: loaded into memory.

    Writing the opened screen to the path that it was opened from, or removing the folder, would destroy its images, and
    raises ``PermissionError`` (``OSError`` for ``.h5ad``). Write it to another path. Stores that are not local folders,
    such as ``s3://…``, are not protected. A copy of the screen, ``screen.copy()``, reads the same images.

    Parameters
    ----------
    path
        Path of an ``.h5ad`` file or a ``.zarr`` folder, URL of a Zarr store (``s3://…``, requires fsspec), or a store
        object of the zarr package.
    image_key
        Key of the images in ``obsm``.
    layer, obsm_key
        Place of features to open in place of the images. ``layer`` is the name of a layer, or ``"X"`` for the matrix
        ``X``. ``obsm_key`` is a key of ``obsm``. Default: open the images.

    Returns
    -------
    AnnData with the images or the requested features. Other layers are not opened, and ``X`` is opened only if it holds
    the requested features.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is truncated or not an AnnData file, or if the features are not a dense array.
    KeyError
        If the file has no images or features at the given place.

    Warns
    -----
    UserWarning
        If each chunk of the images in a Zarr store holds only a part of an image, which is slow to read.

    Examples
    --------
    >>> adata.write_h5ad("screen.h5ad")  # without compression, so that the images can be memory-mapped
    >>> screen = scbd.data.open_screen("screen.h5ad")
    >>> screen.obsm["single_cell_images"].shape
    (240, 4, 32, 32)
    """
    group = open_store(path)
    if layer is not None or obsm_key is not None:
        return _open_features(group, path, layer, obsm_key)
    images = find_images(group, path, image_key)
    parts = read_tables(group, image_key)
    if isinstance(images, h5py.Dataset):
        with images.file:
            images = images[...]
    elif isinstance(images, zarr.Array) and images.chunks[1:] != images.shape[1:]:
        msg = (
            f"Chunks of {images.chunks} in {path} hold parts of images, which takes long to read: convert it once with "
            "scbd.data.write_screen(new_path, path, y_key=…)."
        )
        warn_user(msg)
    return keep_on_disk(AnnData(**parts | {"obsm": parts["obsm"] | {image_key: images}}))


def _open_features(group: Any, path: Any, layer: str | None, obsm_key: str | None) -> AnnData:
    """Open the features of cells in an AnnData file, without its images, as described in :func:`open_screen`.

    Parameters
    ----------
    group
        AnnData file, opened as an HDF5 file or a Zarr group.
    path
        Path of the file, for error messages.
    layer, obsm_key
        Place of the features: layer ``layer`` (``"X"`` for ``X``), or ``obsm[obsm_key]`` if ``layer`` is `None`.

    Returns
    -------
    AnnData with the features. An array is left on disk (Zarr) or memory-mapped (HDF5) if possible; a table is loaded.

    Raises
    ------
    KeyError
        If there are no features at this place.
    ValueError
        If the features are neither a dense array nor a table, for example a sparse matrix.
    """
    from anndata.io import read_elem

    place = f"obsm/{obsm_key}" if layer is None else "X" if layer == "X" else f"layers/{layer}"
    if place not in group:
        inside = [f"{name}/{key}" for name in ("layers", "obsm") if name in group for key in group[name]]
        msg = f"{path} has no {place} (its parts: {', '.join((['X'] if 'X' in group else []) + inside)})."
        raise KeyError(msg)
    # anndata before 0.8 wrote dense arrays without a type
    kind = group[place].attrs.get("encoding-type", "array" if hasattr(group[place], "shape") else None)
    if kind not in ("array", "dataframe"):
        msg = f"{place} of {path} is no dense array ({kind}): make it dense (toarray()), and write it again."
        raise ValueError(msg)
    parts = read_tables(group, obsm_key or "")
    features: Any = group[place]
    if kind == "dataframe":
        features = read_elem(features)
    elif isinstance(features, h5py.Dataset):
        in_place = memory_map_dataset(features)
        features = features[...] if in_place is None else in_place
    if layer is None:
        return keep_on_disk(AnnData(**parts | {"obsm": parts["obsm"] | {obsm_key: features}}))
    return keep_on_disk(AnnData(**parts | ({"X": features} if layer == "X" else {"layers": {layer: features}})))


def open_embedding(path: str | os.PathLike[str]) -> AnnData:
    """Load the embeddings of cells from a file into memory.

    The file was written by the model method ``embed_to``, or is any other AnnData file with embeddings in ``obsm``.

    Parameters
    ----------
    path
        Path of a ``.zarr`` folder or an ``.h5ad`` file.

    Returns
    -------
    AnnData with the table of cells in ``obs`` and the embeddings in ``obsm``. The functions of ``scbd.metrics`` accept
    this object.

    Raises
    ------
    FileNotFoundError
        If there is no such file or folder.
    ValueError
        If the file is damaged or not an AnnData file.

    Examples
    --------
    >>> embedded = model.embed_to("embedding.zarr", dtype="float16")
    >>> scbd.data.open_embedding("embedding.zarr").obsm["X_scbd_c"].shape
    (240, 64)
    """
    group = open_store(path)
    arrays = block_arrays(group)
    parts = read_tables(group, *arrays)
    read = {key: ZarrSource(array, f"obsm[{key!r}]", FEATURES).read(slice(None)) for key, array in arrays.items()}
    return AnnData(**parts | {"obsm": parts["obsm"] | read})


def verify_screen(path: str | os.PathLike[str]) -> None:
    """Verify that the files of a screen or of embeddings are complete and undamaged, by their checksums.

    Parameters
    ----------
    path
        Path of a Zarr store that :func:`write_screen` or the model method ``embed_to`` has written.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    ValueError
        If files of images or embeddings are damaged or missing (the message names the files and their rows), if the
        tables were changed after writing, or if the store has no checksums because it was written by another program.

    Examples
    --------
    >>> screen = scbd.data.write_screen("screen.zarr", adata, y_key="gene")
    >>> scbd.data.verify_screen("screen.zarr")  # no output and no error: the screen is undamaged
    """
    path = local_path(path)
    group = open_store(path)
    recorded: Any = group.attrs.get(STORE_KEY)
    arrays = block_arrays(group, fast=True)
    if recorded is None or not arrays:
        msg = f"{path} has no checksums: scbd verifies what write_screen and embed_to have written."
        raise ValueError(msg)
    wrong = [] if digest_of_tables(path, arrays) == recorded["tables"] else ["its tables are not what was written"]
    with progress_bar("Verifying", sum(array.shape[0] for array in arrays.values())) as bar:
        for array in arrays.values():
            size = (array.shards or array.chunks)[0]
            for block, start in enumerate(range(0, array.shape[0], size)):
                file, stop = path / block_file(array, block), min(start + size, array.shape[0])
                try:
                    if not file.exists():
                        wrong.append(f"{file} is missing, with rows {start} to {stop - 1}")
                    array[start:stop]
                except (IndexError, OSError, RuntimeError, ValueError) as error:
                    wrong.append(f"{file} is damaged, with rows {start} to {stop - 1} ({error})")
                bar.update(stop - start)
    if wrong:
        msg = f"{path} is damaged in {format_count(len(wrong), 'place')}: {join_first(wrong)}. Copy or write it again."
        raise ValueError(msg)


def write_screen(
    path: str | os.PathLike[str],
    plates: Plate | Sequence[Plate],
    *,
    y_key: str | Sequence[str],
    image_key: str = IMAGE_KEY,
    channels: Channels | None = None,
    image_size: ImageSize | None = None,
    dtype: Literal["uint8", "uint16", "float16", "float32"] | None = None,
    intensity_range: Sequence[float] | Sequence[Sequence[float]] | None = None,
    compression: Literal["lz4", "zstd"] | None = None,
    seed: int = 0,
) -> AnnData:
    """Write the crops of one or several plates into one screen on disk, to be opened with :func:`open_screen`.

    The screen has one row per cell. Rows are sorted by perturbation, and the cells of a perturbation are in random
    order across all plates. For a training batch, the cells of a perturbation can then be read quickly, as a few
    stretches of consecutive rows, and still come from different wells. This order requires that all plates are given at
    once. To add a plate later, write the old screen and the new plate to a new path.

    The screen appears at ``path`` only when it is complete. If writing is interrupted, even by a kill of the process,
    call the function again with the same cells. It then continues where it stopped.

    Memory holds the tables and, for each CPU core, a block of rows of 64 MiB and the images that are being converted.
    Plates that store many rows per chunk, such as a compressed ``.h5ad``, are first copied uncompressed to a temporary
    file in the folder that contains ``path``.

    Parameters
    ----------
    path
        Path of the new screen, which must end in ``.zarr``. It becomes a folder with files of 64 MiB before
        compression. In these files, each image is a Zarr chunk of its own, with a checksum.
    plates
        One plate or several, each as AnnData with images in ``obsm``, as :class:`Crops`, or as a path for
        :func:`read_crops`. If there are several plates, a new column ``obs["source"]`` holds the name of the file that
        each cell comes from. A plate that already has a column ``source`` keeps the values of this column. Columns of
        ``obs`` that hold dates, intervals or mixed values are written as text. A column is mixed, for example, if plate
        rows have numbers on one plate and letters on another.
    y_key
        Column of ``obs`` with the perturbation, or several columns whose combination is the perturbation.
    image_key
        Key of the images in ``obsm``, in the plates and in the screen.
    channels
        Names or numbers of the channels to write, in this order. A mapping from new names to present names or numbers
        renames channels. Default: all channels except masks.
    image_size
        Number of pixels per side to which images are resized (bilinear, antialiased). Crops that are not square require
        a pair ``(height, width)``, which may change their aspect ratio. Default: images are not resized.
    dtype
        Dtype of the stored images. Default: the dtype of the plates. If a different integer dtype is given, intensities
        are scaled to its range. If a float dtype is given, intensities are not scaled.
    intensity_range
        Range of intensities, ``(low, high)`` or one such pair per channel, that is scaled to the range from the lowest
        to the highest value of the integer dtype. Intensities outside ``intensity_range`` are clipped. Default: the
        0.1 % and 99.9 % percentiles of each channel in about 2,048 random crops (in 1,024 random pixels per crop if
        images are floats). The range is stored in ``uns["scbd_store"]``.
    compression
        Compression of the images: ``"lz4"`` reads faster, ``"zstd"`` takes less space. Default: no compression.
    seed
        Seed of the random order of cells, and of the random sample of crops for the default of ``intensity_range``.

    Returns
    -------
    AnnData of the new screen, as returned by :func:`open_screen`.

    Raises
    ------
    FileExistsError
        If there is a file or folder at ``path`` already.
    OSError
        If the disk has too little space. The space is checked in advance only if images are not compressed.
    KeyError
        If a plate lacks the column ``y_key``, the images or a channel.
    TypeError, ValueError
        If plates differ in channels, dtype or image size, a plate is given twice, two plates have the same image
        files, a column cannot be stored, an argument is not allowed, an image has NaN or infinite pixels (the message
        names the image), a file cannot be read, or the folder next to ``path`` for the incomplete screen holds a screen
        that was begun with other cells or settings.

    Warns
    -----
    UserWarning
        If a plate has no cells. Such plates are ignored.

    Examples
    --------
    >>> plates = [adata[adata.obs["well"] == well].copy() for well in ("P1_W1", "P1_W2")]
    >>> screen = scbd.data.write_screen("screen.zarr", plates, y_key="gene", compression="lz4")
    >>> screen.obs["gene"].is_monotonic_increasing  # sorted by perturbation
    True
    """
    path = local_path(path)
    if path.suffix != ".zarr":
        msg = f"{path}: give a path that ends in .zarr."
        raise ValueError(msg)
    if path.exists():
        msg = f"{path} is there: give another path, or remove it."
        raise FileExistsError(msg)
    check_choice("compression", compression, (*COMPRESSION_LEVELS, None))
    given = [plates] if isinstance(plates, (Crops, AnnData, str, os.PathLike)) else list(plates)
    if not given:
        msg = "There is no plate to write: give at least one."
        raise ValueError(msg)
    check_plates_distinct(given)
    empty = [f"plate {number}" for number, plate in enumerate(given) if isinstance(plate, AnnData) and not plate.n_obs]
    if empty and len(empty) < len(given):
        msg = f"{len(empty)} of {len(given)} plates {inflect(len(empty), 'has', 'have')} no cell ({join_first(empty)})."
        warn_user(msg)
        given = [plate for plate in given if not isinstance(plate, AnnData) or plate.n_obs]
    crops = [_plate_crops(plate, image_key, channels, f"plate {number}") for number, plate in enumerate(given)]
    size, kind = _output_size_and_dtype(crops, image_size, dtype, intensity_range)
    _check_plates_match(crops, y_key, sized=size is not None)
    _check_files_distinct(crops)
    obs, order = _sort_and_shuffle(crops, y_key, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (len(obs), crops[0].images.shape[1], *(size or crops[0].images.shape[2:]))
    if compression is None:
        _check_space(path, math.prod(shape) * kind.itemsize)
    with ExitStack() as stack:
        crops = [_copy_if_chunked(plate, path.parent, stack) for plate in crops]
        scale = output_intensity_range(crops, kind, intensity_range, seed)
        plan = ScreenPlan(crops, order, shape, kind, size, scale)
        var = as_storable(channel_table(crops[0].channels), "var")
        uns = {} if scale is None else {STORE_KEY: {"intensity_range": scale}}
        store = BlockStore(
            path,
            {"obs": obs, "var": var, "uns": uns},
            {image_key: (shape, kind)},
            rows_per_block(shape, kind, _BLOCK_BYTES),
            plan.digest(obs),
            by_row=True,
            compression=compression,
        )
        todo = np.flatnonzero(~store.begin()).tolist()
        written = map_in_threads(lambda block: store.write(block, {image_key: plan.images(store.rows(block))}), todo)
        sizes = [store.rows(block).stop - store.rows(block).start for block in todo]
        bar = stack.enter_context(progress_bar(f"Writing {path.name}", sum(sizes)))
        for n, _ in zip(sizes, stack.enter_context(closing(written)), strict=True):
            bar.update(n)
        store.finish()
    return open_screen(path, image_key=image_key)


def _plate_crops(plate: Plate, image_key: str, channels: Channels | None, name: str) -> Crops:
    """Return the images of a plate, restricted to the given channels, with their table of cells.

    Parameters
    ----------
    plate
        Plate as crops, as AnnData, or as a path for :func:`read_crops`.
    image_key
        Key of the images in ``obsm``, if the plate is AnnData or a path.
    channels
        Names or numbers of the channels to keep. Default: all channels except masks.
    name
        Name of the plate in error messages, if the plate is AnnData.
    """
    if isinstance(plate, Crops):
        return select_channels(plate, channels)
    if isinstance(plate, AnnData):
        return crops_from_anndata(plate, image_key, name, channels)
    return read_crops(plate, image_key=image_key, channels=channels)


def _output_size_and_dtype(
    plates: Sequence[Crops], image_size: ImageSize | None, dtype: Any, intensity_range: Any
) -> tuple[tuple[int, int] | None, np.dtype]:
    """Check how the images of the plates are to be converted, and return their size and dtype in the new screen.

    The arguments are those of :func:`write_screen`.

    Returns
    -------
    Height and width of the converted images (`None` if images are not resized), and their dtype.

    Raises
    ------
    TypeError
        If ``dtype`` is not one of the supported dtypes of images.
    ValueError
        If ``dtype`` cannot represent the pixels of the plates, ``intensity_range`` is malformed or would have no
        effect, or the images of a plate cannot be resized to ``image_size``.
    """
    stored, n_channels = plates[0].images.dtype, plates[0].images.shape[1]
    wanted = stored if dtype is None else np.dtype(dtype)
    if wanted.name not in IMAGE_DTYPES:
        msg = f"dtype={wanted.name!r} is not one of images: use {', '.join(IMAGE_DTYPES)}."
        raise TypeError(msg)
    if wanted == np.float16 and stored == np.uint16:
        msg = "dtype='float16' rounds whole numbers above 2,048 and cannot represent values above 65,504: keep uint16."
        raise ValueError(msg)
    if intensity_range is not None:
        if wanted.kind == "f" or wanted == stored:
            msg = f"Intensities do not change from {stored} to {wanted}: drop intensity_range."
            raise ValueError(msg)
        found = np.asarray(intensity_range, dtype=np.float32)
        if found.shape not in ((2,), (n_channels, 2)) or not (found[..., 0] < found[..., 1]).all():
            msg = f"intensity_range={found.tolist()}: give (low, high), for all or for each of {n_channels} channels."
            raise ValueError(msg)
    size = None
    for plate in plates:
        try:
            size = size_after_resizing(image_size, *plate.images.shape[2:])
        except ValueError as error:
            msg = f"{plate.name}: {error}"
            raise ValueError(msg) from error
    # import the module for resizing, and torch with it, before the threads that convert images start, since each of
    # these threads limits torch to one core
    if image_size is not None:
        importlib.import_module("scbd.data._loading")
    return None if image_size is None else size, wanted


def _check_plates_match(plates: Sequence[Crops], y_key: str | Sequence[str], *, sized: bool) -> None:
    """Raise an error if plates differ in channels, dtype or image size, or if a plate lacks perturbation labels.

    Parameters
    ----------
    plates
        Crops of all plates of the new screen.
    y_key
        Column or columns of ``obs`` with the perturbation.
    sized
        Whether all images will be resized to one size. If true, different image sizes are accepted.

    Raises
    ------
    ValueError
        If plates differ in channels, dtype or image size, or a cell has no perturbation label.
    KeyError
        If a plate lacks a column of ``y_key``.
    """
    first = plates[0]
    for plate in plates:
        if (plate.channels, plate.images.dtype) != (first.channels, first.images.dtype):
            channels = [f"{', '.join(p.channels)} ({p.images.dtype})" for p in (plate, first)]
            msg = f"{plate.name} has channels {channels[0]}, {first.name} has {channels[1]}: they must be the same."
            raise ValueError(msg)
        if not sized and plate.images.shape[2:] != first.images.shape[2:]:
            sides = [" × ".join(map(str, p.images.shape[2:])) for p in (plate, first)]
            msg = f"{plate.name} has {sides[0]} pixels, {first.name} {sides[1]}: give image_size."
            raise ValueError(msg)
        try:
            label_values(plate.obs, y_key)
        except (KeyError, ValueError) as error:
            msg = f"{plate.name}: {error.args[0]}"
            raise type(error)(msg) from error


def _check_files_distinct(plates: Sequence[Crops]) -> None:
    """Raise ``ValueError`` if two plates read the image of a cell from the same files."""
    seen: dict[tuple[str, ...], int] = {}
    for number, plate in enumerate(plates if len(plates) > 1 else ()):
        source: Any = plate.images
        while isinstance(source, ColumnSource):
            source = source.source
        for files in source.files() if isinstance(source, FileSource) else ():
            if seen.setdefault(files, number) != number:
                msg = (
                    f"{plates[seen[files]].name} and {plate.name} both name {files[0]}: its cell would be there twice, "
                    "perhaps in training and in validation; name each file on one plate."
                )
                raise ValueError(msg)


def _check_space(path: Path, n_bytes: int) -> None:
    """Raise ``OSError`` if the disk has too little space for a new screen.

    If an earlier run was interrupted, the part of the screen that is already on disk is subtracted.

    Parameters
    ----------
    path
        Final path of the screen.
    n_bytes
        Number of bytes of the whole screen.
    """
    partial = partial_path(path)
    there = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    free = shutil.disk_usage(path.parent).free
    if n_bytes - there > free:
        msg = f"{path} takes {(n_bytes - there) / 2**30:.1f} GiB more, the disk has {free / 2**30:.1f} free."
        raise OSError(msg)


def _copy_if_chunked(plate: Crops, folder: Path, stack: ExitStack) -> Crops:
    """Copy the images of a plate to a temporary file without chunks, if they are stored in chunks of several rows.

    From such chunks, reading one row takes as long as reading the whole chunk.

    Parameters
    ----------
    plate
        Crops of the plate.
    folder
        Folder of the temporary file.
    stack
        Exit stack of the caller. When it ends, the temporary file is closed, which deletes it.

    Returns
    -------
    Crops that read from the temporary file, or ``plate`` itself if no copy is needed.
    """
    source = plate.images
    chunk_rows = getattr(source, "chunk_rows", 1)
    if chunk_rows == 1:
        return plate
    n_chunks = max(1, rows_per_block(source.shape, source.dtype, _BLOCK_BYTES) // chunk_rows)
    # the temporary file has no name, so that the operating system deletes it even if the process is killed
    file = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
    images: np.ndarray = np.memmap(file, source.dtype, "w+", shape=source.shape)

    def read(rows: slice) -> int:
        return len(source.read(rows, out=images[rows]))

    blocks = iterate_blocks(source.shape[0], n_chunks * chunk_rows)
    with progress_bar(f"Reading {plate.name}", source.shape[0]) as bar:
        for n_read in map_in_threads(read, blocks) if getattr(source, "concurrent", False) else map(read, blocks):
            bar.update(n_read)
    return replace(plate, images=ArraySource(images, plate.name))


@dataclass(frozen=True, eq=False)
class ScreenPlan:
    """Plan for writing a screen, which states the cell that each row is read from and the conversion of images.

    Attributes
    ----------
    plates
        Crops of all plates, whose images can be read by row.
    order
        Number of the cell that each row of the screen is read from, integers ``(N,)``. Cells are numbered consecutively
        over all plates, one plate after the other.
    shape, dtype
        Shape ``(N, C, H, W)`` and dtype of the images in the screen.
    image_size
        Height and width to which images are resized; `None` if they are not resized.
    intensity_range
        Two intensities of each channel, ``(C, 2)``, that become the lowest and the highest value of the integer dtype;
        `None` if intensities are not scaled.
    """

    plates: Sequence[Crops]
    order: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype
    image_size: tuple[int, int] | None
    intensity_range: np.ndarray | None
    # Lock for reading from sources of images that only one thread may read at a time. All plates use the same lock,
    # since several plates may read from the same source.
    _turn: Lock = field(default_factory=Lock)

    def images(self, rows: slice) -> np.ndarray:
        """Read the images for some rows of the screen from their plates, and convert them to its size and dtype.

        Several threads can call this method at once.

        Parameters
        ----------
        rows
            Slice of rows of the screen.

        Returns
        -------
        Images ``(number of rows, C, H, W)`` in the size and dtype of the screen.

        Raises
        ------
        ValueError
            If an image has NaN or infinite pixels (the message names the image), or cannot be read.
        """
        order = self.order[rows]
        images, first = np.empty((len(order), *self.shape[1:]), self.dtype), 0
        for plate in self.plates:
            n = plate.images.shape[0]
            places = np.flatnonzero((order >= first) & (order < first + n))
            # read the cells of a plate in the order in which the plate is stored
            places = places[np.argsort(order[places])]
            step = rows_per_block(plate.images.shape, plate.images.dtype, _CONVERTED_BYTES)
            for part in (places[block] for block in iterate_blocks(len(places), step)):
                with nullcontext() if getattr(plate.images, "concurrent", False) else self._turn:
                    raw = plate.images.read(order[part] - first)
                check_finite(raw, plate, order[part] - first)
                # a pixel that is too large for float16 becomes infinite; suppress numpy's warning, since the next check
                # raises an error
                with np.errstate(over="ignore"):
                    images[part] = self._converted(raw)
                check_finite(images[part], plate, order[part] - first)
            first += n
        return images

    def _converted(self, images: np.ndarray) -> np.ndarray:
        """Resize images, scale their intensities, and cast them to the dtype of the screen.

        Images are resized only if ``image_size`` is given, and intensities are scaled only if ``intensity_range`` is
        given.
        """
        if self.image_size not in (None, images.shape[2:]):
            from scbd.data._loading import resize_to

            images = resize_to(images, self.image_size).numpy()
        if self.intensity_range is not None:
            low, high = self.intensity_range.T[:, :, None, None]
            highest = np.iinfo(self.dtype).max
            images = np.subtract(images, low, dtype=np.float32)
            images *= highest / (high - low)
            images.clip(0, highest, out=images)
        if self.dtype.kind == "u" and images.dtype.kind == "f":
            np.round(images, out=images)
        return images.astype(self.dtype, copy=False)

    def digest(self, obs: pd.DataFrame) -> str:
        """Compute a SHA-256 hash of all that determines the content of the screen.

        An interrupted run is continued only if this hash is the same. The hash covers the table ``obs`` of the screen,
        the order of its rows, the images of up to 64 cells per plate, the channels, and the settings of the conversion.
        """
        digest = hashlib.sha256(digest_cells(None, obs).encode())
        digest.update(self.order.tobytes())
        for plate in self.plates:
            digest.update(digest_cells(plate.images, plate.obs.iloc[:0]).encode())
        scale = None if self.intensity_range is None else self.intensity_range.tolist()
        digest.update(json.dumps([*self.shape, self.dtype.name, *self.plates[0].channels, scale]).encode())
        return digest.hexdigest()


def _sort_and_shuffle(
    plates: Sequence[Crops], y_key: str | Sequence[str], seed: int
) -> tuple[pd.DataFrame, np.ndarray]:
    """Sort the cells of all plates by perturbation, and shuffle them within each perturbation.

    Returns
    -------
    - Table of the cells of all plates in the new order.
    - Number of the cell in each row of this table, integers ``(N,)``. Cells are numbered consecutively over all plates
      (attribute ``order`` of :class:`ScreenPlan`).
    """
    # convert the columns of all plates together, since a column may hold text on one plate and numbers on another
    obs = concat_tables([plate.obs for plate in plates]) if len(plates) > 1 else plates[0].obs
    named = _add_source_column(obs, plates)
    obs, others = as_storable(named), stored_names(named.columns)
    order = np.random.default_rng(seed).permutation(len(obs))
    if len(obs) < 2**31:
        order = order.astype(np.int32)
    codes = label_values(obs, [others.get(column, column) for column in as_columns(y_key)]).cat.codes.to_numpy()
    order = order[np.argsort(codes[order], kind="stable")]
    obs = obs.iloc[order].astype({column: "category" for column in obs if obs[column].dtype == object})
    obs.index = _unique_names(plates)[order].rename(obs.index.name)
    return obs, order


def _unique_names(plates: Sequence[Crops]) -> pd.Index:
    """Return a unique name for each cell of all plates, one plate after the other.

    If a name occurs twice and there are several plates, the number of the plate is appended to every name. A name that
    occurs twice on the same plate gets a further number.
    """
    names = [plate.obs.index.astype(str) for plate in plates]
    together = names[0].append(names[1:])
    if len(names) > 1 and not together.is_unique:
        together = pd.Index([f"{name}-{number}" for number, of_plate in enumerate(names) for name in of_plate])
    with warnings.catch_warnings():
        # suppress the warning that some names already end in a number, since the result is unique anyway
        warnings.filterwarnings("ignore", "Suffix used", UserWarning)
        return make_index_unique(together)


def _add_source_column(obs: pd.DataFrame, plates: Sequence[Crops]) -> pd.DataFrame:
    """Add a column ``source`` with the name of the file of each cell to the table of the cells of all plates.

    Cells of a plate that already has a column ``source`` keep their values of this column. The table of a single plate
    is returned unmodified.

    Parameters
    ----------
    obs
        Table of the cells of all plates, one plate after the other.
    plates
        Crops of the plates.
    """
    new = [number for number, plate in enumerate(plates) if SOURCE_COLUMN not in plate.obs]
    if len(plates) == 1 or not new:
        return obs
    kept = [plate.obs[SOURCE_COLUMN] for plate in plates if SOURCE_COLUMN in plate.obs]
    old = {str(name) for column in kept for name in column.dropna().unique()}
    # bytes of a file name that are not UTF-8 cannot be stored, and are written as \xe9 and the like
    readable = [os.fsencode(plates[number].name).decode(errors="backslashreplace") for number in new]
    names = dict(zip(new, unique_file_names(readable, old), strict=True))
    plate_of = np.repeat(np.arange(len(plates), dtype=np.int32), [len(plate.obs) for plate in plates])
    if not old:
        return obs.assign(**{SOURCE_COLUMN: pd.Categorical.from_codes(plate_of, list(names.values()))})
    column = obs[SOURCE_COLUMN].to_numpy(object, copy=True)
    for number, name in names.items():
        column[plate_of == number] = name
    return obs.assign(**{SOURCE_COLUMN: column})
