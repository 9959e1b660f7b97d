"""Reading of images and features from HDF5 files, such as ``.h5ad``: opening, memory-mapping, and reading by row."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from scbd._shared.files import check_file
from scbd.data._sources import allocate_output, as_row_numbers, check_images, iterate_runs


def open_h5(path: Path) -> h5py.File:
    """Open an HDF5 file for reading, and check that its compression can be decoded.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is not HDF5, is truncated, or is only a placeholder that Git LFS has not replaced by the data.
    ImportError
        If a dataset is compressed with a method that h5py lacks, and the package hdf5plugin is not installed.
    """
    check_file(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        msg = f"{path} cannot be read as .h5ad ({error}): it is truncated or of another kind."
        raise ValueError(msg) from error
    filters: set[int] = set()  # numbers of the HDF5 filters, such as compression, that datasets were written with

    def add_filters(_: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset):
            created = item.id.get_create_plist()
            filters.update(created.get_filter(place)[0] for place in range(created.get_nfilters()))

    file.visititems(add_filters)
    if not all(map(h5py.h5z.filter_avail, filters)):
        try:
            import hdf5plugin  # noqa: F401  # importing it registers its filters
        except ImportError as error:
            file.close()
            msg = f"{path} was compressed by a filter that HDF5 does not have by itself: pip install hdf5plugin."
            raise ImportError(msg) from error
    return file


def memory_map_dataset(dataset: h5py.Dataset) -> np.ndarray | None:
    """Map an HDF5 dataset into memory as a read-only array, or return `None` if that is impossible.

    A dataset can be mapped if its values lie uncompressed and contiguous in the file. As long as the array exists, the
    file stays open, and HDF5 refuses to write to this file.
    """
    offset = dataset.id.get_offset() if dataset.chunks is None and not dataset.external else None
    if offset is None:
        return None
    array = np.memmap(dataset.file.filename, dataset.dtype, mode="r", offset=offset, shape=dataset.shape)
    array.file = dataset.file  # type: ignore[attr-defined]
    # return the mapped data as a plain np.ndarray, since AnnData cannot write an object of the subclass np.memmap
    return array.view(np.ndarray)


class HDF5Source:
    """Images in an HDF5 dataset with any chunks and compression, read with h5py.

    HDF5 compresses a dataset in chunks of rows. A call of :meth:`read` decompresses each chunk that contains requested
    rows, once per call. If chunks hold many rows, reading one row therefore costs as much as reading its whole chunk.

    Parameters
    ----------
    images
        Dataset of shape ``(N, C, H, W)`` in an open file, with one row per cell.
    where
        Name of the dataset and its file, for error messages.

    Raises
    ------
    TypeError, ValueError
        If the dataset does not hold images, see :class:`ArraySource`.
    """

    in_memory = False

    def __init__(self, images: h5py.Dataset, where: str = "images") -> None:
        check_images(images.shape, images.dtype, where)
        self.shape: tuple[int, ...] = images.shape
        self.dtype: np.dtype = images.dtype
        self.chunk_rows = images.chunks[0] if images.chunks else 1
        self._images, self._where = images, where

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Read the images of the given rows, in the given order, into an array that the caller may modify.

        Parameters
        ----------
        rows
            Row numbers (one row per cell), or a slice of rows.
        out
            Contiguous array to write to, of shape ``(number of rows, C, H, W)`` and the stored dtype. Default: a new
            array.

        Returns
        -------
        Images ``(number of rows, C, H, W)`` in the stored dtype.

        Raises
        ------
        IndexError
            If a row number is out of range.
        ValueError
            If the file is damaged where these rows are stored.
        """
        out = allocate_output(self, rows, out)
        rows = as_row_numbers(rows, self.shape[0])
        if not len(rows):
            return out
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        # read rows of the same chunk, and rows that follow one another in the file, with one call of h5py
        apart = (np.diff(wanted) > 1) & (np.diff(wanted // self.chunk_rows) != 0)
        for start, stop in iterate_runs(apart):
            first, last = int(wanted[start]), int(wanted[stop - 1])
            try:
                if (np.diff(wanted[start:stop]) == 1).all() and (np.diff(order[start:stop]) == 1).all():
                    place = int(order[start])
                    self._images.read_direct(out, np.s_[first : last + 1], np.s_[place : place + stop - start])
                else:
                    out[order[start:stop]] = self._images[first : last + 1][wanted[start:stop] - first]
            except (OSError, RuntimeError) as error:
                msg = f"{self._where} is damaged or truncated: rows {first} to {last} cannot be read ({error})."
                raise ValueError(msg) from error
        return out
