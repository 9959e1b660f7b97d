"""Crops on disk: stretches of neighbours from each kind of store, by its library and by scbd; writing them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import zarr
from _compare import Row, compared, timed
from _scale import Scale
from anndata import AnnData

from scbd.data import open_screen, write_screen
from scbd.data._input_location import image_source
from scbd.datasets import simulated_screen

IMAGES = "single_cell_images"
# of each perturbation of a P × 8 batch, the four stretches that are drawn
NEIGHBOURS = 2


def crops(n: int, side: int) -> AnnData:
    """4 channels, uint16: simulated cells and the noise of a camera."""
    cells = simulated_screen(n_cells=n // 4, n_wells=8, image_size=side, seed=0)
    rng = np.random.default_rng(0)
    images = np.concatenate([cells.obsm[IMAGES]] * 4).astype(np.uint16) * np.uint16(16)
    images += rng.poisson(30, images.shape).astype(np.uint16)
    obs = pd.DataFrame({"gene": rng.integers(0, 64, len(images)).astype(str)}, index=np.arange(len(images)).astype(str))
    return AnnData(obs=obs, obsm={IMAGES: images})


def described(shape: tuple[int, ...]) -> str:
    return f"{'×'.join(map(str, shape[1:]))} uint16"


def batch_of_neighbours(n: int, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    starts = rng.choice(n // NEIGHBOURS, size // NEIGHBOURS, replace=False) * NEIGHBOURS
    return (starts[:, None] + np.arange(NEIGHBOURS)).reshape(-1)


def reading(folder: Path, size: int, repeats: int) -> list[Row]:
    # Zarr's own reading takes milliseconds a crop
    table, slow = [], size // 8
    for name in ("screen.h5ad", "raw.zarr", "lz4.zarr", "zstd.zarr"):
        source = image_source(open_screen(folder / name), IMAGES)
        library = through_library(folder / name)
        out = np.empty((size, *source.shape[1:]), source.dtype)
        memory = np.ascontiguousarray(source.read(slice(None)))
        seconds, copies = np.empty((repeats, 2)), np.empty(repeats)
        n = source.shape[0]
        source.read(batch_of_neighbours(n, size, 0), out)
        for repeat in range(repeats):
            rows = batch_of_neighbours(n, size, repeat)
            some = np.sort(rows)[:slow]
            seconds[repeat, 0] = timed(lambda some=some: library(some))[0] * size / slow
            seconds[repeat, 1] = timed(lambda rows=rows: source.read(rows, out))[0]
            copies[repeat] = timed(lambda rows=rows: np.take(memory, rows, axis=0, out=out, mode="clip"))[0]
        row = compared(seconds)
        share = float(np.median(copies / seconds[:, 1]))
        n_bytes = sum(file.stat().st_size for file in [folder / name, *(folder / name).rglob("*")] if file.is_file())
        rate = f"{size / row['ours_s']:,.0f} crops/s, {share:.0%} of a copy in memory"
        row["note"] = f"{rate}; {memory.nbytes / n_bytes:.2f}× smaller"
        row["difference"] = float(np.abs(source.read(some).astype(int) - library(some).astype(int)).max())
        table.append(
            {"claim": f"{size:,} crops of {described(source.shape)} in stretches of {NEIGHBOURS}, {name}", **row}
        )
    return table


def through_library(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Rows as h5py or Zarr give them."""
    if path.suffix == ".h5ad":
        dataset = h5py.File(path)["obsm"][IMAGES]
        return lambda rows: dataset[rows]
    array = zarr.open_array(path, path=f"obsm/{IMAGES}", mode="r")
    return lambda rows: np.asarray(array.oindex[rows])


def writing(folder: Path, cells: AnnData) -> list[Row]:
    table = []
    forms: list[tuple[str, dict[str, Any]]] = [
        ("raw.zarr", {}),
        ("lz4.zarr", {"compression": "lz4"}),
        ("zstd.zarr", {"compression": "zstd"}),
        ("small.zarr", {"compression": "lz4", "image_size": 64, "dtype": "uint8"}),
    ]
    cells.write_h5ad(folder / "screen.h5ad")  # read in place
    for name, how in forms:
        seconds = timed(lambda name=name, how=how: write_screen(folder / name, cells, y_key="gene", **how))[0]
        note = f"{cells.n_obs / seconds:,.0f} crops/s, synchronised to the disk"
        what = "resized to 64 pixels, uint8, " if "image_size" in how else ""
        table.append(
            {
                "claim": f"writing {cells.n_obs:,} crops of {described(cells.obsm[IMAGES].shape)}, {what}{name}",
                "ours_s": seconds,
                "note": note,
            }
        )
    return table


def converting(folder: Path, sizes: tuple[int, ...]) -> list[Row]:
    """Plates that anndata has compressed: its chunks span thousands of rows, and a fraction of each image."""
    return [compressed(folder, n) for n in sizes]


def compressed(folder: Path, n: int) -> Row:
    """A plate of 4×32×32 uint16, beside reading blocks of 64 random rows: as dense as blocks of 4,096 over many."""
    plate, size = folder / f"{n}.h5ad", 64
    cells = simulated_screen(n_cells=n, n_wells=8, image_size=32, seed=0)
    rng = np.random.default_rng(0)
    images = cells.obsm[IMAGES].astype(np.uint16) * np.uint16(16) + rng.poisson(30, cells.obsm[IMAGES].shape)
    cells.obsm[IMAGES] = images.astype(np.uint16)
    cells.write_h5ad(plate, compression="gzip")
    with h5py.File(plate) as file:
        dataset = file["obsm"][IMAGES]
        stretch, chunks = dataset.chunks[0], "×".join(map(str, dataset.chunks))
        sequential = timed(lambda: [dataset[start : start + stretch] for start in range(0, n, stretch)])[0]
        wanted = np.sort(rng.choice(n, size, replace=False))
        # every block once asked for its rows by themselves; one of them says enough
        naive = timed(lambda: [dataset[row] for row in wanted])[0] * n / size
    seconds, screen = timed(lambda: write_screen(folder / f"{n}_screen.zarr", plate, y_key="gene"))
    rows = cells.obs_names.get_indexer(screen.obs_names)
    note = f"{n / naive:,.0f} and {n / seconds:,.0f} cells/s, read from the first row to the last {n / sequential:,.0f}"
    return {
        "claim": f"converting a gzip .h5ad of {n:,} crops of 4×32×32 uint16, chunks of {chunks}",
        "naive_s": naive,
        "ours_s": seconds,
        "ratio": naive / seconds,
        "note": note,
        "difference": float((screen.obsm[IMAGES][:] != cells.obsm[IMAGES][rows]).sum()),
    }


def rows(scale: Scale) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        cells = crops(*scale.of((8192, 100), (800, 32)))
        written = writing(Path(folder), cells)
        read = reading(Path(folder), scale.of(2048, 64), scale.repeats)
        return read + written + converting(Path(folder), scale.of((8000, 16_000), (200,)))
