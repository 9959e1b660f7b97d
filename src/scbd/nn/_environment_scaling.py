"""Standardisation per environment, with means and variances shrunk towards those of all environments."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


# variance below which a channel is constant up to rounding; standardised channels have a variance of about 1
_VARIANCE_TOLERANCE = 1e-10


class Moments(NamedTuple):
    """Mean and variance of each channel over pixels and cells, with their errors; float64 ``(C,)`` each."""

    mean: Tensor
    variance: Tensor
    """Variance within groups of cells."""
    mean_error: Tensor
    """Squared standard error of the mean. Cells, not pixels, are the independent observations."""
    variance_error: Tensor
    """Squared standard error of the variance, at least as large as for normally distributed values.

    For these, it is the squared variance times the mean squared error of its logarithm, because :func:`align` compares
    logarithms of variances."""


class ChannelSums:
    """Sums over cells, accumulated batch by batch, from which :class:`Moments` are computed.

    Parameters
    ----------
    n_groups
        Number of groups of cells, such as environments. Variances are computed within groups.
    """

    def __init__(self, n_groups: int = 1) -> None:
        self._counts = torch.zeros(n_groups, dtype=torch.float64)
        self._sums: Tensor | None = None

    def add(self, values: Tensor, groups: Tensor | None = None) -> None:
        """Add cells: ``values (B, C)`` or ``(B, C, H, W)``, and the group of each cell, int64 ``(B,)``."""
        pixels = values.detach().float().flatten(2) if values.ndim > 2 else values.detach().float()[:, :, None]
        # means per cell are computed on the device; sums in float64 on the CPU, since not every device supports float64
        mean, square = (part.cpu().double() for part in (pixels.mean(2), pixels.square().mean(2)))
        groups = torch.zeros(len(mean), dtype=torch.int64) if groups is None else groups.cpu()
        powers = torch.stack([mean, square, mean.square(), mean * square, square.square()], 1)
        if self._sums is None:
            self._sums = torch.zeros(len(self._counts), *powers.shape[1:], dtype=torch.float64)
        self._sums.index_add_(0, groups, powers)
        self._counts += torch.bincount(groups, minlength=len(self._counts))

    @property
    def n_cells(self) -> list[int]:
        """Number of cells added so far, per group."""
        return self._counts.long().tolist()

    def of(self, group: int) -> ChannelSums:
        """Return the sums of a single group that contains cells."""
        assert self._sums is not None
        alone = ChannelSums()
        alone._sums, alone._counts = self._sums[group, None], self._counts[group, None]
        return alone

    def moments(self) -> Moments:
        """Compute the moments of all cells added so far.

        The mean is the mean over cells, whatever their group. If groups hold fewer than two cells on average, all cells
        are treated as one group.

        Raises
        ------
        ValueError
            If no cell was added.
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
        # d: squared distance of a cell's pixels from the mean of the cell's group, averaged over pixels;
        # ``distance`` is the mean of d over cells, ``distance2`` the mean of d squared
        distance = square - mean.square()
        distance2 = square2 + 4 * mean**2 * mean2 + mean**4 - 4 * mean * product + 2 * mean**2 * square - 4 * mean**4
        scatter = (share * (distance2 - distance.square())).sum(0)
        within_cells, among_cells, scatter = (part.clamp(min=0) for part in (within_cells, among_cells, scatter))
        # few cells have similar distances from their mean (two cells have the same), however wrong their variance is;
        # the scatter of the distances would then underestimate the error
        variance_error = torch.maximum(scatter / freedom, among_cells.square() * _log_variance_error(freedom))
        return Moments((share * mean).sum(0), within_cells + among_cells, among_cells / n, variance_error)


def _log_variance_error(freedom: Tensor) -> Tensor:
    """Return the mean squared error of the logarithm of a sample variance of normally distributed values.

    ``freedom`` is the number of degrees of freedom of the sample variance.
    """
    half = freedom / 2
    return torch.polygamma(1, half) + (torch.digamma(half) - half.log()).square()


class Alignment(NamedTuple):
    """Change of a normalisation ``(x - m) / s`` to the centre ``m + s * shift`` and the scale ``s * ratio``."""

    shift: Tensor
    """Shift of the centre in units of the old scale, ``(C,)``, float64."""
    ratio: Tensor
    """New scale divided by the old scale, ``(C,)``, float64."""


