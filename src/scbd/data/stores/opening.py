"""Open what lies on disk as an AnnData: tables in memory, images where they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from scbd._keys import IMAGE_KEY

if TYPE_CHECKING:
    import zarr
    from anndata import AnnData
    from zarr.abc.store import Store

# beside images, what of an AnnData is read
_TABLES = ("obs", "var", "uns")


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

    Examples
    --------
    >>> adata.write_h5ad("screen.h5ad")
    >>> scbd.data.memory_map_h5ad("screen.h5ad", "obsm/single_cell_images").shape
    (240, 4, 32, 32)
    """
    path = Path(path)
    with _open_h5(path) as file:
        if key not in file or not isinstance(file[key], h5py.Dataset):
            group = file.get(key.rsplit("/", 1)[0], {})
            msg = f"{path} holds no array {key!r}; beside it lie: {', '.join(group) or 'none'}."
            raise KeyError(msg)
        dataset = _own(file, key)
        offset = _offset(dataset)
        if offset is None:
            msg = (
                f"{key!r} in {path} is compressed or chunked, which cannot be memory-mapped: "
                "write the file without compression (adata.write_h5ad(path)), or load it with anndata.read_h5ad."
            )
            raise ValueError(msg)
        return np.memmap(path, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape)


def open_screen(path: str | os.PathLike[str] | Store, *, image_key: str = IMAGE_KEY) -> AnnData:
    """Open an ``.h5ad`` or Zarr store of any size: tables in memory, images where they are.

    Images of an uncompressed ``.h5ad`` are memory-mapped, those of a Zarr store are read by the offsets of their chunks
    (:class:`ZarrSource`). Images that can be read neither way (a compressed ``.h5ad``) are loaded.

    Parameters
    ----------
    path
        An ``.h5ad`` file; a ``.zarr`` folder; the URL of a Zarr store (``s3://…``, with fsspec); or a store of Zarr's.
    image_key
        Key in ``obsm`` of the images.

    Returns
    -------
    An AnnData without ``X`` and layers: scbd models read images alone. Images are a :class:`numpy.memmap`, a
    :class:`zarr.Array` or an array.

    Raises
    ------
    FileNotFoundError, ValueError, KeyError
        If there is no such file; if it is truncated, of another kind, refers to other files, or its writing was not
        finished; if it has no such images.

    Examples
    --------
    >>> adata.write_h5ad("screen.h5ad")  # without compression, so that images can be mapped
    >>> screen = scbd.data.open_screen("screen.h5ad")
    >>> type(screen.obsm["single_cell_images"]).__name__
    'memmap'
    """
    from anndata import AnnData

    parts, images = open_tables(path, image_key)
    if isinstance(images, h5py.Dataset):
        with images.file:
            images = images[...]
    return AnnData(**parts | {"obsm": parts["obsm"] | {image_key: images}})


def open_embedding(path: str | os.PathLike[str]) -> AnnData:
    """Open what ``embed_to`` has written: the table in memory, embeddings memory-mapped.

    Parameters
    ----------
    path
        An ``.h5ad`` file.

    Returns
    -------
    AnnData with the blocks in ``obsm``; metrics read it as it is.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such file; if it is truncated, of another kind, or refers to other files.

    Examples
    --------
    >>> embedded = model.embed_to("embedding.h5ad", dtype="float16")
    >>> scbd.data.open_embedding("embedding.h5ad").obsm["X_scbd_c"].shape
    (240, 64)
    """
    from anndata import AnnData
    from anndata.io import read_elem

    with _open_h5(Path(path)) as file:
        parts = {name: read_elem(file[name]) for name in _TABLES if name in file}
        mapped = [key for key in file.get("obsm", {}) if _offset(_own(file, f"obsm/{key}")) is not None]
    return AnnData(**parts, obsm={key: memory_map_h5ad(path, f"obsm/{key}") for key in mapped})


def open_tables(
    path: str | os.PathLike[str] | Store, image_key: str
) -> tuple[dict[str, Any], np.memmap | h5py.Dataset | zarr.Array]:
    """What :func:`open_screen` makes an AnnData of, and the images; of an open file if only HDF5 can read them."""
    is_path = isinstance(path, os.PathLike) or (isinstance(path, str) and "://" not in path)
    if not is_path or Path(path).is_dir():  # type: ignore[arg-type]
        return _open_zarr(path, image_key)
    return _open_hdf5(Path(path), image_key)  # type: ignore[arg-type]


def _open_hdf5(path: Path, image_key: str) -> tuple[dict[str, Any], np.memmap | h5py.Dataset]:
    file = _open_h5(path)
    try:
        parts = _tables(file, path, image_key)
        images = _own(file, f"obsm/{image_key}")
    except BaseException:
        file.close()
        raise
    if _offset(images) is None:
        return parts, images
    file.close()
    return parts, memory_map_h5ad(path, f"obsm/{image_key}")


def _open_zarr(path: str | os.PathLike[str] | Store, image_key: str) -> tuple[dict[str, Any], zarr.Array]:
    import zarr

    try:
        group = zarr.open_group(path, mode="r", zarr_format=3)
    except (FileNotFoundError, ValueError) as error:
        msg = (
            f"{path} is no Zarr store of format 3 ({error}). Older ones can hold code that runs when they are read: if "
            "you trust this one, load it with anndata.read_zarr, and write that with scbd.data.write_screen."
        )
        raise ValueError(msg) from error
    parts = _tables(group, path, image_key)
    images = group["obsm"][image_key]  # type: ignore[index]
    if not images.attrs.get("scbd_store", {"complete": True})["complete"]:  # type: ignore[union-attr,call-overload,index]
        msg = f"{path} was not finished: call write_screen again with the same cells, it goes on where it stopped."
        raise ValueError(msg)
    return parts, images  # type: ignore[return-value]


def _tables(group: Any, path: Any, image_key: str) -> dict[str, Any]:
    from anndata.io import read_elem

    obsm = group["obsm"] if "obsm" in group else {}
    if "obs" not in group or image_key not in obsm:
        msg = f"{path} has no images at obsm[{image_key!r}]; its obsm keys are: {', '.join(obsm) or 'none'}."
        raise KeyError(msg)
    parts = {name: read_elem(group[name]) for name in _TABLES if name in group}
    return parts | {"obsm": {key: read_elem(obsm[key]) for key in obsm if key != image_key}}


def _own(file: h5py.File, key: str) -> h5py.Dataset:
    """A dataset whose bytes lie in this very file.

    Raises
    ------
    ValueError
        If it is a link to another file, or its bytes are taken from others: a file from elsewhere could so name any
        file of this machine.
    """
    dataset, parts = file[key], key.split("/")
    links = [file.get("/".join(parts[: i + 1]), getlink=True) for i in range(len(parts))]
    if any(isinstance(link, h5py.ExternalLink) for link in links) or dataset.external or dataset.is_virtual:
        msg = f"{key!r} of {file.filename} lies in another file, which is not followed: copy the images into it."
        raise ValueError(msg)
    return dataset


def _offset(dataset: h5py.Dataset) -> int | None:
    """Where its bytes begin, if they lie in one stretch as they are."""
    return dataset.id.get_offset() if dataset.chunks is None else None


def _open_h5(path: Path) -> h5py.File:
    if not path.is_file():
        msg = f"There is no file {path}."
        raise FileNotFoundError(msg)
    try:
        return h5py.File(path, "r")
    except OSError as error:
        msg = f"{path} cannot be read as .h5ad ({error}): it is truncated or of another kind; copy or write it again."
        raise ValueError(msg) from error
