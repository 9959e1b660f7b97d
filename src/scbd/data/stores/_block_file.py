"""An ``.h5ad`` whose large arrays are written block by block, and gone on with after a kill."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from scbd._files import partial_path
from scbd._jobs import begin_with, check_same, header_path, remove_headers, room_needed
from scbd._progress import progress_bar
from scbd.data.sources._zarr_codecs import checksum
from scbd.data.stores._hdf5 import open_h5
from scbd.data.stores._tables import STORE_KEY, TABLES_KEY, damaged_tables, tables_checksums

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from anndata import AnnData

# a checksum with this bit is one; without it the block has not been written
WRITTEN = np.uint64(1 << 32)


class BlockFile:
    """Arrays of an ``.h5ad``, each in one stretch of the file, to be memory-mapped; with a checksum of every block.

    HDF5 writes the tables, reserves the places of arrays and checksums, and is closed; these are then written to their
    places in the file, so that no moment leaves a file that HDF5 could not open.

    Parameters
    ----------
    path
        Of the whole file; until then it lies beside, see :func:`partial_path`.
    tables
        What else is in the file: ``obs``, ``var``; both are :func:`storable`.
    arrays
        Shape and dtype of each array of ``obsm``, all with the same number of rows.
    block_size
        Rows of a block.
    settings
        What decides every byte, as text, and what else is kept of it, as arrays: a file that was begun goes on only if
        the text is the same.
    """

    def __init__(
        self,
        path: Path,
        tables: AnnData,
        arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        block_size: int,
        settings: Mapping[str, Any],
    ) -> None:
        self._path, self._tables, self._arrays = path, tables, arrays
        self._block_size, self._settings = block_size, settings
        self._n_blocks = -(-tables.n_obs // block_size)
        self._partial = partial_path(path)

    def begin(self) -> np.ndarray:
        """Write the tables, or look at what is there; which blocks are, boolean ``(n_blocks,)``.

        Raises
        ------
        FileExistsError, ValueError
            If another file is there, or was begun there.
        """
        self._file = None
        while self._file is None:
            if self.is_there():
                self._partial.unlink(missing_ok=True)  # begun too late
                return np.ones(self._n_blocks, dtype=bool)
            if not self._partial.exists():
                self._write_header()
            with suppress(FileNotFoundError):  # another process has just given it its name
                self._file = os.open(self._partial, os.O_RDWR)
        # by way of the descriptor: the name may change any time
        with os.fdopen(os.dup(self._file), "rb") as opened, h5py.File(opened, "r") as file:
            self._check_same(file, self._partial)
            self._starts = {key: file["obsm"][key].id.get_offset() for key in self._arrays}
            self._checksums_at = file["uns"][STORE_KEY]["checksums"].id.get_offset()
        return self.done()

    def is_there(self) -> bool:
        """Whether the whole file has its name already: another process has finished it.

        Raises
        ------
        FileExistsError
            If something else has that name.
        """
        if not self._path.exists():
            return False
        try:
            with h5py.File(self._path, "r") as file:
                self._check_same(file, self._path)
        except (KeyError, OSError, ValueError) as error:
            raise FileExistsError(exists(self._path)) from error
        return True

    def write(self, block: int, values: Mapping[str, np.ndarray]) -> None:
        """Keep the rows of a block: first these, their checksum once they are on the disk."""
        assert self._file is not None
        crc = 0
        for key, (shape, dtype) in self._arrays.items():
            row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
            start = self._starts[key] + block * self._block_size * row_bytes
            with room_needed(self._path):
                _write_at(self._file, values[key].data.cast("B"), start)
            crc = checksum(values[key], crc)
        with room_needed(self._path):
            os.fsync(self._file)
            _write_at(self._file, memoryview((np.uint64(crc) | WRITTEN).tobytes()), self._checksums_at + 8 * block)

    def done(self) -> np.ndarray:
        """Which blocks are there, boolean ``(n_blocks,)``."""
        assert self._file is not None
        return np.frombuffer(os.pread(self._file, 8 * self._n_blocks, self._checksums_at), "<u8") >= WRITTEN

    def finish(self) -> bool:
        """Give the file its name if it is whole; whether it is."""
        if self._file is None:  # another process was faster
            return True
        whole = bool(self.done().all())
        os.fsync(self._file)
        os.close(self._file)
        if whole:
            with suppress(FileNotFoundError):  # another process was faster
                os.replace(self._partial, self._path)
            remove_headers(self._partial)
        return whole

    def _check_same(self, file: h5py.File, path: Path) -> None:
        store = file["uns"][STORE_KEY]
        check_same({key: store[key][()] for key in store}, self._settings, path)

    def _write_header(self) -> None:
        header = header_path(self._partial)
        try:
            with room_needed(self._path):
                self._write_tables(header)
            begin_with(header, self._partial)
        finally:
            header.unlink(missing_ok=True)

    def _write_tables(self, header: Path) -> None:
        from anndata import AnnData
        from anndata.io import write_elem

        layout = {"block_size": self._block_size, "arrays": np.array(list(self._arrays), dtype=str)}
        uns = {STORE_KEY: dict(self._settings) | layout}
        AnnData(obs=self._tables.obs, var=self._tables.var, uns=uns).write_h5ad(header)
        with h5py.File(header, "r+") as file:
            for key, (shape, dtype) in self._arrays.items():
                _reserve(file["obsm"], key, shape, dtype)
            _reserve(file["uns"][STORE_KEY], "checksums", (self._n_blocks,), np.dtype("u8"))
            file["uns"][STORE_KEY]["checksums"][...] = 0
            write_elem(file["uns"][STORE_KEY], TABLES_KEY, tables_checksums(file, _layout(file, self._arrays)))
        with header.open("rb+") as file:
            os.fsync(file.fileno())


def damaged_rows(path: Path) -> tuple[list[slice], int, list[str] | None]:
    """Blocks of a file whose checksum is wrong, how many there are, and parts that are; see :func:`damaged_tables`.

    Raises
    ------
    ValueError
        If the file has no checksums.
    """
    with open_h5(path) as file:
        if "checksums" not in file.get(f"uns/{STORE_KEY}", {}):
            raise ValueError(no_checksums(path))
        store = file["uns"][STORE_KEY]
        checksums, size = store["checksums"][...], int(store["block_size"][()])
        names = store["arrays"].asstr()[...].tolist() if "arrays" in store else []
        tables = damaged_tables(file, _layout(file, names))
        arrays = [file["obsm"][name] for name in names]
        n, damaged = max((len(array) for array in arrays), default=len(checksums) * size), []
        with progress_bar("Verifying", n) as bar:
            for block, expected in enumerate(checksums):
                rows = slice(block * size, min((block + 1) * size, n))
                crc = 0
                for array in arrays:
                    crc = checksum(array[rows], crc)
                if np.uint64(crc) | WRITTEN != expected:
                    damaged.append(rows)
                bar.update(rows.stop - rows.start)
    return damaged, len(checksums), tables


def _layout(file: h5py.File, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {f"obsm/{name}": (file["obsm"][name].shape, file["obsm"][name].dtype) for name in names}


def exists(path: Any) -> str:
    """A sentence."""
    return f"{path} exists: it is kept; move it away, or write to another path."


def no_checksums(path: Any) -> str:
    """A sentence."""
    return f"{path} was not written by scbd, and has no checksums to verify."


def _reserve(group: h5py.Group, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """A dataset whose place in the file is decided now, and not filled."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)  # the same cells, the same bytes
    kind, space = h5py.h5t.py_create(dtype), h5py.h5s.create_simple(shape)
    dataset = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, space, properties))
    dataset.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})


def _write_at(file: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):  # a system call writes at most 2 GiB
        done += os.pwrite(file, data[done:], start + done)
