"""Communication between the processes of distributed training: joint batches and synchronised buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn


def gather_rows(rows: Tensor) -> Tensor:
    r"""Concatenate the rows of all training processes in the order of their ranks, and propagate gradients.

    A contrastive loss compares pairs of cells. Every process therefore computes the loss :math:`L` of the joint batch,
    which holds the cells of all processes. With :math:`W` processes, the same loss :math:`L` is computed :math:`W`
    times, and the gradient of the sum of these losses with respect to the rows :math:`z` of one process is :math:`W\,
    \partial L / \partial z`. Data-parallel training averages the gradients of parameters over the processes, which
    yields the gradient of :math:`L`.

    Parameters
    ----------
    rows
        Rows of this process, such as one embedding per cell, ``(B, ...)``. The shape must be the same in all processes.

    Returns
    -------
    Rows of all :math:`W` processes, ``(W B, ...)``. With a single process, ``rows`` itself is returned.

    Examples
    --------
    >>> gather_rows(torch.ones(3, 2)).shape  # one process: the same rows; n processes: n times as many rows
    torch.Size([3, 2])
    """
    if rank_and_world_size()[1] == 1:
        return rows
    return _Gather.apply(rows) if rows.requires_grad else _gather_without_gradient(rows)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of training processes: 0 and 1 if training is not distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def broadcast_buffers(module: nn.Module) -> None:
    """Overwrite the buffers of a module in every training process with the buffers of the process of rank 0.

    Buffers such as BatchNorm's running statistics differ between processes, since each process is trained on different
    cells. Parameters are equal in all processes.
    """
    if rank_and_world_size()[1] > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)


def wait_for_all() -> None:
    """Wait until all training processes have reached this call."""
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
