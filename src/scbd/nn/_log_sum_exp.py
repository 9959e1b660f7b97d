"""Log-sum-exp over the Gram matrix of embeddings, tile by tile, with memory linear in the batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Iterator

# (rows, columns) of a tile of the Gram matrix, by device: on a CPU, a tile that fits into a core's cache
_TILE_SHAPE_BY_DEVICE = {"cpu": (128, 2048)}
# … on other devices a large tile, since launching a kernel takes longer than computing a small tile
_DEFAULT_TILE_SHAPE = (2048, 8192)
# memory, in bytes, for exponentials that are kept for the backward pass instead of being recomputed; enough for most of
# the upper triangle of the Gram matrix at a batch size of 2,048
_CACHED_EXPONENTIALS_BYTES = 7 * 2**20
# largest 1/temperature in float32, which represents exp(±40) and sums of it; float64 is used for lower temperatures
_MAX_FLOAT32_INVERSE_TEMPERATURE = 40.0
# lowest temperature: ratios of two exponentials, up to exp(2/temperature), overflow float64 below it
MIN_TEMPERATURE = 1 / 350


def log_sum_exp(z: Tensor, temperature: float, labels: Tensor | None = None) -> tuple[Tensor, ...]:
    """Compute the log-sum-exp of each anchor's logits over all other cells, or separately by label.

    Memory is O(B·D) plus a constant amount for exponentials, whatever the batch size.

    Parameters
    ----------
    z
        Embeddings of unit length, float32 or float64 ``(B, D)``.
    temperature
        Scale of the logits, at least ``MIN_TEMPERATURE``.
    labels
        Integer labels ``(B,)``. If given, the sum over cells with the anchor's label and the sum over cells with other
        labels are computed separately.

    Returns
    -------
    Without labels, one tensor ``(B,)``. With labels, two tensors ``(B,)``: over cells with the same label, and over
    cells with other labels. An empty sum gives −inf.
    """
    if z.dtype == torch.float32 and 1 / temperature > _MAX_FLOAT32_INVERSE_TEMPERATURE:
        return tuple(part.float() for part in _LogSumExp.apply(z.double(), temperature, labels))
    return _LogSumExp.apply(z, temperature, labels)


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp over the tiles of the Gram matrix, with a backward pass that recomputes exponentials."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float, labels: Tensor | None) -> tuple[Tensor, ...]:
        sums = z.new_zeros(1 if labels is None else 2, len(z))
        kept: list[Tensor] = []
        room = _CACHED_EXPONENTIALS_BYTES if ctx.needs_input_grad[0] else 0
        scaled = z / temperature
        for rows, columns, new in _tiles(z):
            tile = _exponentials(scaled, z, rows, columns)
            room -= tile.nbytes
            if room >= 0:
                kept.append(tile)
            for total, part in zip(sums, _split_by_label(tile, labels, rows, columns), strict=True):
                total[rows] += part.sum(1)
                total[columns][new] += part[:, new].sum(0)
        ctx.save_for_backward(z, sums, labels)
        ctx.temperature, ctx.kept = temperature, kept
        return tuple(sums.log())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        z, sums, labels = ctx.saved_tensors
        # the sum of an anchor without partners is empty, and its gradient is zero
        weights = torch.stack(gradients) / sums.clamp(min=torch.finfo(z.dtype).tiny)
        scaled = z / ctx.temperature
        kept = iter(ctx.kept)
        gradient = torch.zeros_like(z)
        for rows, columns, new in _tiles(z):
            tile = next(kept, None)
            if tile is None:
                tile = _exponentials(scaled, z, rows, columns)
            terms = [
                (w[rows, None] + w[columns]).mul_(part)
                for w, part in zip(weights, _split_by_label(tile, labels, rows, columns), strict=True)
            ]
            product = terms[0] if len(terms) == 1 else terms[0].add_(terms[1])
            gradient[rows].addmm_(product, scaled[columns])
            gradient[columns][new].addmm_(product[:, new].T, scaled[rows])
        return gradient, None, None


def _tiles(z: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the rows and columns of each tile on or above the diagonal of the Gram matrix.

    The third slice selects the columns of the tile that are not also among its rows. The mirrored tile below the
    diagonal holds these columns only.
    """
    n = len(z)
    height, width = _TILE_SHAPE_BY_DEVICE.get(z.device.type, _DEFAULT_TILE_SHAPE)
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        for left in range(start, n, width):
            new = slice(rows.stop - rows.start if left == start else 0, None)
            yield rows, slice(left, min(left + width, n)), new


def _exponentials(scaled: Tensor, z: Tensor, rows: slice, columns: slice) -> Tensor:
    """Compute ``exp(z_i · z_j / temperature)`` in a tile, with zero on the diagonal of the Gram matrix."""
    tile = torch.mm(scaled[rows], z[columns].T).exp_()
    return tile.fill_diagonal_(0) if rows.start == columns.start else tile


def _split_by_label(tile: Tensor, labels: Tensor | None, rows: slice, columns: slice) -> tuple[Tensor, ...]:
    """Return the tile itself, or with labels its entries within labels and its entries between labels."""
    if labels is None:
        return (tile,)
    same = labels[rows, None] == labels[columns]
    return tile * same, tile * ~same
