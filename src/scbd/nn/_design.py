"""What a batch can tell of its environments at equal label: the quadratic forms of a design, and their size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from scbd.nn._groups import Groups

Partners = Literal["within", "across"]

# degrees of freedom, of all groups together, that are rounding
_NO_FREEDOM = 1e-6


class Circle:
    """Groups of cells that are compared: how much a batch can tell of what they differ in at equal label.

    With R taking each label's mean away, and K averaging over each group of several cells, the sum of squares between
    groups at equal label is the quadratic form Q = R K R. It is above zero by chance, since each cell is like itself.
    ``own`` is what is taken off for that, a number a cell: what is left, M = Q - R diag(own) R, is zero on average
    whatever the variances of the cells.
    """

    def __init__(self, label: Groups, group: Groups, pair: Groups) -> None:
        self.group, self._label = group, label
        n_label, n_group, n_pair = (counted(groups) for groups in (label, group, pair))
        self.weight = torch.where(n_group > 1, 1 / n_group, 0.0)
        shared = label.sums(n_pair * self.weight) / n_label.square()
        diagonal = self.weight - 2 * n_pair * self.weight / n_label + shared
        partnered = n_label > 1
        total = torch.where(partnered, label.sums(diagonal) / (1 - 1 / n_label), 0.0)
        several = 1 - 2 / n_label
        of_many = (diagonal - total / n_label.square()) / torch.where(n_label > 2, several, 1.0)
        self.own = torch.where(partnered, torch.where(n_label > 2, of_many, total / n_label), 0.0)
        # what of the squared norm of M lies inside of a label, a share for each of its cells
        self._inside = self.own.square() * several * partnered - 2 * self.own * diagonal
        self._inside += label.sums(self.own).square() / n_label**3
        self._table: Tensor | None = None
        if group is pair:  # each group lies inside of one label
            kept = label.sums((n_group > 1).to(n_label)) / n_label
            self._inside += self.weight - 2 * n_pair * self.weight / n_label + kept.square() / n_label
        else:
            self._table = label.table(group).float()
        freedom = self.freedom(torch.ones_like(n_label))
        self.tells = freedom > _NO_FREEDOM * (1 + self.weight.sum())
        # where all labels scatter alike
        self.freedom_of_one = torch.where(self.tells, freedom, 0.0)

    def between(self, apart: Tensor) -> Tensor:
        """Products of cells of a group ``apart (B, D)`` from their labels' means, summed: of M, so zero by chance."""
        of_group = (apart * self.group.sums(apart)).sum(1, keepdim=True)
        return (self.weight * of_group - self.own * apart.square().sum(1, keepdim=True)).sum().to(apart.dtype)

    def freedom(self, variance: Tensor) -> Tensor:
        """Squared norm of M where labels have such variances, ``(B, 1)``: degrees of freedom where all have one."""
        inside = (self._inside * variance.square()).sum()
        if self._table is None:
            return inside
        of_label, n_label = self._label.first(variance).float(), self._table.sum(1, keepdim=True)
        n_group = self._table.sum(0)
        each = torch.where(n_group > 1, 1 / n_group, 0.0)
        mean = (of_label * self._table).sum(0) * each
        diagonal = (of_label / n_label * self._table.square()).sum(0) * each
        # what groups differ in as labels do
        common = self._table * (of_label / n_label).sqrt() * each.sqrt()
        with torch.autocast(common.device.type, enabled=False):  # nothing may be left of terms that cancel
            overlap = (common.T @ common) if common.shape[0] > common.shape[1] else (common @ common.T)
        return inside + mean.square().sum() - 2 * (mean * diagonal).sum() + overlap.square().sum()


class Design:
    """What is the same for all representations of a batch."""

    def __init__(self, environments: Tensor | Groups, labels: Tensor | Groups) -> None:
        codes = [given.labels if isinstance(given, Groups) else given for given in (environments, labels)]
        if codes[1].ndim != 1 or codes[0].shape != codes[1].shape:
            shapes = " and ".join(str(tuple(given.shape)) for given in codes)
            msg = f"environments and labels must both be (B,), got {shapes}."
            raise ValueError(msg)
        if len(labels) < 2:
            msg = f"Variance is between cells: the batch holds {len(labels)}, give it at least 2."
            raise ValueError(msg)
        self.label, environment = Groups.of(labels), Groups.of(environments)
        pair = self.label.crossed(environment)
        self.n_label = counted(self.label).float()
        self.freedom = (1 - 1 / self.n_label).sum()
        self.circles: dict[Partners, Circle] = {
            "within": Circle(self.label, pair, pair),
            "across": Circle(self.label, environment, pair),
        }


def counted(groups: Groups) -> Tensor:
    """Cells of each cell's group, ``(B, 1)``, as exact as the device can."""
    counts = groups.n_others[:, None] + 1
    return counts.to(torch.float32 if counts.device.type == "mps" else torch.float64)
