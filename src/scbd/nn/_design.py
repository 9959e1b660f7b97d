"""What a batch can tell of its environments at equal label: the quadratic forms of a design, and their size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from scbd.nn._groups import Groups, exact
from scbd.nn._numbers import Numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

Environments = Tensor | Groups | Numbers
Partners = Literal["within", "across"]

# degrees of freedom, of all groups together, that are rounding
_NO_FREEDOM = 1e-6


class Averages:
    """K averages over each group of several cells: Q = R K R, with R taking each label's mean away.

    Parameters
    ----------
    label, group
        Of each cell.
    pair
        Their cross; ``group``, if each lies inside of one label.
    """

    def __init__(self, label: Groups, group: Groups, pair: Groups) -> None:
        self._label, self._group = label, group
        n_label, n_group, n_pair = (counted(groups) for groups in (label, group, pair))
        self._weight = torch.where(n_group > 1, 1 / n_group, 0.0)
        self.trace = self._weight.sum()
        shared = label.sums(n_pair * self._weight) / n_label.square()
        self.diagonal = self._weight - 2 * n_pair * self._weight / n_label + shared
        # the squared norm of Q, where groups lie inside of one label, a share for each cell
        kept = label.sums((n_group > 1).to(n_label)) / n_label
        self._inside = self._weight - 2 * n_pair * self._weight / n_label + kept.square() / n_label
        self._table = None if group is pair else label.table(group).float()
        # of the environment as columns of 0 and 1, at equal label: their squares, and what K explains of these
        self.own_squares = 1 - 2 * n_pair / n_label + label.sums(n_pair) / n_label.square()
        self.own_explained = ((n_group > 1) * self.own_squares).sum() if group is pair else self._of_columns()

    def _of_columns(self) -> Tensor:
        """Squares of the environments' columns, each less its labels' means, between environments."""
        assert self._table is not None
        with torch.autocast(self._table.device.type, enabled=False):
            common = self._table / self._table.sum(1, keepdim=True).sqrt()  # (labels, environments)
            n_group = self._table.sum(0)
            each = torch.where(n_group > 1, 1 / n_group, 0.0)
            if common.shape[0] > common.shape[1]:
                overlap = (common.T @ common).square().sum(0)
            else:
                overlap = (common * (common @ common.T @ common)).sum(0)
            alike = common.square().sum(0)
            return (each * (n_group.square() - 2 * n_group * alike + overlap)).sum().to(self.trace)

    def squares(self, apart: Tensor) -> Tensor:
        """Sum of squares between groups of ``apart (B, D)``, a number a cell ``(B, 1)``."""
        return self._weight * (apart * self._group.sums(apart)).sum(1, keepdim=True)

    def norm(self, variance: Tensor) -> Tensor:
        """Squared norm of Q where labels have such variances, ``(B, 1)``."""
        if self._table is None:
            return (self._inside * variance.square()).sum()
        of_label, n_label = self._label.first(variance).float(), self._table.sum(1, keepdim=True)
        n_group = self._table.sum(0)
        each = torch.where(n_group > 1, 1 / n_group, 0.0)
        mean = (of_label * self._table).sum(0) * each
        diagonal = (of_label / n_label * self._table.square()).sum(0) * each
        # what groups differ in as labels do
        common = self._table * (of_label / n_label).sqrt() * each.sqrt()
        with torch.autocast(common.device.type, enabled=False):  # nothing may be left of terms that cancel
            overlap = (common.T @ common) if common.shape[0] > common.shape[1] else (common @ common.T)
        return mean.square().sum().to(self.trace) - 2 * (mean * diagonal).sum() + overlap.square().sum()


class Regression:
    """K is what a regression on smooth functions of a number explains, as averages are of a regression on groups."""

    def __init__(self, label: Groups, numbers: Numbers) -> None:
        self.trace = numbers.terms.square().sum()
        self._terms = numbers.terms - label.sums(numbers.terms) / counted(label)
        self.diagonal = self.own_squares = self._terms.square().sum(1, keepdim=True)
        self.own_explained = (self._terms.T @ self._terms).square().sum()

    def squares(self, apart: Tensor) -> Tensor:
        """Sum of squares of ``apart (B, D)`` that is explained, a number a cell ``(B, 1)``."""
        terms = self._terms.to(apart)
        return (apart * (terms @ (terms.T @ apart))).sum(1, keepdim=True)

    def norm(self, variance: Tensor) -> Tensor:
        """Squared norm of Q = R K R where labels have such variances, ``(B, 1)``."""
        with torch.autocast(variance.device.type, enabled=False):
            return (self._terms.T @ (variance * self._terms)).square().sum()


class RegressionWithin:
    """K is what such a regression explains in each label by itself, where R changes nothing: K is Q."""

    def __init__(self, label: Groups, numbers: Numbers) -> None:
        self._label = label
        self._terms = numbers.terms_within(label)
        self.diagonal = self.own_squares = self._terms.square().sum(1, keepdim=True)
        # of length one and at right angles in each label: all of them are explained
        self.trace = self.own_explained = self.diagonal.sum()

    def squares(self, apart: Tensor) -> Tensor:
        """Sum of squares of ``apart (B, D)`` that is explained, a number a cell ``(B, 1)``."""
        weighted = [term * apart for term in self._terms.to(apart).split(1, 1)]
        return torch.stack([(own * self._label.sums(own)).sum(1, keepdim=True) for own in weighted]).sum(0)

    def norm(self, variance: Tensor) -> Tensor:
        """Squared norm of Q where labels have such variances, ``(B, 1)``."""
        return (self.diagonal * variance.square()).sum()


class Circle:
    """Cells that are compared: how much a batch can tell of what they differ in at equal label.

    With R taking each label's mean away, and K averaging over groups of cells, or smoothing along a number, the sum of
    squares that these explain at equal label is the quadratic form Q = R K R. It is above zero by chance, since each
    cell is like itself. ``own`` is what is taken off for that, a number a cell: what is left, M = Q - R diag(own) R, is
    zero on average whatever the variances of the cells.
    """

    def __init__(self, label: Groups, explained: Averages | Regression | RegressionWithin) -> None:
        n_label, diagonal = counted(label), explained.diagonal
        self._explained = explained
        partnered = n_label > 1
        total = torch.where(partnered, label.sums(diagonal) / (1 - 1 / n_label), 0.0)
        several = 1 - 2 / n_label
        of_many = (diagonal - total / n_label.square()) / torch.where(n_label > 2, several, 1.0)
        self.own = torch.where(partnered, torch.where(n_label > 2, of_many, total / n_label), 0.0)
        # what M has less of squared norm than Q: inside of labels, a share for each of their cells
        self._less = 2 * self.own * diagonal - self.own.square() * several * partnered
        self._less -= label.sums(self.own).square() / n_label**3
        freedom = self.freedom(torch.ones_like(n_label))
        self.tells = freedom > _NO_FREEDOM * (1 + explained.trace)
        # where all labels scatter alike
        self.freedom_of_one = torch.where(self.tells, freedom, 0.0)
        # what an environment adds to M that explains all of a feature; at most a cell each
        gain = explained.own_explained - (self.own * explained.own_squares).sum()
        self.gain = torch.where(
            self.tells, gain.clamp(min=0) / explained.own_squares.mean().clamp(min=_NO_FREEDOM), 0.0
        )

    def between(self, apart: Tensor) -> Tensor:
        """Products of cells that are compared, ``apart (B, D)`` from their labels' means, summed: zero by chance."""
        each = self._explained.squares(apart) - self.own * apart.square().sum(1, keepdim=True)
        return each.sum().to(apart.dtype)

    def freedom(self, variance: Tensor) -> Tensor:
        """Squared norm of M where labels have such variances, ``(B, 1)``: degrees of freedom where all have one."""
        return self._explained.norm(variance) - (self._less * variance.square()).sum()


