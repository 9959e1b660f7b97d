"""A screen of a million cells, from its plates to its scores: rate and memory of every stage.

Fifty thousand simulated cells are photographed again and again, each plate turned its own way and with a camera's
noise. Every stage is a process of its own, whose memory is read from outside five times a second. Takes 40 GB of disk.

python benchmarks/speed/million.py [--cells 1000000] [--steps 200] [--folder DIR] [--smoke]

Writes million.json, from which `python benchmarks/speed --docs` makes the table and the picture of
large_screens.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from _compare import machine
from _scale import SMOKE, Scale
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "million.json"
STAGES = ["simulate", "write", "verify", "train", "embed", "evaluate"]
IMAGES = "single_cell_images"


class Size(NamedTuple):
    """Cells in all, cells that are simulated for every plate, pixels a side; steps and their cells."""

    cells: int
    plate: int
    side: int
    steps: int
    batch: int


FULL = Size(1_000_000, 50_000, 64, 200, 1024)
TINY = Size(600, 300, 16, 2, 64)


class Photographed:
    """The simulated cells as another plate shows them."""

    in_memory = False

    def __init__(self, cells: np.ndarray, plate: int) -> None:
        self._cells, self._plate = cells, plate
        self.shape, self.dtype = cells.shape, cells.dtype

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        images = np.rot90(self._cells[rows], self._plate % 4, axes=(2, 3))
        images = images[..., ::-1] if self._plate % 8 >= 4 else images
        noise = np.random.default_rng([self._plate, int(np.arange(len(self._cells))[rows][0])])
        noisy = np.clip(images + noise.integers(-6, 7, images.shape, dtype=np.int16), 0, 255)
        out = np.empty(images.shape, self.dtype) if out is None else out
        out[...] = noisy
        return out


def simulate(folder: Path, size: Size) -> int:
    from scbd.datasets import simulated_screen

    cells = simulated_screen(min(size.cells, size.plate), n_wells=34, image_size=size.side, seed=0)
    np.save(folder / "cells.npy", cells.obsm[IMAGES])
    cells.obs.to_parquet(folder / "cells.parquet")
    return cells.n_obs


def write(folder: Path, size: Size) -> int:
    from scbd.data import Crops, write_screen

    cells, obs = np.load(folder / "cells.npy", mmap_mode="r"), pd.read_parquet(folder / "cells.parquet")
    channels = [f"channel {number}" for number in range(cells.shape[1])]
    plates = [
        Crops(
            Photographed(cells, plate),
            obs.assign(plate=f"plate {plate}").set_axis([f"{plate}_{name}" for name in obs.index]),
            channels,
            f"plate {plate}",
        )
        for plate in range(-(-size.cells // size.plate))
    ]
    return write_screen(folder / "screen.zarr", plates, y_key="gene", compression="lz4").n_obs


def verify(folder: Path, size: Size) -> int:
    from scbd.data import verify_screen

    verify_screen(folder / "screen.zarr")
    return size.cells


def train(folder: Path, size: Size) -> int:
    from scbd import SCBDModel
    from scbd.data import open_screen

    screen = open_screen(folder / "screen.zarr")
    SCBDModel.setup_anndata(screen, y_key="gene", e_key="well")
    model = SCBDModel(screen, encoder="small")
    settings: dict[str, Any] = {
        "max_steps": size.steps,
        "batch_size": size.batch,
        "train_size": 0.98,
        "validation_size": 0.01,
    }
    model.train(lr=1e-3, batch_kwargs={"neighbours": True}, perturbations_per_batch=size.batch // 32, **settings)
    model.save(folder / "model", overwrite=True)
    return size.steps * size.batch


def embed(folder: Path, size: Size) -> int:
    from scbd import SCBDModel
    from scbd.data import open_screen

    model = SCBDModel.load(folder / "model", adata=open_screen(folder / "screen.zarr"))
    return model.embed_to(folder / "z.zarr", dtype="float16").n_obs


def evaluate(folder: Path, size: Size) -> int:
    from scbd.data import open_embedding
    from scbd.metrics import aggregate, batch_probe

    embedding = open_embedding(folder / "z.zarr")
    aggregate(embedding, "X_scbd_c", gene_key="gene", control="nontargeting")
    batch_probe(embedding, "X_scbd_c", "well")
    return embedding.n_obs


def memory_of(process: int | str) -> tuple[float, float] | None:
    """MiB of its own, and MiB of files that are mapped."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    # without any where it has just ended
    return (kib["RssAnon"] / 2**10, kib["RssFile"] / 2**10) if kib else None


