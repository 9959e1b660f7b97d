"""Zarr stores of images or embeddings whose arrays are written in blocks of rows.

If the writing of a store is interrupted, a later run writes only the missing blocks.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import warnings
from contextlib import nullcontext, suppress
from glob import escape as glob_escape
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import numpy as np
import zarr

from scbd._shared.files import partial_path
from scbd.data._sources import STORE_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

# Level of each compression that a user can choose for stored images. The levels are high, because images are written
# once and read many times, and the level hardly affects the speed of reading.
COMPRESSION_LEVELS: dict[str, int] = {"lz4": 5, "zstd": 3}


class BlockStore:
    """AnnData store in Zarr whose large arrays are written in blocks of consecutive rows.

    If the writing process is killed, a later run continues with the blocks that are missing. While the store is
    incomplete, it lies in a folder next to its final path (:func:`~scbd._shared.files.partial_path`). This folder has
    an empty marker file for each block that is completely on disk. Blocks without a marker file are written again.
    Several processes may write different blocks of one store.

    Parameters
    ----------
    path
        Final path of the store.
    tables
        Small parts of the AnnData object, which are written at once: ``{"obs": table}``, and optionally ``"var"`` and
        ``"uns"``. Tables must have the types that :func:`as_storable` returns.
    arrays
        Shape and dtype of each array of ``obsm``, by key. All arrays have one row per cell.
    block_size
        Number of rows per block. The rows of a block are one file in each array.
    digest
        Hash of all that determines the content of the store, such as cells and settings. An incomplete store is
        continued only if it was begun with the same hash.
    by_row
        If true, each row is a Zarr chunk that can be read without the other rows of its block. If false, a block is one
        chunk.
    compression
        Compression of the arrays: ``"lz4"``, ``"zstd"``, or `None` for no compression.
    """

    def __init__(
        self,
        path: Path,
        tables: Mapping[str, Any],
        arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        block_size: int,
        digest: str,
        *,
        by_row: bool = False,
        compression: str | None = None,
    ) -> None:
        self._path, self._partial = path, partial_path(path)
        self._tables, self._arrays, self._n = tables, arrays, len(tables["obs"])
        self._block_size = min(block_size, self._n)
        self._digest = f"{digest} {self._block_size} {compression}"
        self._by_row, self._compression = by_row, compression
        self._turn = Lock()
        self._n_blocks = -(-self._n // self._block_size)

    def rows(self, block: int) -> slice:
        """Return the slice of the rows that belong to the block of the given number."""
        return slice(block * self._block_size, min((block + 1) * self._block_size, self._n))

    def begin(self) -> np.ndarray:
        """Create the incomplete store, or open the incomplete store of an earlier run.

        Returns
        -------
        Boolean array ``(n_blocks,)``: true for each block that an earlier run has already written.

        Raises
        ------
        FileExistsError
            If the final path holds a store that was written from other cells or with other settings.
        OSError
            If the folder for the incomplete store cannot be created.
        ValueError
            If the folder for the incomplete store holds a store that was begun with other cells or other settings.
        """
        if self._path.exists():
            if _read_store_attributes(self._path).get("digest") != self._digest:
                msg = f"{self._path} is there: give another path, or remove it."
                raise FileExistsError(msg)
            return np.ones(self._n_blocks, dtype=bool)
        store = self._partial / "store"
        if not store.exists():
            shutil.rmtree(self._partial, ignore_errors=True)
            # write the store to a folder with a unique name and then rename the folder, since another process may begin
            # the same store at the same time
            own = self._partial.with_name(f"{self._partial.name}.{uuid4().hex}")
            try:
                (own / "done").mkdir(parents=True)
                self._write_header(own / "store")
                os.rename(own, self._partial)
            except OSError as error:
                # another process has begun the store in the meantime
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            finally:
                shutil.rmtree(own, ignore_errors=True)
        if _read_store_attributes(store).get("digest") != self._digest:
            msg = (
                f"{self._partial} is the beginning of something else (other cells, order or settings): remove it to "
                "begin again, or write to another path."
            )
            raise ValueError(msg)
        self._open = block_arrays(zarr.open_group(store, mode="r+", zarr_format=3), fast=True)
        return self.done()

    def write(self, block: int, values: Mapping[str, np.ndarray]) -> None:
        """Write the given values as the rows of a block, and mark the block as written.

        Once this method returns, the block need not be written again if the process is killed.
        """
        for key, array in self._open.items():
            file = self._partial / "store" / block_file(array, block)
            # an interrupted earlier run may have left an incomplete file of this block
            file.unlink(missing_ok=True)
            # compressing one block already occupies all cores, so that several blocks at once would only take more
            # memory
            with self._turn:
                array[self.rows(block)] = values[key]
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        (self._partial / "done" / str(block)).touch()

    def done(self) -> np.ndarray:
        """Return a boolean array ``(n_blocks,)`` that is true for each block that is completely on disk."""
        return np.array([(self._partial / "done" / str(block)).exists() for block in range(self._n_blocks)])

    def finish(self) -> bool:
        """Move the store to its final path if all blocks are on disk.

        Returns
        -------
        True if the store is complete and at its final path, false if blocks are missing.
        """
        if self._path.exists():
            return True
        if not self.done().all():
            return False
        with suppress(FileNotFoundError):  # another process may have moved the complete store already
            os.rename(self._partial / "store", self._path)
        shutil.rmtree(self._partial, ignore_errors=True)
        # delete folders with a unique name, which remain if a process is killed while it begins the store
        for left in self._partial.parent.glob(f"{glob_escape(self._partial.name)}.*"):
            shutil.rmtree(left, ignore_errors=True)
        return True

    def _write_header(self, store: Path) -> None:
        """Write the tables of the store, and create its arrays without values.

        The hash of the content and the hash of the files of the tables are recorded as attributes of the store.
        """
        from anndata.io import write_elem
        from zarr.codecs import BloscCodec, Crc32cCodec

        group = zarr.open_group(store, mode="w", zarr_format=3)
        with warnings.catch_warnings():
            # suppress anndata's warning that a later version will divide tables in Zarr into shards: scbd can read
            # tables with and without shards
            warnings.filterwarnings("ignore", "zarr v3 autosharding", UserWarning)
            for slot, table in {**self._tables, "obsm": {}}.items():
                write_elem(group, slot, table)
        group.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        compressors: list[Any] = [Crc32cCodec()]
        if self._compression is not None:
            level = COMPRESSION_LEVELS[self._compression]
            compressors.insert(0, BloscCodec(cname=self._compression, clevel=level, shuffle="shuffle"))  # type: ignore[arg-type]
        for key, (shape, dtype) in self._arrays.items():
            block = (self._block_size, *shape[1:])
            group.create_array(
                f"obsm/{key}",
                shape=shape,
                dtype=dtype,
                chunks=(1, *shape[1:]) if self._by_row else block,
                shards=block if self._by_row else None,
                compressors=compressors,
                filters=None,
                # Zarr does not store a chunk in which every number equals the fill value. The fill value is 165 for
                # integers and NaN for floats. No real image or embedding consists of only this value, so that all
                # chunks are stored, and a missing chunk reveals lost data.
                fill_value=165 if dtype.kind == "u" else np.nan,
                attributes={"encoding-type": "array", "encoding-version": "0.2.0", STORE_KEY: True},
            )
        tables = digest_of_tables(store, block_arrays(group))
        group.attrs[STORE_KEY] = {"digest": self._digest, "tables": tables}


def block_arrays(group: Any, *, fast: bool = False) -> dict[str, zarr.Array]:
    """Return the arrays in ``obsm`` of a store that scbd has written in blocks of rows, as a dictionary by key.

    Parameters
    ----------
    group
        Opened AnnData store. For a store in HDF5, the dictionary is empty, since scbd writes blocks only in Zarr.
    fast
        If true, the arrays encode and decode chunks with the library zarrs in place of Zarr's own code. This library
        writes and verifies about eight times as many chunks per second.
    """
    if not isinstance(group, zarr.Group) or "obsm" not in group:
        return {}
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}) if fast else nullcontext():
        arrays = cast("zarr.Group", group["obsm"]).arrays()
        return {key: array for key, array in sorted(arrays) if STORE_KEY in array.attrs}


def block_file(array: zarr.Array, block: int) -> str:
    """Return the path of the file that holds a block of rows of an array, relative to the folder of the Zarr store."""
    return f"{array.path}/{array.metadata.encode_chunk_key((block, *(0 for _ in array.shape[1:])))}"


def _read_store_attributes(store: Path) -> dict[str, Any]:
    """Return the attributes that scbd records in each Zarr store that it writes: the hashes of its content.

    The dictionary is empty if there is no store at this path, or if another program has written the store.
    """
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        attributes: Any = zarr.open_group(store, mode="r", zarr_format=3).attrs.get(STORE_KEY, {})
        return attributes
    return {}


def digest_of_tables(store: Path, arrays: Mapping[str, zarr.Array]) -> str:
    """Compute one SHA-256 hash of all files of a Zarr store except the blocks of its large arrays.

    The file ``zarr.json`` of the root is excluded as well, because this hash is recorded in it.
    """
    digest = hashlib.sha256()
    blocks = tuple(f"{array.path}/c/" for array in arrays.values())
    for file in sorted(file for file in store.rglob("*") if file.is_file()):
        name = file.relative_to(store).as_posix()
        if name != "zarr.json" and not name.startswith(blocks):
            digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
