r"""Invariance as an analysis of variance: the variance of features that is explained by the environment.

A feature of a cell with label :math:`y` (its perturbation) and environment :math:`e` is modelled as :math:`f = m_y +
a_e + b_{ye} + \varepsilon`. Here :math:`m_y` is the mean of the label, :math:`a_e` the effect of the environment on
cells of all labels, :math:`b_{ye}` the additional effect of the environment on cells of this label (interaction), and
:math:`\varepsilon` the residual. The proportion of variance explained by the environment, conditional on the label, is

.. math:: \omega^2 = \mathrm{E}\, (a_e + b_{ye})^2 \,/\, \mathrm{Var} f,

the effect size of an analysis of variance. It is zero when, given the label, the mean of the feature does not depend on
the environment. As an objective for training, it has four properties that the contrastive forms of the invariance loss
(:func:`scbd.nn.invariance_loss`) lack:

- **It is a ratio.** Shrinking the embedding to a point, in all features or in one, does not change it. A collapse of
  the embedding is therefore not rewarded, whatever the weight of the loss.
- **It is estimated without bias.** The product of the deviations of two *different* cells of one environment from the
  means of their labels has the expectation :math:`(a_e + b_{ye})^2`, if both cells have label :math:`y`. Noise averages
  out, however few partners a cell has. The contrastive forms, in contrast, use the absolute value of a noisy
  difference, which is positive even under perfect invariance. The fewer partners a cell has, the larger is this value.
  As a loss, it therefore favours a smaller embedding where the batch is small or environments are many.
- **It is conditional on the label.** Environments may differ in the frequencies of labels.
- **Its standard error is computed.** If the environment explains no variance, the estimate still varies between
  batches. It varies more if batches are smaller, environments are more numerous, or features vary in fewer directions.
  The estimate divided by its standard error measures how strongly a batch contradicts invariance. This measure has the
  same unit for every batch size, number of labels and number of environments.

The estimate is computed from pairs of cells. There are two choices of pairs (pairings):

- ``"within"``: cells of the same environment *and label*. These pairs show the entire effect, :math:`a_e` and
  :math:`b_{ye}`. An example of :math:`b_{ye}` is a shade that is bright for a high digit in one environment and for a
  low digit in another; its average over labels is the same in all environments. With many labels and environments there
  are few such pairs: with 56 genes in 34 wells, a cell has on average a third of a partner in a batch of 512.
- ``"across"``: cells of the same environment and any label, after subtraction of the mean of each cell's label. These
  pairs show :math:`a_e` and hardly any of :math:`b_{ye}`, but there are many: fifteen partners per cell in the same
  batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from scbd._shared.checks import check_choice
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence


# largest variance of a constant feature that can be due to rounding, relative to the feature's squared mean or to the
# largest variance of all features
_ROUNDING = 1e-12
# strength of the shrinkage of the variance within one label towards the variance within all labels, as a number of
# prior degrees of freedom
_PRIOR_FREEDOM = 1.0


class ExplainedVariance(NamedTuple):
    """Proportion of the features' variance that the environment explains, conditional on the label, and its error."""

    share: Tensor
    """Estimated proportion of the variance, at most 1. Its expectation is 0 if the environment explains no variance."""
    error: Tensor
    """Standard deviation of ``share`` if the environment explains no variance; 0 if there are no cells to compare."""
    freedom: Tensor
    r"""Degrees of freedom, :math:`\|M\|^2`: number of contrasts between environments that the batch can estimate."""


