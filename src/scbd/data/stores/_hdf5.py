"""HDF5 files as they come: opened, held to what lies inside of them, and their arrays mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np

from scbd._files import check_file


def memory_map_h5ad(path: str | os.PathLike[str], key: str) -> np.ndarray:
    """Memory-map one array of an uncompressed ``.h5ad``, for example ``"obsm/single_cell_images"``.

    :meth:`anndata.AnnData.write_h5ad` without ``compression`` stores an array as one contiguous stretch of the file,
    so that a row is read by the operating system alone, at the speed of the disk.

    As long as the array lives the file is open, and HDF5 refuses to write to it: what is mapped cannot be lost by
    writing its table back over it.

    Returns
    -------
    A read-only array over a :class:`numpy.memmap`; AnnData writes it like any other.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is not HDF5 (truncated, or of another kind) or refers to other files, or the array is compressed or
        chunked.
    KeyError
        If the file holds no such array.

    Examples
    --------
    >>> adata.write_h5ad("screen.h5ad")
    >>> scbd.data.memory_map_h5ad("screen.h5ad", "obsm/single_cell_images").shape
    (240, 4, 32, 32)
    """
    file = open_h5(Path(path))
    if key not in file or not isinstance(file[key], h5py.Dataset):
        group = file.get(key.rsplit("/", 1)[0], {})
        msg = f"{path} holds no array {key!r}; beside it lie: {', '.join(group) or 'none'}."
        raise KeyError(msg)
    if offset_of(file[key]) is None:
        msg = (
            f"{key!r} in {path} is compressed or chunked, which cannot be memory-mapped: "
            "write the file without compression (adata.write_h5ad(path)), or load it with anndata.read_h5ad."
        )
        raise ValueError(msg)
    return mapped(file[key])


def mapped(dataset: h5py.Dataset) -> np.ndarray:
    """What :func:`memory_map_h5ad` returns, of a dataset of an open file that has an offset."""
    file = dataset.file
    array = np.memmap(file.filename, dataset.dtype, mode="r", offset=offset_of(dataset) or 0, shape=dataset.shape)
    array.file = file  # type: ignore[attr-defined]  # open as long as the map lives
    # a plain array: AnnData writes none of another type
    return array.view(np.ndarray)


def offset_of(dataset: h5py.Dataset) -> int | None:
    """Where its bytes begin, if they lie in one stretch as they are."""
    return dataset.id.get_offset() if dataset.chunks is None else None


def open_h5(path: Path) -> h5py.File:
    """A file that is whole and refers to no other; to be read.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is none; if it is not HDF5 or truncated, or refers to other files.
    """
    check_file(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        msg = f"{path} cannot be read as .h5ad ({error}): it is truncated or of another kind; copy or write it again."
        raise ValueError(msg) from error
    try:
        _check_own(file)
    except (KeyError, OSError, RuntimeError, SystemError) as error:
        file.close()
        msg = f"{path} is damaged ({error}): copy or write it again."
        raise ValueError(msg) from error
    except BaseException:
        file.close()
        raise
    return file


def _check_own(file: h5py.File) -> None:
    """Raise if anything in a file lies in another: one from elsewhere could so name any file of this machine."""
    links: dict[str, h5py.HardLink | h5py.SoftLink | h5py.ExternalLink] = {}
    # collected first: HDF5 loses an error that is raised while it visits
    file.visititems_links(links.__setitem__)
    for name, link in links.items():
        # soft links need no look: what they lead to is in this file, unless by way of an external one
        found = file[name] if isinstance(link, h5py.HardLink) else None
        taken = isinstance(found, h5py.Dataset) and (found.external or found.is_virtual)
        if taken or isinstance(link, h5py.ExternalLink):
            msg = f"{name!r} of {file.filename} lies in another file, which is not followed: copy it into this one."
            raise ValueError(msg)
