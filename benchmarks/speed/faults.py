"""What is lost when things go wrong: processes killed at random moments, bytes flipped, files cut or missing.

python benchmarks/speed/faults.py [--kills 50]

Writes faults.json, from which `python benchmarks/speed --docs` makes the table of large_screens.md. What is
already there is not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _compare import machine

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from conftest import contents, make_plates
from helpers.crash_injection import WRITING, kill_until
from model import test_kills as runs

from scbd import SCBDModel
from scbd._shared.threads import limit_torch_to_one_thread
from scbd.data import open_screen, verify_screen, write_screen
from scbd.data._input_location import image_source

ELSEWHERE = Path("/dev/shm")  # a file system in memory, on most systems
RESULTS = Path(__file__).parent / "faults.json"
IMAGES = "single_cell_images"


def killed(at_least: int, once: Callable[[Path, int], tuple[int, bool]]) -> dict[str, int]:
    """Runs to their end, until processes were killed so often; how many ended otherwise than without kills."""
    found = {"tried": 0, "runs": 0, "lost": 0}
    while found["tried"] < at_least:
        with tempfile.TemporaryDirectory() as folder:
            kills, same = once(Path(folder), found["runs"])
        found["tried"] += kills
        found["runs"] += 1
        found["lost"] += not same
    return found


def killed_writing(name: str, compression: Any, whole: Path) -> Callable[[Path, int], tuple[int, bool]]:
    write_screen(whole / name, make_plates(3, 100), y_key="gene", compression=compression)
    expected = read(whole / name)

    def once(folder: Path, seed: int) -> tuple[int, bool]:
        path = folder / name
        kills = kill_until(path, WRITING.format(path=str(path), compression=compression), longest=0.5, seed=seed)
        return kills, read(path) == expected

    return once


def trained(whole: Path) -> None:
    if not (whole / "model").exists():
        runs.train(whole)


def killed_training(whole: Path) -> Callable[[Path, int], tuple[int, bool]]:
    trained(whole)
    expected = state(whole)

    def once(folder: Path, seed: int) -> tuple[int, bool]:
        code = runs.CODE.format(folder=str(folder), job="train")
        kills = kill_until(folder / "model" / "model.pt", code, longest=1.0, seed=seed)
        found = state(folder)
        return kills, all(torch.equal(found[name], value) for name, value in expected.items())

    return once


def killed_saving(whole: Path) -> Callable[[Path, int], tuple[int, bool]]:
    """Training that hardly does more than write checkpoints, with TMPDIR on another file system."""
    runs.train_large(whole / "large")
    expected = state(whole / "large")

    def once(folder: Path, seed: int) -> tuple[int, bool]:
        elsewhere = Path(tempfile.mkdtemp(dir=ELSEWHERE))
        os.environ["TMPDIR"] = str(elsewhere)
        try:
            code = runs.CODE.format(folder=str(folder), job="train_large")
            kills = kill_until(folder / "model" / "model.pt", code, longest=5.0, seed=seed)
            left = [*elsewhere.iterdir(), *folder.glob(".*.partial")]
        finally:
            del os.environ["TMPDIR"]
            shutil.rmtree(elsewhere)
        found = state(folder)
        return kills, not left and all(torch.equal(found[name], value) for name, value in expected.items())

    return once


def killed_embedding(whole: Path) -> Callable[[Path, int], tuple[int, bool]]:
    trained(whole)
    (whole / "embedded").mkdir()
    runs.embed(whole / "embedded")
    expected = contents(whole / "embedded" / "z.zarr")

    def once(folder: Path, seed: int) -> tuple[int, bool]:
        shutil.copytree(whole / "model", folder / "model")
        (folder / "embedded").mkdir()
        path = folder / "embedded" / "z.zarr"
        kills = kill_until(path, runs.CODE.format(folder=str(path.parent), job="embed"), longest=0.5, seed=seed)
        return kills, contents(path) == expected

    return once


def state(folder: Path) -> dict[str, torch.Tensor]:
    return SCBDModel.load(str(folder / "model"), adata=runs.make_model().adata).module.state_dict()


def damaged(path: Path, damage: Callable[[Path, np.random.Generator], None], n: int) -> dict[str, int]:
    """Damage a copy, again and again; lost are those that neither verifying nor reading says anything of."""
    found = {"tried": n, "runs": n, "lost": 0}
    right = read(path)
    for seed in range(n):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            shutil.copytree(path, copy)
            damage(copy, np.random.default_rng(seed))
            found["lost"] += unnoticed(copy, right)
    return found


def read(path: Path) -> list[str]:
    """Everything that opening a screen gives."""
    adata = open_screen(path)
    tables = [f"{frame.dtypes.to_dict()} {frame.reset_index().to_csv()}" for frame in (adata.obs, adata.var)]
    images = image_source(adata, IMAGES).read(slice(None))
    return [*tables, repr(sorted(map(repr, adata.uns.items()))), images.dtype.str, images.tobytes().hex()]


def unnoticed(path: Path, right: list[str]) -> bool:
    """Whether images or tables that are not those that were written are given out as if whole."""
    try:
        verify_screen(path)
        return read(path) != right
    except (
        AttributeError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # what they say is a matter of the tests
        return False


def some_file(path: Path, rng: np.random.Generator) -> Path:
    """A file of the images, in proportion to its size."""
    files = sorted(file for file in (path / "obsm" / IMAGES).rglob("*") if file.is_file())
    sizes = np.array([file.stat().st_size for file in files], dtype=float)
    return files[rng.choice(len(files), p=sizes / sizes.sum())]


def flip(path: Path, rng: np.random.Generator) -> None:
    flip_one(some_file(path, rng), rng)


def flip_table(path: Path, rng: np.random.Generator) -> None:
    """Anywhere but in images: labels, names, types, where things lie."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and IMAGES not in file.parts)
    flip_one(files[rng.integers(len(files))], rng)