def explained_variance(
    features: Tensor, environments: Environments, labels: Tensor | Groups, *, partners: Partners = "within"
) -> ExplainedVariance:
    r"""Estimate the proportion of the features' variance that the environment explains, conditional on the label.

    The function also returns the standard error of the estimate.

    Features are standardised over the batch. Let :math:`r_i` be the difference between cell :math:`i` and the mean of
    its label, :math:`g` a group of cells that are compared with each other (see ``partners``), and :math:`n_g` the
    number of its cells. The sum of squares between groups, conditional on the label, is

    .. math:: T = \sum_g \frac{1}{n_g} \Bigl\| \sum_{i \in g} r_i \Bigr\|^2 - \sum_i d_i \|r_i\|^2
              = \sum_{ij} M_{ij} \langle r_i, r_j \rangle.

    :math:`T` is large if the cells of a group deviate from the means of their labels in the same direction. The numbers
    :math:`d_i` subtract the product of each cell with itself. The expectation of :math:`T` is therefore zero, whatever
    the variances of cells, if environments are assigned at random within each label. For batch size :math:`B` and
    :math:`D` features, the estimated proportion is :math:`\hat\omega^2 = T / BD`. Groups of a single cell carry no
    information and are excluded.

    An effect of the environment is not detected if it cannot be distinguished from an effect of the label. If each
    environment holds one label, :math:`M` is zero. The more environments and labels depend on each other, the smaller
    :math:`M` is. The standard deviation of :math:`T` if the environment explains no variance,

    .. math:: \mathrm{sd}(T)^2 = 2 \|C\|^2 \sum_{ij} M_{ij}^2 s_i^2 s_j^2,

    takes this dependence into account. Here :math:`s_i^2` is the variance of the label of cell :math:`i`, and :math:`C`
    the covariance of :math:`r_i / s_i`. The standard deviation is larger if the :math:`r_i` vary in fewer directions.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(B, D)``, of any scale. Half precision is converted to float32.
    environments
        Environment of each cell: integer codes, ``(B,)``, or their :class:`Groups`.
    labels
        Label of each cell: integer codes, ``(B,)``, or their :class:`Groups`.
    partners
        Which cells are compared with each other:

        - ``"within"``: cells of the same environment and label. There are few pairs, but they show the entire effect.
        - ``"across"``: cells of the same environment and any label, after subtraction of the mean of each cell's label.
          There are many pairs, but they show only effects that are the same for all labels.

    Returns
    -------
    ``share``, ``error`` and ``freedom`` (see ``ExplainedVariance``), scalars, float32 or float64. Only ``share``
    has a gradient.

    Raises
    ------
    ValueError
        If the shapes do not match, the batch holds fewer than two cells, environments are floating-point numbers, or
        ``partners`` is unknown.

    References
    ----------
    Hays (1963), Statistics for psychologists: the effect size :math:`\omega^2`. The estimates and their use were
    developed for this package.

    Examples
    --------
    >>> features, gene = torch.randn(256, 16, generator=torch.manual_seed(0)), torch.arange(256) % 8
    >>> well = torch.arange(256) // 8 % 4
    >>> share = scbd.nn.explained_variance(features, well, gene).share
    >>> abs(float(share)) < 0.05  # these features do not depend on the well
    True
    """
    check_choice("partners", partners, {"within": "of the same label", "across": "of any label"})
    design = BatchDesign(environments, labels)
    found, n = estimate_effects(features, design)[0][partners], features.numel()
    freedom = design.pairings[0][partners].freedom_of_one
    return ExplainedVariance(found.between / n, found.scatter / n, freedom.to(found.between))


