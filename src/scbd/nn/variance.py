r"""Invariance as analysis of variance: what the environment explains of a feature, in units of what chance explains.

Write a feature of a cell with label :math:`y` and environment :math:`e` as
:math:`f = m_y + g_{ye} + \varepsilon`, with :math:`\sum_e p_{e|y}\, g_{ye} = 0`: what the label explains, what the
environment explains at equal label, and the rest. The environment's share of the variance is

.. math:: \omega^2 = \mathrm{E}\, g_{ye}^2 \,/\, \mathrm{Var} f,

the effect size of an analysis of variance. As an objective it has what the contrastive forms
(:func:`scbd.nn.invariance_loss`) lack:

- **It is a ratio.** Shrinking the embedding to a point, whole or one feature at a time, changes nothing. A collapse is
  not rewarded, however large its weight.
- **It is estimated without bias.** A product of two *different* cells of one environment has the expectation of
  :math:`g^2`; noise averages out, with however few partners. The absolute value of a noisy difference does not: it is
  positive under perfect invariance, the more so the fewer the partners, and calls for a smaller embedding where the
  batch is small or the environments many.
- **It asks for what the label does not explain.** Environments may differ in how often they show a label. And features
  whose average is the same in all environments, but which mean another label in each (a shade that is bright for a high
  digit here and for a low one there), are seen.
- **It knows its own error.** If the environment explains nothing, the estimate still scatters, the more so the smaller
  the batch, the more numerous the environments and the fewer the directions in use. Divided by that standard error, it
  says by how much a batch contradicts invariance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from scbd.nn.groups import Groups, pair_codes

if TYPE_CHECKING:
    from collections.abc import Sequence

# variance of a feature that carries nothing, far below what float32 can tell from zero beside one
_TINY = 1e-8


class ExplainedVariance(NamedTuple):
    """What the environment explains at equal label."""

    share: Tensor
    """Of the variance; 0 in expectation where the environment explains nothing, at most 1."""
    error: Tensor
    """Standard deviation of ``share`` where the environment explains nothing; 0 where there is nothing to compare."""


def explained_variance(features: Tensor, environments: Tensor, labels: Tensor) -> ExplainedVariance:
    r"""Share of the features' variance that the environment explains at equal label, and its standard error.

    Features are standardised over the batch. For cell :math:`i` with :math:`k_i` others of its label and environment,

    .. math:: \hat\omega^2 = \frac{1}{BD} \sum_i \frac{k_i}{k_i + 1}\,
              \big\langle f_i - \bar f_{y_i \setminus i},\; \bar f_{y_i e_i \setminus i} - \bar f_{y_i \setminus i}
              \big\rangle:

    whether the cell, and the others of its environment, differ in the same direction from all others of its label.
    The factor, the reliability of a mean of :math:`k` draws, counts a cell for what its partners can tell: one
    without any counts zero.

    If the environment explains nothing, environments could have been drawn anew within each label, and the share
    would scatter by

    .. math:: \mathrm{sd}(\hat\omega^2) \approx
              \frac{1}{BD} \sqrt{2 N\, \mathrm{E}_{i \ne j} \langle r_i, r_j \rangle^2},

    with residuals :math:`r` from the label's mean, and :math:`N` the number of differences between environments that
    the batch can tell: of each label the number of its environments less one, where those have many cells, and fewer
    where they have few. The fewer directions the residuals use, the larger it is.

    Parameters
    ----------
    features
        ``(B, D)``, of any scale. Half precision is computed in float32.
    environments, labels
        Integer codes, ``(B,)``.

    Returns
    -------
    ``share`` and ``error``, scalars, float32 or float64. No gradient flows through ``error``.

    Raises
    ------
    ValueError
        If the shapes do not match, or the batch holds fewer than two cells.

    References
    ----------
    Hays (1963), Statistics for psychologists: the effect size :math:`\omega^2`. The estimate and its use are ours.
    """
    return _explained(features, _Design(environments, labels))


def invariance_statistic(passed: Sequence[Tensor], environments: Tensor, labels: Tensor) -> Tensor:
    r"""By how much a batch contradicts invariance: the environment's share in standard errors, over representations.

    .. math:: \frac{1}{S} \sum_s \hat\omega^2_s \,/\, \mathrm{sd}(\hat\omega^2_s)

    Of order one, on either side of zero, where the environment explains nothing; its unit is the same whatever the
    batch, the number of labels and of environments, and the scale of the features. See :mod:`scbd.nn.variance`.

    Parameters
    ----------
    passed
        Representations of the same cells, each ``(B, D)``: usually all stages on the way to an embedding. An embedding
        may be blind to the environment because it computes the label from what differs between environments, in two
        steps; the first of them is seen on the way.
    environments, labels
        Integer codes, ``(B,)``.

    Returns
    -------
    A scalar, in standard errors.

    Raises
    ------
    ValueError
        See :func:`explained_variance`.
    """
    design = _Design(environments, labels)
    explained = [_explained(features, design) for features in passed]
    return torch.stack([torch.where(x.error > 0, x.share / x.error.clamp(min=_TINY), 0.0) for x in explained]).mean()


class _Design:
    """What is the same for all representations of a batch: partners, and what they can tell.

    ``own`` are a cell's partners of label and environment, ``every`` those of its label.
    """

    def __init__(self, environments: Tensor, labels: Tensor) -> None:
        if labels.ndim != 1 or environments.shape != labels.shape:
            shapes = f"{tuple(environments.shape)} and {tuple(labels.shape)}"
            msg = f"environments and labels must both be (B,), got {shapes}."
            raise ValueError(msg)
        if len(labels) < 2:
            msg = f"Variance is between cells: the batch holds {len(labels)}, give it at least 2."
            raise ValueError(msg)
        self.own, self.every = Groups(pair_codes(labels, environments)), Groups(labels)
        self.n_own, self.n_every = self.own.n_others[:, None], self.every.n_others[:, None]
        # how many groups can differ: of each label one less than there are, and those of one cell are none
        weight, size = self.n_own / (self.n_own + 1), self.n_every + 1
        mean = self.every.sums(weight) / size
        self.n_differences = (weight * (1 - weight) - 2 * weight.square() / size + mean.square() / size).sum()


def _explained(features: Tensor, design: _Design) -> ExplainedVariance:
    if features.ndim != 2 or len(features) != len(design.n_own):
        msg = f"features must be (B, D) for {len(design.n_own)} environments and labels, got {tuple(features.shape)}."
        raise ValueError(msg)
    with torch.autocast(features.device.type, enabled=False):
        f = features.to(torch.promote_types(features.dtype, torch.float32))
        f = f - f.mean(0)
        f = f * torch.rsqrt(f.square().mean(0) + _TINY)
        own, every = design.own.sums(f) - f, design.every.sums(f) - f
        apart = f - every / design.n_every.clamp(min=1)
        # k/(k+1) times the mean of k others is their sum over k+1
        of_environment = (own - design.n_own * (f - apart)) / (design.n_own + 1)
        return ExplainedVariance((apart * of_environment).mean(), _error(apart.detach(), design))


def _error(apart: Tensor, design: _Design) -> Tensor:
    """Standard deviation of the share if environments were drawn anew within each label."""
    # distances from the mean of the others are larger than from the true mean
    residuals = apart * torch.sqrt(design.n_every / (design.n_every + 1))
    # how alike two different cells are by chance; the Gram matrix has the norm of the covariance, if it is smaller
    products = residuals.T @ residuals if apart.shape[1] <= len(apart) else residuals @ residuals.T
    alike = products.square().sum() - residuals.square().sum(1).square().sum()
    n_pairs = len(apart) * (len(apart) - 1)
    return torch.sqrt((2 * design.n_differences * alike).clamp(min=0) / n_pairs) / apart.numel()
