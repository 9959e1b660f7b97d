"""What cells of one kind look like to a normalisation, and how it must change for others to look like them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# of a variance of order 1, what is rounding
_CONSTANT = 1e-10


class Moments(NamedTuple):
    """Of each channel of some cells, over pixels and cells, float64 ``(C,)`` each."""

    mean: Tensor
    variance: Tensor
    """Within groups of cells."""
    mean_error: Tensor
    """Squared standard error of the mean; what varies at random is a cell, not a pixel."""
    variance_error: Tensor
    """That of the variance; at least what it is of normal values, in units of whose logarithm it is used."""


class ChannelSums:
    """Sums over cells, batch by batch, from which their :class:`Moments` are made.

    Parameters
    ----------
    n_groups
        Number of groups of cells, such as environments: variances are those within.
    """

    def __init__(self, n_groups: int = 1) -> None:
        self._counts = torch.zeros(n_groups, dtype=torch.float64)
        self._sums: Tensor | None = None

    def add(self, values: Tensor, groups: Tensor | None = None) -> None:
        """Count cells in: ``values (B, C)`` or ``(B, C, H, W)``, and the group of each cell, int64 ``(B,)``."""
        pixels = values.detach().float().flatten(2) if values.ndim > 2 else values.detach().float()[:, :, None]
        # per cell on its device; sums in float64, which not every device has
        mean, square = (part.cpu().double() for part in (pixels.mean(2), pixels.square().mean(2)))
        groups = torch.zeros(len(mean), dtype=torch.int64) if groups is None else groups.cpu()
        powers = torch.stack([mean, square, mean.square(), mean * square, square.square()], 1)
        if self._sums is None:
            self._sums = torch.zeros(len(self._counts), *powers.shape[1:], dtype=torch.float64)
        self._sums.index_add_(0, groups, powers)
        self._counts += torch.bincount(groups, minlength=len(self._counts))

    def moments(self) -> Moments:
        """Of all cells so far. The mean is that of cells; where groups hold fewer than two on average, all are one.

        Raises
        ------
        ValueError
            If there are none.
        """
        if self._sums is None:
            msg = "There are no cells to take means and variances of."
            raise ValueError(msg)
        sums, counts = self._sums[self._counts > 0], self._counts[self._counts > 0]
        n = counts.sum()
        if 2 * len(counts) > n:
            sums, counts = sums.sum(0, keepdim=True), n[None]
        mean, square, mean2, product, square2 = (sums / counts[:, None, None]).unbind(1)
        share = (counts / n)[:, None]
        within_cells = (share * (square - mean2)).sum(0)
        freedom = (n - len(counts)).clamp(min=1)
        among_cells = (share * (mean2 - mean.square())).sum(0) * n / freedom
        # of a cell, its pixels' mean squared distance from the mean of its group
        distance = square - mean.square()
        distance2 = square2 + 4 * mean**2 * mean2 + mean**4 - 4 * mean * product + 2 * mean**2 * square - 4 * mean**4
        scatter = (share * (distance2 - distance.square())).sum(0)
        within_cells, among_cells, scatter = (part.clamp(min=0) for part in (within_cells, among_cells, scatter))
        # distances from a mean of few cells are alike (of two, the same), however far off their variance is
        variance_error = torch.maximum(scatter / freedom, among_cells.square() * _log_variance_error(freedom))
        return Moments((share * mean).sum(0), within_cells + among_cells, among_cells / n, variance_error)


def _log_variance_error(freedom: Tensor) -> Tensor:
    """Mean squared error of the logarithm of a variance of normal values, with so many degrees of freedom."""
    half = freedom / 2
    return torch.polygamma(1, half) + (torch.digamma(half) - half.log()).square()


class Alignment(NamedTuple):
    """How a normalisation ``(x - m) / s`` must change, in its own units: ``m + s * shift`` and ``s * ratio``."""

    shift: Tensor
    """``(C,)``, float64."""
    ratio: Tensor
    """``(C,)``, float64."""


def align(reference: Moments, new: Moments, *, scale: bool = True) -> Alignment:
    r"""Change a normalisation such that new cells leave it as those of the reference do: in mean, and in variance.

    With means :math:`a, c` and standard deviations :math:`b, d` of reference and new cells, both behind the
    normalisation as it was, new values :math:`u` become :math:`a + b (u - c) / d`. Before, means and variances of new
    cells are drawn towards those of the reference, by what share of their squared differences over all channels (of
    variances, of their logarithms) is sampling (James and Stein, 1961; Smyth, 2004): a few cells, which tell little,
    change little. Channels that do not vary stay.

    Parameters
    ----------
    reference, new
        Of the same channels.
    scale
        Whether variances are aligned, too; `False` leaves the ratio 1.
    """
    varies = (reference.variance > _CONSTANT) & (new.variance > _CONSTANT)
    known, seen = (torch.where(varies, part.variance, 1.0) for part in (reference, new))
    difference = new.mean - reference.mean
    share = _more_than_sampling(difference / known.sqrt(), (new.mean_error + reference.mean_error) / known, varies)
    mean = reference.mean + share * difference
    error = (new.variance_error / seen.square() + reference.variance_error / known.square()) / 4
    share = _more_than_sampling((seen / known).log() / 2, error, varies & scale)
    # not of logarithms: a variance of two cells may be as small as any number by chance
    ratio = (1 + share * (seen / known - 1)).sqrt()
    return Alignment(torch.where(varies, mean - reference.mean * ratio, 0.0), ratio)


def _more_than_sampling(differences: Tensor, errors: Tensor, used: Tensor) -> Tensor:
    """What share of differences ``(C,)`` is more than sampling error, by their squares; 0 of channels not used."""
    if not bool(used.any()):
        return torch.zeros_like(differences)
    signal = (differences.square() - errors)[used].mean().clamp(min=0)
    share = signal / (signal + errors).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(used, share, 0.0)