def invariance_statistic(
    passed: Sequence[Tensor],
    environments: Environments | Sequence[Environments],
    labels: Tensor | Groups,
) -> Tensor:
    r"""Measure how strongly a batch contradicts invariance to the environment, in standard errors.

    The measure is the variance of the representations that the environment explains, divided by its standard error:

    .. math:: \frac{1}{2S} \sum_s \Bigl(
              \frac{\hat\omega^2_{s,\text{within}}}{\mathrm{sd}(\hat\omega^2_{s,\text{within}})} +
              \frac{\hat\omega^2_{s,\text{across}}}{\mathrm{sd}(\hat\omega^2_{s,\text{across}})} \Bigr)

    The sum is over all :math:`S` representations :math:`s`. Each term adds two estimates of the explained proportion of
    variance, :math:`\hat\omega^2`: from pairs of cells within a label and from pairs across labels (see
    :func:`explained_variance`). If there are no pairs of one kind, only the other estimate is used. For example, there
    are no pairs within labels if each plate has one well per perturbation and plates are the environments.

    If the environment explains no variance, the statistic is of order one, positive or negative. Its unit does not
    depend on the batch size, the numbers of labels and environments, or the scale of the features.

    A cell may have several environments, for example its plate and its position on the plate. The statistic is then the
    mean of the statistics of all environments for which the batch contains information. Positions are compared over all
    plates, and plates over all positions. The combination of plate and position cannot serve as a single environment if
    the data have one row per well, because no row would have a partner.

    Parameters
    ----------
    passed
        Representations of the same cells, each ``(B, D)``: usually the intermediate representations of all stages of
        the encoder, and the embedding. Intermediate representations are included because an embedding may be invariant
        although the encoder uses differences between environments: the encoder can compute the label from such
        differences in two steps. The first step is visible in an intermediate representation.
    environments
        Environment of each cell: integer codes, ``(B,)``, or their :class:`Groups`; or a sequence of these for several
        environments per cell.
    labels
        Label of each cell: integer codes, ``(B,)``, or their :class:`Groups`.

    Returns
    -------
    The invariance statistic, a scalar, in standard errors.

    Raises
    ------
    ValueError
        If :func:`explained_variance` raises it, or if the sequence of environments is empty.

    Examples
    --------
    >>> features, gene = torch.randn(256, 16, generator=torch.manual_seed(0)), torch.arange(256) % 8
    >>> well = torch.arange(256) // 8 % 4
    >>> shifted = features + 3 * torch.nn.functional.one_hot(well, 16)  # one feature per well is shifted
    >>> blind, seen = (float(scbd.nn.invariance_statistic([x], well, gene)) for x in (features, shifted))
    >>> blind < 3 < 30 < seen  # in standard errors: independent of the well, and shifted by the well
    True
    """
    design = BatchDesign(environments, labels)
    return in_errors([estimate_effects(features, design) for features in passed], design)


def in_errors(explained: Sequence[Estimates], design: BatchDesign) -> Tensor:
    """Compute the invariance statistic from the estimates for each representation.

    ``explained`` holds one result of :func:`estimate_effects` per representation. For each environment, the estimates
    are divided by their standard errors and averaged over representations and over pairs within and across labels. The
    statistic is the mean over environments.
    """
    each, resolved = [], []
    for column, pairings in enumerate(design.pairings):
        resolvable = torch.stack([pairing.resolvable for pairing in pairings.values()])
        both = torch.stack([x.in_errors for of_one in explained for x in of_one[column].values()])
        each.append(_mean_of_resolvable(both, resolvable))
        resolved.append(resolvable.any())
    return _mean_of_resolvable(torch.stack(each), torch.stack(resolved))


def _mean_of_resolvable(values: Tensor, resolvable: Tensor) -> Tensor:
    """Average the values whose entry in ``resolvable`` is true; all other values must be zero.

    ``resolvable`` is boolean. It is false for comparisons that the batch does not allow, because no cell has a partner.
    """
    return values.mean() * (len(resolvable) / resolvable.sum().clamp(min=1))


class PairingEstimate(NamedTuple):
    """Estimate of the variance that the environment explains, from pairs of cells within labels or across labels."""

    between: Tensor
    """Sum of squares between groups of cells, summed over features: :math:`T` in :func:`explained_variance`."""
    scatter: Tensor
    """Standard deviation of ``between`` if the environment explains no variance; 0 if there are no pairs to compare."""

    @property
    def in_errors(self) -> Tensor:
        """Sum of squares ``between`` divided by its standard deviation ``scatter``, which has no gradient."""
        nothing = self.scatter == 0
        # the result without any pairs: zero, but NaN if the estimate is NaN, so that invalid features remain visible
        zero = 0.0 * self.between.detach()
        return torch.where(nothing, zero, self.between / torch.where(nothing, 1.0, self.scatter))

    def per_gain(self, pairing: Pairing) -> PairingEstimate:
        """Divide the estimate by its value for a feature whose variance is entirely due to the environment.

        The division by this value, the ``gain`` of the pairing, corrects for cells without a partner. A gain below 1,
        the contribution of one cell, is replaced by 1.
        """
        gain = pairing.gain.clamp(min=1).to(self.between)
        return PairingEstimate(self.between / gain, self.scatter / gain)


