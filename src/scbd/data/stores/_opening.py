"""Open what lies on disk as an AnnData: tables in memory, images where they are."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np

from scbd._keys import CONTENT_KEY, IMAGE_KEY
from scbd.data._formats import kind_of, taken_elsewhere
from scbd.data.stores._copying import with_copy
from scbd.data.stores._guard import check_inside, guarded
from scbd.data.stores._hdf5 import mapped, offset_of, open_h5
from scbd.data.stores._results import with_results
from scbd.data.stores._tables import BOOKKEEPING, STORE_KEY

if TYPE_CHECKING:
    import zarr
    from anndata import AnnData
    from zarr.abc.store import Store

    Images: TypeAlias = np.ndarray | h5py.Dataset | zarr.Array

# beside images, what of an AnnData is read
_TABLES = ("obs", "var", "uns")
# what to do with a store of format 2, which another tool is needed to read
_CONVERT_IMAGES = "convert it: scbd.data.write_screen(new_path, anndata.read_zarr(path), y_key=…), or write it again"
_CONVERT_FEATURES = "write it again: anndata.read_zarr(path).write_zarr(new_path)"
# what is loaded for want of another way may take so much of the memory that is free
_MEMORY_SHARE = 0.5


def open_screen(
    path: str | os.PathLike[str] | Store,
    *,
    image_key: str = IMAGE_KEY,
    layer: str | None = None,
    obsm_key: str | None = None,
) -> AnnData:
    """Open an ``.h5ad`` or Zarr store of any size: tables in memory, images or features where they are.

    Images of an uncompressed ``.h5ad`` are memory-mapped, those of a Zarr store are read by the offsets of their chunks
    (:class:`ZarrSource`). Images that can be read neither way (a compressed ``.h5ad``) are loaded. What
    :func:`add_to_screen` has added is there, too.

    As long as a screen in a local path is open, writing to that path is refused, since the images would be lost: write
    elsewhere, or keep results with :func:`add_to_screen`. Writing over an object store is not refused, and loses them.

    Of a screen in Zarr, ``copy()`` copies tables and results, and reads the same images; a copy of some rows
    (``screen[rows].copy()``) has their images in memory.

    Parameters
    ----------
    path
        An ``.h5ad`` file; a ``.zarr`` folder; the URL of a Zarr store (``s3://…``, with fsspec); or a store of Zarr's.
    image_key
        Key in ``obsm`` of the images.
    layer, obsm_key
        In place of images: layer with features (``"X"`` for ``X``), or key of ``obsm`` with them.

    Returns
    -------
    An AnnData without other layers, and without ``X`` unless that has the features. Images or features are a read-only
    array over a :class:`numpy.memmap`, a :class:`zarr.Array` or an array in memory.

    Raises
    ------
    FileNotFoundError, ValueError, KeyError
        If there is no such file; if it is truncated, of another kind, refers to other files, or its writing was not
        finished; if it has no such images; if they would have to be loaded and are too large for that.

    Warns
    -----
    UserWarning
        If ``X``, layers or other parts of the file are left behind; if chunks of a Zarr store hold parts of images; if
        results beside the screen are those of other cells.

    Examples
    --------
    >>> adata.write_h5ad("screen.h5ad")  # without compression, so that images can be mapped
    >>> screen = scbd.data.open_screen("screen.h5ad")
    >>> screen.obsm["single_cell_images"].shape
    (240, 4, 32, 32)
    """
    from anndata import AnnData

    if layer is not None or obsm_key is not None:
        return open_features(path, layer, obsm_key)
    group, images = open_store(path, image_key)
    _say_what_is_left(group, path)
    parts = _tables(group, image_key)
    if isinstance(images, h5py.Dataset):
        with images.file:
            images = _loaded(images, "write it once with scbd.data.write_screen(new_path, path, y_key=…)")
    elif not isinstance(images, np.ndarray) and images.chunks[1:] != images.shape[1:]:
        msg = (
            f"Chunks of {images.chunks} in {path} hold parts of images, which models do not read: convert it with "
            "scbd.data.write_screen(new_path, path, y_key=…)."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    parts = with_results(path, parts, images)
    return with_copy(AnnData(**parts | {"obsm": parts["obsm"] | {image_key: images}}))


def open_features(path: str | os.PathLike[str] | Store, layer: str | None, obsm_key: str | None) -> AnnData:
    """The same of features, dense; see :func:`open_screen`."""
    from anndata import AnnData
    from anndata.io import read_elem

    place = f"obsm/{obsm_key}" if layer is None else "X" if layer == "X" else f"layers/{layer}"
    group = _opened(path, _CONVERT_FEATURES)
    if place not in group:
        msg = f"{path} has no {place} (its parts: {', '.join(_parts_of(group))})."
        raise KeyError(msg)
    kind = group[place].attrs.get("encoding-type")
    if kind not in ("array", "dataframe"):
        msg = f"{place} of {path} is no dense array ({kind}): make it dense (toarray()), and write it again."
        raise ValueError(msg)
    _say_what_is_left(group, path, place.split("/")[0])
    parts = _tables(group, obsm_key or "")
    features: Any = group[place]
    if kind == "dataframe":
        features = read_elem(features)
    elif isinstance(features, h5py.Dataset):
        if offset_of(features) is None:
            with features.file:
                features = _loaded(features, "write the table again without compression, or as Zarr")
        else:
            features = mapped(features)
    else:
        features = guarded(features)
    if layer is None:
        return with_copy(AnnData(**parts | {"obsm": parts["obsm"] | {obsm_key: features}}))
    return with_copy(AnnData(**parts | ({"X": features} if layer == "X" else {"layers": {layer: features}})))


def open_embedding(path: str | os.PathLike[str]) -> AnnData:
    """Open what ``embed_to`` has written: the table in memory, embeddings memory-mapped.

    As long as it is open, writing to its own path is refused (by HDF5: "file is already open"): write elsewhere.

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

    Warns
    -----
    UserWarning
        If ``X``, neighbours or other parts of the file are left behind.

    Examples
    --------
    >>> embedded = model.embed_to("embedding.h5ad", dtype="float16")
    >>> scbd.data.open_embedding("embedding.h5ad").obsm["X_scbd_c"].shape
    (240, 64)
    """
    from anndata import AnnData

    file = open_h5(Path(path))
    _say_what_is_left(file, path)
    on_disk = {
        key: dataset
        for key, dataset in file.get("obsm", {}).items()
        if isinstance(dataset, h5py.Dataset) and offset_of(dataset) is not None
    }
    parts = _tables(file, *on_disk)
    return AnnData(**parts | {"obsm": parts["obsm"] | {key: mapped(dataset) for key, dataset in on_disk.items()}})


def image_keys(path: str | os.PathLike[str] | Store) -> list[str]:
    """Keys of ``obsm`` in a store that images may be at: those of arrays of four dimensions.

    Raises
    ------
    FileNotFoundError, ValueError
        As :func:`open_screen` does, of a store that cannot be opened.
    """
    group = _opened(path, _CONVERT_IMAGES)
    return _image_keys(group["obsm"] if "obsm" in group else {})


def open_tables(path: str | os.PathLike[str] | Store, image_key: str) -> tuple[dict[str, Any], Images]:
    """What :func:`open_screen` makes an AnnData of, and the images; of an open file if only HDF5 can read them."""
    group, images = open_store(path, image_key)
    return with_results(path, _tables(group, image_key), images), images


def open_store(path: str | os.PathLike[str] | Store, image_key: str) -> tuple[h5py.File | zarr.Group, Images]:
    """A store as it is, and its images."""
    group = _opened(path, _CONVERT_IMAGES)
    images: Any = _images(group, path, image_key)
    if isinstance(images, h5py.Dataset):
        return group, images if offset_of(images) is None else mapped(images)
    if not images.attrs.get(STORE_KEY, {"complete": True})["complete"]:
        msg = f"{path} was not finished: call write_screen again with the same cells, it goes on where it stopped."
        raise ValueError(msg)
    return group, guarded(images)


def _opened(path: str | os.PathLike[str] | Store, convert: str) -> h5py.File | zarr.Group:
    """A store as it is, held to what lies inside of it; ``convert``: what to do with one of Zarr's format 2."""
    from zarr.storage import LocalStore

    if isinstance(path, LocalStore):
        path = path.root
    elif isinstance(path, str):
        path = path.removeprefix("file://")
    if not isinstance(path, (str, os.PathLike)) or "://" in str(path):
        return _open_zarr(path, convert)
    path = Path(path)
    if path.exists() and (kind := kind_of(path)).name not in ("anndata", "unknown"):
        raise ValueError(taken_elsewhere(path, kind))
    if not path.is_dir():
        return open_h5(path)
    check_inside(path)
    return _open_zarr(path, convert)


def _open_zarr(path: str | os.PathLike[str] | Store, convert: str) -> zarr.Group:
    import zarr

    try:
        return zarr.open_group(path, mode="r", zarr_format=3)
    except (FileNotFoundError, ValueError) as error:
        try:
            zarr.open_group(path, mode="r", zarr_format=2)
        except (FileNotFoundError, ValueError):
            msg = f"{path} is no Zarr store of format 3 ({error})."
        else:
            msg = (
                f"{path} is a Zarr store of format 2, which AnnData before 0.13 writes by default; scbd reads format "
                f"3. If the store is yours, {convert} after anndata.settings.zarr_write_format = 3. (Format 2 from "
                "elsewhere can hold code that runs when it is read.)"
            )
        raise ValueError(msg) from error


def _images(group: Any, path: Any, image_key: str) -> Any:
    obsm = group["obsm"] if "obsm" in group else {}
    if "obs" not in group or not hasattr(obsm.get(image_key), "shape"):
        msg = f"{path} has no images at obsm[{image_key!r}]; its obsm keys are: {', '.join(obsm) or 'none'}."
        others, has_x = _image_keys(obsm), "X" in group and _holds(group["X"])
        if others:
            msg += f" They may be at {' or '.join(f'image_key={key!r}' for key in others)}."
        elif CONTENT_KEY in obsm and not has_x:
            msg += " It has embeddings alone, as scbd run and embed_to write: give the file that was given to these."
        raise KeyError(msg + " It has X: open it as features with layer='X' (scbd.data.open_screen)." * has_x)
    return obsm[image_key]


def _image_keys(obsm: Any) -> list[str]:
    return [key for key in obsm if len(getattr(obsm[key], "shape", ())) == 4]


def _tables(group: Any, *on_disk: str) -> dict[str, Any]:
    """Parts of an AnnData; of ``obsm`` what does not stay on disk."""
    from anndata.io import read_elem

    parts = {name: read_elem(group[name]) for name in _TABLES if name in group}
    if STORE_KEY in parts.get("uns", {}):
        # true of this store alone, and not of what is made of it
        kept = {key: value for key, value in parts["uns"].pop(STORE_KEY).items() if key not in BOOKKEEPING}
        parts["uns"] |= {STORE_KEY: kept} if kept else {}
    obsm = group["obsm"] if "obsm" in group else {}
    return parts | {"obsm": {key: read_elem(obsm[key]) for key in obsm if key not in on_disk}}


def _parts_of(group: Any) -> list[str]:
    """Where features could be."""
    inside = [f"{name}/{key}" for name in ("layers", "obsm") if name in group for key in group[name]]
    return [*(["X"] if "X" in group else []), *inside]


def _holds(node: Any) -> bool:
    return node.attrs.get("encoding-type") != "null" and (hasattr(node, "shape") or bool(list(node)))


def _say_what_is_left(group: Any, path: Any, *read: str) -> None:
    left = [name for name in sorted(set(group) - {*_TABLES, "obsm", *read}) if _holds(group[name])]
    if left:
        msg = (
            f"{', '.join(left)} of {path} stay on disk, since scbd reads tables and what it learns from alone: load "
            "the file with anndata to have them, and do not write over it."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def _loaded(array: h5py.Dataset, remedy: str) -> np.ndarray:
    size, free = array.size * array.dtype.itemsize, free_memory()
    if size > _MEMORY_SHARE * free:
        msg = (
            f"{array.name} of {array.file.filename} is compressed or chunked, and would take {size / 2**30:.1f} of "
            f"{free / 2**30:.1f} GiB of free memory: {remedy}, and open that."
        )
        raise ValueError(msg)
    return array[...]


def free_memory() -> int:
    """Bytes that can be had; where the system does not tell, all there are."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