def watched(stage: str, folder: Path, size: Size) -> dict[str, Any]:
    """Run a stage by itself, and look at its memory all the while."""
    command = [sys.executable, __file__, "--stage", stage, "--folder", str(folder), "--size", json.dumps(size)]
    with (folder / f"{stage}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        start, trace = time.perf_counter(), []
        while process.poll() is None:
            memory = memory_of(process.pid)
            if memory is not None:
                trace.append([round(time.perf_counter() - start, 1), *(round(part) for part in memory)])
            time.sleep(0.2)
    assert process.stdout is not None
    if process.returncode:
        raise SystemExit(f"{stage} failed, see {folder / f'{stage}.log'}")
    said = json.loads(process.stdout.read().splitlines()[-1])
    own = np.array(trace)[:, 1]
    every = max(1, len(trace) // 200)
    return {"stage": stage, **said, "own_mib": int(own.max()), "trace": trace[::every]}


def one_stage(stage: str, folder: Path, size: Size) -> dict[str, Any]:
    """In a process of its own: what it did, how long the work took, and its memory before."""
    import scbd._workflows.run  # noqa: F401  # the libraries count as what is there before

    before = memory_of("self")
    assert before is not None
    start = time.perf_counter()
    cells = globals()[stage](folder, size)
    return {"cells": cells, "seconds": time.perf_counter() - start, "before_mib": round(before[0])}


def result() -> dict[str, Any]:
    """For :func:`_report.write_docs`."""
    saved = json.loads(RESULTS.read_text())
    table = [
        {
            "stage": row["stage"] + (f", steps of {FULL.batch:,}" if row["stage"] == "train" else ""),
            "cells": f"{row['cells']:,}",
            "seconds": f"{row['seconds']:,.0f}",
            "cells/s": f"{row['cells'] / row['seconds']:,.0f}",
            "own memory before, MiB": f"{row['before_mib']:,}",
            "own memory at most, MiB": f"{row['own_mib']:,}",
        }
        for row in saved["rows"]
    ]
    return {"table": table, "machine": saved["machine"], "date": saved["date"]}


def plot(path: Path) -> None:
    """Memory over time, a line a stage."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    ax = figure.subplots()
    for row, style in zip(json.loads(RESULTS.read_text())["rows"][1:], ("-", "--", ":", "-.", "-"), strict=False):
        seconds, own, _ = np.array(row["trace"]).T
        ax.plot(seconds / seconds[-1], own / 2**10, style, label=row["stage"])
    ax.set(xlabel="share of the stage's time", ylabel="own memory, GiB", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--smoke", action="store_true", help="as small as can be, to see that everything runs")
    parser.add_argument("--folder", type=Path, help="kept; by default one that is removed")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        warnings.filterwarnings("ignore")
        logging.disable(logging.INFO)
        print(json.dumps(one_stage(arguments.stage, arguments.folder, Size(*arguments.size))))
        return
    size = (SMOKE if arguments.smoke else Scale()).of(FULL, TINY)
    size = size._replace(cells=arguments.cells or size.cells, steps=arguments.steps or size.steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        rows = []
        for stage in STAGES:
            rows.append(watched(stage, folder, size))
            print({key: value for key, value in rows[-1].items() if key != "trace"}, flush=True)
        n_bytes = sum(file.stat().st_size for file in (folder / "screen.zarr").rglob("*") if file.is_file())
        saved = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "store_bytes": n_bytes, "rows": rows}
        RESULTS.write_text(json.dumps(saved) + "\n")


if __name__ == "__main__":
    main()