def align(reference: Moments, new: Moments, *, scale: bool = True) -> Alignment:
    """Compute how to change a normalisation so that new cells get the mean and the variance of reference cells.

    Let :math:`a, c` be the means and :math:`b, d` the standard deviations of reference and new cells after the original
    normalisation. New values :math:`u` become :math:`a + b (u - c) / d`.

    Before this, the means and variances of new cells are shrunk towards those of the reference (James and Stein, 1961;
    Smyth, 2004). The amount of shrinkage is the proportion of their squared differences over all channels that is
    sampling error. For variances, differences of logarithms are used. A small number of cells, whose estimates are
    imprecise, therefore changes the normalisation only slightly. Channels that do not vary are not changed.

    Parameters
    ----------
    reference, new
        Moments of the same channels, for reference cells and new cells.
    scale
        Whether to align variances as well. With `False`, the ratio is 1.
    """
    varies = (reference.variance > _VARIANCE_TOLERANCE) & (new.variance > _VARIANCE_TOLERANCE)
    known, seen = (torch.where(varies, part.variance, 1.0) for part in (reference, new))
    difference = new.mean - reference.mean
    share = _signal_fraction(difference / known.sqrt(), (new.mean_error + reference.mean_error) / known, varies)
    mean = reference.mean + share * difference
    error = (new.variance_error / seen.square() + reference.variance_error / known.square()) / 4
    share = _signal_fraction((seen / known).log() / 2, error, varies & scale)
    # shrink variances, not their logarithms: the variance of two cells can be arbitrarily small by chance
    ratio = (1 + share * (seen / known - 1)).sqrt()
    return Alignment(torch.where(varies, mean - reference.mean * ratio, 0.0), ratio)


def _signal_fraction(differences: Tensor, errors: Tensor, used: Tensor) -> Tensor:
    """Estimate, per channel, the proportion of squared differences that exceeds sampling error; 0 for unused channels.

    Parameters
    ----------
    differences
        Differences between new and reference cells, ``(C,)``.
    errors
        Squared standard errors of the differences, ``(C,)``.
    used
        Which channels are used, boolean ``(C,)``.
    """
    if not bool(used.any()):
        return torch.zeros_like(differences)
    signal = (differences.square() - errors)[used].mean().clamp(min=0)
    share = signal / (signal + errors).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(used, share, 0.0)