def flip_one(file: Path, rng: np.random.Generator) -> None:
    said = bytearray(file.read_bytes())
    said[rng.integers(len(said))] ^= 1 << int(rng.integers(8))
    file.write_bytes(said)


def cut(path: Path, rng: np.random.Generator) -> None:
    file = some_file(path, rng)
    said = file.read_bytes()
    file.write_bytes(said[: rng.integers(len(said))])


def remove(path: Path, rng: np.random.Generator) -> None:
    some_file(path, rng).unlink()


def result() -> dict[str, Any]:
    """For :func:`_report.write_docs`."""
    saved = json.loads(RESULTS.read_text())
    table = [
        {"what goes wrong": row["what"], "tried": f"{row['tried']}", "lost or unnoticed": f"{row['lost']}"}
        for row in saved["rows"]
    ]
    return {"table": table, "machine": saved["machine"], "date": saved["date"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--damages", type=int, default=200)
    arguments = parser.parse_args()
    limit_torch_to_one_thread()  # as the processes that are killed: with others, the last bits of weights may be others
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}

    def note(what: str, count: Callable[[], dict[str, int]]) -> None:
        if any(row["what"] == what for row in saved["rows"]):
            return
        saved["rows"].append({"what": what, **count()})
        saved.update(machine=machine(), date=time.strftime("%Y-%m-%d"))
        RESULTS.write_text(json.dumps(saved) + "\n")
        print(saved["rows"][-1], flush=True)

    kills, n = arguments.kills, arguments.damages
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder)
        once = killed_writing("s.zarr", "lz4", whole)
        note("kill -9 while writing a screen", lambda: killed(kills, once))
        note("kill -9 while training", lambda: killed(kills, killed_training(whole)))
        if ELSEWHERE.is_dir() and ELSEWHERE.stat().st_dev != whole.stat().st_dev:
            saving = "kill -9 while training, TMPDIR on another file system"
            note(saving, lambda: killed(kills, killed_saving(whole)))
        note("kill -9 while embedding", lambda: killed(kills, killed_embedding(whole)))
        damages = {
            "a flipped bit": flip,
            "a flipped bit of the tables": flip_table,
            "a file cut off": cut,
            "a missing file": remove,
        }
        for what, damage in damages.items():
            note(what, lambda: damaged(whole / "s.zarr", damage, n))


if __name__ == "__main__":
    main()
