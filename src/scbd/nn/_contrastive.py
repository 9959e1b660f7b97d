r"""Supervised contrastive loss and invariance losses on the unit sphere (Makino et al., 2025, section 2).

Both losses use the probability that anchor :math:`i` is matched with partner :math:`j`,

.. math:: \log P_{ij} = z_i \cdot z_j / \tau - \log \sum_{a} \exp(z_i \cdot z_a / \tau).

Both losses need only *sums* of :math:`\log P_{ij}` over the partners that share a label. Such a sum is a product with a
class sum, :math:`z_i \cdot S_{u_i}` with :math:`S_u = \sum_{j: u_j = u} z_j`. Masks and a second softmax are therefore
not needed. The only computation with quadratic time is one log-sum-exp over the Gram matrix. It is computed tile by
tile with O(B·D) memory, and both losses on one embedding can use the same result (:func:`log_normaliser`).

The paper prints a formula and a code listing that differ. The published numbers come from the listing:

============  ======================================  =========================================
..            formula                                 listing
============  ======================================  =========================================
normaliser    all others (``include_self=False``)     the whole row (``include_self=True``)
supervised    sum over anchors (``reduction="sum"``)  mean over anchors (``reduction="mean"``)
invariance    ``reduction="formula"``                 ``reduction="listing"``
============  ======================================  =========================================
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from scbd._shared import linear_maps
from scbd._shared.checks import check_choice
from scbd.nn._groups import Groups
from scbd.nn._log_sum_exp import MIN_TEMPERATURE, log_sum_exp

if TYPE_CHECKING:
    pass

InvarianceReduction = Literal["listing", "formula", "mean", "mass"]


def log_normaliser(
    z: Tensor, *, temperature: float = 0.1, include_self: bool = True, without: Tensor | Groups | None = None
) -> Tensor:
    r"""Compute the term that the losses on one embedding share: :math:`\log \sum_a \exp(z_i \cdot z_a / \tau)`.

    Give the result to :func:`supervised_contrastive_loss` and :func:`invariance_loss` to compute it only once. Time is
    quadratic in the batch size, memory is linear. Second derivatives are not supported.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether the sum includes the anchor itself (:math:`a = i`). The paper's listing includes it, the paper's formula
        does not.
    without
        Integer labels, shape ``(B,)``, or their :class:`Groups`. Other cells with the anchor's label are excluded from
        the anchor's sum. By default no cell is excluded.

    Returns
    -------
    Logarithm of the sum for each anchor, shape ``(B,)``, float32 or float64.

    Raises
    ------
    ValueError
        If ``z`` is not a batch of at least two vectors of unit length (to within 1 %), or if the temperature is not
        above 1/350. Lengths are checked only on the CPU. On other devices the check would make the processor wait for
        the device.

    Examples
    --------
    >>> z = torch.nn.functional.normalize(torch.randn(8, 4, generator=torch.manual_seed(0)), dim=1)
    >>> scbd.nn.log_normaliser(z).shape
    torch.Size([8])
    """
    left_out = None if without is None else Groups.of(without).labels
    z = validate_embeddings(z, temperature, left_out, "without")
    with torch.autocast(z.device.type, enabled=False):
        *_, others = log_sum_exp(z, temperature, left_out)
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
    r"""Pull embeddings with the same label together and push all others apart.

    .. math:: L^{sup} = -\sum_i \frac{1}{|P(i)|} \sum_{p \in P(i)} \log P_{ip},
       \qquad P(i) = \{p \ne i : u_p = u_i\}

    With ``reduction="mean"``, the mean over anchors replaces the sum over anchors. An anchor without a positive
    contributes zero, also with smoothing. The mean still counts this anchor, as in the published code. If all
    embeddings have collapsed to one point, the loss per anchor is exactly :math:`\log B`, or :math:`\log(B-1)` with
    ``include_self=False``.

    **Label smoothing** (Szegedy et al., 2016) with :math:`\varepsilon` changes the target of an anchor: it should be
    matched with a partner of its label with probability :math:`1 - \varepsilon`, and otherwise with any other cell:

    .. math:: -\sum_i \Bigl[ \frac{1 - \varepsilon}{|P(i)|} \sum_{p \in P(i)} \log P_{ip} +
              \frac{\varepsilon}{B - 1} \sum_{a \ne i} \log P_{ia} \Bigr].

    Some cells carry a label without showing its phenotype, for example because a guide does not cut, or because only
    some cells show the phenotype. With smoothing, the loss of such cells is limited when they are not distinguished
    from all others. All embeddings on the sphere have the same length, so an embedding cannot express uncertainty by
    its length; it does so by a position between the labels. With many environments, the published invariance loss has
    nearly the same effect (see :func:`invariance_loss`). Smoothing does not change the loss of a collapsed embedding.

    **Positives from other environments.** With ``environments``, the partners of a cell are the cells with its label in
    other environments. Cells with the same label *and* the same environment are excluded from all sums of the anchor:
    they are neither attracted nor repelled. Features that are common to the cells of one well then cannot be used to
    match partners.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``. Half precision is converted to float32.
    labels
        Integer labels, shape ``(B,)``, or their :class:`Groups` if several losses use the same labels.
    environments
        Integer environment labels, shape ``(B,)``, or their :class:`Groups`. If given, positives are taken only from
        other environments. By default positives are taken from all environments.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether :math:`\exp(z_i \cdot z_i/\tau)` is part of the normaliser. The paper's listing includes it, the paper's
        formula does not.
    smoothing
        :math:`\varepsilon`, at least 0 and below 1.
    reduction
        ``"mean"`` (the paper's listing) or ``"sum"`` (the paper's formula) over anchors.
    anchors
        Which cells are anchors, boolean, ``(B,)``. The other cells serve only as partners. By default all cells are
        anchors.
    log_normaliser
        Result of :func:`log_normaliser` for the same embeddings, temperature and ``include_self``, to save time. With
        ``environments``, it must be computed ``without`` the cells that share the anchor's label and environment.

    Returns
    -------
    The loss, a scalar, float32 or float64.

    Raises
    ------
    ValueError
        If the shapes do not match, the batch holds fewer than two examples, ``z`` is not of unit length (see
        :func:`log_normaliser`), ``smoothing`` is not at least 0 and below 1, or ``reduction`` is unknown.

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
    >>> round(float(point), 3) == round(float(np.log(8)), 3)
    True
    """
    check_smoothing(smoothing)
    partners = Groups.of(labels)
    z = validate_embeddings(z, temperature, partners.labels, "labels")
    left_out = None
    if environments is not None:
        environments = Groups.of(environments)
        validate_embeddings(z, temperature, environments.labels, "environments")
        left_out = partners.cross(environments)
    if log_normaliser is None:
        log_normaliser = _log_normaliser(z, temperature=temperature, include_self=include_self, without=left_out)
    with torch.autocast(z.device.type, enabled=False):
        aside, n_aside = (z, 0) if left_out is None else (left_out.sums(z), left_out.n_others)

        def unmatched(sums: Tensor, n: Tensor) -> Tensor:
            """Return the mean of -log P over ``n`` partners per anchor; ``sums`` still includes the excluded cells."""
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

    Let :math:`P_e(i)` be the other examples of the anchor's environment and :math:`N_e(i)` the examples of all other
    environments. Let :math:`n_i^+` and :math:`n_i^-` be their numbers. The forms of the loss are

    ``"listing"`` (the published code)
        .. math:: \frac{1}{B} \sum_i \frac{1}{B} \Bigl|\sum_{p \in P_e(i)} \log P_{ip} -
                  \sum_{n \in N_e(i)} \log P_{in}\Bigr|
    ``"formula"`` (the paper's equation, summed over anchors)
        .. math:: \sum_i \Bigl|\sum_{p \in P_e(i)} \log P_{ip} - \sum_{n \in N_e(i)} \log P_{in}\Bigr|
    ``"mean"`` (per-term means)
        .. math:: \frac{1}{B} \sum_i \Bigl|\tfrac{1}{n_i^+} \sum_{p} \log P_{ip} - \tfrac{1}{n_i^-} \sum_{n}
                  \log P_{in}\Bigr| = \frac{1}{B} \sum_i |z_i \cdot (\mu_i^+ - \mu_i^-)| / \tau
    ``"mass"`` (probability mass against frequency)
        .. math:: \frac{1}{B} \sum_i \Bigl|\log \sum_p P_{ip} - \log \sum_n P_{in} - \log \frac{n_i^+}{n_i^-}\Bigr|

    **Which form to choose.** With two balanced environments, the two sums of the listing have equally many terms, and
    all forms have nearly the same objective. With :math:`E` environments there are about :math:`E-1` times more
    negatives than positives, so that the two *sums* cannot be equal. The listing can then only be reduced by shrinking
    every :math:`|\log P_{ij}|`. This pulls embeddings of different environments together, whatever their label, and
    pushes embeddings of the same environment apart.

    Add the listing with weight :math:`\alpha` to the supervised loss. With many environments, it then equals, up to a
    constant, label smoothing with :math:`\varepsilon \approx \alpha / (1 + \alpha)` plus :math:`2 \alpha / E` times the
    mean log-probability of the anchor's own environment.

    The forms ``"mean"`` and ``"mass"`` are valid for many and for unbalanced environments:

    - ``"mean"``: the normaliser cancels. The loss is zero exactly when, for every anchor, the mean embedding of its own
      environment (:math:`\mu_i^+`) and the mean embedding of the others (:math:`\mu_i^-`) have the same projection on
      the anchor. Only first moments enter.
    - ``"mass"``: the normaliser cancels as well. The loss is zero when an anchor is matched with its own environment as
      often as this environment occurs in the batch. All moments of the similarities enter.

    For both, ``include_self`` makes no difference. Their scale differs from that of the listing. A value of ``alpha``
    tuned for one form is therefore not suitable for another.

    An anchor has no comparison if it is alone in its environment or if the batch holds a single environment. With
    ``"mean"`` and ``"mass"``, such an anchor contributes zero. With ``"listing"`` and ``"formula"``, only the empty sum
    is zero, as in the published code, so that the loss of a batch with a single environment is **not** zero.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``. Half precision is converted to float32.
    environments
        Integer environment labels, shape ``(B,)``, or their :class:`Groups`.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether :math:`\exp(z_i \cdot z_i/\tau)` is part of the normaliser. The paper's listing includes it, the paper's
        formula does not.
    reduction
        The form of the loss, see above.
    log_normaliser
        Result of :func:`log_normaliser` for the same embeddings, temperature and ``include_self``, to save time. The
        forms ``"mean"`` and ``"mass"`` do not use it.

    Returns
    -------
    The loss, a scalar, float32 or float64.

    Raises
    ------
    ValueError
        If the shapes do not match, the batch holds fewer than two examples, ``z`` is not of unit length (see
        :func:`log_normaliser`), or ``reduction`` is unknown.

    References
    ----------
    Makino et al. (2025), section 2 and appendix B.

    Examples
    --------
    >>> z = torch.nn.functional.normalize(torch.randn(2, 4, generator=torch.manual_seed(0)), dim=1).repeat(4, 1)
    >>> mixed = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])  # either embedding is as often in either well
    >>> sorted_by_well = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])  # the embedding says which well it is
    >>> float(scbd.nn.invariance_loss(z, mixed)) < 1 < float(scbd.nn.invariance_loss(z, sorted_by_well))
    True
    """
    neighbours = Groups.of(environments)
    z = validate_embeddings(z, temperature, neighbours.labels, "environments")
    check_choice("reduction", reduction, InvarianceReduction)
    with torch.autocast(z.device.type, enabled=False):
        of_environment, n_own = neighbours.sums(z), neighbours.n_others
        own, other = of_environment - z, z.sum(0) - of_environment
        n_other = len(z) - 1 - n_own
        informative = (n_own > 0) & (n_other > 0)
        if reduction == "mass":
            inside, outside = log_sum_exp(z, temperature, neighbours.labels)
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


