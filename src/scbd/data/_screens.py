"""Screens on disk: Zarr stores with shards and checksums, written once in blocks and read by row."""

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
from scbd._shared.progress import progress_bar
from scbd.data._block_store import COMPRESSION_LEVELS, BlockStore, block_arrays, block_file, digest_of_tables
from scbd.data._formats import SOURCE_COLUMN, unique_file_names
from scbd.data._hdf5_source import memory_map_dataset
from scbd.data._intensity_range import check_finite, output_intensity_range
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
from scbd.data._sources import FEATURES, IMAGE_DTYPES, STORE_KEY, ArraySource, digest_cells
from scbd.data._storable import as_storable, stored_names
from scbd.data._zarr_source import ZarrSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr.abc.store import Store

    from scbd._shared.checks import ImageSize
    from scbd.data._channels import Channels

    Plate: TypeAlias = Crops | AnnData | str | os.PathLike[str]

# number of bytes in a block of rows, which is written at once as one file of the store
_BLOCK_BYTES = 64 * 2**20
# number of bytes of images that are read and converted at once: few enough for the caches of the CPU and for memory
_CONVERTED_BYTES = 8 * 2**20


def open_screen(
    path: str | os.PathLike[str] | Store,
    *,
    image_key: str = IMAGE_KEY,
    layer: str | None = None,
    obsm_key: str | None = None,
) -> AnnData:
    """Open an ``.h5ad`` file or a Zarr store of any size, without loading its images or features if possible.

    Tables are loaded into memory. Images and features are treated as follows:

    - ``.h5ad`` file without compression or chunks: memory-mapped (:class:`numpy.memmap`).
    - Zarr store: left on disk as a :class:`zarr.Array`, which models read with :class:`ZarrSource`.
    - Other ``.h5ad`` file: loaded into memory.

    Write results to another path: writing an opened screen over itself destroys its images.

    Parameters
    ----------
    path
        Path of an ``.h5ad`` file or a ``.zarr`` folder, URL of a Zarr store (``s3://…``, requires fsspec), or a store
        object of the zarr package.
    image_key
        Key of the images in ``obsm``.
    layer, obsm_key
        Open features in place of images: name of their layer (``"X"`` for ``X``), or their key in ``obsm``.

    Returns
    -------
    AnnData with the images or features. Other layers are not opened, and neither is ``X`` unless it holds the features.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is truncated or of another kind, or if the features are not a dense array.
    KeyError
        If the file has no such images or features.

    Warns
    -----
    UserWarning
        If each chunk of the images in a Zarr store holds only a part of an image, which is slow to read.

    Examples
    --------
    >>> adata.write_h5ad("screen.h5ad")  # without compression, so that images can be mapped
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
        warnings.warn(msg, UserWarning, stacklevel=2)
    return AnnData(**parts | {"obsm": parts["obsm"] | {image_key: images}})


def _open_features(group: Any, path: Any, layer: str | None, obsm_key: str | None) -> AnnData:
    """Open the dense features of a store, see :func:`open_screen`.

    Parameters
    ----------
    group
        Opened HDF5 file or Zarr group.
    path
        Path of the store, for error messages.
    layer, obsm_key
        Place of the features. If ``layer`` is `None`, they are at ``obsm_key``.

    Raises
    ------
    KeyError
        If there are no features at this place.
    ValueError
        If the features are not a dense array or a table.
    """
    from anndata.io import read_elem

    place = f"obsm/{obsm_key}" if layer is None else "X" if layer == "X" else f"layers/{layer}"
    if place not in group:
        inside = [f"{name}/{key}" for name in ("layers", "obsm") if name in group for key in group[name]]
        msg = f"{path} has no {place} (its parts: {', '.join((['X'] if 'X' in group else []) + inside)})."
        raise KeyError(msg)
    kind = group[place].attrs.get("encoding-type")
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
        return AnnData(**parts | {"obsm": parts["obsm"] | {obsm_key: features}})
    return AnnData(**parts | ({"X": features} if layer == "X" else {"layers": {layer: features}}))


def open_embedding(path: str | os.PathLike[str]) -> AnnData:
    """Load embeddings that ``embed_to`` has written, or that another AnnData file holds, into memory.

    Parameters
    ----------
    path
        Path of a ``.zarr`` folder or an ``.h5ad`` file.

    Returns
    -------
    AnnData with the table of cells in ``obs`` and the embeddings in ``obsm``. Functions of ``scbd.metrics`` accept it.

    Raises
    ------
    FileNotFoundError
        If there is no such file or folder.
    ValueError
        If the file is damaged or of another kind.

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
    """Verify the checksums of a whole screen or embedding that scbd has written.

    Parameters
    ----------
    path
        Path of a store written by :func:`write_screen` or ``embed_to``.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    ValueError
        If blocks are damaged or missing (the message names the files and their rows), if the tables differ from what
        was written, or if the store has no checksums.

    Examples
    --------
    >>> screen = scbd.data.write_screen("screen.zarr", adata, y_key="gene")
    >>> scbd.data.verify_screen("screen.zarr")  # silent: everything is as it was written
    """
    path = local_path(path)
    group = open_store(path)
    said: Any = group.attrs.get(STORE_KEY)
    arrays = block_arrays(group, fast=True)
    if said is None or not arrays:
        msg = f"{path} has no checksums: scbd verifies what write_screen and embed_to have written."
        raise ValueError(msg)
    wrong = [] if digest_of_tables(path, arrays) == said["tables"] else ["its tables are not what was written"]
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
    """Write plates of crops into one screen, to be opened with :func:`open_screen`.

    Rows are sorted by perturbation and shuffled within each perturbation, across all plates. For a batch, the cells of
    a perturbation can then be read as a few stretches of consecutive rows, which come from different wells. All plates
    must therefore be given at once. To add a plate later, write the old screen and the new plate to a new path.

    The store appears at ``path`` only when it is complete. If writing is interrupted, even by a kill, call the function
    again with the same cells, and it continues where it stopped.

    Memory holds the tables and, for each core, a block of 64 MiB and the images that are being converted. Plates that
    store many rows per chunk, such as a compressed ``.h5ad``, are first copied uncompressed to a temporary file in the
    same folder as ``path``.

    Parameters
    ----------
    path
        Path of the new store, which ends in ``.zarr``. It becomes a folder with files of 64 MiB before compression, in
        which each image is a chunk with its own checksum.
    plates
        One plate or several: AnnData with images in ``obsm``, :class:`Crops`, or paths for :func:`read_crops`. If there
        are several plates, ``obs["source"]`` holds the name of the file of each cell; a plate that already has this
        column keeps its own values. Columns of dates, intervals or mixed values are written as text. For example, a
        column is mixed if rows are numbered on one plate and have letters on another.
    y_key
        Column of ``obs`` with the perturbation, or several columns.
    image_key
        Key of the images in ``obsm``, in the plates and in the screen.
    channels
        Names or numbers of the channels to write, in this order. A mapping from new names to names or numbers renames
        channels. Default: all channels except masks.
    image_size
        Resize images to this number of pixels per side (bilinear, antialiased). Crops that are not square require a
        pair ``(height, width)``, which may change their aspect ratio. Default: do not resize.
    dtype
        Dtype of the stored images. Default: the dtype of the plates. Intensities are scaled if the dtype changes to an
        integer dtype, but not if it changes to a float dtype.
    intensity_range
        Intensities to scale to the lowest and the highest value of the integer dtype: ``(low, high)``, or one such pair
        per channel. Intensities outside the range are clipped. Default: the 0.1 and 99.9 % percentiles of each channel
        in about 2,048 random crops (for float images, in 1,024 random pixels per crop). The range is kept in
        ``uns["scbd_store"]``.
    compression
        Compression of the images: ``"lz4"`` reads fastest, ``"zstd"`` is smaller. Default: no compression.
    seed
        Seed of the shuffling and of the random sample of intensities.

    Returns
    -------
    The screen, opened with :func:`open_screen`.

    Raises
    ------
    FileExistsError
        If there is a file or folder at ``path``.
    OSError
        If the disk has too little space. This is checked in advance only without compression.
    KeyError
        If a plate lacks ``y_key``, the images or a channel.
    TypeError, ValueError
        If plates do not fit together or are given twice, a column cannot be stored, an argument is not allowed, an
        image has NaN or infinite pixels (the message names it), a file cannot be read, or the folder for the incomplete
        store holds the beginning of a store with other content.

    Warns
    -----
    UserWarning
        If some of the plates have no cell.

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
        warnings.warn(msg, UserWarning, stacklevel=2)
        given = [plate for plate in given if not isinstance(plate, AnnData) or plate.n_obs]
    crops = [_plate_crops(plate, image_key, channels, f"plate {number}") for number, plate in enumerate(given)]
    size, kind = _output_size_and_dtype(crops, image_size, dtype, intensity_range)
    _check_plates_match(crops, y_key, sized=size is not None)
    obs, order = _sort_and_shuffle(crops, y_key, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (len(obs), crops[0].images.shape[1], *(size or crops[0].images.shape[2:]))
    n_bytes = math.prod(shape) * kind.itemsize
    if compression is None:
        _check_space(path, n_bytes)
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
            max(1, _BLOCK_BYTES * len(obs) // n_bytes),
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
    """Return the crops of a plate, restricted to the given channels."""
    if isinstance(plate, Crops):
        return select_channels(plate, channels)
    if isinstance(plate, AnnData):
        return crops_from_anndata(plate, image_key, name, channels)
    return read_crops(plate, image_key=image_key, channels=channels)


def _output_size_and_dtype(
    plates: Sequence[Crops], image_size: ImageSize | None, dtype: Any, intensity_range: Any
) -> tuple[tuple[int, int] | None, np.dtype]:
    """Return the size and the dtype of the images to store; the size is `None` if images are not resized.

    Raises
    ------
    TypeError
        If the dtype is not a dtype of images.
    ValueError
        If the dtype cannot represent the stored values, ``intensity_range`` is malformed or has no effect, or
        ``image_size`` does not suit the images of a plate.
    """
    stored, n_channels = plates[0].images.dtype, plates[0].images.shape[1]
    wanted = stored if dtype is None else np.dtype(dtype)
    if wanted.name not in IMAGE_DTYPES:
        msg = f"dtype={wanted.name!r} is not one of images: use {', '.join(IMAGE_DTYPES)}."
        raise TypeError(msg)
    if wanted == np.float16 and stored == np.uint16:
        msg = "dtype='float16' rounds whole numbers above 2,048, and has none above 65,504: leave uint16 as it is."
        raise ValueError(msg)
    if intensity_range is not None:
        if wanted.kind == "f" or wanted == stored:
            msg = f"From {stored} to {wanted} intensities stay as they are: leave intensity_range out."
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
    if image_size is not None:  # load torch before the worker threads start, each of which limits it to one core
        importlib.import_module("scbd.data._loading")
    return None if image_size is None else size, wanted


def _check_plates_match(plates: Sequence[Crops], y_key: str | Sequence[str], *, sized: bool) -> None:
    """Raise if plates differ in channels, dtype or image size, or lack a perturbation.

    The image size is not compared if ``sized`` is true, because the images are then resized.
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


