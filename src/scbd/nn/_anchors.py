"""Means over some cells of a batch, for which the processor does not wait for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def sum_over(values: Tensor, anchors: Tensor | None) -> Tensor:
    """Sum of those of the ``values (B,)`` that are of anchors, boolean ``(B,)``; by default of all.

    To choose them by ``values[anchors]``, the processor would wait to hear how many there are.
    """
    return values.sum() if anchors is None else torch.where(anchors, values, 0.0).sum()


def mean_over(values: Tensor, anchors: Tensor | None) -> Tensor:
    """Their mean; 0 where there is none."""
    return values.mean() if anchors is None else sum_over(values, anchors) / anchors.sum().clamp(min=1)