class Design:
    """What is the same for all representations of a batch: its labels, and one or several environments beside them.

    Attributes
    ----------
    circles
        Of each environment.
    """

    def __init__(self, environments: Environments | Sequence[Environments], labels: Tensor | Groups) -> None:
        columns = [environments] if isinstance(environments, Environments) else environments
        if not columns:
            msg = "environments is an empty sequence: give the codes of one, or of several side by side."
            raise ValueError(msg)
        for column in columns:
            _check(column, labels)
        self.label = Groups.of(labels)
        self.n_label = counted(self.label).float()
        self.freedom = (1 - 1 / self.n_label).sum()
        self.circles = [self._of(column) for column in columns]

    def _of(self, environment: Environments) -> dict[Partners, Circle]:
        if isinstance(environment, Numbers):
            return {
                "within": Circle(self.label, RegressionWithin(self.label, environment)),
                "across": Circle(self.label, Regression(self.label, environment)),
            }
        environment = Groups.of(environment)
        pair = self.label.crossed(environment)
        return {
            "within": Circle(self.label, Averages(self.label, pair, pair)),
            "across": Circle(self.label, Averages(self.label, environment, pair)),
        }


def _check(environments: Environments, labels: Tensor | Groups) -> None:
    """Raise ``ValueError`` unless both are of the same cells, at least two, and codes are integers."""
    shapes = [tuple(_of_cells(given).shape) for given in (environments, labels)]
    if len(shapes[1]) != 1 or shapes[0] != shapes[1]:
        msg = f"environments and labels must both be (B,), got {shapes[0]} and {shapes[1]}."
        raise ValueError(msg)
    if len(labels) < 2:
        msg = f"Variance is between cells: the batch holds {len(labels)}, give it at least 2."
        raise ValueError(msg)
    if isinstance(environments, Tensor) and environments.is_floating_point():
        msg = (
            f"environments are {environments.dtype}: give integer codes, or what has an order, such as time, as "
            "scbd.nn.Numbers(environments)."
        )
        raise ValueError(msg)


def _of_cells(given: Environments) -> Tensor:
    """One value a cell, ``(B,)``."""
    if isinstance(given, Groups):
        return given.labels
    return given.values if isinstance(given, Numbers) else given


def counted(groups: Groups) -> Tensor:
    """Cells of each cell's group, ``(B, 1)``, as exact as the device can."""
    counts = groups.n_others[:, None] + 1
    return counts.to(exact(counts.device))