def estimate_effects(features: Tensor, design: BatchDesign) -> Estimates:
    """Estimate the variance of ``features (B, D)`` that each environment explains, conditional on the label.

    For each environment of a cell, there are two estimates: from pairs of cells within labels and across labels.
    """
    if features.ndim != 2 or len(features) != len(design.n_label):
        msg = f"features must be (B, D) for {len(design.n_label)} environments and labels, got {tuple(features.shape)}."
        raise ValueError(msg)
    with torch.autocast(features.device.type, enabled=False):
        f = _standardised(features.to(torch.promote_types(features.dtype, torch.float32)))
        apart = f - design.label.sums(f) / design.n_label
        squares = apart.detach().square().mean(1, keepdim=True)
        variance = squares.sum() / design.freedom.clamp(min=1)
        nothing = variance < _ROUNDING
        # variance within each label: it differs between labels, and determines how much the estimates vary by chance
        of_label = (design.label.sums(squares) + _PRIOR_FREEDOM * variance) / (design.n_label - 1 + _PRIOR_FREEDOM)
        scaled = apart.detach() * torch.rsqrt(torch.where(nothing, 1.0, of_label))
        alike = _squared_covariance_norm(scaled, design.freedom)

        estimates: Estimates = [{} for _ in design.pairings]
        for column, pairings in enumerate(design.pairings):
            for name, pairing in pairings.items():
                by_chance = 2 * alike * pairing.freedom(of_label.to(pairing.own)).clamp(min=0)
                scatter = torch.where(pairing.resolvable & ~nothing, by_chance, 0.0).sqrt()
                estimates[column][name] = PairingEstimate(pairing.between(apart), scatter.to(f.dtype))
        return estimates


def _standardised(features: Tensor) -> Tensor:
    """Standardise features to mean 0 and variance 1 over the batch; constant features become 0.

    A feature is constant if its variance is negligible compared with its squared mean or with the largest variance of
    all features.
    """
    mean = features.mean(0)
    f = features - mean
    variance = f.square().mean(0)
    beside = torch.maximum(mean.square(), variance.max()).detach()
    constant = variance <= _ROUNDING * beside
    return torch.where(constant, 0.0, f * torch.rsqrt(torch.where(constant, 1.0, variance)))


def _squared_covariance_norm(apart: Tensor, freedom: Tensor) -> Tensor:
    """Estimate the squared norm of the covariance of features, after scaling to a mean variance of 1.

    The norm is larger if the features vary in fewer directions. ``apart (B, D)`` holds the differences of the cells
    from the means of their labels, and ``freedom`` is its number of degrees of freedom.
    """
    # the Gram matrix of the cells has the same norm as the covariance of the features; the smaller of the two matrices
    # is computed
    products = apart.T @ apart if apart.shape[1] <= len(apart) else apart @ apart.T
    total = products.diagonal().sum()
    # the subtraction makes the estimate unbiased: chance similarities between few cells inflate the squared norm
    squares = products.square().sum() - total.square() / freedom.clamp(min=1)
    covariance = squares.clamp(min=0) / ((freedom - 1) * (freedom + 2)).clamp(min=1)
    variance = total / (freedom * apart.shape[1]).clamp(min=1)
    return torch.where(variance > 0, covariance / variance.square(), 0.0)


# number of standard errors that are subtracted from the estimated interaction of a batch, so that an interaction that
# may be due to chance becomes 0
_INTERACTION_STANDARD_ERRORS = 2.0


class EnvironmentEffects(NamedTuple):
    """Effects of the environments on the representations of a batch, scalars. Only ``statistic`` has a gradient."""

    statistic: Tensor
    """Effects of environments on all representations, in standard errors, see :func:`scbd.nn.invariance_statistic`."""
    interaction: Tensor
    """Proportion of variance, from 0 to 1, that is explained by effects of an environment that differ between labels.

    It is the maximum over representations and over environments."""
    embedding_statistic: Tensor
    """Effects of environments on the last representation, the embedding, in standard errors."""


