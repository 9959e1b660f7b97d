"""The two kinds of store, written block by block: what is there after a kill is whole blocks, and is gone on with."""

from __future__ import annotations

import fnmatch
import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._files import partial_path
from scbd._jobs import begin_with, check_same, header_path, remove_headers, room_needed
from scbd.data.stores._block_file import BlockFile, exists
from scbd.data.stores._shards import ShardEncoder
from scbd.data.stores._tables import STORE_KEY, TABLES_KEY, storable, tables_checksums

if TYPE_CHECKING:
    import zarr

    from scbd.data.stores._plan import ScreenPlan


class Container(Protocol):
    """A store while it is written."""

    def is_there(self) -> bool:
        """Whether the whole store has its name already.

        Raises
        ------
        FileExistsError
            If something else has that name.
        """
        ...

    def begin(self) -> np.ndarray:
        """Make what is not there yet; which blocks are, boolean ``(n_blocks,)``.

        Raises
        ------
        ValueError
            If another store was begun there.
        """
        ...

    def write(self, block: int, images: np.ndarray) -> None:
        """Keep the images of a block; when this returns, they survive a kill."""
        ...

    def finish(self) -> bool:
        """Give the store its name if it is whole; whether it is."""
        ...


class HDF5Container:
    """An uncompressed ``.h5ad``: images in one stretch, to be memory-mapped."""

    def __init__(self, path: Path, plan: ScreenPlan, image_key: str) -> None:
        tables = AnnData(obs=plan.obs, var=_var(plan))
        arrays = {image_key: (plan.shape, plan.dtype)}
        self._file = BlockFile(path, tables, arrays, plan.block_size, plan.settings() | _scale(plan))
        self._image_key = image_key

    def is_there(self) -> bool:
        """Whether the whole file has its name."""
        return self._file.is_there()

    def begin(self) -> np.ndarray:
        """Write the tables, or look at what is there."""
        return self._file.begin()

    def write(self, block: int, images: np.ndarray) -> None:
        """Images go to their place."""
        self._file.write(block, {self._image_key: images})

    def finish(self) -> bool:
        """Rename it if it is whole."""
        return self._file.finish()


