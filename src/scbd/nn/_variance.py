r"""Invariance as analysis of variance: what the environment explains of a feature, in units of what chance explains.

Write a feature of a cell with label :math:`y` and environment :math:`e` as
:math:`f = m_y + a_e + b_{ye} + \varepsilon`: what the label explains, what an environment does to cells of all
labels alike, what it does to those of one label beyond that, and the rest. The environment's share of the variance is

.. math:: \omega^2 = \mathrm{E}\, (a_e + b_{ye})^2 \,/\, \mathrm{Var} f,

the effect size of an analysis of variance. It is zero when a cell's environment cannot be told from the feature's
mean, given its label. As an objective it has what the contrastive forms (:func:`scbd.nn.invariance_loss`) lack:

- **It is a ratio.** Shrinking the embedding to a point, whole or one feature at a time, changes nothing. A collapse is
  not rewarded, however large its weight.
- **It is estimated without bias.** A product of two *different* cells of one environment has the expectation of
  :math:`(a_e + b_{ye})^2`; noise averages out, with however few partners. The absolute value of a noisy difference does
  not: it is positive under perfect invariance, the more so the fewer the partners, and calls for a smaller embedding
  where the batch is small or the environments many.
- **It asks for what the label does not explain.** Environments may differ in how often they show a label.
- **It knows its own error.** If the environment explains nothing, the estimate still scatters, the more so the smaller
  the batch, the more numerous the environments and the fewer the directions in use. Divided by that standard error, it
  says by how much a batch contradicts invariance, in the same unit for every batch, number of labels and of
  environments.

There are two circles of partners to estimate it from:

- ``"within"``: cells of the same environment *and label*. They see all of it, also features which mean another label in
  each environment (a shade that is bright for a high digit here and for a low one there), whose average over labels
  is the same everywhere. With many labels and environments they are few: 56 genes in 34 wells leave a cell a third of
  one in a batch of 512.
- ``"across"``: cells of the same environment, each compared with its own label, whichever that is. They see
  :math:`a_e`, and hardly anything of :math:`b_{ye}`, but are many: fifteen in that batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence

Partners = Literal["within", "across"]

# variance of a feature that carries nothing, far below what float32 can tell from zero beside one
_TINY = 1e-8


class ExplainedVariance(NamedTuple):
    """What the environment explains at equal label."""

    share: Tensor
    """Of the variance; 0 in expectation where the environment explains nothing, at most 1."""
    error: Tensor
    """Standard deviation of ``share`` where the environment explains nothing; 0 where there is nothing to compare."""


def explained_variance(
    features: Tensor, environments: Tensor | Groups, labels: Tensor | Groups, *, partners: Partners = "within"
) -> ExplainedVariance:
    r"""Share of the features' variance that the environment explains at equal label, and its standard error.

    Features are standardised over the batch. Let :math:`r_i` be a cell less the mean of all *other* cells of its label,
    and :math:`j` its :math:`k_i` partners; then

    .. math:: \hat\omega^2 = \frac{1}{BD} \sum_i \frac{k_i}{k_i + 1}\,
              \Big\langle r_i,\; \frac{1}{k_i} \sum_j r_j^{(i)} \Big\rangle:

    whether the cell and others of its environment differ in the same direction from their labels' means. For partners
    of another label, :math:`r_j^{(i)} = r_j`; one of the same label is less the same mean as :math:`r_i`, that of all
    but :math:`i`. Either way the sum is zero on average when environments are drawn anew within each label. The
    factor, the reliability of a mean of :math:`k` draws, counts a cell for what its partners can tell: one without
    any counts zero.

    Under environments drawn anew, the share scatters by

    .. math:: \mathrm{sd}(\hat\omega^2) \approx
              \frac{1}{BD} \sqrt{2 N\, \mathrm{E}_{i \ne j} \langle r_i, r_j \rangle^2},

    with :math:`N` the number of differences between environments that the batch can tell: the number of environments
    less one, of each label for ``"within"`` and once for ``"across"``, where they have many cells, and fewer where they
    have few. The fewer directions the residuals use, the larger it is.

    Parameters
    ----------
    features
        ``(B, D)``, of any scale. Half precision is computed in float32.
    environments, labels
        Integer codes, ``(B,)``, or their :class:`Groups`.
    partners
        ``"within"``: cells of the same environment and label, which see all of what differs, and are few; or
        ``"across"``: cells of the same environment, each compared with its own label, which are many, and see what is
        alike for all labels.

    Returns
    -------
    ``share`` and ``error``, scalars, float32 or float64. No gradient flows through ``error``.

    Raises
    ------
    ValueError
        If the shapes do not match, the batch holds fewer than two cells, or ``partners`` is not known.

    References
    ----------
    Hays (1963), Statistics for psychologists: the effect size :math:`\omega^2`. The estimates and their use are ours.

    Examples
    --------
    >>> features, gene = torch.randn(256, 16, generator=torch.manual_seed(0)), torch.arange(256) % 8
    >>> well = torch.arange(256) // 8 % 4
    >>> share = scbd.nn.explained_variance(features, well, gene).share
    >>> abs(float(share)) < 0.05  # these features know nothing of the well
    True
    """
    if partners not in get_args(Partners):
        msg = f"partners={partners!r} is not known: use 'within' (of the same label) or 'across' (of any label)."
        raise ValueError(msg)
    return _explained(features, _Design(environments, labels))[partners]


def invariance_statistic(passed: Sequence[Tensor], environments: Tensor | Groups, labels: Tensor | Groups) -> Tensor:
    r"""By how much a batch contradicts invariance: the environment's share in standard errors.

    .. math:: \frac{1}{2S} \sum_s \Big(
              \frac{\hat\omega^2_{s,\text{within}}}{\mathrm{sd}(\hat\omega^2_{s,\text{within}})} +
              \frac{\hat\omega^2_{s,\text{across}}}{\mathrm{sd}(\hat\omega^2_{s,\text{across}})} \Big)

    over both circles of partners and all representations :math:`s`; over one circle, where in the other nobody has a
    partner (wells of which each plate has one a perturbation). Of order one, on either side of zero, where the
    environment explains nothing; its unit is the same whatever the batch, the number of labels and of environments,
    and the scale of the features. See :func:`explained_variance`.

    Parameters
    ----------
    passed
        Representations of the same cells, each ``(B, D)``: usually all stages on the way to an embedding. An embedding
        may be blind to the environment because it computes the label from what differs between environments, in two
        steps; the first of them is seen on the way.
    environments, labels
        Integer codes, ``(B,)``, or their :class:`Groups`.

    Returns
    -------
    A scalar, in standard errors.

    Raises
    ------
    ValueError
        See :func:`explained_variance`.

    Examples
    --------
    >>> features, gene = torch.randn(256, 16, generator=torch.manual_seed(0)), torch.arange(256) % 8
    >>> well = torch.arange(256) // 8 % 4
    >>> told = features + 3 * torch.nn.functional.one_hot(well, 16)  # says which well it is
    >>> blind, seen = (float(scbd.nn.invariance_statistic([x], well, gene)) for x in (features, told))
    >>> blind < 3 < 30 < seen  # standard errors
    True
    """
    design = _Design(environments, labels)
    both = [x for features in passed for x in _explained(features, design).values()]
    # where there is nothing to compare, the share is exactly zero
    mean = torch.stack([x.share / x.error.clamp(min=_TINY) for x in both]).mean()
    # a circle in which nobody has a partner says nothing, and is not averaged in as zero
    told = torch.stack([(n > 0).any() for n in design.n_partners.values()])
    return mean * (len(told) / told.sum().clamp(min=1))


class _Design:
    """What is the same for all representations of a batch: who is whose partner, and what they can tell."""

    def __init__(self, environments: Tensor | Groups, labels: Tensor | Groups) -> None:
        codes = [given.labels if isinstance(given, Groups) else given for given in (environments, labels)]
        if codes[1].ndim != 1 or codes[0].shape != codes[1].shape:
            shapes = " and ".join(str(tuple(given.shape)) for given in codes)
            msg = f"environments and labels must both be (B,), got {shapes}."
            raise ValueError(msg)
        if len(labels) < 2:
            msg = f"Variance is between cells: the batch holds {len(labels)}, give it at least 2."
            raise ValueError(msg)
        self.label, self.environment = Groups.of(labels), Groups.of(environments)
        self.pair = self.label.crossed(self.environment)
        self.n_label = self.label.n_others[:, None]
        self.n_partners: dict[Partners, Tensor] = {
            "within": self.pair.n_others[:, None],
            "across": self.environment.n_others[:, None],
        }
        within, across = (n / (n + 1) for n in self.n_partners.values())
        size = self.n_label + 1
        self.n_differences: dict[Partners, Tensor] = {
            "within": _n_differences(within, size, self.label.sums(within) / size),
            "across": _n_differences(across, len(labels), across.mean()),
        }


def _n_differences(weight: Tensor, size: Tensor | int, mean: Tensor) -> Tensor:
    """How many groups can differ, one less than there are; those of one cell are none.

    ``weight`` is the reliability of each cell's partners, ``size`` how many cells the groups divide, ``mean`` the
    weight's average over those.
    """
    return (weight * (1 - weight) - 2 * weight.square() / size + mean.square() / size).sum().clamp(min=0)


def _explained(features: Tensor, design: _Design) -> dict[Partners, ExplainedVariance]:
    """From both circles of partners."""
    if features.ndim != 2 or len(features) != len(design.n_label):
        msg = f"features must be (B, D) for {len(design.n_label)} environments and labels, got {tuple(features.shape)}."
        raise ValueError(msg)
    with torch.autocast(features.device.type, enabled=False):
        f = features.to(torch.promote_types(features.dtype, torch.float32))
        f = f - f.mean(0)
        f = f * torch.rsqrt(f.square().mean(0) + _TINY)
        apart = f - (design.label.sums(f) - f) / design.n_label.clamp(min=1)
        # alone of its label, a cell has nothing to differ from
        apart = torch.where(design.n_label > 0, apart, 0.0)
        of_pair = design.pair.sums(apart)
        # partners of the label are less the mean without this cell, not without themselves
        n_others = design.n_label - design.n_partners["within"]
        within = (of_pair * design.n_label - apart * n_others) / (design.n_label + 1)
        sums: dict[Partners, Tensor] = {"within": within, "across": design.environment.sums(apart) - of_pair + within}
        alike = _alike(apart.detach(), design)
        return {
            circle: ExplainedVariance(
                # k/(k+1) times the mean of k others is their sum over k+1
                (apart * of_partners / (design.n_partners[circle] + 1)).mean(),
                torch.sqrt(2 * design.n_differences[circle] * alike) / apart.numel(),
            )
            for circle, of_partners in sums.items()
        }


def _alike(apart: Tensor, design: _Design) -> Tensor:
    """Mean square of the inner product of two different cells: how alike they are by chance."""
    # distances from the mean of the others are larger than from the true mean
    residuals = apart * torch.sqrt(design.n_label / (design.n_label + 1))
    # the Gram matrix has the norm of the covariance, if it is smaller
    products = residuals.T @ residuals if apart.shape[1] <= len(apart) else residuals @ residuals.T
    total = products.square().sum() - residuals.square().sum(1).square().sum()
    return total.clamp(min=0) / (len(apart) * (len(apart) - 1))