class EnvironmentScaling(nn.Module):
    """Standardisation per environment, :math:`(x - m_e) / s_e`, to remove effects on all cells of an environment.

    It applies to each channel of preprocessed images, each feature, or each dimension of an embedding. Mean and
    standard deviation of an environment are estimated from its reference cells, such as its controls. After the
    standardisation, the reference cells of every environment have the mean and standard deviation that reference cells
    have over all environments. Estimates from few cells are shrunk towards the mean and standard deviation over all
    environments, in proportion to their sampling error (see :func:`align`). With several columns of environments, such
    as plate and position, one column is standardised after the other.

    Parameters
    ----------
    n_channels
        Number of channels, features or dimensions ``C``.
    n_columns
        Number of columns of environments ``K``.
    scale
        Whether to standardise the standard deviation as well as the mean.

    Attributes
    ----------
    n_cells
        Number of cells from which an environment was estimated, buffer ``(R,)``, int64; 0 if it was not estimated. The
        environment with code ``j`` in column ``k`` is in row ``j * K + k``.
    shift, ratio
        :math:`m_e` and :math:`s_e`, buffers ``(R + 1, C)``. They are 0 and 1 for environments that were not estimated,
        and in the last row, which is used for unknown environments.
    reference
        :class:`Moments` of the reference cells over all environments of a column, buffer ``(K, 4, C)``; 0 if not
        estimated. New environments are standardised to these moments.
    of_controls
        :class:`Moments` of controls after the standardisation, buffer ``(K, 4, C)``. They are used if reference cells
        are other cells than controls; 0 if not estimated.
    """

    n_cells: Tensor
    shift: Tensor
    ratio: Tensor
    reference: Tensor
    of_controls: Tensor

    def __init__(self, n_channels: int, n_columns: int = 1, *, scale: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("n_cells", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("shift", torch.zeros(1, n_channels))
        self.register_buffer("ratio", torch.ones(1, n_channels))
        for name in ("reference", "of_controls"):
            self.register_buffer(name, torch.zeros(n_columns, len(Moments._fields), n_channels))

    def known(self, codes: Tensor) -> Tensor:
        """Return whether environments with codes ``(B, K)`` were estimated, boolean ``(B, K)``."""
        return torch.cat([self.n_cells, self.n_cells.new_zeros(1)])[self._rows(codes)] > 0

    @torch.no_grad()
    def learn(
        self,
        batches: Callable[[], Iterable[Tensor]],
        codes: Tensor,
        used: Tensor,
        controls: Tensor | None = None,
    ) -> None:
        """Estimate the statistics of environments that were not estimated before.

        The first call also estimates the common moments of all environments (``reference``). An environment with fewer
        than two finite reference cells is not estimated. Cells with values that are not finite are excluded.

        Parameters
        ----------
        batches
            Function that returns an iterator over the values of all ``N`` cells. It is called several times.
        codes
            Environments of the cells, int64 ``(N, K)``; -1 if unknown.
        used
            Which cells are reference cells in each column, boolean ``(N, K)``.
        controls
            Controls that replace the reference cells in environments that were not estimated from these, boolean
            ``(N, K)``. Such an environment is standardised to the moments that the controls of the first call have
            after standardisation.
        """
        if not len(codes):
            return
        device = self.shift.device
        codes, used, controls = codes.to(device), used.to(device), None if controls is None else controls.to(device)
        self._make_room(int(codes.max()) + 1)
        for column in range(len(self.reference)):
            sums = partial(self._sums, column, batches, codes)
            new = sums(used & ~self.known(codes))
            self._first(self.reference[column], new)
            self._align_environments(column, new, self.reference)
            if controls is not None:
                if not self.of_controls[column].any():
                    self._first(self.of_controls[column], sums(controls & self.known(codes)))
                if self.of_controls[column].any():
                    self._align_environments(column, sums(controls & ~self.known(codes)), self.of_controls)

    def _sums(self, column: int, batches: Callable[[], Iterable[Tensor]], codes: Tensor, wanted: Tensor) -> ChannelSums:
        """Sum over selected cells, boolean ``(N, K)``, of a column, per environment.

        Values are standardised by the columns before this one.
        """
        of = codes[:, column]
        chosen, sums, start = wanted[:, column] & (of >= 0), ChannelSums(int(of.max()) + 1), 0
        if not chosen.any():
            return sums
        until = torch.where(torch.arange(codes.shape[1], device=codes.device) <= column, codes, -1)
        for batch in batches():
            part = slice(start, start := start + len(batch))
            finite = chosen[part] & batch.flatten(1).isfinite().all(1).to(codes.device)
            sums.add(self(batch, until[part])[finite], of[part][finite])
        return sums

    @staticmethod
    def _first(reference: Tensor, sums: ChannelSums) -> None:
        """Store the moments of the first cells as the reference for environments that are estimated later."""
        if not reference.any() and any(sums.n_cells):
            reference.copy_(torch.stack(sums.moments()))

    def _align_environments(self, column: int, sums: ChannelSums, references: Tensor) -> None:
        """Estimate shift and ratio that give each environment of a column the moments of its reference."""
        reference = Moments(*references[column].cpu().double())
        for code, n_cells in enumerate(sums.n_cells):
            if n_cells > 1:
                row = code * len(self.reference) + column
                aligned = align(reference, sums.of(code).moments(), scale=self.scale)
                self.n_cells[row] = n_cells
                self.shift[row], self.ratio[row] = aligned.shift.to(self.shift), aligned.ratio.to(self.ratio)

    def forward(self, values: Tensor, codes: Tensor) -> Tensor:
        """Standardise values ``(B, C, H, W)`` or ``(B, C)`` per environment, given codes ``(B, K)``.

        Values are not changed by environments that are unknown (code -1) or were not estimated.
        """
        if not len(self.n_cells):
            return values
        rows = self._rows(codes)
        shift, ratio = self.shift[rows[:, 0]], self.ratio[rows[:, 0]]
        for row in rows.T[1:]:
            shift, ratio = shift + ratio * self.shift[row], ratio * self.ratio[row]
        trailing = [1] * (values.ndim - 2)
        return (values - shift.view(*shift.shape, *trailing)).div_(ratio.view(*ratio.shape, *trailing))

    def _rows(self, codes: Tensor) -> Tensor:
        n_columns = len(self.reference)
        rows = codes * n_columns + torch.arange(n_columns, device=codes.device)
        return torch.where((codes < 0) | (rows >= len(self.n_cells)), len(self.n_cells), rows)

    def _make_room(self, n_codes: int) -> None:
        more = n_codes * len(self.reference) - len(self.n_cells)
        if more > 0:
            self.n_cells = torch.cat([self.n_cells, self.n_cells.new_zeros(more)])
            self.shift = torch.cat([self.shift, self.shift[-1:].expand(more, -1)])
            self.ratio = torch.cat([self.ratio, self.ratio[-1:].expand(more, -1)])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Allocate as many environments as were saved, before loading; older models have no environments to load."""
        if (saved := state_dict.get(prefix + "n_cells")) is not None:
            self._make_room(len(saved) // len(self.reference))
            super()._load_from_state_dict(state_dict, prefix, *args)
