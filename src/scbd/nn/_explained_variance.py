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

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scbd._shared.checks import check_choice
from scbd.nn._groups import Groups, copy_to, sum_rows

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
    row, found = ("within", "across").index(partners), estimate_effects([features], design)
    share, error = (values[row, 0].to(torch.promote_types(features.dtype, torch.float32)) for values in found)
    return ExplainedVariance(share, error, share.new_tensor(design.pairings[row].freedom_of_one))


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
    return environment_effects(passed, environments, labels).statistic


class Estimates(NamedTuple):
    """Estimates of the variance that environments explain, from P pairings (rows), for S representations (columns)."""

    share: Tensor
    """Estimated proportion of the variance of each representation, ``(P, S)``."""
    error: Tensor
    """Standard deviation of ``share`` if the environment explains no variance, ``(P, S)``, without gradient.

    It is 0 if there are no pairs to compare."""


def estimate_effects(passed: Sequence[Tensor], design: BatchDesign) -> Estimates:
    """Estimate the variance of representations that each environment explains, conditional on the label.

    Parameters
    ----------
    passed
        The S representations of the cells, ``(B, D)`` each. They are the columns of one matrix, since many operations
        on single representations would take longer on a GPU, however small they are.
    design
        The labels and the environments of the cells, with their P pairings.
    """
    label, widths = design.label, tuple(features.shape[-1] for features in passed)
    for features in passed:
        if features.ndim != 2 or len(features) != len(label):
            shape = tuple(features.shape)
            msg = f"features must be (B, D) for {len(label)} environments and labels, got {shape}."
            raise ValueError(msg)
    with torch.autocast(passed[0].device.type, enabled=False):
        x = torch.cat(list(passed), 1)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        column, averages, n_features = _columns(widths, x.device)
        mean = x.detach().mean(0)
        x = x - mean
        of_label = label.group_sums(x)
        apart = x - (of_label / label.group_sizes).index_select(0, label.index)
        # sums of squares between the groups of each pairing, less the squares of single cells, and total variance
        squares = torch.cat([apart, of_label, *design.environment_sums(apart)]).square()
        sums = (design.weights.to(x.dtype) @ squares).to(averages.dtype)
        between, variance = sums.split([len(design.pairings), 1])
        with torch.no_grad():
            # a feature is constant if its variance is negligible compared with its squared mean, or with the largest
            # variance of all features of its representation
            largest = variance.new_zeros(len(widths)).scatter_reduce(0, column, variance[0], "amax")
            constant = variance <= _ROUNDING * torch.maximum(mean.square(), largest.index_select(0, column))
        precision = variance.masked_fill(constant, torch.inf).reciprocal()
        share = (between * precision) @ averages

        with torch.no_grad():
            # variance within each label: it differs between labels, and determines how much estimates vary by chance
            of_cell = squares[: len(x)] @ (averages * precision.T).to(x.dtype)
            of_label = label.group_sums(of_cell).to(share.dtype)
            total = of_label.sum(0) / max(design.freedom, 1)
            nothing = total < _ROUNDING
            variances = (of_label + _PRIOR_FREEDOM * total) / (label.group_sizes - 1 + _PRIOR_FREEDOM)
            variances = variances.masked_fill(nothing, 1.0)
            scales = variances.rsqrt().index_select(1, column) * precision.sqrt()
            scaled = apart * scales.to(x.dtype).index_select(0, label.index)
            trace = (of_label / variances).sum(0) * n_features
            norms = _squared_covariance_norm(scaled.split(widths, 1), trace, design.freedom)
            by_chance = 2 / len(x) ** 2 * norms * design.freedoms(variances).clamp(min=0)
            return Estimates(share, by_chance.masked_fill(nothing, 0.0).sqrt())


