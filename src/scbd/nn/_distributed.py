"""Communication between training processes: joint batches for contrastive losses, and synchronised buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn


def gather_rows(rows: Tensor) -> Tensor:
    r"""Concatenate the rows of all processes in the order of their ranks, with gradient.

    A contrastive loss compares pairs of cells, so every process computes the loss :math:`L` of the joint batch. With
    :math:`W` processes there are :math:`W` equal losses. The gradient of all these losses with respect to the rows of
    one process is :math:`W\, \partial L / \partial z`. Data-parallel training averages the gradients of parameters over
    processes, which yields the gradient of the loss of the joint batch.

    Parameters
    ----------
    rows
        Rows of this process, ``(B, ...)``, with the same shape in all processes.

    Returns
    -------
    Rows of all processes, ``(W B, ...)``. With a single process, ``rows`` itself is returned.

    Examples
    --------
    >>> gather(torch.ones(3, 2)).shape  # on one device, as it is; on n, n times as many rows
    torch.Size([3, 2])
    """
    if rank_and_world_size()[1] == 1:
        return rows
    return _Gather.apply(rows) if rows.requires_grad else _gather_without_gradient(rows)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def broadcast_buffers(module: nn.Module) -> None:
    """Replace the buffers of a module by the buffers of the process with rank 0.

    BatchNorm's running statistics differ between processes, since each process sees other cells. Parameters do not
    differ.
    """
    if rank_and_world_size()[1] > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)


def wait_for_all() -> None:
    """Wait until all processes have reached this call."""
    if rank_and_world_size()[1] > 1:
        distributed.barrier()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _gather_without_gradient(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        distributed.all_reduce(grad)
        return grad.chunk(rank_and_world_size()[1])[rank_and_world_size()[0]]


def _gather_without_gradient(rows: Tensor) -> Tensor:
    rows = rows.detach().contiguous()
    parts = [torch.empty_like(rows) for _ in range(rank_and_world_size()[1])]
    distributed.all_gather(parts, rows)
    return torch.cat(parts)
