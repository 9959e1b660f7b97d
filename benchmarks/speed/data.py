"""Batches: one item at a time against whole gathers; memory against memory-map."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scvi
import torch
from _compare import Row, compared, largest_difference, timed
from _scale import Scale
from anndata import AnnData
from step import Clock
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import scbd
from scbd.data import ArraySource, ShuffleSampler, open_screen, resize_images
from scbd.data._loading import BatchLoader
from scbd.nn import Preprocess


class PerItem(Dataset):
    """One row of a table and one image an item: resized where it must be, transformed and standardised, one by one."""

    def __init__(self, images: np.ndarray, obs: pd.DataFrame, preprocess: Preprocess) -> None:
        self.images, self.obs = images, obs
        self.size, self.mean, self.sd = preprocess.output_shape[1:], preprocess.mean, preprocess.sd

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        row = self.obs.iloc[index]
        image = torch.from_numpy(self.images[index].astype(np.float32))
        if image.shape[1:] != self.size:
            image = F.interpolate(image[None], self.size, mode="bilinear", antialias=True, align_corners=False)[
                0
            ].round()
        return (torch.arcsinh(image) - self.mean) / self.sd, int(row["y"]), int(row["e"])


def cells_of(n: int, shape: tuple[int, int, int], dtype: str, n_labels: int = 64) -> AnnData:
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"y": rng.integers(0, n_labels, n), "e": rng.integers(0, 34, n)}, index=np.arange(n).astype(str))
    images = rng.integers(0, 256 if dtype == "uint8" else 4096, (n, *shape)).astype(dtype)
    return AnnData(obs=obs, obsm={"single_cell_images": images})


def loading(n: int, repeats: int) -> list[Row]:
    """Cells in two batches, as the encoder takes them: crops of 64 pixels as stored, and of 100 resized to 64."""
    table = []
    for stored in (64, 100):
        cells = cells_of(n, (4, stored, stored), "uint16")
        images = cells.obsm["single_cell_images"]
        once = images if stored == 64 else resize_images(images, 64)
        preprocess = Preprocess((4, 64, 64), "uint16")
        preprocess.fit([torch.from_numpy(once[: n // 4])])
        y, e = (cells.obs[key].to_numpy() for key in "ye")
        sampler = ShuffleSampler(np.arange(n), n // 2, n_steps=2)
        per_item = DataLoader(PerItem(images, cells.obs, preprocess), batch_sampler=list(sampler))
        loader = BatchLoader(ArraySource(once), y, e, sampler)

        def naive() -> list[torch.Tensor]:
            return [batch[0] for batch in per_item]

        def ours() -> list[torch.Tensor]:
            return [preprocess(batch["inputs"]) for batch in loader]

        seconds = np.empty((repeats, 2))
        for row in seconds:
            row[0] = timed(naive)[0]
            ours()
            row[1] = timed(ours)[0]
        gather = min(timed(lambda: [batch["inputs"] for batch in loader])[0] for _ in range(repeats))
        row = compared(seconds)
        what = f"{n:,} cells of 4×{stored}×{stored}" + (" to 64×64 (scbd: resized once)" if stored != 64 else "")
        row["difference"] = max(map(largest_difference, ours(), naive()))
        row["note"] = f"{n / row['ours_s']:,.0f} cells/s; reading alone {n / gather:,.0f} cells/s"
        table.append({"claim": f"{what}, prepared for the encoder", **row})
    return table


def training(n: int, batch: int, steps: int, repeats: int) -> list[Row]:
    """Seconds a step of the small encoder, from a memory-map and from memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.h5ad"
        in_memory = cells_of(n, (4, 64, 64), "uint16")
        in_memory.write_h5ad(path)
        forms: list[tuple[Callable[[], AnnData], Any]] = [
            (lambda: in_memory, None),
            (lambda: open_screen(path), None),
            (lambda: open_screen(path), "device"),
        ]
        seconds = np.array(
            [[seconds_a_step(make(), preload, batch, steps) for make, preload in forms] for _ in range(repeats)]
        )
    what = f"train(), small encoder, batch {batch:,} of 4×64×64 uint16, "
    note = "naive: from memory; the goal is 0.95×"
    return [
        {"claim": f"{what}from a memory-map", **compared(seconds[:, [0, 1]]), "note": note},
        {"claim": f"{what}memory-map, preload='device'", **compared(seconds[:, [0, 2]]), "note": note},
    ]


def seconds_a_step(cells: AnnData, preload: Any, batch: int, steps: int) -> float:
    scvi.settings.seed = 0
    scbd.SCBDModel.setup_anndata(cells, "y", "e")
    model, clock = scbd.SCBDModel(cells, encoder="small"), Clock()
    model.train(
        max_steps=steps,
        batch_size=batch,
        train_size=1.0,
        batch_kwargs={"preload": preload},
        accelerator="cpu",
        enable_progress_bar=False,
        callbacks=[clock],
    )
    return float(np.median(np.diff(clock.ends[1:])))


def rows(scale: Scale) -> list[Row]:
    n, batch, steps = scale.of((20_000, 1024, 14), (64, 32, 3))
    return loading(scale.of(4096, 64), scale.repeats) + training(n, batch, steps, scale.repeats)
