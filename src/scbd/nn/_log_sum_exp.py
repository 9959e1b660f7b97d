"""Log-sum-exp over the rows of the Gram matrix of embeddings, with memory linear in the batch size.

The Gram matrix, which holds the similarities of all pairs of cells, is computed tile by tile and never stored as a
whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

# number of rows and columns of a tile of the Gram matrix on a CPU: a tile fits into the cache of a core
_TILE_SHAPE_BY_DEVICE = {"cpu": (128, 2048)}
# number of rows and columns of a tile of the Gram matrix on other devices, such as GPUs: up to 8,192 cells, the whole
# matrix is one tile, since launching a kernel takes longer than computing a small tile
_DEFAULT_TILE_SHAPE = (8192, 8192)
# memory, in bytes, for exponentials that are kept for the backward pass instead of being recomputed. On a CPU, it
# suffices for most of the upper triangle of the Gram matrix at a batch size of 2,048; on other devices, for one tile.
_CACHED_EXPONENTIALS_BYTES_BY_DEVICE = {"cpu": 7 * 2**20}
_DEFAULT_CACHED_EXPONENTIALS_BYTES = 2**28
# largest inverse temperature for which float32 is used; float32 can represent the exponentials, up to exp(40) and down
# to exp(-40), and sums of them; for lower temperatures, float64 is used
_MAX_FLOAT32_INVERSE_TEMPERATURE = 40.0
# lower limit of the temperature; below it, the ratio of two exponentials, at most exp(2/temperature), overflows in
# float64
MIN_TEMPERATURE = 1 / 350


def log_sum_exp(z: Tensor, temperature: float, include_self: bool = False) -> Tensor:
    """Compute, for each cell (the anchor), the log-sum-exp of its similarities to the cells of the batch.

    The similarity of two cells is ``z_i · z_j / temperature``. Memory is O(B·D), plus a constant amount for
    exponentials that does not depend on the batch size B: up to 64 MB on a CPU, and 1 GB on a GPU.

    Parameters
    ----------
    z
        Embeddings of unit length, float32 or float64 ``(B, D)``.
    temperature
        Temperature by which similarities are divided, at least ``MIN_TEMPERATURE``.
    include_self
        Whether to include the similarity of the anchor to itself.

    Returns
    -------
    The log-sum-exp of each cell, ``(B,)``.
    """
    if z.dtype == torch.float32 and 1 / temperature > _MAX_FLOAT32_INVERSE_TEMPERATURE:
        return log_sum_exp(z.double(), temperature, include_self).float()
    with torch.autocast(z.device.type, enabled=False):
        return _LogSumExp.apply(z, temperature, include_self)


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp over the tiles of the Gram matrix, with a backward pass that recomputes exponentials."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float, include_self: bool) -> Tensor:
        sums = z.new_zeros(len(z))
        kept: list[Tensor] = []
        room = _CACHED_EXPONENTIALS_BYTES_BY_DEVICE.get(z.device.type, _DEFAULT_CACHED_EXPONENTIALS_BYTES)
        room *= ctx.needs_input_grad[0]
        scaled = z / temperature
        for rows, columns, new in _tiles(z):
            tile = _exponentials(scaled, z, rows, columns, include_self)
            room -= tile.nbytes
            if room >= 0:
                kept.append(tile)
            sums[rows].add_(tile.sum(1))
            if new.start < tile.shape[1]:
                sums[columns][new].add_(tile[:, new].sum(0))
        ctx.save_for_backward(z, sums)
        ctx.temperature, ctx.include_self, ctx.kept = temperature, include_self, kept
        return sums.log()

    @staticmethod
    def backward(ctx: Any, gradient_of_result: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            msg = "log_normaliser has no second derivative: compute gradients without create_graph=True."
            raise RuntimeError(msg)
        z, sums = ctx.saved_tensors
        weights = gradient_of_result / sums
        scaled = z / ctx.temperature
        kept = iter(ctx.kept)
        gradient = torch.zeros_like(z)
        for rows, columns, new in _tiles(z):
            tile = next(kept, None)
            if tile is None:
                tile = _exponentials(scaled, z, rows, columns, ctx.include_self)
            product = (weights[rows, None] + weights[columns]).mul_(tile)
            gradient[rows].addmm_(product, scaled[columns])
            if new.start < tile.shape[1]:
                gradient[columns][new].addmm_(product[:, new].T, scaled[rows])
        return gradient, None, None


def _tiles(z: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of the rows and of the columns of each tile on or above the diagonal of the Gram matrix.

    The Gram matrix is symmetric, so that tiles below the diagonal are not needed. A third slice selects the columns of
    a tile that are not among its rows. Each entry in these columns also represents its mirror image below the diagonal,
    which no tile contains.
    """
    n = len(z)
    height, width = _TILE_SHAPE_BY_DEVICE.get(z.device.type, _DEFAULT_TILE_SHAPE)
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        for left in range(start, n, width):
            new = slice(rows.stop - rows.start if left == start else 0, None)
            yield rows, slice(left, min(left + width, n)), new


def _exponentials(scaled: Tensor, z: Tensor, rows: slice, columns: slice, include_self: bool) -> Tensor:
    """Compute ``exp(z_i · z_j / temperature)`` for one tile.

    ``scaled`` is ``z / temperature``. ``rows`` and ``columns`` select the cells of the tile. Unless ``include_self`` is
    true, entries on the diagonal of the Gram matrix are set to 0.
    """
    tile = torch.mm(scaled[rows], z[columns].T).exp_()
    return tile.fill_diagonal_(0) if rows.start == columns.start and not include_self else tile
