"""Groups of cells that have the same label (perturbation or environment): counts, sums and averages per label."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor


def copy_to(device: torch.device, values: np.ndarray | Tensor) -> Tensor:
    """Copy an array or a CPU tensor to a device. On a CUDA GPU, the CPU does not wait until the copy is complete.

    float64 becomes float32 on Apple's GPUs (MPS), which do not support float64.
    """
    tensor = torch.as_tensor(values)
    if device.type == "mps" and tensor.dtype == torch.float64:
        tensor = tensor.float()
    if device.type != "cuda":
        return tensor.to(device)
    # a copy from memory that is not pinned (page-locked) may wait for the GPU
    return tensor.pin_memory().to(device, non_blocking=True)


def sum_rows(values: Tensor, index: Tensor, n_groups: int) -> Tensor:
    """Sum the rows of ``values (N, D)`` over each of G groups, ``(G, D)``; ``index (N,)`` is the group of each row."""
    empty = torch.zeros(n_groups, values.shape[1], dtype=values.dtype, device=values.device)
    return empty.index_add(0, index, values)


class Groups:
    """Groups of the cells of a batch that have the same label, computed once per batch and used by several losses.

    The groups are computed on the CPU. If the labels are on a GPU, the CPU therefore waits for the GPU once. Batches of
    the training loader bring their groups along (:meth:`of`), which avoids waiting.

    Parameters
    ----------
    labels
        Integer label of each cell, such as its perturbation or environment, ``(B,)``.

    Attributes
    ----------
    codes
        Number of the group of each cell, in ascending order of the labels, int64 array ``(B,)``.
    counts
        Number of cells of each of the G groups, int64 array ``(G,)``.

    Examples
    --------
    >>> gene = scbd.nn.Groups(torch.tensor([0, 1, 1, 1]))
    >>> gene.n_others
    tensor([0, 2, 2, 2])
    >>> z = torch.nn.functional.normalize(torch.randn(4, 8, generator=torch.manual_seed(0)), dim=1)
    >>> loss = scbd.nn.supervised_contrastive_loss(z, gene)  # groups are not counted again
    """

    def __init__(self, labels: Tensor) -> None:
        self.device, self.shape = labels.device, labels.shape
        found = np.unique(labels.long().cpu().numpy(), return_inverse=True, return_counts=True)
        self.distinct_labels, self.codes, self.counts = found
        self._crossed: tuple[np.ndarray, Groups] | None = None

    @classmethod
    def of(cls, labels: Tensor | Groups) -> Groups:
        """Return the groups of cells with the same label, or ``labels`` unmodified if they are groups already.

        If the training loader has computed the groups of these labels (:meth:`attach`), they are not computed again.
        """
        known = labels if isinstance(labels, Groups) else getattr(labels, "groups", None)
        return cls(labels) if known is None else known  # type: ignore[arg-type]

    def attach(self, labels: Tensor) -> Tensor:
        """Attach these groups to the tensor of their labels, so that :meth:`of` finds them, and return the tensor."""
        labels.groups = self  # type: ignore[attr-defined]
        return labels

    def to(self, device: torch.device) -> Groups:
        """Return these groups with tensors on another device."""
        if device == self.device:
            return self
        groups = Groups.__new__(Groups)
        groups.device, groups.shape = device, self.shape
        groups.distinct_labels, groups.codes, groups.counts = self.distinct_labels, self.codes, self.counts
        groups._crossed = self._crossed and (self._crossed[0], self._crossed[1].to(device))
        return groups

    @cached_property
    def labels(self) -> Tensor:
        """Label of each cell, int64 ``(B,)``."""
        return copy_to(self.device, self.distinct_labels[self.codes])

    @cached_property
    def n_others(self) -> Tensor:
        """Number of other cells with the cell's label, int64 ``(B,)``."""
        return copy_to(self.device, self.counts[self.codes] - 1)

    @cached_property
    def group_sizes(self) -> Tensor:
        """Number of cells of each of the G groups, float32 ``(G, 1)``."""
        return copy_to(self.device, self.counts[:, None].astype(np.float32))

    @cached_property
    def index(self) -> Tensor:
        """Number of the group of each cell, int64 ``(B,)``, on the device of the labels."""
        return copy_to(self.device, self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    def cross(self, others: Groups) -> Groups:
        """Return the groups of cells that have both the same label in this object and the same label in ``others``.

        These may be the cells with the same perturbation in the same environment. The result is cached, since several
        losses use the same pair of labels.
        """
        if self._crossed is None or self._crossed[0] is not others.codes:
            self._crossed = others.codes, self.regroup(self.codes * len(others.counts) + others.codes)
        return self._crossed[1]

    def regroup(self, labels: np.ndarray) -> Groups:
        """Return groups by other labels, integer array ``(B,)``, on the device of these labels."""
        groups = Groups(torch.from_numpy(labels))
        groups.device = self.device
        return groups

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
        counts = self.counts
        n_sets = np.maximum(counts // size, np.minimum(counts, 2))
        order = np.argsort(self.codes, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order)) - (counts.cumsum() - counts)[self.codes[order]]
        first_set = (n_sets.cumsum() - n_sets)[self.codes]
        of_set = self.regroup(first_set + place * n_sets[self.codes] // counts[self.codes])
        labels = self.regroup(self.distinct_labels.repeat(n_sets))
        return of_set.group_sums(values) / of_set.group_sizes.to(values.dtype), labels

    def group_sums(self, values: Tensor) -> Tensor:
        """Return, for each group, the sum of ``values (B, D)`` over its cells, ``(G, D)``."""
        return sum_rows(values, self.index, len(self.counts))

    def sums(self, values: Tensor) -> Tensor:
        """Return, for each cell, the sum of ``values (B, D)`` over all cells with its label, ``(B, D)``.

        The sum includes the cell itself.
        """
        return self.group_sums(values).index_select(0, self.index)
