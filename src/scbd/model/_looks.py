"""What cells look like to a model, as plain arrays; and what must change for others to look like them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd._linear_maps import between_normals, within_covariance
from scbd.data import read_tensor
from scbd.model._adaptation import adapted_buffers, reference_moments
from scbd.model._adapted import Adaptation, AdaptedCells
from scbd.model._forward import check_finite_inputs, embedded
from scbd.nn import Moments

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from scbd.data import ImageSource
    from scbd.model._contract import BlockName, EmbeddingModule

_BATCH_SIZE = 256


def look(module: EmbeddingModule, source: ImageSource, rows: np.ndarray, groups: np.ndarray) -> dict[str, Any]:
    """What cells look like, as plain arrays: moments within the network, mean and covariance of each z."""
    moments = reference_moments(module, *_grouped(source, rows, groups))
    z = _embeddings(module, source, rows, Adaptation({}, {}))
    normal = {block: _normal(values, groups) for block, values in z.items()}
    return {
        "moments": {name: torch.stack(part).numpy() for name, part in moments.items()},
        "mean": {block: mean for block, (mean, _) in normal.items()},
        "covariance": {block: spread for block, (_, spread) in normal.items()},
    }


def adaptation_to(
    module: EmbeddingModule,
    source: ImageSource,
    rows: np.ndarray,
    groups: np.ndarray,
    reference: Mapping[str, Any],
    *,
    linear_map: bool,
) -> dict[str, Any]:
    """To the environment of some cells, as plain values, with what it did.

    Parameters
    ----------
    module
        Trained; left as it was.
    source, rows, groups
        The cells, and within what their variances are taken, ``(len(rows),)``.
    reference
        What :func:`look` found of such cells of the training.
    linear_map
        Whether z passes a map at the end.
    """
    moments = {name: Moments(*torch.from_numpy(values)) for name, values in reference["moments"].items()}
    buffers = adapted_buffers(module, *_grouped(source, rows, groups), moments)
    adaptation = Adaptation(buffers, {})
    before, after = (_embeddings(module, source, rows, part) for part in (Adaptation({}, {}), adaptation))
    maps = {}
    if linear_map:
        for block, z in after.items():
            there = reference["mean"][block], reference["covariance"][block]
            width = len(there[0])
            maps[block] = between_normals(_normal(z, groups), there, width / (width + len(rows)))
        after = Adaptation(buffers, maps).mapped(module, after)
    scale = np.sqrt(np.trace(reference["covariance"]["c"])) or 1.0
    distances = [float(np.linalg.norm(z["c"].mean(0) - reference["mean"]["c"]) / scale) for z in (before, after)]
    return {
        "n_cells": len(rows),
        "distance_before": distances[0],
        "distance_after": distances[1],
        "linear_map": linear_map,
        "buffers": {name: values.cpu().numpy() for name, values in buffers.items()},
        "maps": {block: part._asdict() for block, part in maps.items()},
    }


def _embeddings(
    module: EmbeddingModule, source: ImageSource, rows: np.ndarray, adaptation: Adaptation
) -> dict[BlockName, np.ndarray]:
    """Embeddings of both blocks, ``(len(rows), D)`` each."""
    blocks: list[BlockName] = ["c"] if module.style is None else ["c", "s"]
    all_by_it = np.broadcast_to(np.int64(0), source.shape[:1])  # no memory, however many cells there are
    cells = AdaptedCells(all_by_it, [adaptation])
    parts = [rows[start : start + _BATCH_SIZE] for start in range(0, len(rows), _BATCH_SIZE)]
    with closing(embedded(module, source, parts, blocks, "embedding", {}, cells)) as batches:
        found = list(batches)
    return {block: np.concatenate([batch[block] for batch in found]) for block in blocks}


def _grouped(
    source: ImageSource, rows: np.ndarray, groups: np.ndarray
) -> tuple[Generator[tuple[torch.Tensor, torch.Tensor]], int]:
    """Inputs as stored with the group of each cell, batch by batch, and the number of groups."""
    names, codes = np.unique(groups, return_inverse=True)

    def batches() -> Generator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, len(rows), _BATCH_SIZE):
            part = slice(start, start + _BATCH_SIZE)
            inputs = read_tensor(source, rows[part])
            check_finite_inputs(inputs, rows[part])
            yield inputs, torch.from_numpy(codes[part])

    return batches(), len(names)


def _normal(z: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, and covariance within groups; where these hold fewer than two cells on average, all are one."""
    if 2 * len(np.unique(groups)) > len(groups):
        groups = np.zeros(len(groups))
    return z.mean(0, dtype=np.float64), within_covariance(z, groups)
