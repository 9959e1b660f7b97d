"""Cells of a batch that share a label: how many they are, and their sums."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """Which cells share a label.

    Parameters
    ----------
    labels
        Integer labels, ``(B,)``.

    Attributes
    ----------
    n_others
        How many others share a cell's label, ``(B,)``.
    """

    def __init__(self, labels: Tensor) -> None:
        _, self._index, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        self._n_groups = len(counts)
        self.n_others = counts[self._index] - 1

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values (B, D)`` over all cells of a cell's label, itself included, ``(B, D)``."""
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_add(0, self._index, values).index_select(0, self._index)


def pair_codes(labels: Tensor, environments: Tensor) -> Tensor:
    """A code for each pair of label and environment, integer ``(B,)``."""
    environments = environments - environments.min()
    return labels * (environments.max() + 1) + environments