def environment_effects(
    passed: Sequence[Tensor],
    environments: Environments | Sequence[Environments],
    labels: Tensor | Groups,
) -> EnvironmentEffects:
    r"""Compute how significant the effects of environments on a batch are, and how much they differ between labels.

    An effect of an environment on the cells of all labels is detected by pairs of cells within labels and by pairs
    across labels (see :func:`explained_variance`). An effect on the cells of one label is detected only by pairs within
    labels. The difference of both estimates is the **interaction** of environment and label. For pairs :math:`c`,
    within or across, the explained proportion of variance is :math:`\omega^2_c = T_c / (g_c D)`. Here :math:`T_c` is
    the sum of squares defined in :func:`explained_variance`, :math:`D` the number of features, and :math:`g_c` the
    value that :math:`T_c` would have for a feature whose variance is entirely due to the environment. The division by
    :math:`g_c` corrects for cells without a partner. The interaction that a batch shows beyond chance is

    .. math:: \max_s \bigl( \omega^2_{s, within} - \omega^2_{s, across} - 2\,\mathrm{sd} \bigr)_+,

    with the maximum over representations :math:`s`, and :math:`\mathrm{sd}` the standard deviation of the difference. A
    large interaction indicates that the environment changes the relation between a feature and the label. Such features
    are misleading even if z_c is invariant, since z_c may be computed from two of them.

    If cells have several environments, the interaction is the maximum over environments.

    Parameters
    ----------
    passed, environments, labels
        See :func:`invariance_statistic`. The last element of ``passed`` is the embedding.

    Returns
    -------
    - ``statistic``: invariance statistic of all representations, see :func:`invariance_statistic`;
    - ``interaction``: the interaction defined above, a proportion of the variance;
    - ``embedding_statistic``: invariance statistic of the embedding alone.

    All three are scalars. Only ``statistic`` has a gradient.

    Raises
    ------
    ValueError
        See :func:`invariance_statistic`.

    Examples
    --------
    >>> gene, well = torch.arange(512) % 4, torch.arange(512) // 4 % 2
    >>> noise = torch.randn(512, 8, generator=torch.manual_seed(0))
    >>> alike = noise + 2 * well[:, None]  # each well shifts all genes equally
    >>> differently = noise + 2 * (2 * well - 1)[:, None] * (2 * (gene % 2) - 1)[:, None]  # or differently
    >>> [round(float(environment_effects([x], well, gene).interaction), 1) for x in (alike, differently)]
    [0.0, 0.8]
    """
    design = BatchDesign(environments, labels)
    explained = [estimate_effects(features, design) for features in passed]
    statistic = in_errors(explained, design)
    with torch.no_grad():
        interactions = [_interaction(of_one, design) / x.shape[1] for of_one, x in zip(explained, passed, strict=True)]
        interaction = torch.stack(interactions).max()
        return EnvironmentEffects(statistic, interaction, in_errors(explained[-1:], design))


def _interaction(explained: Estimates, design: BatchDesign) -> Tensor:
    """Estimate the variance of one representation explained by effects of an environment that differ between labels.

    This interaction, summed over features, is the proportion of variance explained in pairs of cells within labels,
    minus the proportion explained in pairs across labels, minus two standard errors, and at least 0. It is 0 if the
    batch lacks pairs of one of these kinds. For several environments, it is the maximum.
    """
    found = []
    for pairings, estimates in zip(design.pairings, explained, strict=True):
        within, across = (estimates[name].per_gain(pairings[name]) for name in ("within", "across"))
        error = (within.scatter.square() + across.scatter.square()).sqrt()
        seen = (within.between - across.between - _INTERACTION_STANDARD_ERRORS * error).clamp(min=0)
        found.append(torch.where(pairings["within"].resolvable & pairings["across"].resolvable, seen, 0.0))
    return torch.stack(found).max()


Environments = Tensor | Groups
Partners = Literal["within", "across"]
# estimates for one representation: one dictionary per environment of a cell, from pairs within and across labels
Estimates = list[dict[Partners, PairingEstimate]]

# largest number of degrees of freedom that can be due to rounding, relative to 1 plus the trace of K, the matrix that
# averages over groups (see Pairing)
_FREEDOM_TOLERANCE = 1e-6


