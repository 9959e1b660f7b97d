"""Read what was written, and compare it with its checksums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from scbd._keys import IMAGE_KEY
from scbd.data.progress import progress_bar
from scbd.data.sources import ZarrSource
from scbd.data.stores.block_file import STORE_KEY, damaged_rows, no_checksums
from scbd.data.stores.opening import open_screen

if TYPE_CHECKING:
    from zarr.abc.store import Store


def verify_screen(path: str | os.PathLike[str] | Store, *, image_key: str = IMAGE_KEY) -> None:
    """Read a whole screen or embedding that scbd has written, and compare it with its checksums.

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
        If blocks are damaged or missing (which rows of which files), or there are no checksums.

    Examples
    --------
    >>> screen = scbd.data.write_screen("screen.h5ad", adata, y_key="gene")
    >>> scbd.data.verify_screen("screen.h5ad")  # silent: every block is as it was written
    """
    is_file = isinstance(path, (str, os.PathLike)) and Path(path).is_file()
    damaged, n = _of_file(Path(path)) if is_file else _of_store(path, image_key)  # type: ignore[arg-type]
    if damaged:
        msg = f"{len(damaged)} of {n} blocks are damaged: " + "; ".join(damaged[:5])
        raise ValueError(msg)


def _of_file(path: Path) -> tuple[list[str], int]:
    damaged, n = damaged_rows(path)
    return [f"{path} is damaged, with rows {rows.start} to {rows.stop - 1}" for rows in damaged], n


def _of_store(path: str | os.PathLike[str] | Store, image_key: str) -> tuple[list[str], int]:
    adata = open_screen(path, image_key=image_key)
    if STORE_KEY not in adata.uns:
        raise ValueError(no_checksums(path))
    source = ZarrSource(adata.obsm[image_key], f"obsm[{image_key!r}]", verify=True)
    size, n = int(adata.uns[STORE_KEY]["block_size"]), adata.n_obs
    damaged, starts = [], range(0, n, size)
    with progress_bar("Verifying", n) as bar:
        for start in starts:
            stop = min(start + size, n)
            try:
                source.read(slice(start, stop))
            except (ValueError, FileNotFoundError) as error:
                damaged.append(str(error))
            bar.update(stop - start)
    return damaged, len(starts)
