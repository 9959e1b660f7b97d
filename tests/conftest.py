from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of libraries loaded below, also in subprocesses
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # numerical results must be those of a CPU on every machine

import numpy as np
import pytest
import torch
from anndata import AnnData
from helpers.small_tables import make_cells, make_wells  # noqa: F401 tests import both from here
from hypothesis import settings
from threadpoolctl import threadpool_limits

import scbd
from scbd.metrics import _probes
from scbd.model import ImageModel
from scbd.nn import _encoders as encoders

IMAGE_KEY = "single_cell_images"

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("quick")
# with one process per core and tiny matrices, more threads only wait for each other
threadpool_limits(1)  # also for numpy, which is already loaded
torch.set_num_threads(1)

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell have no handler

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: they stay in memory, and scanning them takes half a second."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real data next to the checkout."""
    if not SHARED.is_dir():
        pytest.skip("the real data are not here: no folder ../shared/data beside the checkout")
    return SHARED


def run_cells(name: str, stop: Callable[[int, str], bool]) -> SimpleNamespace:
    """Run the code cells of a notebook before the first with `stop(number, source)`; return the names they define."""
    path = Path(__file__).parents[1] / "notebooks" / f"{name}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": name}
    for number, source in enumerate(sources):
        if stop(number, source):
            return SimpleNamespace(**namespace)
        exec(compile(source, path.name, "exec"), namespace)
    msg = f"No cell of {path.name} is the one to stop at."
    raise ValueError(msg)


@pytest.fixture
def cells() -> AnnData:
    return make_cells()


def make_plates(n: int = 3, cells: int = 40, dtype: str = "uint16") -> list[AnnData]:
    """Return plates in which the first pixels state the plate and the number of the cell."""
    found = []
    for number in range(n):
        plate = make_cells(cells, dtype=dtype, seed=number)
        plate.obs["plate"] = f"plate_{number}"
        plate.obsm[IMAGE_KEY][:, 0, 0, 0] = number
        plate.obsm[IMAGE_KEY][:, 0, 0, 1] = np.arange(cells)
        found.append(plate)
    return found


def contents(path: Path) -> dict[str, bytes]:
    """Return the content of a file, or of all files in a folder."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def make_screen() -> AnnData:
    """Return a simulated screen of four genes in two complexes and six wells."""
    return scbd.datasets.simulated_screen(240, image_size=32, n_complexes=2, genes_per_complex=2, n_wells=6)


@pytest.fixture
def permuted_once() -> Iterator[None]:
    """Fit probes on permuted labels once instead of five times, for tests that do not depend on chance level."""
    with pytest.MonkeyPatch.context() as patch:  # a separate context: a test may undo its own patches
        patch.setattr(_probes, "_PERMUTED_FIT_SIZE", 0)
        yield


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, permuted_once: None) -> None:
    """Train a small encoder for two steps, whatever the code of a page requests."""
    monkeypatch.setitem(encoders.ENCODERS, "resnet18", encoders.small_encoder)
    brief: dict[str, Any] = {"max_steps": 2, "max_epochs": None, "batch_size": 24}
    fit = ImageModel._fit

    def briefly(model, objective, settings, **how):
        quiet = {**settings.trainer_kwargs, "enable_progress_bar": False}
        return fit(model, objective, settings.replace(**brief, trainer_kwargs=quiet), **how)

    monkeypatch.setattr(ImageModel, "_fit", briefly)