def _check_space(path: Path, n_bytes: int) -> None:
    """Raise ``OSError`` if the disk has too little space for the part of a store that is not yet written."""
    partial = partial_path(path)
    there = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    free = shutil.disk_usage(path.parent).free
    if n_bytes - there > free:
        msg = f"{path} takes {(n_bytes - there) / 2**30:.1f} GiB more, the disk has {free / 2**30:.1f} free."
        raise OSError(msg)


def _copy_if_chunked(plate: Crops, folder: Path, stack: ExitStack) -> Crops:
    """Return the plate with images that can be read by row.

    If the images are stored in chunks of several rows, they are copied to a temporary file without chunks. ``stack``
    closes the file, which deletes it.
    """
    source = plate.images
    chunk_rows = getattr(source, "chunk_rows", 1)
    if chunk_rows == 1:
        return plate
    n, *image = source.shape
    step = chunk_rows * max(1, _BLOCK_BYTES // (chunk_rows * math.prod(image) * source.dtype.itemsize))
    # the file has no name, so that the operating system deletes it even after a kill
    file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
    images: np.ndarray = np.memmap(file, source.dtype, "w+", shape=source.shape)

    def read(start: int) -> int:
        return len(source.read(slice(start, start + step), out=images[start : start + step]))

    starts = range(0, n, step)
    with progress_bar(f"Reading {plate.name}", n) as bar:
        for n_read in map_in_threads(read, starts) if getattr(source, "concurrent", False) else map(read, starts):
            bar.update(n_read)
    return replace(plate, images=ArraySource(images, plate.name))


@dataclass(frozen=True, eq=False)
class ScreenPlan:
    """Origin of the rows of a screen, and conversion of their images.

    Attributes
    ----------
    plates
        Crops that can be read by row.
    order
        For each row of the screen, the number of the plate row that it is read from. Plate rows are numbered
        consecutively, one plate after the other.
    shape, dtype
        Shape ``(N, C, H, W)`` and dtype of the stored images.
    image_size
        Height and width to resize images to; `None` does not resize.
    intensity_range
        For each channel the intensities that become the lowest and the highest value of the integer dtype, ``(C, 2)``;
        `None` does not scale intensities.
    """

    plates: Sequence[Crops]
    order: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype
    image_size: tuple[int, int] | None
    intensity_range: np.ndarray | None
    # lock for sources that only one thread may read at a time; plates may share a source
    _turn: Lock = field(default_factory=Lock)

    def images(self, rows: slice) -> np.ndarray:
        """Read the images of some rows of the screen from their plates, and convert them.

        Several threads can call this method at once.

        Raises
        ------
        ValueError
            If an image has NaN or infinite pixels (the message names it), or cannot be read.
        """
        order = self.order[rows]
        images, first = np.empty((len(order), *self.shape[1:]), self.dtype), 0
        for plate in self.plates:
            n, *image = plate.images.shape
            places = np.flatnonzero((order >= first) & (order < first + n))
            # read in the order in which the plate is stored
            places = places[np.argsort(order[places])]
            step = max(1, _CONVERTED_BYTES // (math.prod(image) * plate.images.dtype.itemsize))
            for part in (places[start : start + step] for start in range(0, len(places), step)):
                with nullcontext() if getattr(plate.images, "concurrent", False) else self._turn:
                    raw = plate.images.read(order[part] - first)
                check_finite(raw, plate, order[part] - first)
                with np.errstate(over="ignore"):  # values too large for float16 become infinite: checked next
                    images[part] = self._converted(raw)
                check_finite(images[part], plate, order[part] - first)
            first += n
        return images

    def _converted(self, images: np.ndarray) -> np.ndarray:
        """Return images resized, scaled and cast as the screen stores them."""
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
        """Compute the SHA-256 of what determines the content of the screen.

        It covers the table ``obs``, the order of rows, a sample of pixels of each plate, and the settings of the
        conversion.
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
    """Return the table of all plates in the order of the screen, and the ``order`` of :class:`ScreenPlan`.

    Rows are sorted by perturbation and shuffled within each perturbation.
    """
    # convert all plates together, since a column may hold text on one plate and numbers on another
    obs = pd.concat([plate.obs for plate in plates]) if len(plates) > 1 else plates[0].obs
    named = _add_source_column(obs, plates)
    obs, others = as_storable(named), stored_names(named.columns)
    order = np.random.default_rng(seed).permutation(len(obs))
    if len(obs) < 2**31:
        order = order.astype(np.int32)
    codes = label_values(obs, [others.get(column, column) for column in as_columns(y_key)]).cat.codes.to_numpy()
    order = order[np.argsort(codes[order], kind="stable")]
    obs = obs.iloc[order].astype({column: "category" for column in obs if obs[column].dtype == object})
    obs.index = _unique_names(plates)[order]
    return obs, order


def _unique_names(plates: Sequence[Crops]) -> pd.Index:
    """Return unique names of all cells.

    If names are repeated and there are several plates, the number of the plate is appended to each name. Names that are
    still repeated, within a plate, get a further number.
    """
    names = [plate.obs.index.astype(str) for plate in plates]
    together = names[0].append(names[1:])
    if len(names) > 1 and not together.is_unique:
        together = pd.Index([f"{name}-{number}" for number, of_plate in enumerate(names) for name in of_plate])
    if together.is_unique:
        return together
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Suffix used", UserWarning)  # pandas warns of names with a suffix already
        return make_index_unique(together)


def _add_source_column(obs: pd.DataFrame, plates: Sequence[Crops]) -> pd.DataFrame:
    """Return the table of all plates with a column that names the file of each row.

    If a plate already has such a column, its values are kept.
    """
    new = [number for number, plate in enumerate(plates) if SOURCE_COLUMN not in plate.obs]
    if len(plates) == 1 or not new:
        return obs
    old = {
        str(name)
        for plate in plates
        if SOURCE_COLUMN in plate.obs
        for name in plate.obs[SOURCE_COLUMN].dropna().unique()
    }
    names = dict(zip(new, unique_file_names([plates[number].name for number in new], old), strict=True))
    plate_of = np.repeat(np.arange(len(plates), dtype=np.int32), [len(plate.obs) for plate in plates])
    if not old:
        return obs.assign(**{SOURCE_COLUMN: pd.Categorical.from_codes(plate_of, list(names.values()))})
    column = obs[SOURCE_COLUMN].to_numpy(object, copy=True)
    for number, name in names.items():
        column[plate_of == number] = name
    return obs.assign(**{SOURCE_COLUMN: column})
