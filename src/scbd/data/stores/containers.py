"""The two kinds of store, written block by block: what is there after a kill is whole blocks, and is gone on with."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import h5py
import numpy as np

from scbd.data.sources.zarr_codecs import checksum
from scbd.data.stores.shards import ShardEncoder

if TYPE_CHECKING:
    import zarr

    from scbd.data.stores.plan import ScreenPlan

STORE_KEY = "scbd_store"
# a checksum with this bit is one; without it the block has not been written
WRITTEN = np.uint64(1 << 32)


class Container(Protocol):
    """A store while it is written."""

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

    def finish(self) -> None:
        """Give the whole store its name."""
        ...


class HDF5Container:
    """An uncompressed ``.h5ad``: images in one stretch, to be memory-mapped, and a checksum of every block.

    HDF5 writes the tables, reserves the place of images and checksums, and is closed; these are then written to their
    places in the file, so that no moment leaves a file that HDF5 could not open.
    """

    def __init__(self, path: Path, plan: ScreenPlan, image_key: str) -> None:
        self._path, self._plan, self._image_key = path, plan, image_key
        self._partial = partial_path(path)

    def begin(self) -> np.ndarray:
        """Write the tables, or look at what is there."""
        if not self._partial.exists():
            self._write_header()
        with h5py.File(self._partial, "r") as file:
            store = file["uns"][STORE_KEY]
            found = {key: store[key][()].decode() for key in ("format", "digest")}
            check_same(found, self._plan, self._partial)
            self._images_at = file["obsm"][self._image_key].id.get_offset()
            self._checksums_at = store["checksums"].id.get_offset()
        self._file = os.open(self._partial, os.O_RDWR)
        size = 8 * self._plan.n_blocks
        return np.frombuffer(os.pread(self._file, size, self._checksums_at), "<u8") >= WRITTEN

    def write(self, block: int, images: np.ndarray) -> None:
        """Images first, their checksum once they are on the disk."""
        start = self._images_at + self._plan.rows(block).start * self._plan.row_bytes
        _write_at(self._file, images.data.cast("B"), start)
        os.fsync(self._file)
        said = np.uint64(checksum(images)) | WRITTEN
        _write_at(self._file, memoryview(said.astype("<u8").tobytes()), self._checksums_at + 8 * block)

    def finish(self) -> None:
        """Rename."""
        os.fsync(self._file)
        os.close(self._file)
        os.replace(self._partial, self._path)

    def _write_header(self) -> None:
        from anndata import AnnData

        header = partial_path(self._partial)
        said: dict[str, Any] = self._plan.settings() | {"block_size": self._plan.block_size}
        AnnData(obs=self._plan.obs, var=_var(self._plan), uns={STORE_KEY: said | _scale(self._plan)}).write_h5ad(header)
        with h5py.File(header, "r+") as file:
            _reserve(file["obsm"], self._image_key, self._plan.shape, self._plan.dtype)
            store = file["uns"][STORE_KEY]
            _reserve(store, "checksums", (self._plan.n_blocks,), np.dtype("<u8"))
            store["checksums"][...] = 0
        with header.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(header, self._partial)


class ZarrContainer:
    """A sharded Zarr store of format 3: a file a block, a chunk an image, each with a checksum."""

    def __init__(self, path: Any, plan: ScreenPlan, image_key: str, compression: Any) -> None:
        self._path, self._plan, self._image_key, self._compression = path, plan, image_key, compression
        self._partial = partial_path(path) if isinstance(path, Path) else path

    def begin(self) -> np.ndarray:
        """Write the tables, or look at what is there."""
        import zarr

        group = zarr.open_group(self._partial, mode="a", zarr_format=3)
        key = f"obsm/{self._image_key}"
        if key not in group:
            self._write_header(group)
        self._array = cast("zarr.Array", group[key])
        check_same(self._said, self._plan, self._partial, self._compression)
        self._encoder = ShardEncoder(self._array)
        from zarr.core.sync import sync

        exists = [self._array.store.exists(self._key(block)) for block in range(self._plan.n_blocks)]
        return np.array([sync(found) for found in exists])

    def write(self, block: int, images: np.ndarray) -> None:
        """A shard appears under its name when it is whole."""
        from zarr.core.buffer import default_buffer_prototype
        from zarr.core.sync import sync

        data = default_buffer_prototype().buffer.from_bytes(self._encoder.encode(images))
        sync(self._array.store.set(self._key(block), data))
        if isinstance(self._partial, Path):
            with (self._partial / self._key(block)).open("rb+") as file:
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Mark as complete, and rename."""
        self._array.attrs[STORE_KEY] = self._said | {"complete": True}
        if isinstance(self._path, Path):
            os.replace(self._partial, self._path)

    @property
    def _said(self) -> dict[str, Any]:
        return dict(cast("dict[str, Any]", self._array.attrs[STORE_KEY]))

    def _key(self, block: int) -> str:
        path = self._array.path
        key = self._array.metadata.encode_chunk_key((block, 0, 0, 0))
        return f"{path}/{key}" if path else key

    def _write_header(self, group: zarr.Group) -> None:
        """Tables first, the images' array last: where it is, all else is."""
        from anndata.io import write_elem

        said: dict[str, Any] = self._plan.settings() | {"block_size": self._plan.block_size}
        tables = {
            "obs": self._plan.obs,
            "var": _var(self._plan),
            "obsm": {},
            "uns": {STORE_KEY: said | _scale(self._plan)},
        }
        with warnings.catch_warnings():
            # of how tables will be stored by a later anndata; either way is read
            warnings.filterwarnings("ignore", "zarr v3 autosharding", UserWarning)
            for name, table in tables.items():
                write_elem(group, name, table)
        group.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
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
                STORE_KEY: said | {"compression": str(self._compression), "complete": False},
            },
        )


def partial_path(path: Path) -> Path:
    """Where a store lies until it is whole."""
    return path.with_name(f".{path.name}.partial")


def check_same(found: dict[str, Any], plan: ScreenPlan, partial: Any, compression: str | None = None) -> None:
    """Raise if what was begun is another store."""
    wanted = plan.settings()
    if {key: found.get(key) for key in wanted} != wanted or found.get("compression", str(compression)) != str(
        compression
    ):
        msg = (
            f"{partial} is the beginning of another store (other cells, order or settings): move it away, or write to "
            "another path."
        )
        raise ValueError(msg)


def check_space(path: Path, size: int) -> None:
    """Raise if the disk has less room than a store of this size takes beside what has been written of it.

    Raises
    ------
    OSError
        If so.
    """
    partial = partial_path(path)
    written = sum(file.stat().st_blocks * 512 for file in (partial, *partial.rglob("*")) if file.exists())
    needed, free = size - written, shutil.disk_usage(path.parent).free
    if needed > free:
        msg = f"{path} takes {needed / 2**30:.1f} GiB more, the disk has {free / 2**30:.1f} GiB free: make room first."
        raise OSError(msg)


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


def _var(plan: ScreenPlan) -> Any:
    import pandas as pd

    return pd.DataFrame({"channels": plan.channels}, index=pd.Index(plan.channels).astype(str))


def _scale(plan: ScreenPlan) -> dict[str, np.ndarray]:
    scale = plan.convert.intensity_range
    return {} if scale is None else {"intensity_range": np.array(scale)}
