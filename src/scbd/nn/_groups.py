"""Groups of cells that have the same label (perturbation or environment): counts, sums and averages per label."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """Groups of the cells of a batch that have the same label, computed once per batch and used by several losses.

    Parameters
    ----------
    labels
        Integer label of each cell, such as its perturbation or environment, ``(B,)``.

    Attributes
    ----------
    labels
        Label of each cell, int64 ``(B,)``.
    n_others
        Number of other cells with the cell's label, for each cell, ``(B,)``.
    sizes
        Number of cells with the cell's label, including the cell itself, ``(B, 1)``, float64 (float32 on Apple's GPUs).

    Examples
    --------
    >>> gene = scbd.nn.Groups(torch.tensor([0, 1, 1, 1]))
    >>> gene.n_others
    tensor([0, 2, 2, 2])
    >>> z = torch.nn.functional.normalize(torch.randn(4, 8, generator=torch.manual_seed(0)), dim=1)
    >>> loss = scbd.nn.supervised_contrastive_loss(z, gene)  # groups are not counted again
    """

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels.long()
        # on a GPU, this call makes the CPU wait for the GPU: groups are therefore computed only once
        found = torch.unique(self.labels, return_inverse=True, return_counts=True)
        self._distinct_labels, self._index, self._counts = found
        self._n_groups = len(self._counts)
        self._crossed: tuple[Groups, Groups] | None = None
        self.n_others = self._counts[self._index] - 1
        # Apple's GPUs (MPS) do not support float64
        self.sizes = (self.n_others[:, None] + 1).to(torch.float32 if labels.device.type == "mps" else torch.float64)

    @classmethod
    def of(cls, labels: Tensor | Groups) -> Groups:
        """Return the groups of cells with the same label, or ``labels`` unmodified if they are groups already."""
        return labels if isinstance(labels, Groups) else cls(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def cross(self, others: Groups) -> Groups:
        """Return the groups of cells that have both the same label in this object and the same label in ``others``.

        These may be the cells with the same perturbation in the same environment. The result is cached, since several
        losses use the same pair of labels.
        """
        if self._crossed is None or self._crossed[0] is not others:
            self._crossed = others, Groups(self._index * others._n_groups + others._index)
        return self._crossed[1]

    def table(self, others: Groups) -> Tensor:
        """Count the cells with each combination of a label of this object (rows) and a label of ``others`` (columns).

        Rows and columns are in ascending order of the labels.
        """
        size = self._n_groups * others._n_groups
        counts = torch.bincount(self._index * others._n_groups + others._index, minlength=size)
        return counts.view(self._n_groups, others._n_groups)

    def average_over_sets(self, values: Tensor, size: int) -> tuple[Tensor, Groups]:
        """Average ``values (B, D)`` over sets of cells; all cells of a set have the same label.

        The ``n`` cells of a label are divided into ``n // size`` sets, but into at least two sets if the label has two
        or more cells. The sets of a label have equal numbers of cells, or differ by one cell. Cells are assigned to
        sets in the order of the batch.

        Parameters
        ----------
        values
            Values of the cells, such as their embeddings, ``(B, D)``.
        size
            Intended number of cells per set.

        Returns
        -------
        Mean of each of the ``S`` sets, ``(S, D)``, and the groups of the labels of the sets.
        """
        counts = self._counts
        n_sets = torch.maximum(counts // size, counts.clamp(max=2))
        order = torch.argsort(self._index, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self._index[order]]
        first_set = (n_sets.cumsum(0) - n_sets)[self._index]
        of_set = first_set + place * n_sets[self._index] // counts[self._index]
        labels = self._distinct_labels.repeat_interleave(n_sets)
        sums = torch.zeros(len(labels), values.shape[1], dtype=values.dtype, device=values.device)
        return sums.index_add(0, of_set, values) / torch.bincount(of_set)[:, None], Groups(labels)

    def first(self, values: Tensor) -> Tensor:
        """Return one row of ``values (B, D)`` per label, ``(labels, D)``.

        All cells of a label must have the same values.
        """
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_copy(0, self._index, values)

    def sums(self, values: Tensor) -> Tensor:
        """Return, for each cell, the sum of ``values (B, D)`` over all cells with its label, ``(B, D)``.

        The sum includes the cell itself.
        """
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_add(0, self._index, values).index_select(0, self._index)