# the function under a second name, for use where an argument is called log_normaliser
_log_normaliser = log_normaliser


def collapsed_loss(batch_size: int, *, include_self: bool = True) -> float:
    """Return the supervised contrastive loss of a batch in which all embeddings are the same point.

    The value is ``log B``, or ``log(B - 1)`` with ``include_self=False``. If the loss of a trained embedding stays at
    this value, the embedding has collapsed and distinguishes no labels.

    Examples
    --------
    >>> round(contrastive_ceiling(512), 3)
    6.238
    """
    return math.log(batch_size if include_self else batch_size - 1)


def normalised_supervised_information(
    loss: Tensor,
    labels: Tensor | Groups,
    *,
    smoothing: float = 0.0,
    include_self: bool = True,
    anchors: Tensor | None = None,
) -> Tensor:
    r"""Compute the normalised supervised information of an embedding: at most 1, 0 if collapsed, below 0 if worse.

    The value compares the loss with the loss of a collapsed embedding (:func:`collapsed_loss`). If all embeddings
    are one point, a cell (the anchor) of label :math:`u` is matched with its own label as often as the label occurs,
    :math:`\pi_u`. The target of the loss is :math:`m_u = 1 - \varepsilon + \varepsilon\,(n_u - 1) / (B - 1)`, with
    :math:`\varepsilon` the smoothing and :math:`n_u` the number of cells of the label. The loss of an embedding that
    reaches the target is below that of the point by a Kullback-Leibler divergence, the mean over anchors of

    .. math:: m_u \log \frac{m_u}{\pi_u} + (1 - m_u) \log \frac{1 - m_u}{1 - \pi_u}.

    Without smoothing, this is the entropy of the labels. The normalised supervised information is the difference
    between the loss of the point and the loss of the embedding, divided by this divergence.

    Anchors without a partner carry no information and are excluded from the numerator and the denominator. Shuffled
    batches with many labels, in which most cells have no partner, therefore give the same value as batches in which all
    cells have one, provided that labels are equally rare.

    Where labels are rarer, the same embedding gets a lower value. If the embedding matches an anchor :math:`w` times as
    readily with a cell of its label as with another cell, the value is
    :math:`1 - \mathrm{KL}(m_u \| P_u) / \mathrm{KL}(m_u \| \pi_u)` with :math:`P_u = w \pi_u / (1 + (w - 1) \pi_u)`.
    Compare only values of batches that are drawn in the same way.

    Parameters
    ----------
    loss
        Result of :func:`supervised_contrastive_loss` for these labels, with ``reduction="mean"``.
    labels
        Integer labels, shape ``(B,)``, or their :class:`Groups`.
    smoothing, include_self, anchors
        The same values as in the loss.

    Returns
    -------
    A scalar. It is 0 where labels carry no information (all cells have one label, or each cell has its own label) and
    where there is no anchor.

    Examples
    --------
    >>> gene = torch.arange(64) % 4
    >>> z = torch.nn.functional.one_hot(gene, 4).float()  # a corner for each gene
    >>> loss = scbd.nn.supervised_contrastive_loss(z, gene)
    >>> round(float(share_learned(loss, gene)), 2)
    1.0
    """
    n_positives, size = Groups.of(labels).n_others, len(labels)
    partnered = n_positives > 0
    asked = 1 - smoothing + smoothing * n_positives / (size - 1)
    frequency = (n_positives + 1) / size if include_self else n_positives / (size - 1)
    informative = partnered & (frequency < 1) & (True if anchors is None else anchors)
    divergence = torch.xlogy(asked, asked / frequency) + torch.xlogy(1 - asked, (1 - asked) / (1 - frequency))
    most = mean_over(torch.where(informative, divergence, 0.0), anchors)
    with_partner = mean_over(torch.where(partnered, 1.0, 0.0), anchors)
    of_a_point = with_partner * collapsed_loss(size, include_self=include_self)
    return torch.where(informative.any(), (of_a_point - loss) / most, 0.0)


