r"""Log-sum-exp over all pairs of a batch, streamed: one triangle of the Gram matrix, never the matrix.

The Gram matrix is symmetric, so each tile above the diagonal serves its rows and its columns. The backward pass needs
no more than the embeddings and the sums: the gradient of :math:`\sum_i g_i \log \sum_{a \ne i} \exp(s_{ia})`, with
:math:`s_{ij} = z_i \cdot z_j / \tau`, is

.. math:: \frac{1}{\tau} \sum_j e^{s_{kj}} (w_k + w_j) z_j, \qquad w_i = g_i \Big/ \sum_{a \ne i} e^{s_{ia}}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Iterator

# rows and columns of a tile: one that stays in a core's cache; where launching costs more than computing, a large one
_TILE = {"cpu": (128, 2048)}
_LARGE_TILE = (2048, 8192)
# exponentials kept for the backward pass rather than computed again: most of the triangle at a batch of 2,048
_KEPT_BYTES = 7 * 2**20
# float32 holds exp(±40) and sums of it; below this temperature similarities of unit vectors ask for float64 …
_FLOAT32_LIMIT = 40.0
# … and below 1/350 for more than that
LOWEST_TEMPERATURE = 1 / 350


def log_sums(z: Tensor, temperature: float, labels: Tensor | None = None) -> tuple[Tensor, ...]:
    """Log-sum-exp of each anchor's logits over all others, or apart over those of its label and of other labels.

    Memory is O(B·D) beyond a fixed number of exponentials, whatever the batch.

    Parameters
    ----------
    z
        Embeddings of unit length, float32 or float64 ``(B, D)``.
    temperature
        At least ``LOWEST_TEMPERATURE``.
    labels
        Integer labels ``(B,)``.

    Returns
    -------
    Without labels one tensor ``(B,)``, with labels two; −inf where there is nothing to sum.
    """
    if z.dtype == torch.float32 and 1 / temperature > _FLOAT32_LIMIT:
        return tuple(part.float() for part in _LogSums.apply(z.double(), temperature, labels))
    return _LogSums.apply(z, temperature, labels)


class _LogSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float, labels: Tensor | None) -> tuple[Tensor, ...]:
        sums = z.new_zeros(1 if labels is None else 2, len(z))
        kept: list[Tensor] = []
        room = _KEPT_BYTES if ctx.needs_input_grad[0] else 0
        scaled = z / temperature
        for rows, columns, new in _tiles(z):
            tile = _exponentials(scaled, z, rows, columns)
            room -= tile.nbytes
            if room >= 0:
                kept.append(tile)
            for total, part in zip(sums, _parts(tile, labels, rows, columns), strict=True):
                total[rows] += part.sum(1)
                total[columns][new] += part[:, new].sum(0)
        ctx.save_for_backward(z, sums, labels)
        ctx.temperature, ctx.kept = temperature, kept
        return tuple(sums.log())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        z, sums, labels = ctx.saved_tensors
        # an anchor without partners has an empty sum, and no gradient
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
                for w, part in zip(weights, _parts(tile, labels, rows, columns), strict=True)
            ]
            product = terms[0] if len(terms) == 1 else terms[0].add_(terms[1])
            gradient[rows].addmm_(product, scaled[columns])
            gradient[columns][new].addmm_(product[:, new].T, scaled[rows])
        return gradient, None, None


def _tiles(z: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows and columns of the tiles on and above the diagonal, and which of a tile's columns are not its rows."""
    n = len(z)
    height, width = _TILE.get(z.device.type, _LARGE_TILE)
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        for left in range(start, n, width):
            new = slice(rows.stop - rows.start if left == start else 0, None)
            yield rows, slice(left, min(left + width, n)), new


def _exponentials(scaled: Tensor, z: Tensor, rows: slice, columns: slice) -> Tensor:
    """``exp(s)`` of a tile, zero for an anchor with itself."""
    tile = torch.mm(scaled[rows], z[columns].T).exp_()
    return tile.fill_diagonal_(0) if rows.start == columns.start else tile


def _parts(tile: Tensor, labels: Tensor | None, rows: slice, columns: slice) -> tuple[Tensor, ...]:
    """The tile, or what of it lies inside and outside of the anchors' labels."""
    if labels is None:
        return (tile,)
    same = labels[rows, None] == labels[columns]
    return tile * same, tile * ~same
