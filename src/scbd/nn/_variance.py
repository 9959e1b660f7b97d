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

There are two ways of pairing to estimate it from:

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

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from scbd._checks import check_choice
from scbd.nn._contrastive import Groups, exact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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

    .. math:: T = \sum_g \frac{1}{n_g} \Bigl\| \sum_{i \in g} r_i \Bigr\|^2 - \sum_i d_i \|r_i\|^2
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
    check_choice("partners", partners, {"within": "of the same label", "across": "of any label"})
    design = Design(environments, labels)
    found, freedom = explained_by(features, design).pairings[0][partners], design.pairings[0][partners].freedom_of_one
    return ExplainedVariance(
        found.between / features.numel(), found.scatter / features.numel(), freedom.to(found.between)
    )


def invariance_statistic(
    passed: Sequence[Tensor],
    environments: Environments | Sequence[Environments],
    labels: Tensor | Groups,
) -> Tensor:
    r"""By how much a batch contradicts invariance: the environment's share in standard errors.

    .. math:: \frac{1}{2S} \sum_s \Bigl(
              \frac{\hat\omega^2_{s,\text{within}}}{\mathrm{sd}(\hat\omega^2_{s,\text{within}})} +
              \frac{\hat\omega^2_{s,\text{across}}}{\mathrm{sd}(\hat\omega^2_{s,\text{across}})} \Bigr)

    over both ways of pairing and all representations :math:`s`; over one pairing, where in the other nobody has a
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
    >>> shifted = features + 3 * torch.nn.functional.one_hot(well, 16)  # says which well it is
    >>> blind, seen = (float(scbd.nn.invariance_statistic([x], well, gene)) for x in (features, shifted))
    >>> blind < 3 < 30 < seen  # standard errors
    True
    """
    design = Design(environments, labels)
    return in_errors([explained_by(features, design) for features in passed], design)


def in_errors(explained: Sequence[Explained], design: Design) -> Tensor:
    """The statistic, of representations one by one."""
    each, resolved = [], []
    for column, pairings in enumerate(design.pairings):
        resolvable = torch.stack([pairing.resolvable for pairing in pairings.values()])
        both = torch.stack([x.in_errors for of_one in explained for x in of_one.pairings[column].values()])
        each.append(_mean_of_resolvable(both, resolvable))
        resolved.append(resolvable.any())
    return _mean_of_resolvable(torch.stack(each), torch.stack(resolved))


def _mean_of_resolvable(values: Tensor, resolvable: Tensor) -> Tensor:
    """Of values that are zero where nothing is resolvable: these say nothing, and are not averaged in as zero."""
    return values.mean() * (len(resolvable) / resolvable.sum().clamp(min=1))


class Between(NamedTuple):
    """What one pairing of partners sees."""

    between: Tensor
    """Sum of products between cells of a group."""
    scatter: Tensor
    """Its standard deviation where the environment explains nothing; 0 where there is nothing to compare."""

    @property
    def in_errors(self) -> Tensor:
        """In standard deviations; no gradient flows through these."""
        nothing = self.scatter == 0
        # what is not a number stays that, also where nothing is resolvable
        zero = 0.0 * self.between.detach()
        return torch.where(nothing, zero, self.between / torch.where(nothing, 1.0, self.scatter))

    def per_gain(self, pairing: Pairing) -> Between:
        """In units of what an environment adds that explains all of a feature; no less than a cell."""
        gain = pairing.gain.clamp(min=1).to(self.between)
        return Between(self.between / gain, self.scatter / gain)


class Explained(NamedTuple):
    """What environments explain of one representation."""

    pairings: list[dict[Partners, Between]]
    """By each environment, from each pairing of partners."""
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

        def of(pairing: Pairing) -> Between:
            by_chance = 2 * alike * pairing.freedom(of_label.to(pairing.own)).clamp(min=0)
            scatter = torch.where(pairing.resolvable & ~nothing, by_chance, 0.0).sqrt()
            return Between(pairing.between(apart), scatter.to(f.dtype))

        pairings = [{name: of(pairing) for name, pairing in pairings.items()} for pairings in design.pairings]
        return Explained(pairings, f.shape[1])


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


# standard errors of a batch, of an interaction that counts no more than as nothing
_BY_CHANCE = 2.0


