"""Cost against size: batch, image size, perturbations, cells. No naive form: these are curves, not claims."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from _compare import Row, timed
from _scale import Scale
from anndata import AnnData
from step import SETTINGS, batch, take_step

import scbd
from scbd.data import PerturbationSampler, ShuffleSampler, stratified_split
from scbd.model._objective import SCBDModule
from scbd.nn import Preprocess


def step_rows(scale: Scale) -> list[Row]:
    """Seconds of one step of two ResNet-18."""
    table = []
    sizes = [(128, 64), (512, 64), (2048, 64), (256, 32), (256, 64), (256, 100), (256, 128)]
    for size, pixels in scale.of(sizes, [(16, 32)]):
        for bf16 in (False, True):
            preprocess = Preprocess((4, pixels, pixels), "uint8")
            module = SCBDModule(preprocess, encoder=scale.of("resnet18", "small"), **SETTINGS)
            optimizer, inputs = torch.optim.AdamW(module.parameters(), fused=True), batch(size, (4, pixels, pixels))
            take_step(module, optimizer, inputs, bf16)
            seconds = min(
                timed(lambda: take_step(module, optimizer, inputs, bf16))[0] for _ in range(min(scale.repeats, 2))
            )
            what = f"step, batch {size:,} of {pixels}×{pixels}×4, {'bfloat16' if bf16 else 'float32'}"
            table.append({"claim": what, "ours_s": seconds, "note": f"{size / seconds:,.0f} cells/s"})
    return table


def sampler_rows(scale: Scale) -> list[Row]:
    """Seconds to draw a batch of 2,048 from a million cells."""
    table = []
    rng = np.random.default_rng(0)
    rows = np.arange(scale.of(1_000_000, 4000))
    for n_perturbations in scale.of((10, 1000, 5000, 50_000), (10, 300)):
        labels = rng.integers(0, n_perturbations, len(rows))
        sampler = PerturbationSampler(rows, 2048, labels=labels, perturbations_per_batch=256)
        seconds = min(timed(lambda: [sampler.batch(step) for step in range(10)])[0] / 10 for _ in range(scale.repeats))
        table.append({"claim": f"batch of 256 × 8 from {n_perturbations:,} perturbations", "ours_s": seconds})
    return table


def cells_rows(scale: Scale) -> list[Row]:
    """Seconds of what is done once for all cells, by their number (images of one pixel: tables alone)."""
    table = []
    rng = np.random.default_rng(0)
    for n in scale.of((100_000, 1_000_000, 5_000_000), (10_000,)):
        obs = pd.DataFrame(
            {"y": pd.Categorical.from_codes(rng.integers(0, 5000, n), [f"g{i}" for i in range(5000)])}
            | {"e": pd.Categorical.from_codes(rng.integers(0, 34, n), [f"w{i}" for i in range(34)])}
        )
        obs.index = obs.index.astype(str)
        cells = AnnData(obs=obs, obsm={"single_cell_images": np.zeros((n, 1, 1, 1), dtype=np.uint8)})
        codes = [obs[key].cat.codes.to_numpy() for key in "ye"]
        permute = timed(lambda: ShuffleSampler(np.arange(n), 2048).batch(0))[0]
        table += [
            {
                "claim": f"setup_anndata, {n:,} cells",
                "ours_s": timed(lambda: scbd.SCBDModel.setup_anndata(cells, "y", "e"))[0],
            },
            {"claim": f"stratified split, {n:,} cells", "ours_s": timed(lambda: stratified_split(codes))[0]},
            {"claim": f"an epoch's permutation, {n:,} cells", "ours_s": permute},
        ]
    return table


def rows(scale: Scale) -> list[Row]:
    return step_rows(scale) + sampler_rows(scale) + cells_rows(scale)
