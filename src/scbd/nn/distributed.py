"""Rows of all processes as one batch: a contrastive loss learns from pairs, also those between devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


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
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return rows
    return _Gather.apply(rows) if rows.requires_grad else _gathered(rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _gathered(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        distributed.all_reduce(grad)
        return grad.chunk(distributed.get_world_size())[distributed.get_rank()]


def _gathered(rows: Tensor) -> Tensor:
    rows = rows.detach().contiguous()
    parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, rows)
    return torch.cat(parts)