class ZarrContainer:
    """A sharded Zarr store of format 3: a file a block, a chunk an image, each with a checksum."""

    def __init__(self, path: Any, plan: ScreenPlan, image_key: str, compression: Any) -> None:
        self._path, self._plan, self._image_key, self._compression = path, plan, image_key, compression
        self._partial = partial_path(path) if isinstance(path, Path) else path

    def is_there(self) -> bool:
        """Whether the whole store has its name; one that has none to change is looked at as it is begun."""
        import zarr

        if not self._has_name():
            return False
        try:
            array = zarr.open_group(self._path, mode="r", zarr_format=3)[f"obsm/{self._image_key}"]
            check_same(cast("dict[str, Any]", array.attrs[STORE_KEY]), self._wanted, self._path)
        except (KeyError, OSError, ValueError) as error:
            raise FileExistsError(exists(self._path)) from error
        return True

    def begin(self) -> np.ndarray:
        """Write the tables, or look at what is there."""
        import zarr

        if isinstance(self._partial, Path):
            group = self._local_group()
        else:
            group = zarr.open_group(self._partial, mode="a", zarr_format=3)
            if f"obsm/{self._image_key}" not in group:
                self._write_header(group)
        self._array = cast("zarr.Array", group[f"obsm/{self._image_key}"])
        check_same(self._attrs, self._wanted, self._partial)
        self._encoder = ShardEncoder(self._array)
        return self._done()

    def write(self, block: int, images: np.ndarray) -> None:
        """A shard appears under its name when it is whole."""
        from zarr.core.buffer import default_buffer_prototype
        from zarr.core.sync import sync

        if self._has_name():
            return
        data = default_buffer_prototype().buffer.from_bytes(self._encoder.encode(images))
        if not isinstance(self._partial, Path):
            sync(self._array.store.set(self._key(block), data))
            return
        shard = self._partial / self._key(block)
        try:
            with room_needed(self._path):
                sync(self._array.store.set(self._key(block), data))
                with shard.open("rb+") as file:
                    os.fsync(file.fileno())
        except FileNotFoundError:  # another process had this block, too, and has tidied up
            if not shard.exists() and not self._has_name():
                raise

    def finish(self) -> bool:
        """Rename it if it is whole; what has no name to change is marked."""
        whole = self._has_name() or bool(self._done().all())
        if not isinstance(self._path, Path):
            if whole:
                self._array.attrs[STORE_KEY] = self._attrs | {"complete": True}
            return whole
        if whole:
            self._remove_halves(self._partial)
            with suppress(OSError):  # another process was faster
                os.rename(self._partial, self._path)
            self._remove_halves(self._path)  # of processes that began a block in the meantime
            self._remove_left()
        return whole or self._has_name()

    def _has_name(self) -> bool:
        """Whether another process has finished the store in the meantime."""
        return isinstance(self._path, Path) and self._path.exists()

    def _local_group(self) -> zarr.Group:
        """The beginning, or where another process was faster all of it."""
        import zarr

        while True:
            for path in (self._path, self._partial):
                # what a late block of another process has left where the beginning was is none: it has no tables
                with suppress(FileNotFoundError, KeyError):
                    group = zarr.open_group(path, mode="r+", zarr_format=3)
                    group[f"obsm/{self._image_key}"]
                    return group
            if self._partial.exists():
                shutil.rmtree(self._partial, ignore_errors=True)
            header = header_path(self._partial)
            try:
                with room_needed(self._path):
                    self._write_header(zarr.open_group(header, mode="w", zarr_format=3))
                begin_with(header, self._partial)
            finally:
                shutil.rmtree(header, ignore_errors=True)

    def _remove_halves(self, store: Path) -> None:
        """Blocks that nobody ends: Zarr writes each beside its place, and a kill leaves it there."""
        for folder, _, files in os.walk(store / self._array.path):
            for half in fnmatch.filter(files, "*.partial"):
                Path(folder, half).unlink(missing_ok=True)

    def _remove_left(self) -> None:
        """What processes have left that were killed, or came too late."""
        remove_headers(self._partial)
        shutil.rmtree(self._partial, ignore_errors=True)

    def _done(self) -> np.ndarray:
        from zarr.core.sync import sync

        exists = [self._array.store.exists(self._key(block)) for block in range(self._plan.n_blocks)]
        return np.array([sync(found) for found in exists])

    @property
    def _wanted(self) -> dict[str, str]:
        return self._plan.settings() | {"compression": str(self._compression)}

    @property
    def _attrs(self) -> dict[str, Any]:
        return dict(cast("dict[str, Any]", self._array.attrs[STORE_KEY]))

    def _key(self, block: int) -> str:
        path = self._array.path
        key = self._array.metadata.encode_chunk_key((block, 0, 0, 0))
        return f"{path}/{key}" if path else key

    def _write_header(self, group: zarr.Group) -> None:
        """Tables first, the images' array last: where it is, all else is."""
        from anndata.io import write_elem

        settings: dict[str, Any] = self._plan.settings() | {"block_size": self._plan.block_size}
        tables = {
            "obs": self._plan.obs,
            "var": _var(self._plan),
            "obsm": {},
            "uns": {STORE_KEY: settings | _scale(self._plan)},
        }
        with warnings.catch_warnings():
            # of how tables will be stored by a later anndata; either way is read
            warnings.filterwarnings("ignore", "zarr v3 autosharding", UserWarning)
            for name, table in tables.items():
                write_elem(group, name, table)
            group.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
            images = {f"obsm/{self._image_key}": (self._plan.shape, self._plan.dtype)}
            write_elem(group[f"uns/{STORE_KEY}"], TABLES_KEY, tables_checksums(group, images))
        n, *image = self._plan.shape
        group.create_array(
            f"obsm/{self._image_key}",
            shape=self._plan.shape,
            dtype=self._plan.dtype,
            chunks=(1, *image),
            shards=(min(self._plan.block_size, n), *image),
            compressors=ShardEncoder.codecs(self._compression),
            filters=None,
            attributes={
                "encoding-type": "array",
                "encoding-version": "0.2.0",
                STORE_KEY: settings | self._wanted | {"complete": isinstance(self._path, Path)},
            },
        )


def _var(plan: ScreenPlan) -> pd.DataFrame:
    return storable(pd.DataFrame({"channels": plan.channels}, index=pd.Index(plan.channels).astype(str)), "var")


def _scale(plan: ScreenPlan) -> dict[str, np.ndarray]:
    scale = plan.convert.intensity_range
    return {} if scale is None else {"intensity_range": np.array(scale)}
