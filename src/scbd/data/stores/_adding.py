"""Add results to a screen on disk, without touching it."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._files import partial_path
from scbd._jobs import check_space, locked
from scbd._keys import IMAGE_KEY
from scbd._progress import progress_bar
from scbd.data._digests import digest_cells
from scbd.data.stores._block_file import BlockFile
from scbd.data.stores._hdf5 import open_h5
from scbd.data.stores._opening import open_screen, open_store, open_tables
from scbd.data.stores._results import CELLS_KEY, cells_digest, keys_of, result_files, results_folder
from scbd.data.stores._tables import storable

if TYPE_CHECKING:
    from collections.abc import Sequence

# rows that are written at once
_ROWS = 65_536


def add_to_screen(
    path: str | os.PathLike[str],
    adata: AnnData,
    *,
    obs: Sequence[str] | None = None,
    obsm: Sequence[str] | None = None,
    overwrite: bool = False,
    image_key: str = IMAGE_KEY,
    enable_progress_bar: bool | None = None,
) -> AnnData:
    """Keep results with a screen on disk: columns of ``obs``, arrays of ``obsm``.

    The screen itself is not touched, whatever its kind and size, and may be open. Results lie in a folder beside it,
    ``screen.zarr.results``, one ``.h5ad`` a call, and :func:`open_screen` joins them: columns in memory, arrays
    memory-mapped. Move the folder along with the screen; remove it to have the screen as it was.

    All that a call adds appears at once. A call that was killed has added nothing, and goes on where it stopped when it
    is made again with the same values. Memory holds the columns and a block of rows, so that an embedding of any size
    (:func:`open_embedding`) can be added.

    Parameters
    ----------
    path
        An ``.h5ad`` or ``.zarr`` screen on a disk of this machine.
    adata
        The cells of the screen, told by ``obs_names``, in any order: for example what :func:`open_screen` returned.
    obs, obsm
        Columns and arrays to add; by default all in which ``adata`` differs from the screen. Columns of dates,
        intervals or mixed values are kept as text.
    overwrite
        Replace what the screen has under these names.
    image_key
        Key of the images in ``obsm``, which are never replaced.
    enable_progress_bar
        By default for more than 20,000 cells.

    Returns
    -------
    The screen with its results, as :func:`open_screen` opens it.

    Raises
    ------
    FileExistsError
        If the screen has other values under one of these names, and ``overwrite`` is not set.
    OSError
        If the disk is too small, before anything is written.
    KeyError, TypeError, ValueError
        If ``adata`` has other cells or lacks a name, the images are named, an array is none of numbers, or a column
        cannot be stored.

    Warns
    -----
    UserWarning
        If there is nothing to add.

    Examples
    --------
    >>> screen = scbd.data.write_screen("screen.zarr", adata, y_key="gene")
    >>> screen.obsm["X_scbd_c"] = model.get_latent_representation(screen)
    >>> screen.obs["bright"] = screen.obsm["X_scbd_c"][:, 0] > 0
    >>> screen = scbd.data.add_to_screen("screen.zarr", screen)
    >>> list(screen.obsm), "bright" in screen.obs
    (['X_scbd_c', 'single_cell_images'], True)
    """
    folder = results_folder(path)
    if folder is None:
        msg = f"{path} is not on a disk of this machine: keep its results in a file of their own, adata.write_h5ad."
        raise ValueError(msg)
    group, images = open_store(path, image_key)
    parts, _ = open_tables(path, image_key)
    rows = _rows(adata.obs_names, parts["obs"].index, path)
    mine = storable(adata.obs if obs is None else adata.obs[[name for name in obs if name in adata.obs]])
    columns, arrays = _chosen(adata, mine, rows, parts, obs, obsm, overwrite, image_key, path)
    if not columns and not arrays:
        msg = f"Nothing in obs or obsm differs from what {path} has: nothing is added (uns is not looked at)."
        warnings.warn(msg, UserWarning, stacklevel=2)
        return open_screen(path, image_key=image_key)
    table = mine.iloc[rows][columns].set_axis(parts["obs"].index)
    cells = cells_digest(images, _own_obs(group))
    digest = _digest(table, arrays, rows, cells)
    n = len(table)
    layout = {key: ((n, *values.shape[1:]), values.dtype.newbyteorder("=")) for key, values in arrays.items()}
    check_space(folder, sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in layout.values()))
    folder.mkdir(exist_ok=True)
    with locked(folder):
        target = _target(folder, digest)
        settings = {CELLS_KEY: cells, "digest": digest}
        file = BlockFile(target, AnnData(obs=table), layout, min(_ROWS, n), settings)
        todo = np.flatnonzero(~file.begin())
        bar = progress_bar(f"Adding to {Path(path).name}", len(todo) * min(_ROWS, n), shown=enable_progress_bar)
        with bar:
            for block in todo:
                part = rows[block * _ROWS : (block + 1) * _ROWS]
                values = {key: np.ascontiguousarray(arrays[key][part], dtype) for key, (_, dtype) in layout.items()}
                file.write(int(block), values)
                bar.update(len(part))
        file.finish()
        _remove_replaced(folder)
    return open_screen(path, image_key=image_key)


def _own_obs(group: Any) -> pd.DataFrame:
    from anndata.io import read_elem

    return read_elem(group["obs"])


def _rows(names: pd.Index, wanted: pd.Index, path: Any) -> np.ndarray:
    """Of each cell of the screen its row."""
    if names.equals(wanted):
        return np.arange(len(names))
    if not (names.is_unique and wanted.is_unique):
        msg = f"Cells of {path} and adata are in another order, and obs_names repeat: give cells in the screen's order."
        raise ValueError(msg)
    rows = names.get_indexer(wanted)
    if (rows < 0).any() or len(names) > len(wanted):
        msg = (
            f"adata lacks {(rows < 0).sum()} of the {len(wanted)} cells of {path}, and has "
            f"{len(names) - (rows >= 0).sum()} others (told by obs_names): give a value for every cell of the screen."
        )
        raise ValueError(msg)
    return rows


def _chosen(
    adata: AnnData,
    table: pd.DataFrame,
    rows: np.ndarray,
    parts: dict[str, Any],
    obs: Sequence[str] | None,
    obsm: Sequence[str] | None,
    overwrite: bool,
    image_key: str,
    path: Any,
) -> tuple[list[str], dict[str, Any]]:
    """Names of columns, and arrays by name."""
    given = {
        "obs": (obs, table, parts["obs"], _same_column),
        "obsm": (obsm, adata.obsm, parts["obsm"], _same_array),
    }
    chosen: dict[str, list[str]] = {}
    taken = []
    for slot, (names, mine, theirs, same) in given.items():
        missing = [name for name in names or () if name not in mine]
        if missing:
            keys = ", ".join(map(str, getattr(adata, slot).keys())) or "none"
            msg = f"adata.{slot} has no {missing[0]!r} (it has: {keys})."
            raise KeyError(msg)
        if slot == "obsm" and image_key in (names or ()):
            msg = f"obsm[{image_key!r}] are the images of {path}, which are not replaced: write another screen."
            raise ValueError(msg)
        wanted = [name for name in mine if slot == "obs" or name != image_key] if names is None else names
        chosen[slot] = [name for name in wanted if name not in theirs or not same(mine[name], rows, theirs[name])]
        taken += [f"{slot}[{name!r}]" for name in chosen[slot] if name in theirs]
    if taken and not overwrite:
        msg = f"{path} has {', '.join(taken)} with other values: give overwrite=True, or choose another name."
        raise FileExistsError(msg)
    for name in chosen["obsm"]:
        values = adata.obsm[name]
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            msg = f"obsm[{name!r}] is no array of numbers but {type(values).__name__}: convert it to one."
            raise TypeError(msg)
    return chosen["obs"], {name: adata.obsm[name] for name in chosen["obsm"]}


def _same_column(mine: pd.Series, rows: np.ndarray, theirs: pd.Series) -> bool:
    """Whether values are the same; text may have become categories when it was stored."""
    left, right = (np.asarray(column, dtype=object) for column in (mine.iloc[rows], theirs))
    return bool(((left == right) | (pd.isna(left) & pd.isna(right))).all())


def _same_array(mine: Any, rows: np.ndarray, theirs: Any) -> bool:
    if not (isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and mine.shape == theirs.shape):
        return False
    parts = (slice(start, start + _ROWS) for start in range(0, len(rows), _ROWS))
    return mine.dtype == theirs.dtype and all(
        np.array_equal(mine[rows[part]], theirs[part], equal_nan=mine.dtype.kind == "f") for part in parts
    )


def _digest(table: pd.DataFrame, arrays: dict[str, Any], rows: np.ndarray, cells: str) -> str:
    """Of everything that is added: what was begun goes on only with the same values."""
    digest_input = [cells, digest_cells(None, table), *((key, values.dtype.str) for key, values in arrays.items())]
    digest = hashlib.sha256(repr(digest_input).encode())
    for values in arrays.values():
        for start in range(0, len(rows), _ROWS):
            digest.update(np.ascontiguousarray(values[rows[start : start + _ROWS]]).tobytes())
    return digest.hexdigest()


def _target(folder: Path, digest: str) -> Path:
    """The next file; what a killed call has begun becomes its beginning if it is the same, and goes if not."""
    last = max((int(file.name.split("-")[0]) for file in result_files(folder)), default=0)
    target = folder / f"{last + 1:06d}-{digest[:16]}.h5ad"
    for left in folder.glob(".*.partial*"):
        if left.name.endswith(f"-{digest[:16]}.h5ad.partial"):
            os.rename(left, partial_path(target))
        else:
            left.unlink()
    return target


def _remove_replaced(folder: Path) -> None:
    """Remove files of which later ones replace all they hold."""
    seen: set[tuple[str, str]] = set()
    for file in reversed(result_files(folder)):
        with open_h5(file) as opened:
            keys = set(keys_of(opened))
        if keys <= seen:
            file.unlink()
        seen |= keys