class Pairing:
    """Comparison of cells with their partners, conditional on the label, as a quadratic form M with expectation zero.

    The partners of a cell are the cells of its environment, with the same label (pairs within labels) or with any label
    (pairs across labels). M is a symmetric matrix over the cells of the batch, built from three matrices. R subtracts
    the mean of each label. K replaces each cell by the mean of its group of partners, and cells without a partner by 0.
    Q = R K R is the sum of squares that K explains, conditional on the label. It is positive even by chance, since it
    includes the product of each cell with itself. The vector ``own``, with one number per cell, corrects for this:
    M = Q - R diag(own) R has expectation zero, whatever the variances of the cells, if the environment has no effect.

    Parameters
    ----------
    label, group
        Labels of the cells, and groups of cells that are compared with each other: cells of the same environment, or of
        the same environment and label.
    pair
        Groups of the cells with the same label in the same group. If each group lies within one label, give ``group``
        itself.

    Attributes
    ----------
    own
        Correction for the product of each cell with itself, ``(B, 1)``.
    resolvable
        Whether the batch contains cells that can be compared, a boolean scalar.
    freedom_of_one
        Degrees of freedom if all labels have the same variance, a scalar; 0 if no cells can be compared.
    gain
        Value of the quadratic form M for a feature whose variance is entirely due to the environment, a scalar; 0 if no
        cells can be compared.
    """

    def __init__(self, label: Groups, group: Groups, pair: Groups) -> None:
        self._label, self._group = label, group
        n_label, n_group, n_pair = label.sizes, group.sizes, pair.sizes
        # diagonals of the matrices K and Q
        self._weight = torch.where(n_group > 1, 1 / n_group, 0.0)
        shared = label.sums(n_pair * self._weight) / n_label.square()
        diagonal = self._weight - 2 * n_pair * self._weight / n_label + shared
        # contribution of each cell to the squared norm of Q, if every group lies within one label
        kept = label.sums((n_group > 1).to(n_label)) / n_label
        self._inside = self._weight - 2 * n_pair * self._weight / n_label + kept.square() / n_label
        # otherwise, the norm is computed from the number of cells of each label (row) in each group (column)
        self._table = None if group is pair else label.table(group).float()

        # The numbers ``own`` are those for which all diagonal entries of M are zero; ``total`` is their sum per label.
        partnered = n_label > 1
        total = torch.where(partnered, label.sums(diagonal) / (1 - 1 / n_label), 0.0)
        several = 1 - 2 / n_label
        of_many = (diagonal - total / n_label.square()) / torch.where(n_label > 2, several, 1.0)
        self.own = torch.where(partnered, torch.where(n_label > 2, of_many, total / n_label), 0.0)
        # squared norm of Q minus the squared norm of M, as one contribution per cell; the two matrices differ only in
        # pairs of cells of the same label
        self._less = 2 * self.own * diagonal - self.own.square() * several * partnered
        self._less -= label.sums(self.own).square() / n_label**3
        freedom = self.freedom(torch.ones_like(n_label))
        # the trace of K, which is the sum of the weights, is the number of groups of more than one cell
        self.resolvable = freedom > _FREEDOM_TOLERANCE * (1 + self._weight.sum())
        self.freedom_of_one = torch.where(self.resolvable, freedom, 0.0)

        # The gain is computed from the groups' indicator columns (1 for the cells of a group, otherwise 0), from which
        # label means are subtracted. ``squares`` is the sum of squares over these columns for each cell, ``explained``
        # the part that K explains over all cells.
        squares = 1 - 2 * n_pair / n_label + label.sums(n_pair) / n_label.square()
        explained = ((n_group > 1) * squares).sum() if group is pair else self._explained_squares_of_indicators()
        # the value of M is at most the number of cells
        gain = (explained - (self.own * squares).sum()).clamp(min=0) / squares.mean().clamp(min=_FREEDOM_TOLERANCE)
        self.gain = torch.where(self.resolvable, gain, 0.0)

    def _explained_squares_of_indicators(self) -> Tensor:
        """Compute the sum of squares that K explains of the groups' indicator columns, less label means."""
        assert self._table is not None
        with torch.autocast(self._table.device.type, enabled=False):
            common = self._table / self._table.sum(1, keepdim=True).sqrt()
            n_group = self._table.sum(0)
            each = torch.where(n_group > 1, 1 / n_group, 0.0)
            if common.shape[0] > common.shape[1]:
                overlap = (common.T @ common).square().sum(0)
            else:
                overlap = (common * (common @ common.T @ common)).sum(0)
            alike = common.square().sum(0)
            return (each * (n_group.square() - 2 * n_group * alike + overlap)).sum().to(self._weight)

    def between(self, apart: Tensor) -> Tensor:
        """Compute the quadratic form M of the cells, summed over features.

        Its expectation is zero if the environment has no effect. ``apart (B, D)`` holds the differences of the cells
        from the means of their labels.
        """
        between_groups = self._weight * (apart * self._group.sums(apart)).sum(1, keepdim=True)
        return (between_groups - self.own * apart.square().sum(1, keepdim=True)).sum().to(apart.dtype)

    def freedom(self, variance: Tensor) -> Tensor:
        """Return the sum over all pairs of cells of ``M[i, j]**2 * variance[i] * variance[j]``.

        ``variance (B, 1)`` is the variance within each cell's label.

        If all variances are 1, the result is the number of degrees of freedom.
        """
        less = (self._less * variance.square()).sum()
        if self._table is None:
            return (self._inside * variance.square()).sum() - less
        of_label, n_label = self._label.first(variance).float(), self._table.sum(1, keepdim=True)
        n_group = self._table.sum(0)
        each = torch.where(n_group > 1, 1 / n_group, 0.0)
        mean = (of_label * self._table).sum(0) * each
        diagonal = (of_label / n_label * self._table.square()).sum(0) * each
        # one row per label, one column per group; inner products of columns are large if two groups contain the same
        # labels
        common = self._table * (of_label / n_label).sqrt() * each.sqrt()
        # autocast is disabled because the terms of the result may cancel, which requires full precision
        with torch.autocast(common.device.type, enabled=False):
            overlap = (common.T @ common) if common.shape[0] > common.shape[1] else (common @ common.T)
        squared_norm = mean.square().sum().to(self._weight) - 2 * (mean * diagonal).sum() + overlap.square().sum()
        return squared_norm - less


