"""Read what was written, and compare it with its checksums."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._keys import IMAGE_KEY
from scbd._progress import progress_bar
from scbd.data.sources import ZarrSource
from scbd.data.stores._block_file import damaged_rows, no_checksums
from scbd.data.stores._opening import open_store
from scbd.data.stores._results import results_folder, results_of
from scbd.data.stores._tables import STORE_KEY, damaged_tables

if TYPE_CHECKING:
    from zarr.abc.store import Store


def verify_screen(path: str | os.PathLike[str] | Store, *, image_key: str = IMAGE_KEY) -> None:
    """Read a whole screen or embedding that scbd has written, and compare it with its checksums.

    Images, tables and the results beside a screen (:func:`add_to_screen`) are all covered.

    Parameters
    ----------
    path
        What :func:`write_screen` or ``embed_to`` wrote.
    image_key
        Key of the images of a Zarr store.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If blocks are damaged or missing (which rows of which files), if tables are not what was written (``obs``,
        ``var``, …), or if there are no checksums.

    Warns
    -----
    UserWarning
        If an older scbd wrote the store, without checksums of its tables.

    Examples
    --------
    >>> screen = scbd.data.write_screen("screen.h5ad", adata, y_key="gene")
    >>> scbd.data.verify_screen("screen.h5ad")  # silent: everything is as it was written
    """
    from anndata.io import read_elem

    is_file = isinstance(path, (str, os.PathLike)) and Path(path).is_file()
    damaged, n, tables = _of_file(Path(path)) if is_file else _of_store(path, image_key)  # type: ignore[arg-type]
    folder = results_folder(path)
    if folder is not None and folder.is_dir():
        group, images = open_store(path, image_key)
        files, others = results_of(path, read_elem(group["obs"]), images)
        damaged += others
        for file in files:
            more, more_n, more_tables = _of_file(Path(file.filename))
            damaged, n, tables = damaged + more, n + more_n, [*(tables or []), *(more_tables or [])]
    blocks = [f"{len(damaged)} of {n} blocks are damaged: " + "; ".join(damaged[:5])] if damaged else []
    if blocks or tables:
        raise ValueError(". ".join([*(tables or []), *blocks]))
    if tables is None:
        msg = f"{path} was written by an older scbd, without checksums of its tables: blocks alone were verified."
        warnings.warn(msg, UserWarning, stacklevel=2)


def _of_file(path: Path) -> tuple[list[str], int, list[str] | None]:
    damaged, n, tables = damaged_rows(path)
    blocks = [f"{path} is damaged, with rows {rows.start} to {rows.stop - 1}" for rows in damaged]
    return blocks, n, _sentence(path, tables)


def _of_store(path: str | os.PathLike[str] | Store, image_key: str) -> tuple[list[str], int, list[str] | None]:
    group, images = open_store(path, image_key)
    store: Any = group.get(f"uns/{STORE_KEY}")
    if store is None or "block_size" not in store or isinstance(images, np.ndarray):
        raise ValueError(no_checksums(path))
    tables = _sentence(path, damaged_tables(group, {f"obsm/{image_key}": (images.shape, images.dtype)}))
    source = ZarrSource(images, f"obsm[{image_key!r}]", verify=True)
    size, n = int(store["block_size"][()]), images.shape[0]
    damaged, starts = [], range(0, n, size)
    with progress_bar("Verifying", n) as bar:
        for start in starts:
            stop = min(start + size, n)
            try:
                source.read(slice(start, stop))
            except (ValueError, FileNotFoundError) as error:
                damaged.append(str(error))
            bar.update(stop - start)
    return damaged, len(starts), tables


def _sentence(path: Any, tables: list[str] | None) -> list[str] | None:
    """A sentence for damaged tables."""
    if not tables:
        return tables
    return [f"{path} is damaged, or was changed since it was written, in {', '.join(tables)}"]
