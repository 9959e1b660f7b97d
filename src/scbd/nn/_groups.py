"""Cells grouped by their label: counts, sums and averages within labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass


class Groups:
    """Groups of cells that share a label, computed once per batch and used by several losses.

    Parameters
    ----------
    labels
        Integer labels, ``(B,)``.

    Attributes
    ----------
    labels
        The labels as int64.
    n_others
        Number of other cells with the same label, for each cell, ``(B,)``.

    Examples
    --------
    >>> gene = scbd.nn.Groups(torch.tensor([0, 1, 1, 1]))
    >>> gene.n_others
    tensor([0, 2, 2, 2])
    >>> z = torch.nn.functional.normalize(torch.randn(4, 8, generator=torch.manual_seed(0)), dim=1)
    >>> loss = scbd.nn.supervised_contrastive_loss(z, gene)  # counts nothing again
    """

    def __init__(self, labels: Tensor) -> None:
        labels = labels.long()  # pandas stores few categories as int8, in which codes of pairs would overflow
        # counting makes the processor wait for the device
        _, self._index, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        self._n_groups = len(counts)
        self._crossed: tuple[Groups, Groups] | None = None
        self.labels = labels
        self.n_others = counts[self._index] - 1

    @classmethod
    def of(cls, labels: Tensor | Groups) -> Groups:
        """Return ``labels`` themselves if they are groups already, otherwise compute their groups."""
        return labels if isinstance(labels, Groups) else cls(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def cross(self, others: Groups) -> Groups:
        """Return the groups of cells that share this label and the label of ``others``.

        The result is cached, since several losses use the same pair of labels.
        """
        if self._crossed is None or self._crossed[0] is not others:
            self._crossed = others, Groups(pair_codes(self.labels, others.labels))
        return self._crossed[1]

    def table(self, others: Groups) -> Tensor:
        """Count the cells with each pair of labels, ``(labels, labels of others)``, in the order of codes."""
        size = self._n_groups * others._n_groups
        counts = torch.bincount(self._index * others._n_groups + others._index, minlength=size)
        return counts.view(self._n_groups, others._n_groups)

    def average_over_sets(self, values: Tensor, size: int) -> tuple[Tensor, Groups]:
        """Average ``values (B, D)`` over sets of cells with the same label.

        A label with ``n`` cells is divided into ``n // size`` sets, but into at least two sets if it has two or more
        cells. The cells of a label are divided evenly over its sets, in the order of the batch.

        Parameters
        ----------
        values
            Values of cells, ``(B, D)``.
        size
            Intended number of cells per set.

        Returns
        -------
        Means of the ``S`` sets, ``(S, D)``, and the groups of the sets' labels.
        """
        counts = torch.bincount(self._index)
        n_sets = torch.maximum(counts // size, counts.clamp(max=2))
        order = torch.argsort(self._index, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self._index[order]]
        first_set = (n_sets.cumsum(0) - n_sets)[self._index]
        of_set = first_set + place * n_sets[self._index] // counts[self._index]
        labels = self.first(self.labels[:, None])[:, 0].repeat_interleave(n_sets)
        sums = torch.zeros(len(labels), values.shape[1], dtype=values.dtype, device=values.device)
        return sums.index_add(0, of_set, values) / torch.bincount(of_set)[:, None], Groups(labels)

    def first(self, values: Tensor) -> Tensor:
        """Return one row per label, ``(labels, D)``, of ``values (B, D)`` that are equal within a label."""
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_copy(0, self._index, values)

    def sums(self, values: Tensor) -> Tensor:
        """Sum ``values (B, D)`` over all cells with a cell's label, including the cell itself, ``(B, D)``."""
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_add(0, self._index, values).index_select(0, self._index)


def pair_codes(labels: Tensor, environments: Tensor) -> Tensor:
    """Return an integer code for each pair of a label, int64 ``(B,)``, and an environment, int64 ``(B,)``."""
    environments = environments - environments.min()
    return labels * (environments.max() + 1) + environments