# largest tolerated deviation of a vector's length from 1; half precision rounds unit vectors by less
_LENGTH_TOLERANCE = 0.01


def check_smoothing(smoothing: float) -> None:
    """Raise ``ValueError`` unless smoothing is at least 0 and below 1."""
    if not 0 <= smoothing < 1:
        msg = f"smoothing is a probability below 1, at which labels say nothing; got {smoothing}."
        raise ValueError(msg)


def check_temperature(temperature: float) -> None:
    """Raise ``ValueError`` unless the temperature is finite and large enough for finite logits."""
    if not MIN_TEMPERATURE < temperature < math.inf:
        msg = (
            f"temperature must be a number above {MIN_TEMPERATURE:.4f} (exp(1/temperature) overflows), got "
            f"{temperature}."
        )
        raise ValueError(msg)


def validate_embeddings(z: Tensor, temperature: float, labels: Tensor | None = None, name: str = "") -> Tensor:
    """Return ``z`` in float32 or float64, or raise ``ValueError`` if embeddings, temperature or labels are invalid."""
    if z.ndim != 2 or (labels is not None and labels.shape != z.shape[:1]):
        msg = f"z must be (B, D), got {tuple(z.shape)}."
        if labels is not None:
            msg = f"z must be (B, D) and {name} (B,), got {tuple(z.shape)} and {tuple(labels.shape)}."
        raise ValueError(msg)
    if len(z) < 2:
        msg = f"A contrastive loss compares examples with each other: the batch holds {len(z)}, give it at least 2."
        raise ValueError(msg)
    check_temperature(temperature)
    if z.device.type == "cpu":  # on other devices, the check would make the processor wait for the device
        lengths = torch.linalg.vector_norm(z.detach().float(), dim=1)
        off, row = (lengths - 1).abs().max(0)
        if off > _LENGTH_TOLERANCE:  # false for NaN, which is not an error here: the loss becomes NaN
            msg = (
                f"z must hold vectors of unit length, that of row {int(row)} is {float(lengths[row]):.3g}: use "
                "torch.nn.functional.normalize(z, dim=1)."
            )
            raise ValueError(msg)
    return z.to(torch.promote_types(z.dtype, torch.float32))


