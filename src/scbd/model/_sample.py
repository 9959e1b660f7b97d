"""Which training cells are read for what is learned without a gradient: scales, and what stands before encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from scbd.model._contract import Sample

if TYPE_CHECKING:
    from scbd.data import ImageSource

# enough cells for the statistics of channels to three digits, and for the covariance of features
_IMAGES, _ROWS, _CONTROLS = 4_096, 65_536, 16_384
_BLOCK = 512


def draw_sample(
    source: ImageSource,
    rows: np.ndarray,
    y: np.ndarray,
    e: np.ndarray,
    controls: np.ndarray | None,
    positions: np.ndarray | None,
    *,
    seed: int,
) -> Sample:
    """Some of the training cells, drawn at random.

    Parameters
    ----------
    source
        Inputs of all cells.
    rows
        The training cells among them.
    y, e, controls, positions
        Of all cells, see :class:`scbd.model.Sample`. Of features, controls are drawn beside the others: they may be few
        among all, and features are scaled by them.
    seed
        Of the draw.
    """
    rng, of_features = np.random.default_rng(seed), len(source.shape) == 2
    drawn = rng.choice(rows, min(len(rows), _ROWS if of_features else _IMAGES), replace=False)
    if of_features and controls is not None:
        drawn = np.union1d(drawn, rng.permutation(rows[controls[rows]])[:_CONTROLS])
    drawn = np.sort(drawn)
    blocks = np.array_split(drawn, -(-len(drawn) // _BLOCK))
    return Sample(
        lambda: (torch.from_numpy(source.read(block)) for block in blocks),
        y[drawn],
        e[drawn],
        None if controls is None else controls[drawn],
        None if positions is None else positions[drawn],
    )