class BatchDesign:
    """Labels and environments of a batch, and all quantities of the estimates that do not depend on the features.

    Attributes
    ----------
    label
        Groups of the cells with the same label.
    n_label
        Number of cells that have the label of a cell, including the cell itself, ``(B, 1)``, float32.
    freedom
        Degrees of freedom within labels: the number of cells minus the number of labels.
    pairings
        One dictionary per environment of a cell, with the :class:`Pairing` ``"within"`` labels and ``"across"`` labels.
    """

    def __init__(self, environments: Environments | Sequence[Environments], labels: Tensor | Groups) -> None:
        columns = [environments] if isinstance(environments, Environments) else environments
        if not columns:
            msg = "environments is an empty sequence: give the codes of one, or of several side by side."
            raise ValueError(msg)
        for column in columns:
            _check_codes(column, labels)
        self.label = Groups.of(labels)
        self.n_label = self.label.sizes.float()
        self.freedom = (1 - 1 / self.n_label).sum()
        self.pairings: list[dict[Partners, Pairing]] = []
        for column in columns:
            environment = Groups.of(column)
            pair = self.label.cross(environment)
            within, across = Pairing(self.label, pair, pair), Pairing(self.label, environment, pair)
            self.pairings.append({"within": within, "across": across})


def _check_codes(environments: Environments, labels: Tensor | Groups) -> None:
    """Raise ``ValueError`` if environments and labels are not valid for one batch.

    Both need one value per cell and at least two cells, and codes of environments must not be floating-point numbers.
    """
    shapes = [tuple((given.labels if isinstance(given, Groups) else given).shape) for given in (environments, labels)]
    if len(shapes[1]) != 1 or shapes[0] != shapes[1]:
        msg = f"environments and labels must both be (B,), got {shapes[0]} and {shapes[1]}."
        raise ValueError(msg)
    if len(labels) < 2:
        msg = f"Variance is between cells: the batch holds {len(labels)}, give it at least 2."
        raise ValueError(msg)
    if isinstance(environments, Tensor) and environments.is_floating_point():
        msg = (
            f"environments are {environments.dtype}: give integer codes, and divide a quantity, such as time, into "
            "levels (pandas.qcut)."
        )
        raise ValueError(msg)
