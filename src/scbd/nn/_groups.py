"""Cells of a batch that share a label: how many they are, and their sums."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """Which cells share a label: counted once a batch, and read by all losses on it.

    Parameters
    ----------
    labels
        Integer labels, ``(B,)``.

    Attributes
    ----------
    labels
        The same, int64.
    n_others
        How many others share a cell's label, ``(B,)``.

    Examples
    --------
    >>> gene = scbd.nn.Groups(torch.tensor([0, 1, 1, 1]))
    >>> gene.n_others
    tensor([0, 2, 2, 2])
    >>> z = torch.nn.functional.normalize(torch.randn(4, 8, generator=torch.manual_seed(0)), dim=1)
    >>> loss = scbd.nn.supervised_contrastive_loss(z, gene)  # counts nothing again
    """

    def __init__(self, labels: Tensor) -> None:
        labels = labels.long()  # codes of pairs outgrow the few bits that pandas gives few categories
        # to count, the processor waits for the device
        _, self._index, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        self._n_groups = len(counts)
        self._crossed: tuple[Groups, Groups] | None = None
        self.labels = labels
        self.n_others = counts[self._index] - 1

    @classmethod
    def of(cls, labels: Tensor | Groups) -> Groups:
        """Those of a loss's argument, counted here if they were not before."""
        return labels if isinstance(labels, Groups) else cls(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def crossed(self, others: Groups) -> Groups:
        """Which cells share this label and another one: remembered, since several losses ask for the same pair."""
        if self._crossed is None or self._crossed[0] is not others:
            self._crossed = others, Groups(pair_codes(self.labels, others.labels))
        return self._crossed[1]

    def table(self, others: Groups) -> Tensor:
        """How many cells have a label and another one, ``(labels, other labels)``, in the order of their codes."""
        size = self._n_groups * others._n_groups
        counts = torch.bincount(self._index * others._n_groups + others._index, minlength=size)
        return counts.view(self._n_groups, others._n_groups)

    def first(self, values: Tensor) -> Tensor:
        """One of the ``values (B, D)`` of each label, ``(labels, D)``: for what all of its cells share."""
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_copy(0, self._index, values)

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values (B, D)`` over all cells of a cell's label, itself included, ``(B, D)``."""
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_add(0, self._index, values).index_select(0, self._index)


def pair_codes(labels: Tensor, environments: Tensor) -> Tensor:
    """A code for each pair of label and environment, of int64 ``(B,)``, int64 ``(B,)``."""
    environments = environments - environments.min()
    return labels * (environments.max() + 1) + environments


def exact(device: torch.device) -> torch.dtype:
    """What a device can count in most exactly."""
    return torch.float32 if device.type == "mps" else torch.float64
