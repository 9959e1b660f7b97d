"""Memory of what is done once for all cells: bytes a cell, beyond the table itself, at the moment of most.

Each in a process of its own, whose peak the system has been told to forget once the table is there. By itself, for any
number of cells: python benchmarks/speed/tables.py "split_by_column" 5000000
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from _compare import Row, resident_peak, said, timed
from _scale import Scale
from anndata import AnnData

from scbd import SCBDModel
from scbd.data import ArraySource, Crops, read_crops, stratified_split
from scbd.data._screens import ScreenPlan, _sort_and_shuffle
from scbd.data._sources import digest_cells
from scbd.data._splits import split_by_column

IMAGES = "single_cell_images"
# makes what is given; then does the work, and returns what it keeps
Job = Callable[[int], Callable[[], object]]


def table(n: int) -> pd.DataFrame:
    """5,000 genes, 340 wells of ten plates, a tenth of the cells to validate by."""
    rng = np.random.default_rng(0)
    values = {
        "gene": [f"gene {i}" for i in range(5000)],
        "plate": [f"plate {i}" for i in range(10)],
        "well": [f"{row}{column}" for row in "ABCDEFGH" for column in range(1, 13)][:34],
        "split": ["train"] * 9 + ["validation"],
    }
    columns = {
        name: pd.Categorical.from_codes(rng.integers(0, len(set(names)), n), list(dict.fromkeys(names)))
        for name, names in values.items()
    }
    return pd.DataFrame(columns, index=[f"{i:08d}" for i in range(n)])


def images(n: int) -> np.ndarray:
    """Of one pixel: tables alone."""
    return np.zeros((n, 1, 1, 1), dtype=np.uint8)


def set_up(n: int) -> Callable[[], object]:
    cells = AnnData(obs=table(n), obsm={IMAGES: images(n)})
    return lambda: SCBDModel.setup_anndata(cells, y_key="gene", e_key=["plate", "well"])


def by_column(n: int) -> Callable[[], object]:
    obs = table(n)
    return lambda: split_by_column(obs, "split")


def stratified(n: int) -> Callable[[], object]:
    obs = table(n)
    strata = [obs[key].cat.codes.to_numpy() for key in ("gene", "well")]
    return lambda: stratified_split(strata)


def keys(n: int) -> Callable[[], object]:
    """The crops are empty: nobody looks at them."""
    import lmdb

    folder, obs = tempfile.TemporaryDirectory(), table(n)
    database = lmdb.open(folder.name, map_size=max(2**24, 500 * n), sync=False)
    with database, database.begin(write=True) as writing:
        rows = zip(*(obs[key].astype(str) for key in ("plate", "well", "gene")), strict=True)
        for i, (plate, well, gene) in enumerate(rows):
            writing.put(f"{i:08d}_{plate}_{well}_{i % 300}_{gene}_{i}".encode(), b"", append=True)
    return lambda: read_crops(folder.name)


def plan(n: int) -> Callable[[], object]:
    obs = table(n)
    parts = [slice(start, start + -(-n // 10)) for start in range(0, n, -(-n // 10))]
    plates = [Crops(ArraySource(images(len(obs.iloc[p]))), obs.iloc[p], ["dna"], f"plate {p.start}") for p in parts]
    del obs

    def work() -> object:
        obs, order = _sort_and_shuffle(plates, "gene", 0)
        planned = ScreenPlan(plates, order, (n, 1, 1, 1), np.dtype("uint8"), None, None)
        planned.digest(obs)
        return AnnData(obs=obs), planned

    return work


def digest(n: int) -> Callable[[], object]:
    obs, source = table(n), ArraySource(images(n))
    return lambda: digest_cells(source, obs)


JOBS: dict[str, Job] = {
    "setup_anndata, e_key=['plate', 'well']": set_up,
    "split_by_column": by_column,
    "stratified_split by gene and well": stratified,
    "read_crops of an LMDB": keys,
    "write_screen, its plan": plan,
    "digest of all labels": digest,
}


def bytes_made(kept: object) -> int:
    """Of the table that a job makes, which is not beyond the table; names that it shares with another are not made."""
    obs = getattr(kept, "obs", None)
    return 0 if obs is None else int(obs.memory_usage(deep=isinstance(kept, Crops)).sum())


def resident() -> float:
    """MiB of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def forget_the_peak() -> None:
    """Give back what is free, and let the system count anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measured(job: Job, n: int) -> tuple[float, float, float]:
    """Seconds, MiB at most beyond what was there, MiB of the table that was made."""
    job(1000)()  # libraries are not what is measured
    work = job(n)
    forget_the_peak()
    before = resident()
    seconds, kept = timed(work)
    return seconds, resident_peak() - before, bytes_made(kept) / 2**20


def rows(scale: Scale) -> list[Row]:
    n, found = scale.of(5_000_000, 5000), []
    for name in JOBS:
        seconds, peak, made = said("tables.py", name, str(n))
        found.append(
            {
                "claim": f"{name}, {n:,} cells",
                "ours_s": seconds,
                "bytes_a_cell": (peak - made) * 2**20 / n,
                "note": f"makes a table of {made * 2**20 / n:.0f} bytes a cell" if made else "",
            }
        )
    return found


if __name__ == "__main__":  # NAME CELLS
    warnings.filterwarnings("ignore")
    print(*measured(JOBS[sys.argv[1]], int(sys.argv[2])))
