"""A number of each cell of a batch, such as its column on the plate: what can change slowly with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scbd.nn._groups import exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from scbd.nn._groups import Groups

# a trend, a bend, and what edges need beside; categories of 24 columns would be 23
_DEGREE = 4
# of a vector of length one: below it, the others leave rounding of it
_DEPENDENT = 1e-4


class Numbers:
    """Where cells stand on a scale: an environment with an order, such as a row, a column, the time, a count of cells.

    What such an environment does is taken to change slowly along the order: as a polynomial of degree 4 of the ranks
    within the batch. It sees trends, and edges that differ from the middle; not what goes up and down several times.
    Only the order counts, so that the scale is of no matter, and a number far off is no more than the last. Of numbers
    with at most five values, polynomials tell all that their labels would.

    Parameters
    ----------
    values
        A finite number a cell, ``(B,)``, floating point or integer.

    Attributes
    ----------
    values
        The same.
    terms
        Polynomials of the ranks of degree 1 to 4, ``(B, 4)`` float64: each of mean 0 and length 1, and at right angles
        to the others. Columns of zeros, where there are not as many different values.

    Raises
    ------
    ValueError
        If ``values`` are not ``(B,)``, or not all finite.

    References
    ----------
    Brubeck, Nakatsukasa and Trefethen (2021), Vandermonde with Arnoldi, SIAM Review: how the terms are made.

    Examples
    --------
    >>> column = scbd.nn.Numbers(torch.tensor([1.0, 2.0, 3.0]))
    >>> column.terms[:, :2].round(decimals=2)
    tensor([[-0.7100,  0.4100],
            [ 0.0000, -0.8200],
            [ 0.7100,  0.4100]], dtype=torch.float64)
    """

    def __init__(self, values: Tensor) -> None:
        if values.ndim != 1:
            msg = f"Numbers are (B,), one a cell, got {tuple(values.shape)}: give each column of a table by itself."
            raise ValueError(msg)
        if not bool(values.isfinite().all()):
            n = int((~values.isfinite()).sum())
            msg = f"{n} of {len(values)} numbers are NaN or infinite: leave these cells out."
            raise ValueError(msg)
        self.values = values
        self._ranks = _ranks(values)[:, None]
        self.terms = _polynomials(self._ranks, lambda columns: columns.sum(0, keepdim=True))

    @classmethod
    def columns(cls, table: Tensor | None) -> list[Numbers]:
        """Those of each column of a table ``(B, K)``; of `None`, none."""
        return [] if table is None else [cls(column) for column in table.T]

    def terms_within(self, groups: Groups) -> Tensor:
        """The same of each group by itself, ``(B, 4)``: of mean 0 and length 1 over its cells."""
        return _polynomials(self._ranks, groups.sums)

    def __len__(self) -> int:
        return len(self.values)


def _ranks(values: Tensor) -> Tensor:
    """Ranks from -1 to 1, of equal values their mean."""
    _, index, counts = torch.unique(values, return_inverse=True, return_counts=True)
    twice = 2 * counts.cumsum(0) - counts
    return twice[index].to(exact(values.device)) / len(values) - 1


def _polynomials(x: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """Orthonormal polynomials of ``(B, 1)`` over cells that ``sums`` are taken of, without the constant, ``(B, 4)``.

    Each is made of the one before, times x.
    """
    n = sums(torch.ones_like(x))
    x = x - sums(x) / n
    basis = torch.ones_like(x) / n.sqrt()
    for _ in range(_DEGREE):
        new = basis[:, -1:] * x
        length = sums(new.square()).sqrt()
        for _ in range(2):  # the second time takes off what rounding left
            new = new - (basis * sums(basis * new)).sum(1, keepdim=True)
        kept = sums(new.square()).sqrt()
        dependent = kept <= _DEPENDENT * length
        basis = torch.cat([basis, torch.where(dependent, 0.0, new / torch.where(dependent, 1.0, kept))], 1)
    return basis[:, 1:]