class EnvironmentEffects(NamedTuple):
    """What environments do, scalars. A gradient flows through ``statistic`` alone."""

    statistic: Tensor
    """In standard errors, see :func:`scbd.nn.invariance_statistic`."""
    interaction: Tensor
    """Share of the variance, from 0 to 1, of the representation that has most: what environments do to one label and
    not to another."""
    of_last: Tensor
    """The statistic of the last representation alone."""


def environment_effects(
    passed: Sequence[Tensor],
    environments: Environments | Sequence[Environments],
    labels: Tensor | Groups,
) -> EnvironmentEffects:
    r"""What environments do to the representations of a batch: how surely, and how differently to labels.

    With :math:`\omega^2_c = T_c / (g_c D)` of :func:`explained_variance`'s sums of squares, for each pairing :math:`c`
    of partners, where :math:`g_c` is what an effect of the environment alone would add to :math:`T_c` if it were all of
    a feature's variance: a batch in which most cells have no partner counts as what it is. Both pairings see what an
    environment does to all cells alike; those within a label see what it does to that label, too. So

    .. math:: \max_s \bigl( \omega^2_{s, within} - \omega^2_{s, across} - 2\,\mathrm{sd} \bigr)_+

    is the **interaction** that a batch shows for sure: the environment changes what a feature says of the label. Such
    features mislead, also where z_c is blind to the environment, since it may be computed from two of them.

    Of several environments side by side, it is that of the one which has most.

    Parameters
    ----------
    passed, environments, labels
        See :func:`invariance_statistic`. The last of ``passed`` is the embedding.

    Returns
    -------
    ``statistic``, see :func:`invariance_statistic`; ``interaction``, a share of the variance; and ``of_last``, the
    statistic of the embedding alone. Scalars; a gradient flows through ``statistic`` alone.

    Raises
    ------
    ValueError
        See :func:`invariance_statistic`.

    Examples
    --------
    >>> gene, well = torch.arange(512) % 4, torch.arange(512) // 4 % 2
    >>> noise = torch.randn(512, 8, generator=torch.manual_seed(0))
    >>> alike = noise + 2 * well[:, None]  # a well shifts all cells
    >>> differently = noise + 2 * (2 * well - 1)[:, None] * (2 * (gene % 2) - 1)[:, None]  # or each gene its own way
    >>> [round(float(environment_effects([x], well, gene).interaction), 1) for x in (alike, differently)]
    [0.0, 0.8]
    """
    design = Design(environments, labels)
    explained = [explained_by(features, design) for features in passed]
    statistic = in_errors(explained, design)
    with torch.no_grad():
        interaction = torch.stack([_interaction(of_one, design) for of_one in explained]).max()
        return EnvironmentEffects(statistic, interaction, in_errors(explained[-1:], design))


def _interaction(explained: Explained, design: Design) -> Tensor:
    """Of one representation, beyond what chance may be; 0 where no cell has partners of both kinds."""
    found = []
    for pairings, of_pairing in zip(design.pairings, explained.pairings, strict=True):
        within, across = (of_pairing[name].per_gain(pairings[name]) for name in ("within", "across"))
        error = (within.scatter.square() + across.scatter.square()).sqrt()
        seen = (within.between - across.between - _BY_CHANCE * error).clamp(min=0)
        found.append(torch.where(pairings["within"].resolvable & pairings["across"].resolvable, seen, 0.0))
    return torch.stack(found).max() / explained.n_features


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


class Pairing:
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
        self.resolvable = freedom > _NO_FREEDOM * (1 + explained.trace)
        # where all labels scatter alike
        self.freedom_of_one = torch.where(self.resolvable, freedom, 0.0)
        # what an environment adds to M that explains all of a feature; at most a cell each
        gain = explained.own_explained - (self.own * explained.own_squares).sum()
        self.gain = torch.where(
            self.resolvable, gain.clamp(min=0) / explained.own_squares.mean().clamp(min=_NO_FREEDOM), 0.0
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
    pairings
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
        self.pairings = [self._of(column) for column in columns]

    def _of(self, environment: Environments) -> dict[Partners, Pairing]:
        if isinstance(environment, Numbers):
            return {
                "within": Pairing(self.label, RegressionWithin(self.label, environment)),
                "across": Pairing(self.label, Regression(self.label, environment)),
            }
        environment = Groups.of(environment)
        pair = self.label.crossed(environment)
        return {
            "within": Pairing(self.label, Averages(self.label, pair, pair)),
            "across": Pairing(self.label, Averages(self.label, environment, pair)),
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
