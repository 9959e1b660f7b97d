r"""Supervised contrastive and invariance losses on the unit sphere (Makino et al., 2025, section 2).

Both losses speak of the probability that anchor :math:`i` is matched with partner :math:`j`,

.. math:: \log P_{ij} = z_i \cdot z_j / \tau - \log \sum_{a} \exp(z_i \cdot z_a / \tau),

and both only ever need *sums* of :math:`\log P_{ij}` over the partners that share a label. Such a sum is one
product with a class sum, :math:`z_i \cdot S_{u_i}` where :math:`S_u = \sum_{j: u_j = u} z_j`, so neither masks nor a
second softmax are formed: one log-sum-exp over the Gram matrix is all that is quadratic in time, it is streamed in
memory O(B·D), and both losses on one embedding can share it (:func:`log_normaliser`).

The paper prints a formula and a listing that differ (and the published numbers come from the listing):

============  ======================================  =========================================
..            formula                                 listing
============  ======================================  =========================================
normaliser    all others (``include_self=False``)     the whole row (``include_self=True``)
supervised    sum over anchors (``reduction="sum"``)  mean over anchors (``reduction="mean"``)
invariance    ``reduction="formula"``                 ``reduction="listing"``
============  ======================================  =========================================
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from scbd.nn._anchors import mean_over, sum_over
from scbd.nn._groups import Groups
from scbd.nn._log_sums import log_sums
from scbd.nn._loss_inputs import check_smoothing, checked_batch

InvarianceReduction = Literal["listing", "formula", "mean", "mass"]


def log_normaliser(
    z: Tensor, *, temperature: float = 0.1, include_self: bool = True, without: Tensor | Groups | None = None
) -> Tensor:
    r"""The part that the losses on one embedding have in common: :math:`\log \sum_a \exp(z_i \cdot z_a / \tau)`.

    Pass it to :func:`supervised_contrastive_loss` and :func:`invariance_loss` to compute it once for both. It is
    quadratic in time, linear in memory, and has no second derivative.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether :math:`a = i` is in the sum: the listing keeps it, the formula does not.
    without
        Integer labels, shape ``(B,)``, or their :class:`Groups`: others of an anchor's label are left out of its sum.

    Returns
    -------
    Shape ``(B,)``, float32 or float64.

    Raises
    ------
    ValueError
        If ``z`` is not a batch of at least two vectors of unit length, to 1 %, or the temperature is not above 1/350.
        Lengths are looked at on the CPU alone: elsewhere, the processor would wait for the device.

    Examples
    --------
    >>> z = torch.nn.functional.normalize(torch.randn(8, 4, generator=torch.manual_seed(0)), dim=1)
    >>> scbd.nn.log_normaliser(z).shape
    torch.Size([8])
    """
    left_out = None if without is None else Groups.of(without).labels
    z = checked_batch(z, temperature, left_out, "without")
    with torch.autocast(z.device.type, enabled=False):
        *_, others = log_sums(z, temperature, left_out)
        return torch.logaddexp(others, (z * z).sum(1) / temperature) if include_self else others


def supervised_contrastive_loss(
    z: Tensor,
    labels: Tensor | Groups,
    *,
    environments: Tensor | Groups | None = None,
    temperature: float = 0.1,
    smoothing: float = 0.0,
    include_self: bool = True,
    reduction: Literal["mean", "sum"] = "mean",
    anchors: Tensor | None = None,
    log_normaliser: Tensor | None = None,
) -> Tensor:
    r"""Pull embeddings of one label together, push all others apart.

    .. math:: L^{sup} = -\sum_i \frac{1}{|P(i)|} \sum_{p \in P(i)} \log P_{ip},
       \qquad P(i) = \{p \ne i : u_p = u_i\}

    with the mean over anchors in place of the sum for ``reduction="mean"``. An anchor without a positive contributes
    zero, with smoothing too (and is still counted by the mean, as in the published code). Embeddings that have
    collapsed to one point cost exactly :math:`\log B` an anchor, or :math:`\log(B-1)` without self-similarity: see
    :func:`contrastive_ceiling`.

    **Label smoothing** (Szegedy et al., 2016) with :math:`\varepsilon` asks for a match with a partner of the label
    with probability :math:`1 - \varepsilon`, and with anyone else otherwise:

    .. math:: -\sum_i \Big[ \frac{1 - \varepsilon}{|P(i)|} \sum_{p \in P(i)} \log P_{ip} +
              \frac{\varepsilon}{B - 1} \sum_{a \ne i} \log P_{ia} \Big].

    Cells that carry a label without showing it (guides that do not cut, phenotypes of some cells only) then need not be
    told apart from all others at any price: on the sphere, where every embedding has the same length, "cannot tell"
    has a place in the middle of a cap. The published invariance loss does nearly this where environments are many, see
    :func:`invariance_loss`; a point costs what it cost before.

    **Positives of other environments.** With ``environments``, a cell's partners are those of its label in other
    environments, and those of its label in its own are no part of its sums at all: neither sought nor avoided. What
    the cells of one well share then brings no two partners together.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``. Half precision is computed in float32.
    labels
        Integer labels, shape ``(B,)``, or their :class:`Groups` where several losses read them.
    environments
        The same of environments: positives are taken from other ones only. By default, from all.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether :math:`\exp(z_i \cdot z_i/\tau)` stays in the normaliser: the listing keeps it, the formula does not.
    smoothing
        :math:`\varepsilon`, at least 0 and below 1.
    reduction
        ``"mean"`` (the listing) or ``"sum"`` (the formula) over anchors.
    anchors
        Boolean, ``(B,)``: which cells are anchors; the others are their partners alone. By default all.
    log_normaliser
        What :func:`log_normaliser` returned for the same embeddings, temperature and ``include_self``; with
        ``environments``, ``without`` those that share label and environment.

    Returns
    -------
    A scalar, float32 or float64.

    Raises
    ------
    ValueError
        If the shapes do not match, the batch holds fewer than two examples, ``z`` is not of unit length (see
        :func:`log_normaliser`), or smoothing is not below 1.

    References
    ----------
    Khosla et al. (2020), Supervised Contrastive Learning; Makino et al. (2025), eq. 1 and appendix B. Szegedy et al.
    (2016), Rethinking the Inception architecture for computer vision.

    Examples
    --------
    >>> z = torch.nn.functional.normalize(torch.randn(8, 4, generator=torch.manual_seed(0)), dim=1)
    >>> perturbation = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    >>> loss = scbd.nn.supervised_contrastive_loss(z, perturbation)
    >>> point = scbd.nn.supervised_contrastive_loss(z[:1].expand(8, 4), perturbation)  # all cells in one place
    >>> round(float(point), 3) == round(scbd.nn.contrastive_ceiling(8), 3)
    True
    """
    check_smoothing(smoothing)
    partners = Groups.of(labels)
    z = checked_batch(z, temperature, partners.labels, "labels")
    left_out = None
    if environments is not None:
        environments = Groups.of(environments)
        checked_batch(z, temperature, environments.labels, "environments")
        left_out = partners.crossed(environments)
    if log_normaliser is None:
        log_normaliser = _log_normaliser(z, temperature=temperature, include_self=include_self, without=left_out)
    with torch.autocast(z.device.type, enabled=False):
        aside, n_aside = (z, 0) if left_out is None else (left_out.sums(z), left_out.n_others)

        def unmatched(sums: Tensor, n: Tensor) -> Tensor:
            """Mean of -log P over n others of an anchor, given by the sum of these and of those aside."""
            return log_normaliser - (z * (sums - aside)).sum(1) / temperature / n.clamp(min=1)

        n_positives = partners.n_others - n_aside
        per_anchor = unmatched(partners.sums(z), n_positives)
        if smoothing:
            everyone = torch.full_like(partners.n_others, len(z) - 1) - n_aside
            per_anchor = torch.lerp(per_anchor, unmatched(z.sum(0), everyone), smoothing)
        per_anchor = torch.where(n_positives > 0, per_anchor, 0.0)
    if reduction == "mean":
        return mean_over(per_anchor, anchors)
    if reduction == "sum":
        return sum_over(per_anchor, anchors)
    msg = f"reduction={reduction!r} is not known: use 'mean' (the published listing) or 'sum' (the paper's formula)."
    raise ValueError(msg)


def invariance_loss(
    z: Tensor,
    environments: Tensor | Groups,
    *,
    temperature: float = 0.1,
    include_self: bool = True,
    reduction: InvarianceReduction = "listing",
    log_normaliser: Tensor | None = None,
) -> Tensor:
    r"""Make an anchor as likely to be matched within its environment as outside of it.

    Write :math:`P_e(i)` for the other examples of the anchor's environment, :math:`N_e(i)` for those of all others,
    and :math:`n_i^+, n_i^-` for how many there are. The forms are

    ``"listing"`` (the published code)
        .. math:: \frac{1}{B} \sum_i \frac{1}{B} \Big|\sum_{p \in P_e(i)} \log P_{ip} -
                  \sum_{n \in N_e(i)} \log P_{in}\Big|
    ``"formula"`` (the paper's equation, summed over anchors)
        .. math:: \sum_i \Big|\sum_{p \in P_e(i)} \log P_{ip} - \sum_{n \in N_e(i)} \log P_{in}\Big|
    ``"mean"`` (per-term means)
        .. math:: \frac{1}{B} \sum_i \Big|\tfrac{1}{n_i^+} \sum_{p} \log P_{ip} - \tfrac{1}{n_i^-} \sum_{n}
                  \log P_{in}\Big| = \frac{1}{B} \sum_i |z_i \cdot (\mu_i^+ - \mu_i^-)| / \tau
    ``"mass"`` (probability mass against frequency)
        .. math:: \frac{1}{B} \sum_i \Big|\log \sum_p P_{ip} - \log \sum_n P_{in} - \log \frac{n_i^+}{n_i^-}\Big|

    **Which one.** With two balanced environments the two sums of the listing have equally many terms and all forms
    ask for the same thing. With :math:`E` environments there are about :math:`E-1` times more negatives than
    positives. The two *sums* then cannot be equal, and what the listing can still do is to shrink every
    :math:`|\log P_{ij}|`: it pulls all embeddings together, whatever their label, those of different environments with
    all its weight and pushes those of the same one apart. Beside the supervised loss this is, but for a constant,
    smoothing of labels with :math:`\varepsilon \approx \alpha / (1 + \alpha)`, and twice
    :math:`\alpha / E` times the mean log-probability of the own environment. ``"mean"`` compares like with like: the
    normaliser cancels, and the loss is zero exactly when, seen from each anchor, the mean of its own environment and
    the mean of the others (:math:`\mu_i^\pm`) lie in the same direction; it speaks of first moments only.
    ``"mass"`` also cancels the normaliser and is zero when the own environment is matched as often as its frequency
    says, which involves all moments of the similarities. Both are sound for many, unbalanced environments, and for
    both ``include_self`` makes no difference. Their strength differs from the listing's, so an ``alpha`` does not
    carry over from one form to another.

    An anchor alone in its environment, or in a batch of one environment, has nothing to compare: for ``"mean"`` and
    ``"mass"`` it contributes zero; for ``"listing"`` and ``"formula"`` the empty sum is zero, as in the published
    code, so that a batch of a single environment does **not** cost zero.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``. Half precision is computed in float32.
    environments
        Integer environment labels, shape ``(B,)``, or their :class:`Groups`.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether :math:`\exp(z_i \cdot z_i/\tau)` stays in the normaliser: the listing keeps it, the formula does not.
    reduction
        The form, see above.
    log_normaliser
        What :func:`log_normaliser` returned for the same embeddings, temperature and ``include_self``; the forms
        ``"mean"`` and ``"mass"`` have no use for it.

    Returns
    -------
    A scalar, float32 or float64.

    Raises
    ------
    ValueError
        If the shapes do not match, the batch holds fewer than two examples, or ``z`` is not of unit length (see
        :func:`log_normaliser`).

    References
    ----------
    Makino et al. (2025), section 2 and appendix B.

    Examples
    --------
    >>> z = torch.nn.functional.normalize(torch.randn(2, 4, generator=torch.manual_seed(0)), dim=1).repeat(4, 1)
    >>> mixed = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])  # either embedding is as often in either well
    >>> told = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])  # the embedding says which well it is
    >>> float(scbd.nn.invariance_loss(z, mixed)) < 1 < float(scbd.nn.invariance_loss(z, told))
    True
    """
    neighbours = Groups.of(environments)
    z = checked_batch(z, temperature, neighbours.labels, "environments")
    if reduction not in get_args(InvarianceReduction):
        msg = f"reduction={reduction!r} is not known: use one of {', '.join(get_args(InvarianceReduction))}."
        raise ValueError(msg)
    with torch.autocast(z.device.type, enabled=False):
        of_environment, n_own = neighbours.sums(z), neighbours.n_others
        own, other = of_environment - z, z.sum(0) - of_environment
        n_other = len(z) - 1 - n_own
        informative = (n_own > 0) & (n_other > 0)
        if reduction == "mass":
            inside, outside = log_sums(z, temperature, neighbours.labels)
            chance = torch.log(n_own.clamp(min=1).to(z.dtype)) - torch.log(n_other.clamp(min=1).to(z.dtype))
            return torch.where(informative, inside - outside - chance, 0.0).abs().mean()
        if reduction == "mean":
            apart = own / n_own.clamp(min=1)[:, None] - other / n_other.clamp(min=1)[:, None]
            difference = (z * apart).sum(1) / temperature
            return torch.where(informative, difference.abs(), 0.0).mean()
        if log_normaliser is None:
            log_normaliser = _log_normaliser(z, temperature=temperature, include_self=include_self)
        difference = (z * (own - other)).sum(1) / temperature - (n_own - n_other) * log_normaliser
        if reduction == "formula":
            return difference.abs().sum()
        return difference.abs().mean() / len(z)


# where an argument has the function's name
_log_normaliser = log_normaliser
