from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what is loaded from here on, and by other processes

import numpy as np
import pandas as pd
import pytest
import torch
from anndata import AnnData
from hypothesis import settings
from threadpoolctl import threadpool_limits

import scbd
from scbd.metrics import _probes
from scbd.model import ImageModel
from scbd.nn import _encoders as encoders

IMAGE_KEY = "single_cell_images"

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("quick")
# a process a core, and tiny matrices: more threads only wait for each other
threadpool_limits(1)  # numpy was loaded before
torch.set_num_threads(1)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell leaves jobs in the background without one

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collection: it stays, and to look through it takes half a second."""
    gc.freeze()


@pytest.fixture
def shared() -> Path:
    """Real data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("the real data are not here: no folder ../shared/data beside the checkout")
    return SHARED


def make_cells(n: int = 96, shape: tuple[int, int, int] = (2, 16, 16), dtype: str = "uint8", seed: int = 0) -> AnnData:
    """Cells whose brightness tells the perturbation and whose left edge tells the environment."""
    rng = np.random.default_rng(seed)
    y, e = rng.integers(4, size=n), rng.integers(3, size=n)
    images = rng.normal(40, 5, (n, *shape)) + 30 * y[:, None, None, None]
    images[:, :, :, :4] += 40 * e[:, None, None, None]
    obs = pd.DataFrame(
        {
            "gene": pd.Categorical([f"gene_{i}" for i in y]),
            "well": pd.Categorical([f"well_{i}" for i in e]),
            "plate": pd.Categorical([f"plate_{i % 2}" for i in e]),
        },
        index=[f"cell_{i}" for i in range(n)],
    )
    images = np.clip(images, 0, 255).astype(dtype)
    var = pd.DataFrame(index=[f"channel_{i}" for i in range(shape[0])])
    return AnnData(obs=obs, var=var, obsm={"single_cell_images": images})


def make_wells(
    n_compounds: int = 12, n_plates: int = 4, n_controls: int = 6, n_features: int = 10, seed: int = 0
) -> AnnData:
    """Wells of plates with one layout, as features: one well a compound and plate, and controls at some positions.

    Features tell the compound, and more loudly the plate and the position.
    """
    rng = np.random.default_rng(seed)
    n_wells = n_compounds + n_controls
    compound = np.array([*(f"compound_{i}" for i in range(n_compounds)), *["DMSO"] * n_controls])
    effect = rng.normal(size=(n_wells, n_features))
    effect[n_compounds:] = 0
    place = rng.normal(size=(n_wells, 2)) @ rng.normal(size=(2, n_features))
    plate = 3 * rng.normal(size=(n_plates, n_features))
    values = plate[:, None] + effect + place + 0.3 * rng.normal(size=(n_plates, n_wells, n_features))
    obs = pd.DataFrame(
        {
            "compound": pd.Categorical(np.tile(compound, n_plates)),
            "plate": pd.Categorical(np.repeat([f"plate_{i}" for i in range(n_plates)], n_wells)),
            "well": pd.Categorical(np.tile([f"W{i:02}" for i in range(n_wells)], n_plates)),
        },
        index=[f"well_{i}" for i in range(n_wells * n_plates)],
    )
    var = pd.DataFrame(index=[f"feature_{i}" for i in range(n_features)])
    return AnnData(X=values.reshape(-1, n_features).astype(np.float32), obs=obs, var=var)


@pytest.fixture
def cells() -> AnnData:
    return make_cells()


def make_plates(n: int = 3, cells: int = 40, dtype: str = "uint16") -> list[AnnData]:
    """Plates whose images tell their cells apart."""
    found = []
    for number in range(n):
        plate = make_cells(cells, dtype=dtype, seed=number)
        plate.obs["plate"] = f"plate_{number}"
        plate.obsm[IMAGE_KEY][:, 0, 0, 0] = number
        plate.obsm[IMAGE_KEY][:, 0, 0, 1] = np.arange(cells)
        found.append(plate)
    return found


def contents(path: Path) -> dict[str, bytes]:
    """A file, or all files of a folder."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def make_screen() -> AnnData:
    """Four genes of two complexes in six wells."""
    return scbd.datasets.simulated_screen(240, image_size=32, n_complexes=2, genes_per_complex=2, n_wells=6)


@pytest.fixture
def permuted_once() -> Iterator[None]:
    """Probes learn from permuted labels once, not five times, for what is not about chance."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo what it has patched
        patch.setattr(_probes, "_CHANCE_SIZE", 0)
        yield


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, permuted_once: None) -> None:
    """Training of a small encoder for two steps, whatever a page says."""
    monkeypatch.setitem(encoders.ENCODERS, "resnet18", encoders.small_encoder)
    brief: dict[str, Any] = {"max_steps": 2, "max_epochs": None, "batch_size": 24}
    fit = ImageModel._fit

    def briefly(model, objective, settings, **how):
        quiet = {**settings.trainer_kwargs, "enable_progress_bar": False}
        return fit(model, objective, replace(settings, **brief, trainer_kwargs=quiet), **how)

    monkeypatch.setattr(ImageModel, "_fit", briefly)
