"""Zarr arrays that are written in blocks of rows, so that an interrupted write can continue."""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from contextlib import nullcontext, suppress
from glob import escape as glob_escape
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from uuid import uuid4

import numpy as np
import zarr
from anndata import AnnData

from scbd._shared.files import partial_path
from scbd.data._readers import (
    Crops,
)
from scbd.data._sources import STORE_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    Plate: TypeAlias = Crops | AnnData | str | os.PathLike[str]

# compression levels: high, because a screen is written once and read many times, and reading is nearly as fast as at
# low levels
COMPRESSION_LEVELS: dict[str, int] = {"lz4": 5, "zstd": 3}


class BlockStore:
    """AnnData in Zarr whose large arrays are written block by block, and can be continued after a kill.

    While the store is incomplete, it lies in a folder next to its final path
    (:func:`~scbd._shared.files.partial_path`). This folder has a marker file for each block that is on disk. Blocks
    without a marker are written again. Several processes may write different blocks.

    Parameters
    ----------
    path
        Final path of the store.
    tables
        Other content of the store, by slot: ``obs`` and others. Tables must be :func:`as_storable`.
    arrays
        Shape and dtype of each array of ``obsm``, by key. All arrays have the same number of rows.
    block_size
        Number of rows per block. Each array stores a block as one file.
    digest
        Digest of all that determines the content. An incomplete store is continued only if it has the same digest.
    by_row
        True makes each row a chunk of its own, which can be read alone. False makes each block one chunk.
    compression
        ``"lz4"``, ``"zstd"`` or `None`.
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
        """Return the rows of a block."""
        return slice(block * self._block_size, min((block + 1) * self._block_size, self._n))

    def begin(self) -> np.ndarray:
        """Write the tables, unless an earlier run did, and return which blocks are on disk, boolean ``(n_blocks,)``.

        Raises
        ------
        FileExistsError
            If there is a store with other content at the final path.
        ValueError
            If the folder for the incomplete store holds the beginning of a store with other content.
        """
        if self._path.exists():
            if _read_store_attributes(self._path).get("digest") != self._digest:
                msg = f"{self._path} is there: give another path, or remove it."
                raise FileExistsError(msg)
            return np.ones(self._n_blocks, dtype=bool)
        store = self._partial / "store"
        if not store.exists():
            shutil.rmtree(self._partial, ignore_errors=True)
            # use a unique name first, since another process may begin at the same time
            own = self._partial.with_name(f"{self._partial.name}.{uuid4().hex}")
            try:
                (own / "done").mkdir(parents=True)
                self._write_header(own / "store")
                with suppress(FileExistsError, OSError):
                    os.rename(own, self._partial)
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
        """Write the rows of a block; once this method returns, the block survives a kill of the process."""
        for key, array in self._open.items():
            file = self._partial / "store" / block_file(array, block)
            file.unlink(missing_ok=True)  # an interrupted write may have left a part of it
            with self._turn:  # one block at a time: it occupies all cores, so that several would only take more memory
                array[self.rows(block)] = values[key]
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        (self._partial / "done" / str(block)).touch()

    def done(self) -> np.ndarray:
        """Return which blocks are on disk, boolean ``(n_blocks,)``."""
        return np.array([(self._partial / "done" / str(block)).exists() for block in range(self._n_blocks)])

    def finish(self) -> bool:
        """Move the store to its final path if all blocks are on disk.

        Returns
        -------
        True if the store is complete.
        """
        if self._path.exists():
            return True
        if not self.done().all():
            return False
        with suppress(FileNotFoundError):  # another process has moved it
            os.rename(self._partial / "store", self._path)
        shutil.rmtree(self._partial, ignore_errors=True)
        for left in self._partial.parent.glob(f"{glob_escape(self._partial.name)}.*"):  # left by a kill in begin
            shutil.rmtree(left, ignore_errors=True)
        return True

    def _write_header(self, store: Path) -> None:
        """Write the tables and create the arrays, without their values, and record the digests as attributes."""
        from anndata.io import write_elem
        from zarr.codecs import BloscCodec, Crc32cCodec

        group = zarr.open_group(store, mode="w", zarr_format=3)
        with warnings.catch_warnings():
            # anndata warns that a later version will store tables in another way; scbd reads both
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
                # Zarr does not store a chunk that holds only the fill value. No image has this value everywhere, so
                # that all chunks are stored.
                fill_value=165 if dtype.kind == "u" else np.nan,
                attributes={"encoding-type": "array", "encoding-version": "0.2.0", STORE_KEY: True},
            )
        tables = digest_of_tables(store, block_arrays(group))
        group.attrs[STORE_KEY] = {"digest": self._digest, "tables": tables}


def block_arrays(group: Any, *, fast: bool = False) -> dict[str, zarr.Array]:
    """Return the arrays in ``obsm`` that scbd has written in blocks, by key.

    Parameters
    ----------
    group
        AnnData in Zarr. For an AnnData in HDF5, the result is empty.
    fast
        Use the zarrs library in place of Zarr's own codecs. It writes and verifies about eight times as many chunks per
        second.
    """
    if not isinstance(group, zarr.Group) or "obsm" not in group:
        return {}
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}) if fast else nullcontext():
        arrays = cast("zarr.Group", group["obsm"]).arrays()
        return {key: array for key, array in sorted(arrays) if STORE_KEY in array.attrs}


def block_file(array: zarr.Array, block: int) -> str:
    """Return the path of the file of a block, relative to its store."""
    return f"{array.path}/{array.metadata.encode_chunk_key((block, *(0 for _ in array.shape[1:])))}"


def _read_store_attributes(store: Path) -> dict[str, Any]:
    """Return the attributes with which scbd marks a store that it writes.

    The dictionary is empty if there is no store, or if scbd has not written it.
    """
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        said: Any = zarr.open_group(store, mode="r", zarr_format=3).attrs.get(STORE_KEY, {})
        return said
    return {}


def digest_of_tables(store: Path, arrays: Mapping[str, zarr.Array]) -> str:
    """Compute the SHA-256 of all files of a store that do not belong to blocks.

    The root ``zarr.json`` is excluded, because the digest is recorded in it.
    """
    digest = hashlib.sha256()
    blocks = tuple(f"{array.path}/c/" for array in arrays.values())
    for file in sorted(file for file in store.rglob("*") if file.is_file()):
        name = file.relative_to(store).as_posix()
        if name != "zarr.json" and not name.startswith(blocks):
            digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
