"""Images in an HDF5 dataset or Zarr array of any layout, read through its library: for converting them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd.data.sources.arrays import check_images, target_of

if TYPE_CHECKING:
    import h5py
    import zarr


class SlicedSource:
    """Images in an HDF5 dataset or a Zarr array, whatever its chunks and compression.

    Rows are read in the order of the file, neighbours at once. Where chunks span many rows, random rows are slow:
    convert such a file with :func:`scbd.data.write_screen`.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, of an open file.
    where
        How an error should call it, and its file.

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
        self._images = images
        self._where = where

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
        for start, stop in runs(wanted):
            try:
                read[start:stop] = self._images[wanted[start] : wanted[stop - 1] + 1]
            except (OSError, RuntimeError) as error:
                msg = (
                    f"{self._where} is damaged or truncated: rows {wanted[start]} to {wanted[stop - 1]} cannot be read "
                    f"({error}); copy or write the file again."
                )
                raise ValueError(msg) from error
        if not direct:
            np.take(read, places, axis=0, out=out, mode="clip")
        return out


def runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of rising row numbers without a gap, as start and stop in ``rows``."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return list(zip(edges[:-1], edges[1:], strict=True)) if len(rows) else []
