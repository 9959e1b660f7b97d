"""A number of each cell of a batch, such as its column on the plate: what can change slowly with it."""

from __future__ import annotations

import torch
from torch import Tensor

from scbd.nn._groups import exact

# a trend, a bend, and what edges need beside; categories of 24 columns would be 23
_DEGREE = 4
# of a vector of length one: below it, the others leave rounding of it
_DEPENDENT = 1e-4


class Numbers:
    """Where cells stand on a scale, such as a row, a column, the time or a count of cells: an environment of an order.

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
        self.terms = _polynomials(_ranks(values))

    @classmethod
    def columns(cls, table: Tensor | None) -> list[Numbers]:
        """Those of each column of a table ``(B, K)``; of `None`, none."""
        return [] if table is None else [cls(column) for column in table.T]

    def __len__(self) -> int:
        return len(self.values)


def _ranks(values: Tensor) -> Tensor:
    """Ranks from -1 to 1, of equal values their mean."""
    _, index, counts = torch.unique(values, return_inverse=True, return_counts=True)
    twice = 2 * counts.cumsum(0) - counts
    return twice[index].to(exact(values.device)) / len(values) - 1


def _polynomials(x: Tensor) -> Tensor:
    """Orthonormal polynomials of ``(B,)`` as columns, without the constant: each is made of the one before, times x."""
    basis = torch.full_like(x, len(x) ** -0.5)[:, None]
    for _ in range(_DEGREE):
        new = basis[:, -1] * x
        length = new.norm()
        for _ in range(2):  # the second time takes off what rounding left
            new = new - (basis * (basis * new[:, None]).sum(0)).sum(1)
        kept = new.norm()
        dependent = kept <= _DEPENDENT * length
        new = torch.where(dependent, 0.0, new / torch.where(dependent, 1.0, kept))
        basis = torch.cat([basis, new[:, None]], 1)
    return basis[:, 1:]
