"""Embedding: `get_latent_representation` against the bare encoder on prepared images, and with memory given back."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import numpy as np
import scvi
import torch
from _compare import Row, interleaved, largest_difference
from _scale import Scale
from data import cells_of

import scbd


def rows(scale: Scale) -> list[Row]:
    table = []
    for encoder, shape, dtype, n in (
        ("resnet18", (3, 32, 32), "uint8", scale.of(16_384, 32)),
        ("resnet18", (4, 64, 64), "uint16", scale.of(4096, 16)),
        ("small", (4, 64, 64), "uint16", scale.of(8192, 32)),
    ):
        scvi.settings.seed = 0
        cells = cells_of(n, shape, dtype)
        scbd.SCBDModel.setup_anndata(cells, "y", "e")
        model = scbd.SCBDModel(cells, encoder=encoder, standardize=False)
        model.is_trained_ = True  # random weights take as long
        net = model.module.eval()
        batches = [net.preprocess(torch.from_numpy(part)) for part in _parts(cells.obsm["single_cell_images"], 512)]

        def bare() -> torch.Tensor:
            with torch.inference_mode():
                return torch.cat([net.content.encoder(batch) for batch in batches])

        def ours() -> np.ndarray:
            return model.get_latent_representation(representation="intermediate", enable_progress_bar=False)

        row, theirs, mine = interleaved(bare, ours, scale.repeats)
        row |= {"difference": largest_difference(mine, theirs), "note": f"{n / row['ours_s']:,.0f} cells/s"}
        claim = f"embed {n:,} cells of {shape[1]}×{shape[2]}×{shape[0]}, {encoder}"
        table.append({"claim": claim, **row})

    def returned() -> np.ndarray:
        with mock.patch("scbd.model._embed.keep_freed_memory", nullcontext):
            return ours()

    row, theirs, mine = interleaved(returned, ours, scale.repeats)
    row |= {"difference": largest_difference(mine, theirs), "note": "naive: freed memory goes back to the system"}
    return [*table, {"claim": f"{claim}, memory", **row}]


def _parts(images: np.ndarray, size: int) -> list[np.ndarray]:
    return [images[start : start + size] for start in range(0, len(images), size)]
