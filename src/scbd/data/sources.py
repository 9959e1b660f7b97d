"""Where images lie at rest: one small protocol, for arrays in memory and for memory-maps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np

from scbd._keys import IMAGE_KEY

if TYPE_CHECKING:
    from anndata import AnnData

IMAGE_DTYPES = ("uint8", "uint16", "float16", "float32")


class ImageSource(Protocol):
    """Images that can be read by row: ``shape`` is (N, C, H, W), ``read(rows)`` returns the rows as asked.

    A source is read from one thread at a time.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """As stored."""
        ...

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order, ``(len(rows), C, H, W)``, as stored and free to change.

        They are written to ``out`` where it is given (contiguous, of that shape and dtype), else to a new array.
        """
        ...


class ArraySource:
    """Images in an array, in memory or memory-mapped.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, dtype uint8, uint16, float16 or float32.
    where
        How an error should call the array, for example ``"obsm['single_cell_images']"``.

    Raises
    ------
    TypeError
        If it is not a numpy array (lazy arrays are refused rather than read through a layer that may return other
        rows than asked), or of a dtype that is not read.
    ValueError
        If it is not four-dimensional, or has no cells, channels or pixels.
    """

    def __init__(self, images: Any, where: str = "images") -> None:
        if not isinstance(images, np.ndarray):
            msg = (
                f"{where} is a {type(images).__module__}.{type(images).__name__}, which cannot be read by row safely: "
                "load it into a numpy array, or open the file with scbd.data.open_screen."
            )
            raise TypeError(msg)
        if images.ndim != 4:
            msg = (
                f"{where} has shape {images.shape}, images must be 4-D: (cells, channels, height, width). "
                "For one channel, add an axis with images[:, None]."
            )
            raise ValueError(msg)
        if 0 in images.shape:
            msg = f"{where} has shape {images.shape}: there is nothing to read along an axis of length 0."
            raise ValueError(msg)
        if images.dtype.name not in IMAGE_DTYPES or not images.dtype.isnative:
            msg = f"{where} has dtype {images.dtype.str!r}: cast it to one of {', '.join(IMAGE_DTYPES)}."
            raise TypeError(msg)
        self._images = images

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return self._images.shape

    @property
    def dtype(self) -> np.dtype:
        """As stored."""
        return self._images.dtype

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order, as stored and free to change.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        n, *image_shape = self.shape
        if out is None:
            out = np.empty((count_rows(rows, n), *image_shape), self.dtype)
        if not isinstance(rows, slice) and len(rows) and not (0 <= rows.min() and rows.max() < n):
            msg = f"Rows {rows.min()} to {rows.max()} were asked for, there are {n} images."
            raise IndexError(msg)
        # take would first make a contiguous copy of a view, all of it
        if isinstance(rows, slice) or not self._images.flags.c_contiguous:
            out[...] = self._images[rows]
            return out
        # twice as fast as fancy indexing: with "clip" numpy writes straight to `out`, and nothing is left to clip
        return np.take(self._images, rows, axis=0, out=out, mode="clip")


def count_rows(rows: np.ndarray | slice, n: int) -> int:
    """How many of ``n`` rows are asked for."""
    return len(range(*rows.indices(n))) if isinstance(rows, slice) else len(rows)


def non_finite_rows(source: ImageSource, block: int = 4096) -> np.ndarray:
    """Rows whose images hold a NaN or an infinity; integers are not read at all."""
    if source.dtype.kind != "f":
        return np.empty(0, dtype=np.int64)
    starts = range(0, source.shape[0], block)
    bad = [~np.isfinite(source.read(slice(s, s + block))).all(axis=(1, 2, 3)) for s in starts]
    return np.flatnonzero(np.concatenate(bad))


def memory_map_h5ad(path: str | os.PathLike[str], key: str) -> np.ndarray:
    """Memory-map one array of an uncompressed ``.h5ad``, for example ``"obsm/single_cell_images"``.

    :meth:`anndata.AnnData.write_h5ad` without ``compression`` stores an array as one contiguous stretch of the file,
    so that a row is read by the operating system alone, at the speed of the disk.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is not HDF5 (truncated, or of another kind), or the array is compressed or chunked.
    KeyError
        If the file holds no such array.
    """
    path = Path(path)
    with _open_h5(path) as file:
        if key not in file or not isinstance(file[key], h5py.Dataset):
            group = file.get(key.rsplit("/", 1)[0], {})
            msg = f"{path} holds no array {key!r}; beside it lie: {', '.join(group) or 'none'}."
            raise KeyError(msg)
        dataset = file[key]
        offset = dataset.id.get_offset()
        if offset is None or dataset.chunks is not None:
            msg = (
                f"{key!r} in {path} is compressed or chunked, which cannot be memory-mapped: "
                "write the file without compression (adata.write_h5ad(path)), or load it with anndata.read_h5ad."
            )
            raise ValueError(msg)
        return np.memmap(path, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape)


def open_screen(path: str | os.PathLike[str], *, image_key: str = IMAGE_KEY) -> AnnData:
    """Open an ``.h5ad`` of any size: tables in memory, images memory-mapped.

    Images that cannot be memory-mapped (compressed) are loaded.

    Parameters
    ----------
    path
        An ``.h5ad`` file.
    image_key
        Key in ``obsm`` of the images.

    Returns
    -------
    An AnnData without ``X`` and layers: scbd models read images alone.

    Raises
    ------
    FileNotFoundError, ValueError, KeyError
        See :func:`memory_map_h5ad`.
    """
    from anndata import AnnData
    from anndata.io import read_elem

    path = Path(path)
    with _open_h5(path) as file:
        if "obs" not in file or image_key not in file.get("obsm", {}):
            there = ", ".join(file.get("obsm", {})) or "none"
            msg = f"{path} has no images at obsm[{image_key!r}]; its obsm keys are: {there}."
            raise KeyError(msg)
        parts = {name: read_elem(file[name]) for name in ("obs", "var", "uns") if name in file}
        obsm = {key: read_elem(file["obsm"][key]) for key in file["obsm"] if key != image_key}
        images = file["obsm"][image_key]
        mappable = images.chunks is None and images.id.get_offset() is not None
        obsm[image_key] = None if mappable else images[...]
    if mappable:
        obsm[image_key] = memory_map_h5ad(path, f"obsm/{image_key}")
    return AnnData(obsm=obsm, **parts)


def _open_h5(path: Path) -> h5py.File:
    if not path.is_file():
        msg = f"There is no file {path}."
        raise FileNotFoundError(msg)
    try:
        return h5py.File(path, "r")
    except OSError as error:
        msg = f"{path} cannot be read as .h5ad ({error}): it is truncated or of another kind; copy or write it again."
        raise ValueError(msg) from error