def sum_over(values: Tensor, anchors: Tensor | None) -> Tensor:
    """Sum ``values (B,)`` over anchors, boolean ``(B,)``; by default over all cells.

    Selection with ``values[anchors]`` is avoided, because the processor would wait for the device to report the number
    of anchors.
    """
    return values.sum() if anchors is None else torch.where(anchors, values, 0.0).sum()


def mean_over(values: Tensor, anchors: Tensor | None) -> Tensor:
    """Average ``values (B,)`` over anchors, boolean ``(B,)``, by default over all cells; 0 without any anchor."""
    return values.mean() if anchors is None else sum_over(values, anchors) / anchors.sum().clamp(min=1)


def highest_precision_dtype(device: torch.device) -> torch.dtype:
    """Return the floating-point dtype of highest precision that a device supports."""
    return torch.float32 if device.type == "mps" else torch.float64


def total_variance(z: Tensor) -> float:
    r"""Compute the total variance of unit vectors, :math:`1 - \lVert \bar z \rVert^2`.

    The value is zero if all embeddings are one point, and one if their mean is zero.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(N, D)``.

    Examples
    --------
    >>> spread(torch.eye(4)[:1].repeat(10, 1))  # a point
    0.0
    """
    z = z.double()
    return float((z - z.mean(0)).square().sum(1).mean())


def effective_rank(z: Tensor) -> float:
    """Estimate how many directions an embedding uses: the exponential of the entropy of its covariance spectrum.

    Parameters
    ----------
    z
        Embeddings, shape ``(N, D)``.

    Returns
    -------
    A number between 1 (all embeddings on a line) and ``D`` (isotropic). The value is 0 if all embeddings are one point,
    and NaN if any value is not finite.

    References
    ----------
    Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    Examples
    --------
    >>> round(scbd.nn.effective_rank(torch.cat([torch.eye(4), -torch.eye(4)])), 3)
    4.0
    """
    as_came = torch.promote_types(z.dtype, torch.float32)  # NumPy has no bfloat16, so half precision becomes float32
    return linear_maps.effective_rank(z.detach().to(as_came).cpu().numpy())