@lru_cache(maxsize=16)
@torch.inference_mode(mode=False)
def _columns(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the columns of a matrix that holds S representations of the given widths next to each other.

    Returns
    -------
    Number of the representation of each of the C columns, int64 ``(C,)``; a matrix that averages over the columns of
    each representation, ``(C, S)``; and the widths, ``(S,)``.
    """
    of_column = np.arange(len(widths)).repeat(widths)
    averages = (of_column[:, None] == np.arange(len(widths))) / np.array(widths)
    return copy_to(device, of_column), copy_to(device, averages), copy_to(device, np.array(widths))


def _squared_covariance_norm(parts: Sequence[Tensor], trace: Tensor, freedom: int) -> Tensor:
    """Estimate, for each representation, the squared norm of the covariance of its features.

    The norm is relative to the sum of the features' variances. It is larger if the features vary in fewer directions.

    Parameters
    ----------
    parts
        Differences of the cells from the means of their labels, ``(B, D)`` for each of S representations.
    trace
        Sum of squares of each of them, ``(S,)``.
    freedom
        Degrees of freedom of the cells within labels.
    """
    # the Gram matrix of the cells has the same norm as the covariance of the features; the smaller of the two matrices
    # is computed
    products = [part.T @ part if part.shape[1] <= len(part) else part @ part.T for part in parts]
    norms = torch.stack([torch.linalg.vector_norm(product) for product in products])
    # the subtraction makes the estimate unbiased: chance similarities between few cells inflate the squared norm
    squares = ((norms / trace).square() - 1 / max(freedom, 1)).clamp(min=0)
    return squares * (freedom**2 / max((freedom - 1) * (freedom + 2), 1))


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
    share, error = estimate_effects(passed, design)
    # without any pairs the result is zero, but NaN if the estimate is NaN, so that invalid features remain visible
    in_errors = (share * (design.statistic_weights / error.masked_fill(error == 0, torch.inf))).sum(0)
    with torch.no_grad():
        shares, errors = design.gains * share, design.gains * error
        within, across = slice(len(shares) // 2), slice(len(shares) // 2, None)
        chance = torch.hypot(errors[within], errors[across])
        interaction = torch.sub(shares[within] - shares[across], chance, alpha=_INTERACTION_STANDARD_ERRORS)
    dtype = torch.promote_types(passed[-1].dtype, torch.float32)
    found = in_errors.mean(), interaction.clamp(min=0).amax(), in_errors.detach()[-1]
    return EnvironmentEffects(*(value.to(dtype) for value in found))


Environments = Tensor | Groups
Partners = Literal["within", "across"]
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
        Number of the label, and of the group of cells that are compared with each other, of each pair of label and
        environment that occurs in the batch, int64 ``(J,)``. A group holds the cells of one environment, or of one
        environment and label.
    n_pair, n_label
        Number of cells of each of these pairs, ``(J,)``, and of each of the L labels, ``(L,)``.

    Attributes
    ----------
    group_weights
        Inverse number of cells of each of the G groups, ``(G,)``; 0 for groups of one cell.
    own
        Correction for the product of a cell with itself, for the cells of each pair, ``(J,)``.
    of_squares, tables
        Terms of the degrees of freedom: coefficients of the squared variance within each label, ``(L,)``; and matrices
        for :func:`squared_norms`, ``(3, L, G)``, or `None` if each group lies within one label.
    resolvable
        Whether the batch contains cells that can be compared.
    freedom_of_one
        Degrees of freedom if all labels have the same variance; 0 if no cells can be compared.
    gain
        Value of the quadratic form M for a feature whose variance is entirely due to the environment; 0 if no cells can
        be compared.
    """

    def __init__(self, label: np.ndarray, group: np.ndarray, n_pair: np.ndarray, n_label: np.ndarray) -> None:
        n_group = np.bincount(group, n_pair)
        n, several = n_label[label], 1 - 2 / n_label[label]

        def sums(values: np.ndarray) -> np.ndarray:
            """Sum one value per cell over the cells of the label."""
            return np.bincount(label, n_pair * values)[label]

        # diagonals of the matrices K and Q
        self.group_weights = np.where(n_group > 1, 1 / n_group, 0.0)
        weight, in_group = self.group_weights[group], n_group[group] > 1
        diagonal = weight - 2 * n_pair * weight / n + sums(n_pair * weight) / n**2
        # The numbers ``own`` are those for which all diagonal entries of M are zero; ``total`` is their sum per label.
        total = sums(diagonal) / np.where(n > 1, 1 - 1 / n, np.inf)
        of_many = (diagonal - total / n**2) / np.where(n > 2, several, 1.0)
        self.own = (n > 1) * np.where(n > 2, of_many, total / n)
        # squared norm of Q minus the squared norm of M, as one contribution per cell; the two matrices differ only in
        # pairs of cells of the same label
        less = 2 * self.own * diagonal - (n > 1) * self.own**2 * several - sums(self.own) ** 2 / n**3
        # The gain is computed from the groups' indicator columns (1 for the cells of a group, otherwise 0), from which
        # label means are subtracted. ``squares`` is the sum of squares over these columns for each cell, ``explained``
        # the part that K explains over all cells.
        squares = 1 - 2 * n_pair / n + sums(n_pair) / n**2
        if len(n_group) == len(n_pair):
            # contribution of each cell to the squared norm of Q, if every group lies within one label
            inside = weight - 2 * n_pair * weight / n + (sums(in_group) / n) ** 2 / n
            self.of_squares, self.tables = np.bincount(label, n_pair * (inside - less)), None
            freedom, explained = self.of_squares.sum(), (n_pair * in_group * squares).sum()
        else:
            # otherwise, the norm is computed from the number of cells of each label (row) in each group (column)
            table = np.zeros((len(n_label), len(n_group)))
            table[label, group] = n_pair
            mean = table * self.group_weights
            root = table * np.sqrt(self.group_weights / n_label[:, None])
            self.tables = np.stack([mean, mean - 2 * table * mean / n_label[:, None], root])
            self.of_squares = -np.bincount(label, n_pair * less)
            freedom = self.of_squares.sum() + squared_norms(self.tables, np.ones((len(n_label), 1)))[0]
            explained = _explained_squares_of_indicators(table)
        # the trace of K is the number of groups of more than one cell
        self.resolvable = bool(freedom > _FREEDOM_TOLERANCE * (1 + (n_group > 1).sum()))
        self.freedom_of_one = float(freedom) * self.resolvable
        if not self.resolvable:
            self.of_squares, self.tables = 0 * self.of_squares, None
        # the value of M is at most the number of cells
        gain = max(explained - (n_pair * self.own * squares).sum(), 0)
        gain /= max((n_pair * squares).sum() / n_pair.sum(), _FREEDOM_TOLERANCE)
        self.gain = float(gain) * self.resolvable


def _explained_squares_of_indicators(table: np.ndarray) -> float:
    """Compute the sum of squares that K explains of the groups' indicator columns, less label means.

    ``table`` holds the number of cells of each label (row) in each group (column).
    """
    common, n_group = table / np.sqrt(table.sum(1, keepdims=True)), table.sum(0)
    overlap = (common * np.linalg.multi_dot([common, common.T, common])).sum(0)
    each = (n_group**2 - 2 * n_group * (common**2).sum(0) + overlap) / n_group
    return float(each[n_group > 1].sum())


def squared_norms(tables: Any, variances: Any) -> Any:
    """Compute the squared norm of the matrix Q, weighted by the variances within labels, from arrays or tensors.

    Parameters
    ----------
    tables
        ``tables`` of a :class:`Pairing` across labels, ``(3, L, G)``.
    variances
        Variances of S representations within each label, ``(L, S)``.

    Returns
    -------
    The squared norm for each representation, ``(S,)``.
    """
    mean, rest, root = tables
    # one row per label, one column per group; inner products of columns are large if two groups contain the same labels
    common = root * (variances.T**0.5)[:, :, None]
    turned = common.swapaxes(1, 2)
    overlap = turned @ common if len(root) > root.shape[1] else common @ turned
    return ((mean.T @ variances) * (rest.T @ variances)).sum(0) + (overlap**2).sum((1, 2))


class BatchDesign:
    """Labels and environments of a batch, and all quantities of the estimates that do not depend on the features.

    With K environments per cell, there are P = 2 K pairings: within labels for each environment, and then across
    labels.

    Attributes
    ----------
    label
        Groups of the cells with the same label.
    freedom
        Degrees of freedom within labels: the number of cells minus the number of labels.
    pairings
        The P pairings, each a :class:`Pairing`.
    weights
        Weights of squares, ``(P + 1, R)``, from which sums of squares are computed: the value of M of each pairing, and
        last the total variance, both per cell. The R squares are those of the cells, of the sums over the cells of each
        label, and of :meth:`environment_sums`.
    statistic_weights
        Weights of the pairings in the invariance statistic, ``(P, 1)``.
    gains
        Factors that convert the estimated proportions of variance to the scale on which pairings are compared, ``(P,
        1)``; 0 if the batch lacks pairs within or across labels.
    """

    def __init__(self, environments: Environments | Sequence[Environments], labels: Tensor | Groups) -> None:
        columns = [environments] if isinstance(environments, Environments) else environments
        if not columns:
            msg = "environments is an empty sequence: give the codes of one, or of several side by side."
            raise ValueError(msg)
        for column in columns:
            _check_codes(column, labels)
        self.label = label = Groups.of(labels)
        self.freedom = len(label) - len(label.counts)
        grouped = [Groups.of(column) for column in columns]
        self._pairs = [label.cross(environment) for environment in grouped]
        # number of the label and of the environment of each pair of label and environment
        of_pairs = [
            np.divmod(pair.distinct_labels, len(e.counts)) for pair, e in zip(self._pairs, grouped, strict=True)
        ]
        groups = [[np.arange(len(label_of_pair)) for label_of_pair, _ in of_pairs], [e for _, e in of_pairs]]
        self.pairings = [
            Pairing(label_of_pair, group, pair.counts, label.counts)
            for kind in groups
            for (label_of_pair, _), group, pair in zip(of_pairs, kind, self._pairs, strict=True)
        ]
        n, n_columns = len(label), len(columns)
        starts = np.cumsum([0, n, len(label.counts), *(len(p.group_weights) for p in self.pairings)])
        weights = np.zeros((len(self.pairings) + 1, starts[-1]))
        for row, pairing in enumerate(self.pairings):
            weights[row, :n] = -pairing.own[self._pairs[row % n_columns].codes]
            weights[row, starts[row + 2] : starts[row + 3]] = pairing.group_weights
        weights[-1, :n], weights[-1, n : starts[2]] = 1, 1 / label.counts
        # a column of the environments without any pairs does not count
        n_resolvable = np.array([p.resolvable for p in self.pairings]).reshape(2, n_columns).sum(0)
        share = 1 / np.maximum(n_resolvable, 1) / max((n_resolvable > 0).sum(), 1)
        gains = [n / max(p.gain, 1) for p in self.pairings] * np.tile(n_resolvable == 2, 2)
        self.weights = copy_to(label.device, weights / n)
        self.statistic_weights, self.gains = copy_to(label.device, np.stack([np.tile(share, 2), gains])[:, :, None])
        self._of_squares = copy_to(label.device, np.stack([p.of_squares for p in self.pairings]))
        self._tables = [None if p.tables is None else copy_to(label.device, p.tables) for p in self.pairings]
        self._environments = [copy_to(label.device, e) for e in groups[1]]

    def environment_sums(self, values: Tensor) -> list[Tensor]:
        """Sum ``values (B, D)`` of the cells over the groups of each pairing, one tensor ``(groups, D)`` each."""
        within = [pair.group_sums(values) for pair in self._pairs]
        across = [
            sum_rows(sums, e, len(pairing.group_weights))
            for sums, e, pairing in zip(within, self._environments, self.pairings[len(within) :], strict=True)
        ]
        return [*within, *across]

    def freedoms(self, variances: Tensor) -> Tensor:
        """Return, for each pairing, the sum over all pairs of cells of ``M[i, j]**2 * variance[i] * variance[j]``.

        Parameters
        ----------
        variances
            Variance of S representations within each label, ``(L, S)``.

        Returns
        -------
        The sums, ``(P, S)``. If all variances are 1, they are the numbers of degrees of freedom of the pairings.
        """
        found = self._of_squares @ variances.square()
        for row, tables in enumerate(self._tables):
            if tables is not None:
                found[row] += squared_norms(tables, variances)
        return found


def _check_codes(environments: Environments, labels: Tensor | Groups) -> None:
    """Raise ``ValueError`` if environments and labels are not valid for one batch.

    Both need one value per cell and at least two cells, and codes of environments must not be floating-point numbers.
    """
    shapes = [tuple(given.shape) for given in (environments, labels)]
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
