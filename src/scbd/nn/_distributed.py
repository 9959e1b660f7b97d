"""Several processes: rows of all of them as one batch, since a contrastive loss learns from pairs; and one network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn


def gather(rows: Tensor) -> Tensor:
    r"""Rows of all processes, one after the other in the order of their ranks, with gradient.

    Every process then computes the loss :math:`L` of the joint batch. The gradient of all these equal losses flows
    back to the rows of each process, where it is :math:`W\, \partial L / \partial z` for :math:`W` processes; the mean
    over processes that data-parallel training takes of parameters' gradients makes it that of the joint batch.

    Parameters
    ----------
    rows
        Of this process, the same shape in all, ``(B, ...)``.

    Returns
    -------
    ``(W B, ...)``; ``rows`` themselves where there is a single process.

    Examples
    --------
    >>> gather(torch.ones(3, 2)).shape  # on one device, as it is; on n, n times as many rows
    torch.Size([3, 2])
    """
    if world()[1] == 1:
        return rows
    return _Gather.apply(rows) if rows.requires_grad else _gathered(rows)


def world() -> tuple[int, int]:
    """Rank of this process, and how many there are."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def agree_on_buffers(module: nn.Module) -> None:
    """Take those of the first process: BatchNorm's statistics differ by what each has seen, and parameters do not."""
    if world()[1] > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)


def wait_for_all() -> None:
    """Go on when all processes are here."""
    if world()[1] > 1:
        distributed.barrier()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _gathered(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        distributed.all_reduce(grad)
        return grad.chunk(world()[1])[world()[0]]


def _gathered(rows: Tensor) -> Tensor:
    rows = rows.detach().contiguous()
    parts = [torch.empty_like(rows) for _ in range(world()[1])]
    distributed.all_gather(parts, rows)
    return torch.cat(parts)
