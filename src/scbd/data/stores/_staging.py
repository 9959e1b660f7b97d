"""Plates whose rows are stored many together, put where each row can be read by itself: before they are shuffled."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from contextlib import closing
from typing import TYPE_CHECKING

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData

from scbd._jobs import check_same
from scbd._progress import progress_bar
from scbd.data._prefetch import worked_on
from scbd.data.sources import ArraySource
from scbd.data.stores._block_file import BlockFile
from scbd.data.stores._hdf5 import memory_map_h5ad
from scbd.data.stores._tables import STORE_KEY

if TYPE_CHECKING:
    from pathlib import Path

    from scbd.data.stores._plan import ScreenPlan

_KEY = "images"
# of a plate at once; one row of chunks may be more, and is then kept in a file
_STRETCH_BYTES = 64 * 2**20
_IN_MEMORY = 4 * _STRETCH_BYTES


class StagedPlate:
    """A plate on its way: read in stretches of whole chunks, from the first row to the last, and kept converted.

    What is kept lies in a file of blocks, so that it is gone on with after a kill, by one process or several.

    Parameters
    ----------
    plan
        Of the screen.
    number
        Of the plate.
    folder
        Where the file lies.
    """

    def __init__(self, plan: ScreenPlan, number: int, folder: Path) -> None:
        self._plan, self._number, self._folder = plan, number, folder
        self._source = plan.plates[number].images
        self.n = self._source.shape[0]
        rows = plan.chunk_rows(number)
        size = rows * math.prod(self._source.shape[1:]) * self._source.dtype.itemsize
        self._rows = min(self.n, rows * max(1, _STRETCH_BYTES // size))
        self.n_stretches = -(-self.n // self._rows)
        self._path = folder / f"{number}.h5ad"

    def begin(self) -> None:
        """Make the file, or look at what is there.

        Raises
        ------
        ValueError
            If it was begun from other cells.
        """
        settings = self._plan.settings()
        self._file = None
        if self._path.exists():
            with h5py.File(self._path, "r") as file:
                store = file["uns"][STORE_KEY]
                check_same({key: store[key][()] for key in store}, settings, self._folder)
            return
        shape = (self.n_stretches, self._rows, *self._plan.shape[1:])
        tables = AnnData(obs=pd.DataFrame(index=pd.RangeIndex(self.n_stretches).astype(str)))
        self._file = BlockFile(self._path, tables, {_KEY: (shape, self._plan.dtype)}, 1, settings)
        self._file.begin()

    def write(self, stretch: int) -> int:
        """Read, convert and keep a stretch, if nobody has; how many rows it has."""
        rows = slice(stretch * self._rows, min((stretch + 1) * self._rows, self.n))
        n = rows.stop - rows.start
        if self._file is None or self._file.done()[stretch]:
            return n
        raw = _room((n, *self._source.shape[1:]), self._source.dtype, self._folder)
        with self._plan.turn(self._number):
            self._source.read(rows, out=raw)
        images = _room((n, *self._plan.shape[1:]), self._plan.dtype, self._folder)
        self._plan.convert_to(images, raw, self._number, rows.start)
        self._file.write(stretch, {_KEY: images})
        return n

    def finish(self) -> ArraySource:
        """All rows, memory-mapped."""
        if self._file is not None:
            self._file.finish()
        images = memory_map_h5ad(self._path, f"obsm/{_KEY}").reshape(-1, *self._plan.shape[1:])[: self.n]
        return ArraySource(images, str(self._path))


def missing_bytes(plan: ScreenPlan, folder: Path) -> int:
    """Disk that staged plates will take beside what is there of them."""
    size = sum(plan.plates[number].images.shape[0] for number in slow_plates(plan)) * plan.row_bytes
    return max(0, size - sum(file.stat().st_blocks * 512 for file in folder.rglob("*")))


def slow_plates(plan: ScreenPlan) -> list[int]:
    """Plates of which a row costs as much to read as many."""
    return [number for number in range(len(plan.plates)) if plan.chunk_rows(number) > 1]


def staged(
    plan: ScreenPlan, folder: Path, shard: tuple[int, int], n_workers: int | None, shown: bool | None
) -> ScreenPlan:
    """The same plan, with every row of its plates within reach.

    Every process needs rows of all plates. Each begins with another share of them, and then does what is missing: those
    that run at once do a share each, and one that runs alone does all of it.
    """
    slow = slow_plates(plan)
    if not slow:
        return plan
    folder.mkdir(parents=True, exist_ok=True)
    plates = [StagedPlate(plan, number, folder) for number in slow]
    for plate in plates:
        plate.begin()
    stretches = [(plate, stretch) for plate in plates for stretch in range(plate.n_stretches)]
    first = (shard[0] - 1) * len(stretches) // shard[1]
    mine = stretches[first:] + stretches[:first]
    bar = progress_bar("Reading plates", sum(plate.n for plate in plates), shown=shown)
    with bar, closing(worked_on(lambda item: item[0].write(item[1]), mine, n_workers)) as written:
        for n in written:
            bar.update(n)
    sources = {number: plate.finish() for number, plate in zip(slow, plates, strict=True)}
    return dataclasses.replace(plan, staged=sources)


def _room(shape: tuple[int, ...], dtype: np.dtype, folder: Path) -> np.ndarray:
    """An array; a large one in a file without a name, which the system writes out when it needs the memory."""
    if math.prod(shape) * dtype.itemsize <= _IN_MEMORY:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=shape)
