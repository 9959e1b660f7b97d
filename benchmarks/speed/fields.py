"""Crops cut out of fields of view and written into a screen: rate and memory, and those of a plain loop."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import zarr
from _compare import Row, said, timed
from _scale import Scale
from anndata import AnnData

from scbd.data import crop_cells, open_screen, write_screen

IMAGES = "single_cell_images"
SIZE, CHANNELS = 100, 5


def make_fields(folder: Path, n_fields: int, side: int, kind: str) -> None:
    """A few pictures of blobs and a camera's noise, as files that compress as such do."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:side, :side] / 40
    for number in range(n_fields):
        if number < 4:
            shade = 200 + 150 * np.sin(y + number) * np.sin(x)
            image = rng.poisson(shade, (CHANNELS, side, side)).astype(np.uint16)
        path = folder / f"{number}.{kind}"
        if kind == "tif":
            import tifffile

            tifffile.imwrite(path, np.roll(image, number, axis=-1), photometric="minisblack")
        else:
            chunks = (1, side // 2, side // 2)
            zarr.create_array(path, data=np.roll(image, number, axis=-1), chunks=chunks)


def cells_of(n: int, n_fields: int, side: int) -> pd.DataFrame:
    """Evenly over all fields, away from their edges, of many genes."""
    rng = np.random.default_rng(0)
    yx = rng.integers(SIZE // 2, side - SIZE // 2 + 1, (n, 2))
    genes = rng.integers(0, 64, n).astype(str)
    return pd.DataFrame({"field": np.arange(n) % n_fields, "y": yx[:, 0], "x": yx[:, 1], "gene": genes})


def ours(folder: Path, kind: str, cells: pd.DataFrame) -> None:
    fields = {name: opened(folder / f"{name}.{kind}") for name in cells["field"].unique()}
    write_screen(folder / "ours.zarr", crop_cells(fields, cells, size=SIZE), y_key="gene")


def naive(folder: Path, kind: str, cells: pd.DataFrame) -> None:
    """Field by field into memory, and then to disk; rows are not even put in order."""
    images = np.empty((len(cells), CHANNELS, SIZE, SIZE), np.uint16)
    for field, rows in cells.groupby("field").indices.items():
        image = whole(folder / f"{field}.{kind}")
        for row in rows:
            y, x = cells["y"].iloc[row] - SIZE // 2, cells["x"].iloc[row] - SIZE // 2
            images[row] = image[:, y : y + SIZE, x : x + SIZE]
    obs = cells.set_axis(cells.index.astype(str))
    AnnData(obs=obs, obsm={IMAGES: images}).write_h5ad(folder / "naive.h5ad")


def opened(path: Path) -> zarr.Array:
    if path.suffix == ".tif":
        import tifffile

        return zarr.open_array(tifffile.imread(path, aszarr=True), mode="r")
    return zarr.open_array(path, mode="r")


def whole(path: Path) -> np.ndarray:
    """Read, and the file closed again."""
    if path.suffix == ".tif":
        import tifffile

        return tifffile.imread(path)
    return np.asarray(opened(path)[...])


def read_all(folder: Path, kind: str, n_fields: int) -> None:
    """One after the other: together they are larger than memory."""
    for field in range(n_fields):
        whole(folder / f"{field}.{kind}")


def measured(kind: str, n: int, n_fields: int, side: int) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_fields(folder, n_fields, side, kind)
        how = [name, kind, *map(str, (n, n_fields, side))]
        (own, own_mib), (loop_s, loop_mib) = (said("fields.py", form, *how) for form in ("ours", "naive"))
        reading = timed(lambda: read_all(folder, kind, n_fields))[0]
        screen, loop = open_screen(folder / "ours.zarr"), anndata.read_h5ad(folder / "naive.h5ad", backed="r")
        some = np.arange(0, n, max(1, n // 500))
        rows = loop.obs_names.get_indexer(screen.obs_names[some])
        pairs = zip(screen.obsm[IMAGES].oindex[some], (loop.obsm[IMAGES][row] for row in rows), strict=True)
        wrong = sum(int((one != other).sum()) for one, other in pairs)
    rate = f"{n / own:,.0f} crops/s; fields are read by one thread as fast as {n / reading:,.0f} crops/s"
    return {
        "claim": f"{n:,} crops of {CHANNELS}×{SIZE}×{SIZE} uint16 from {n_fields:,} fields of {side}×{side}, .{kind}",
        "naive_s": loop_s,
        "ours_s": own,
        "ratio": loop_s / own,
        "naive_mib": loop_mib,
        "ours_mib": own_mib,
        "difference": float(wrong),
        "note": rate,
    }


def rows(scale: Scale) -> list[Row]:
    kinds = ["tif", "zarr"] if importlib.util.find_spec("tifffile") else ["zarr"]
    return [measured(kind, *scale.of((100_000, 2000, 1080), (60, 4, 240))) for kind in kinds]


def peak_while(call: Any) -> tuple[float, float]:
    """Seconds, and the most memory of its own that this process had, in MiB: files that are mapped are not counted."""
    peak, over = [anonymous_mib()], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            peak.append(anonymous_mib())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    seconds = timed(call)[0]
    over.set()
    thread.join()
    return seconds, max(peak)


def anonymous_mib() -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), float("nan"))


if __name__ == "__main__":
    forms: dict[str, Any] = {"ours": ours, "naive": naive}
    form, folder, kind, *sizes = sys.argv[1:]
    table = cells_of(*map(int, sizes))
    print(*peak_while(lambda: forms[form](Path(folder), kind, table)))
