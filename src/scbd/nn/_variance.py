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

Where an environment has an order, such as the column of a plate or the time (:class:`scbd.nn.Numbers`), cells are
compared that lie near each other, of the same label or of any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import Tensor

from scbd.nn._design import Circle, Design, Environments, Partners
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence

# of the square of a feature's mean, or of the largest variance: what rounding leaves of one that never changes
_ROUNDING = 1e-12
# degrees of freedom that the variance of all cells lends that of a label
_LENT = 1.0


class ExplainedVariance(NamedTuple):
    """What the environment explains at equal label."""

    share: Tensor
    """Of the variance; 0 in expectation where the environment explains nothing, at most 1."""
    error: Tensor
    """Standard deviation of ``share`` where the environment explains nothing; 0 where there is nothing to compare."""
    freedom: Tensor
    r"""Degrees of freedom, :math:`\|M\|^2`: how many differences of environments the batch can tell at equal label."""


def explained_variance(
    features: Tensor, environments: Environments, labels: Tensor | Groups, *, partners: Partners = "within"
) -> ExplainedVariance:
    r"""Share of the features' variance that the environment explains at equal label, and its standard error.

    Features are standardised over the batch; :math:`r_i` is a cell less the mean of its label. Of the groups :math:`g`
    of partners, the sum of squares between them at equal label is

    .. math:: T = \sum_g \frac{1}{n_g} \Big\| \sum_{i \in g} r_i \Big\|^2 - \sum_i d_i \|r_i\|^2
              = \sum_{ij} M_{ij} \langle r_i, r_j \rangle:

    whether cells of a group differ in the same direction from their labels' means. The :math:`d_i` take off what each
    cell adds by being like itself, so that :math:`T` is zero on average, whatever the variances of cells, when
    environments are drawn anew within each label. :math:`\hat\omega^2` is :math:`T / BD`. A group of
    one cell can tell nothing, and takes no part.

    What environments and labels have in common is seen by neither: if each environment holds one label,
    :math:`M` is zero, and the more they depend on each other the less is left of it. The standard deviation by chance,

    .. math:: \mathrm{sd}(T)^2 = 2 \|C\|^2 \sum_{ij} M_{ij}^2 s_i^2 s_j^2,

    with :math:`s^2` the variance of a cell's label and :math:`C` the covariance of :math:`r_i / s_i`, knows that: it is
    that of the design at hand. The fewer directions the residuals use, the larger it is.

    Of :class:`Numbers`, :math:`T` begins with the sum of squares that a regression of the :math:`r_i` on their
    polynomials explains, one of each label or one of all, in place of that between groups. All else is the same.

    Parameters
    ----------
    features
        ``(B, D)``, of any scale. Half precision is computed in float32.
    environments
        Integer codes, ``(B,)``, or their :class:`Groups`; or :class:`Numbers`, where they have an order.
    labels
        Integer codes, ``(B,)``, or their :class:`Groups`.
    partners
        ``"within"``: cells of the same environment and label, which see all of what differs, and are few; or
        ``"across"``: cells of the same environment, each compared with its own label, which are many, and see what is
        alike for all labels.

    Returns
    -------
    ``share``, ``error`` and ``freedom``, scalars, float32 or float64. A gradient flows through ``share`` alone.

    Raises
    ------
    ValueError
        If the shapes do not match, the batch holds fewer than two cells, codes are no integers, or ``partners`` is not
        known.

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
    design = Design(environments, labels)
    found, freedom = explained_by(features, design).circles[0][partners], design.circles[0][partners].freedom_of_one
    return ExplainedVariance(
        found.between / features.numel(), found.scatter / features.numel(), freedom.to(found.between)
    )


def invariance_statistic(
    passed: Sequence[Tensor],
    environments: Environments | Sequence[Environments],
    labels: Tensor | Groups,
) -> Tensor:
    r"""By how much a batch contradicts invariance: the environment's share in standard errors.

    .. math:: \frac{1}{2S} \sum_s \Big(
              \frac{\hat\omega^2_{s,\text{within}}}{\mathrm{sd}(\hat\omega^2_{s,\text{within}})} +
              \frac{\hat\omega^2_{s,\text{across}}}{\mathrm{sd}(\hat\omega^2_{s,\text{across}})} \Big)

    over both circles of partners and all representations :math:`s`; over one circle, where in the other nobody has a
    partner (wells of which each plate has one a perturbation). Of order one, on either side of zero, where the
    environment explains nothing; its unit is the same whatever the batch, the number of labels and of environments,
    and the scale of the features. See :func:`explained_variance`.

    Several environments of a cell stand side by side (its plate, and its position there): the statistic is the mean of
    what each has by itself, over those of which the batch can tell anything. A position is then compared over all
    plates, and a plate over all its positions; their cross has no cells to compare where a well holds one row.

    Parameters
    ----------
    passed
        Representations of the same cells, each ``(B, D)``: usually all stages on the way to an embedding. An embedding
        may be blind to the environment because it computes the label from what differs between environments, in two
        steps; the first of them is seen on the way.
    environments
        Integer codes, ``(B,)``, or their :class:`Groups`; :class:`Numbers`, where they have an order, such as the
        column of a plate or the time; or a sequence of these, side by side.
    labels
        Integer codes, ``(B,)``, or their :class:`Groups`.

    Returns
    -------
    A scalar, in standard errors.

    Raises
    ------
    ValueError
        See :func:`explained_variance`; or if the sequence is empty.

    Examples
    --------
    >>> features, gene = torch.randn(256, 16, generator=torch.manual_seed(0)), torch.arange(256) % 8
    >>> well = torch.arange(256) // 8 % 4
    >>> told = features + 3 * torch.nn.functional.one_hot(well, 16)  # says which well it is
    >>> blind, seen = (float(scbd.nn.invariance_statistic([x], well, gene)) for x in (features, told))
    >>> blind < 3 < 30 < seen  # standard errors
    True
    """
    design = Design(environments, labels)
    return in_errors([explained_by(features, design) for features in passed], design)


def in_errors(explained: Sequence[Explained], design: Design) -> Tensor:
    """The statistic, of representations one by one."""
    each, tells = [], []
    for column, circles in enumerate(design.circles):
        told = torch.stack([circle.tells for circle in circles.values()])
        both = torch.stack([x.in_errors for of_one in explained for x in of_one.circles[column].values()])
        each.append(_mean_of_told(both, told))
        tells.append(told.any())
    return _mean_of_told(torch.stack(each), torch.stack(tells))


def _mean_of_told(values: Tensor, told: Tensor) -> Tensor:
    """Of values that are zero where nothing can be told: these say nothing, and are not averaged in as zero."""
    return values.mean() * (len(told) / told.sum().clamp(min=1))


class Between(NamedTuple):
    """What one circle of partners sees."""

    between: Tensor
    """Sum of products between cells of a group."""
    scatter: Tensor
    """Its standard deviation where the environment explains nothing; 0 where there is nothing to compare."""

    @property
    def in_errors(self) -> Tensor:
        """In standard deviations; no gradient flows through these."""
        nothing = self.scatter == 0
        # what is not a number stays that, also where nothing can be told
        zero = 0.0 * self.between.detach()
        return torch.where(nothing, zero, self.between / torch.where(nothing, 1.0, self.scatter))

    def per_gain(self, circle: Circle) -> Between:
        """In units of what an environment adds that explains all of a feature; no less than a cell."""
        gain = circle.gain.clamp(min=1).to(self.between)
        return Between(self.between / gain, self.scatter / gain)


class Explained(NamedTuple):
    """What environments explain of one representation."""

    circles: list[dict[Partners, Between]]
    """By each environment, from each circle of partners."""
    n_features: int


def explained_by(features: Tensor, design: Design) -> Explained:
    """What the environments of a batch explain of ``features (B, D)``, at equal label."""
    if features.ndim != 2 or len(features) != len(design.n_label):
        msg = f"features must be (B, D) for {len(design.n_label)} environments and labels, got {tuple(features.shape)}."
        raise ValueError(msg)
    with torch.autocast(features.device.type, enabled=False):
        f = _standardised(features.to(torch.promote_types(features.dtype, torch.float32)))
        apart = f - design.label.sums(f) / design.n_label
        squares = apart.detach().square().mean(1, keepdim=True)
        variance = squares.sum() / design.freedom.clamp(min=1)
        nothing = variance < _ROUNDING
        # labels differ in how much their cells scatter, and with them what chance does
        of_label = (design.label.sums(squares) + _LENT * variance) / (design.n_label - 1 + _LENT)
        alike = _alike(apart.detach() * torch.rsqrt(torch.where(nothing, 1.0, of_label)), design.freedom)

        def of(circle: Circle) -> Between:
            by_chance = 2 * alike * circle.freedom(of_label.to(circle.own)).clamp(min=0)
            scatter = torch.where(circle.tells & ~nothing, by_chance, 0.0).sqrt()
            return Between(circle.between(apart), scatter.to(f.dtype))

        circles = [{name: of(circle) for name, circle in circles.items()} for circles in design.circles]
        return Explained(circles, f.shape[1])


def _standardised(features: Tensor) -> Tensor:
    """Of mean 0 and variance 1 over the batch; 0 where a feature never changes, beside the others or its mean."""
    mean = features.mean(0)
    f = features - mean
    variance = f.square().mean(0)
    beside = torch.maximum(mean.square(), variance.max()).detach()
    constant = variance <= _ROUNDING * beside
    return torch.where(constant, 0.0, f * torch.rsqrt(torch.where(constant, 1.0, variance)))


def _alike(apart: Tensor, freedom: Tensor) -> Tensor:
    """Sum of squares of a covariance whose mean variance is 1: the larger, the fewer directions are in use."""
    # the Gram matrix has the norm of the covariance, if it is smaller
    products = apart.T @ apart if apart.shape[1] <= len(apart) else apart @ apart.T
    total = products.diagonal().sum()
    # of few cells, any two are alike by chance
    squares = products.square().sum() - total.square() / freedom.clamp(min=1)
    covariance = squares.clamp(min=0) / ((freedom - 1) * (freedom + 2)).clamp(min=1)
    variance = total / (freedom * apart.shape[1]).clamp(min=1)
    return torch.where(variance > 0, covariance / variance.square(), 0.0)
