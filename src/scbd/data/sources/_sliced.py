"""Images in an HDF5 dataset or Zarr array of any layout, read through its library: for converting them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from scbd.data.sources._arrays import target_of
from scbd.data.sources._kinds import check_images

if TYPE_CHECKING:
    import h5py
    import zarr

# what is read into memory at once, beside its target
_AT_ONCE = 64 * 2**20


class SlicedSource:
    """Images in an HDF5 dataset or a Zarr array, whatever its chunks and compression.

    Rows are read in the order of the file, and every chunk that holds some of them is decompressed once, whatever it
    spans. Where it spans many rows, a few random ones still cost as much as all of them: convert such a file with
    :func:`scbd.data.write_screen`, which goes through it once, from the first row to the last.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, of an open file.
    where
        How an error should call it, and its file.

    Attributes
    ----------
    chunk_rows
        Rows of a chunk: one of them costs as much to read as all.

    Raises
    ------
    TypeError, ValueError
        If it does not hold images, see :class:`ArraySource`.

    Examples
    --------
    >>> import h5py
    >>> file = h5py.File("images.h5", "w")
    >>> images = file.create_dataset("images", data=adata.obsm["single_cell_images"], compression="gzip")
    >>> scbd.data.SlicedSource(images).read(np.array([3, 1, 2])).shape
    (3, 4, 32, 32)
    >>> file.close()
    """

    in_memory = False

    def __init__(self, images: h5py.Dataset | zarr.Array, where: str = "images") -> None:
        check_images(images.shape, images.dtype, where)
        self.shape: tuple[int, int, int, int] = images.shape  # type: ignore[assignment]
        self.dtype: np.dtype = images.dtype
        rows, *tile = images.chunks or (1, *self.shape[1:])
        self.chunk_rows: int = rows
        self._tile = [min(size, whole) for size, whole in zip(tile, self.shape[1:], strict=True)]
        self._images = images
        self._where = where

    @property
    def glimpse(self) -> Glimpse:
        """One chunk's part of each image, for a look at pixels that costs a chunk a row."""
        return Glimpse(self._images, self._tile)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Images of these rows, in this order, as stored and free to change.

        Raises
        ------
        IndexError
            If there is no such row.
        ValueError
            If the file is damaged there.
        """
        out = target_of(self, rows, out)
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(self.shape[0]))
        if not len(rows):
            return out
        wanted, places = np.unique(rows, return_inverse=True)
        direct = len(wanted) == len(rows) and bool((places[1:] > places[:-1]).all())
        read = out if direct else np.empty((len(wanted), *self.shape[1:]), self.dtype)
        for start, stop in self._stretches(wanted):
            try:
                self._read_stretch(wanted[start:stop], read[start:stop])
            except (OSError, RuntimeError) as error:
                msg = (
                    f"{self._where} is damaged or truncated: rows {wanted[start]} to {wanted[stop - 1]} cannot be read "
                    f"({error}); copy or write the file again."
                )
                raise ValueError(msg) from error
        if not direct:
            np.take(read, places, axis=0, out=out, mode="clip")
        return out

    def _stretches(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """Rising rows without gaps but inside of chunks, as start and stop: no two stretches share a chunk."""
        chunks = rows // self.chunk_rows
        # whole chunks, as many as are read at once
        windows = chunks // max(1, _AT_ONCE // (self.chunk_rows * self._row_bytes))
        apart = (np.diff(rows) != 1) & (np.diff(chunks) != 0)
        breaks = np.flatnonzero(apart | (np.diff(windows) != 0)) + 1
        edges = [0, *breaks.tolist(), len(rows)]
        return list(zip(edges[:-1], edges[1:], strict=True))

    def _read_stretch(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Chunks whose rows do not fit in memory are read one after the other, each to its place in all images."""
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        tiles = _tiles(self.shape[1:], self._tile) if (span.stop - span.start) * self._row_bytes > _AT_ONCE else [()]
        for tile in tiles:
            found = np.asarray(self._images[(span, *tile)])
            out[(slice(None), *tile)] = found if len(found) == len(rows) else found[rows - span.start]

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Glimpse:
    """Of each image the part that one chunk holds: another part for another row.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``.
    tile
        Channels, height and width of a chunk.
    """

    in_memory = False

    def __init__(self, images: h5py.Dataset | zarr.Array, tile: list[int]) -> None:
        n, *whole = images.shape
        self.shape: tuple[int, int, int, int] = (n, *tile)  # type: ignore[assignment]
        self.dtype: np.dtype = images.dtype
        self._images = images
        # without the smaller ones at the edges
        self._tiles = _tiles([size // part * part for size, part in zip(whole, tile, strict=True)], tile)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Parts of the images of these rows, in this order."""
        out = target_of(self, rows, out)
        numbers = range(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows.tolist()
        for place, row in enumerate(numbers):
            out[place] = self._images[(row, *self._tiles[row % len(self._tiles)])]
        return out


def _tiles(whole: tuple[int, ...] | list[int], tile: list[int]) -> list[tuple[slice, ...]]:
    """Chunks of an image, as slices of channels, height and width."""
    starts = (range(0, size, part) for size, part in zip(whole, tile, strict=True))
    return [
        tuple(slice(start, min(start + part, size)) for start, part, size in zip(corner, tile, whole, strict=True))
        for corner in itertools.product(*starts)
    ]
