"""Standardisation of image channels, features or embeddings separately for each environment.

The mean and variance of an environment with few cells are shrunk towards the mean and variance over all environments.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


# variance of a standardised channel below which the channel is constant up to rounding; other standardised channels
# have a variance of about 1
_VARIANCE_TOLERANCE = 1e-10


class Moments(NamedTuple):
    """Mean and variance of each channel over pixels and cells, and their squared standard errors; float64 ``(C,)``."""

    mean: Tensor
    variance: Tensor
    """Variance of each channel within groups of cells, such as environments."""
    mean_error: Tensor
    """Squared standard error of the mean of each channel. Cells, not pixels, are the independent observations."""
    variance_error: Tensor
    """Squared standard error of the variance of each channel, at least the error for normally distributed values.

    For normally distributed values, this error is defined as the squared variance times the mean squared error of the
    variance's logarithm, because :func:`align` compares logarithms of variances."""


class ChannelSums:
    """Sums of powers of the values of cells, accumulated batch by batch, from which :class:`Moments` are computed.

    Parameters
    ----------
    n_groups
        Number of groups of cells, such as environments. Variances are computed within groups.
    """

    def __init__(self, n_groups: int = 1) -> None:
        self._counts = torch.zeros(n_groups, dtype=torch.float64)
        self._sums: Tensor | None = None

    def add(self, values: Tensor, groups: Tensor | None = None) -> None:
        """Add a batch of cells: ``values (B, C)`` or ``(B, C, H, W)``, and the group of each cell, int64 ``(B,)``."""
        pixels = values.detach().float().flatten(2) if values.ndim > 2 else values.detach().float()[:, :, None]
        # the means over the pixels of each cell are computed on the device of the values; they are summed in float64 on
        # the CPU, since not every device supports float64
        mean, square = (part.cpu().double() for part in (pixels.mean(2), pixels.square().mean(2)))
        groups = torch.zeros(len(mean), dtype=torch.int64) if groups is None else groups.cpu()
        powers = torch.stack([mean, square, mean.square(), mean * square, square.square()], 1)
        if self._sums is None:
            self._sums = torch.zeros(len(self._counts), *powers.shape[1:], dtype=torch.float64)
        self._sums.index_add_(0, groups, powers)
        self._counts += torch.bincount(groups, minlength=len(self._counts))

    @property
    def n_cells(self) -> list[int]:
        """Number of cells of each group that were added so far."""
        return self._counts.long().tolist()

    def of(self, group: int) -> ChannelSums:
        """Return the :class:`ChannelSums` of the cells of a single group, which must contain cells."""
        assert self._sums is not None
        alone = ChannelSums()
        alone._sums, alone._counts = self._sums[group, None], self._counts[group, None]
        return alone

    def moments(self) -> Moments:
        """Compute the mean and variance of each channel, and their errors, from all cells added so far.

        The mean is the mean over all cells, whatever their group. The variance is the variance within groups. If groups
        hold fewer than two cells on average, all cells are treated as one group.

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
        # Let d be the squared distance of a cell's pixels from the mean of the cell's group, averaged over the pixels.
        # ``distance`` is the mean of d over the cells of a group, ``distance2`` is the mean of d squared.
        distance = square - mean.square()
        distance2 = square2 + 4 * mean**2 * mean2 + mean**4 - 4 * mean * product + 2 * mean**2 * square - 4 * mean**4
        scatter = (share * (distance2 - distance.square())).sum(0)
        within_cells, among_cells, scatter = (part.clamp(min=0) for part in (within_cells, among_cells, scatter))
        # The error of the variance follows from the scatter of the cells' squared distances from their mean. In a group
        # of few cells, these distances are similar by construction (two cells have the same distance), so that their
        # scatter underestimates the error. The error for normally distributed values is therefore used as a lower
        # bound.
        variance_error = torch.maximum(scatter / freedom, among_cells.square() * _log_variance_error(freedom))
        return Moments((share * mean).sum(0), within_cells + among_cells, among_cells / n, variance_error)


def _log_variance_error(freedom: Tensor) -> Tensor:
    """Return the mean squared error of the logarithm of a sample variance of normally distributed values.

    ``freedom`` is the number of degrees of freedom of the sample variance.
    """
    half = freedom / 2
    return torch.polygamma(1, half) + (torch.digamma(half) - half.log()).square()


class Alignment(NamedTuple):
    """Change of a normalisation ``(x - m) / s`` to a new centre ``m + s * shift`` and a new scale ``s * ratio``."""

    shift: Tensor
    """Shift of the centre of each channel, in units of the old scale ``s``, ``(C,)``, float64."""
    ratio: Tensor
    """New scale of each channel divided by the old scale ``s``, ``(C,)``, float64."""


def align(reference: Moments, new: Moments, *, scale: bool = True) -> Alignment:
    """Compute the change of a normalisation that gives new cells the mean and the variance of reference cells.

    After the original normalisation, let the reference cells have mean :math:`a` and standard deviation :math:`b`, and
    the new cells mean :math:`c` and standard deviation :math:`d`. A value :math:`u` of a new cell becomes :math:`a + b
    (u - c) / d`.

    Before this change is computed, the mean and the variance of the new cells are shrunk towards those of the reference
    cells (James and Stein, 1961; Smyth, 2004). The amount of shrinkage is the proportion of the squared differences
    between new and reference cells, over all channels, that is sampling error. For variances, differences of logarithms
    are used. A small number of new cells, whose mean and variance are imprecise, therefore changes the normalisation
    only slightly. Channels that do not vary are not changed.

    Parameters
    ----------
    reference, new
        Means and variances of the same channels, with their errors, for the reference cells and for the new cells.
    scale
        Whether to align variances as well as means. With `False`, the ratio of scales is 1.
    """
    varies = (reference.variance > _VARIANCE_TOLERANCE) & (new.variance > _VARIANCE_TOLERANCE)
    known, seen = (torch.where(varies, part.variance, 1.0) for part in (reference, new))
    difference = new.mean - reference.mean
    share = _signal_fraction(difference / known.sqrt(), (new.mean_error + reference.mean_error) / known, varies)
    mean = reference.mean + share * difference
    error = (new.variance_error / seen.square() + reference.variance_error / known.square()) / 4
    share = _signal_fraction((seen / known).log() / 2, error, varies & scale)
    # the ratio of the variances is shrunk, and not its logarithm, because the variance of two cells can be arbitrarily
    # small by chance
    ratio = (1 + share * (seen / known - 1)).sqrt()
    return Alignment(torch.where(varies, mean - reference.mean * ratio, 0.0), ratio)


def _signal_fraction(differences: Tensor, errors: Tensor, used: Tensor) -> Tensor:
    """Estimate the proportion of the squared difference in each channel that exceeds its sampling error.

    The differences are between the new cells and the reference cells. The result is 0 for channels that are not used.

    Parameters
    ----------
    differences
        Differences of means, or of logarithms of standard deviations, between new and reference cells, ``(C,)``.
    errors
        Squared standard errors of the differences, ``(C,)``.
    used
        Which channels are used for the estimate, boolean ``(C,)``.
    """
    if not bool(used.any()):
        return torch.zeros_like(differences)
    signal = (differences.square() - errors)[used].mean().clamp(min=0)
    share = signal / (signal + errors).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(used, share, 0.0)


class EnvironmentScaling(nn.Module):
    """Standardisation per environment, :math:`(x - m_e) / s_e`, to remove effects on all cells of an environment.

    The standardised values are the channels of preprocessed images, features, or the dimensions of an embedding. The
    mean and standard deviation of an environment are estimated from its reference cells, such as its controls. After
    the standardisation, the reference cells of every environment have the mean and standard deviation that reference
    cells have over all environments. Estimates from few cells are shrunk towards the mean and standard deviation over
    all environments, in proportion to their sampling error (see :func:`align`).

    A cell may have several environments, such as its plate and its position on the plate. They are the columns of the
    environment codes ``(B, K)``. The values are then standardised by the first column, the result by the second column,
    and so on.

    Parameters
    ----------
    n_channels
        Number of channels, features or dimensions ``C``.
    n_columns
        Number of environments per cell ``K``, such as 2 for plate and position.
    scale
        Whether to standardise the standard deviation as well as the mean.

    Attributes
    ----------
    n_cells
        Number of cells from which the statistics of each environment were estimated, buffer ``(R,)``, int64; 0 if they
        were not estimated. The environment with code ``j`` in column ``k`` is in row ``j * K + k``.
    shift, ratio
        :math:`m_e` and :math:`s_e` of each environment, buffers ``(R + 1, C)``. They are 0 and 1 for environments whose
        statistics were not estimated, and in the last row, which is used for unknown environments.
    reference
        :class:`Moments` of the reference cells over all environments, for each column of codes, buffer ``(K, 4, C)``; 0
        before they are estimated. Environments that are added later are standardised to these moments as well.
    of_controls
        :class:`Moments` of the controls after the standardisation, for each column of codes, buffer ``(K, 4, C)``; 0 if
        not estimated. They are used if the reference cells are not the controls: environments without reference cells
        are then standardised with their controls.
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
        """Return, for codes of environments ``(B, K)``, whether their statistics were estimated, boolean ``(B, K)``."""
        return torch.cat([self.n_cells, self.n_cells.new_zeros(1)])[self._rows(codes)] > 0

    @torch.no_grad()
    def learn(
        self,
        batches: Callable[[], Iterable[Tensor]],
        codes: Tensor,
        used: Tensor,
        controls: Tensor | None = None,
    ) -> None:
        """Estimate the shift and the scale of every environment for which they were not estimated before.

        The first call also estimates the means and variances over all environments (``reference``), to which every
        environment is standardised. An environment with fewer than two finite reference cells is not estimated. Cells
        with values that are not finite are excluded.

        Parameters
        ----------
        batches
            Function that returns an iterator over the values of all ``N`` cells, batch by batch. It is called several
            times.
        codes
            Codes of the environments of the cells, int64 ``(N, K)``; -1 if unknown.
        used
            Which cells are the reference cells of their environment, for each column of codes, boolean ``(N, K)``.
        controls
            Which cells are controls, boolean ``(N, K)``. In an environment that cannot be estimated from reference
            cells, controls replace the reference cells. Such an environment is standardised to the means and variances
            that the controls of the first call have after standardisation.
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
        """Sum powers of the values of selected cells, separately for each environment of one column of codes.

        ``wanted`` selects cells, boolean ``(N, K)``. Before they are summed, the values are standardised by the
        environments of the preceding columns.

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
        """Store the mean and variance over all cells as the ``reference``, unless it was stored before.

        Environments are standardised to the mean and variance of the reference.
        """
        if not reference.any() and any(sums.n_cells):
            reference.copy_(torch.stack(sums.moments()))

    def _align_environments(self, column: int, sums: ChannelSums, references: Tensor) -> None:
        """Estimate shift and scale that give each environment of one column the mean and variance of the reference."""
        reference = Moments(*references[column].cpu().double())
        for code, n_cells in enumerate(sums.n_cells):
            if n_cells > 1:
                row = code * len(self.reference) + column
                aligned = align(reference, sums.of(code).moments(), scale=self.scale)
                self.n_cells[row] = n_cells
                self.shift[row], self.ratio[row] = aligned.shift.to(self.shift), aligned.ratio.to(self.ratio)

    def forward(self, values: Tensor, codes: Tensor) -> Tensor:
        """Standardise values ``(B, C, H, W)`` or ``(B, C)`` per environment, given codes of environments ``(B, K)``.

        An environment that is unknown (code -1), or whose statistics were not estimated, does not change the values.
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
        if n_columns > 1:
            codes = codes * n_columns + torch.arange(n_columns, device=codes.device)
        # -1 stands for the last row of the buffers, which is used for unknown environments
        return codes.clamp(-1, len(self.n_cells))

    def _make_room(self, n_codes: int) -> None:
        more = n_codes * len(self.reference) - len(self.n_cells)
        if more > 0:
            self.n_cells = torch.cat([self.n_cells, self.n_cells.new_zeros(more)])
            self.shift = torch.cat([self.shift, self.shift[-1:].expand(more, -1)])
            self.ratio = torch.cat([self.ratio, self.ratio[-1:].expand(more, -1)])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Allocate buffers for the saved number of environments, then load them.

        Models that were saved by older versions hold no statistics of environments. In this case no buffers are loaded.
        """
        if (saved := state_dict.get(prefix + "n_cells")) is not None:
            self._make_room(len(saved) // len(self.reference))
            super()._load_from_state_dict(state_dict, prefix, *args)
