r"""Supervised contrastive loss and invariance losses on the unit sphere (Makino et al., 2025, section 2).

Let :math:`z_i` be the embedding of cell :math:`i`, scaled to unit length, and :math:`\tau` the temperature. Each cell
of a batch in turn is the *anchor*, and is compared with the other cells of the batch, its *partners*.

Both losses use the probability that anchor :math:`i` is matched with partner :math:`j`. It is a softmax of the
similarities :math:`z_i \cdot z_j / \tau`:

.. math:: \log P_{ij} = z_i \cdot z_j / \tau - \log \sum_{a} \exp(z_i \cdot z_a / \tau).

The supervised loss compares cells with the same perturbation label, the invariance loss cells with the same environment
label. They need only the *sum* of :math:`\log P_{ij}` over the partners :math:`j` that have the label :math:`u_i` of
the anchor. This sum is computed from the sum of the embeddings of each label, :math:`S_u = \sum_{j: u_j = u} z_j`, by
the product :math:`z_i \cdot S_{u_i}`. Masks and a second softmax are therefore not needed.

The only computation whose time is quadratic in the batch size B is the log-sum-exp over the Gram matrix, which holds
the similarities of all pairs of cells. The Gram matrix is computed tile by tile with O(B·D) memory, D being the
dimension of the embeddings. The losses on one embedding can use the same result (:func:`log_normaliser`).

The paper prints a formula and a code listing, which differ. The results published in the paper come from the listing.
These arguments select the one or the other:

===============  ====================================================  ========================================
..               formula of the paper                                  code listing of the paper
===============  ====================================================  ========================================
sum over *a*     all cells except the anchor (``include_self=False``)  all cells (``include_self=True``)
supervised loss  sum over anchors (``reduction="sum"``)                mean over anchors (``reduction="mean"``)
invariance loss  ``reduction="formula"``                               ``reduction="listing"``
===============  ====================================================  ========================================
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import xlogy
from torch import Tensor

from scbd._shared import linear_maps
from scbd._shared.checks import check_choice
from scbd.nn._groups import Groups, copy_to
from scbd.nn._log_sum_exp import MIN_TEMPERATURE, log_sum_exp

InvarianceReduction = Literal["listing", "formula"]


def log_normaliser(z: Tensor, *, temperature: float = 0.1, include_self: bool = True) -> Tensor:
    r"""Compute the logarithm of the normaliser of each anchor's matching probabilities.

    For anchor :math:`i` it is :math:`\log \sum_a \exp(z_i \cdot z_a / \tau)`, with the sum over the cells :math:`a` of
    the batch.

    Both :func:`supervised_contrastive_loss` and :func:`invariance_loss` accept the result as an argument, so that it is
    computed only once for an embedding. Time is quadratic in the batch size, memory is linear. Second derivatives are
    not supported.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether the sum includes the anchor itself (:math:`a = i`). The paper's listing includes it, the paper's formula
        does not.

    Returns
    -------
    Logarithm of the normaliser of each anchor, shape ``(B,)``, float32 or float64.

    Raises
    ------
    ValueError
        If ``z`` is not a batch of at least two vectors of unit length (to within 1 %), or if the temperature is not
        above 1/350. Lengths are checked only on the CPU. On a GPU, the check would make the CPU wait for the GPU.

    Examples
    --------
    >>> z = torch.nn.functional.normalize(torch.randn(8, 4, generator=torch.manual_seed(0)), dim=1)
    >>> scbd.nn.log_normaliser(z).shape
    torch.Size([8])
    """
    z = validate_embeddings(z, temperature)
    return log_sum_exp(z, temperature, include_self)


def supervised_contrastive_loss(
    z: Tensor,
    labels: Tensor | Groups,
    *,
    temperature: float = 0.1,
    smoothing: float = 0.0,
    include_self: bool = True,
    reduction: Literal["mean", "sum"] = "mean",
    anchors: Tensor | None = None,
    log_normaliser: Tensor | None = None,
) -> Tensor:
    r"""Pull embeddings with the same label together and push embeddings with different labels away from each other.

    .. math:: L^{sup} = -\sum_i \frac{1}{|P(i)|} \sum_{p \in P(i)} \log P_{ip},
       \qquad P(i) = \{p \ne i : u_p = u_i\}

    Here :math:`P_{ip}` is the probability that anchor :math:`i` is matched with partner :math:`p`, a softmax of the
    similarities :math:`z_i \cdot z_p / \tau`. The set :math:`P(i)` holds the *positives* of the anchor: the other cells
    with its label :math:`u_i`.

    With ``reduction="mean"``, the mean over anchors replaces the sum over anchors. An anchor without a positive
    contributes zero, also with smoothing. The mean still counts this anchor, as in the published code. If all
    embeddings have collapsed to one point and every anchor has a positive, the loss per anchor is exactly :math:`\log
    B` for batch size :math:`B`, or :math:`\log(B-1)` with ``include_self=False``.

    **Label smoothing** (Szegedy et al., 2016) with :math:`\varepsilon` changes the target of an anchor: the anchor
    should be matched with a cell of its label with probability :math:`1 - \varepsilon`, and with any other cell of the
    batch otherwise. The loss becomes

    .. math:: -\sum_i \Bigl[ \frac{1 - \varepsilon}{|P(i)|} \sum_{p \in P(i)} \log P_{ip} +
              \frac{\varepsilon}{B - 1} \sum_{a \ne i} \log P_{ia} \Bigr].

    Some cells carry a label without showing its phenotype, for example because a guide does not cut, or because only
    some cells show the phenotype. With smoothing, the loss of such a cell is limited if its embedding does not
    distinguish it from cells of other labels. All embeddings on the sphere have the same length. An embedding therefore
    cannot express uncertainty by its length, only by a position between the labels. With many environments, the
    published invariance loss has nearly the same effect as smoothing (see :func:`invariance_loss`). Smoothing does not
    change the loss of a collapsed embedding.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(B, D)``. Half precision is converted to float32.
    labels
        Integer labels, shape ``(B,)``, or their :class:`Groups` if several losses use the same labels.
    temperature
        :math:`\tau`, the scale of the logits.
    include_self
        Whether :math:`\exp(z_i \cdot z_i/\tau)` is part of the normaliser. The paper's listing includes it, the paper's
        formula does not.
    smoothing
        :math:`\varepsilon`, the strength of label smoothing, at least 0 and below 1.
    reduction
        ``"mean"`` (the paper's listing) or ``"sum"`` (the paper's formula) over anchors.
    anchors
        Which cells are anchors, boolean, ``(B,)``. Cells that are not anchors serve only as partners. By default all
        cells are anchors.
    log_normaliser
        Result of :func:`log_normaliser` for the same embeddings, temperature and ``include_self``, to save time.

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
    >>> point = scbd.nn.supervised_contrastive_loss(z[:1].expand(8, 4), perturbation)  # all embeddings are equal
    >>> round(float(point), 3) == round(float(np.log(8)), 3)
    True
    """
    check_smoothing(smoothing)
    partners = Groups.of(labels)
    z = validate_embeddings(z, temperature, partners.shape, "labels")
    how: dict[str, Any] = {"smoothing": smoothing, "reduction": reduction, "anchors": anchors}
    weights = anchor_weights(partners, temperature, **how)
    if log_normaliser is None:
        log_normaliser = _log_normaliser(z, temperature=temperature, include_self=include_self)
    return weighted_sums(anchor_terms(z, partners, log_normaliser, len(weights)), weights)


def anchor_weights(
    labels: Groups,
    temperature: float,
    *,
    smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    anchors: Tensor | None = None,
) -> np.ndarray:
    """Return the weights of each anchor's terms (:func:`anchor_terms`) in the supervised contrastive loss.

    Parameters
    ----------
    labels, temperature, smoothing, reduction, anchors
        See :func:`supervised_contrastive_loss`.

    Returns
    -------
    Weights ``(2, B)``, or ``(3, B)`` with smoothing.
    """
    check_choice("reduction", reduction, {"mean": "the published listing", "sum": "the paper's formula"})
    n_positives = labels.counts[labels.codes] - 1
    chosen = np.ones(len(labels)) if anchors is None else anchors.cpu().numpy()
    # an anchor without a positive contributes zero, but counts in the mean
    of_anchors = (n_positives > 0) * chosen / (max(chosen.sum(), 1) if reduction == "mean" else 1)
    weights = [
        of_anchors,
        (smoothing - 1) / temperature * of_anchors / np.maximum(n_positives, 1),
        -smoothing / temperature * of_anchors / (len(labels) - 1),
    ]
    return np.stack(weights if smoothing else weights[:2])


def anchor_terms(z: Tensor, labels: Groups, log_normaliser: Tensor, n_terms: int) -> Tensor:
    """Return the terms of each anchor, of which supervised contrastive losses are weighted sums, ``(n_terms * B,)``.

    The terms are the logarithm of the normaliser, the sum of the similarities to the positives, and, if ``n_terms`` is
    3, the sum of the similarities to all other cells. Similarities are not divided by the temperature.
    """
    with torch.autocast(z.device.type, enabled=False):
        sums = [labels.sums(z), z.sum(0)][: n_terms - 1]
        return torch.cat([log_normaliser, *((z * (of_partners - z)).sum(1) for of_partners in sums)])


def weighted_sums(terms: Tensor, weights: np.ndarray) -> Tensor:
    """Multiply terms ``(n_terms * B,)`` by weights ``(..., n_terms, B)``, and sum them: the result is ``(...,)``."""
    flat = torch.from_numpy(weights.reshape(*weights.shape[:-2], -1)).to(terms.dtype)
    with torch.autocast(terms.device.type, enabled=False):
        return copy_to(terms.device, flat) @ terms


def invariance_loss(
    z: Tensor,
    environments: Tensor | Groups,
    *,
    temperature: float = 0.1,
    include_self: bool = True,
    reduction: InvarianceReduction = "listing",
    log_normaliser: Tensor | None = None,
) -> Tensor:
    r"""Penalise embeddings that match cells of the same environment more, or less, than cells of other environments.

    Each cell :math:`i` of the batch in turn is the *anchor*. It is matched with cell :math:`j` with the probability
    :math:`P_{ij}`, a softmax of the similarities :math:`z_i \cdot z_j / \tau`.

    Let :math:`P_e(i)` be the other cells of the anchor's environment (positives) and :math:`N_e(i)` the cells of all
    other environments (negatives), and let :math:`B` be the batch size. The argument ``reduction`` selects one of two
    forms of the loss:

    ``"listing"`` (the published code)
        .. math:: \frac{1}{B} \sum_i \frac{1}{B} \Bigl|\sum_{p \in P_e(i)} \log P_{ip} -
                  \sum_{n \in N_e(i)} \log P_{in}\Bigr|
    ``"formula"`` (the paper's equation, summed over anchors)
        .. math:: \sum_i \Bigl|\sum_{p \in P_e(i)} \log P_{ip} - \sum_{n \in N_e(i)} \log P_{in}\Bigr|

    **More than two environments.** With two environments of equal size, the two sums have equally many terms. With
    :math:`E` environments there are about :math:`E-1` times more negatives than positives, so that the two *sums*
    cannot be equal. The loss can then only be reduced by shrinking every :math:`|\log P_{ij}|`. This pulls embeddings
    of different environments together, whatever their label, and pushes embeddings of the same environment away from
    each other. :func:`invariance_statistic` is valid for many and for unbalanced environments.

    With many environments, the supervised loss plus :math:`\alpha` times the loss ``"listing"`` is, up to a constant,
    the supervised loss with label smoothing :math:`\varepsilon \approx \alpha / (1 + \alpha)`, plus :math:`2 \alpha /
    E` times the mean log-probability of matches within the anchor's environment.

    The two forms differ in scale. A value of ``alpha``, the weight of the invariance loss, that was tuned for one form
    is therefore not suitable for the other form.

    Positives or negatives are missing if the anchor is the only cell of its environment, or if the batch holds a single
    environment. Only the sum without terms is then zero, as in the published code. The loss of a batch with a single
    environment is therefore **not** zero.

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
        The form of the loss: ``"listing"`` or ``"formula"``, see above.
    log_normaliser
        Result of :func:`log_normaliser` for the same embeddings, temperature and ``include_self``, to save time.

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
    >>> mixed = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])  # both embeddings are equally frequent in both wells
    >>> sorted_by_well = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])  # each embedding occurs in only one well
    >>> float(scbd.nn.invariance_loss(z, mixed)) < 1 < float(scbd.nn.invariance_loss(z, sorted_by_well))
    True
    """
    neighbours = Groups.of(environments)
    z = validate_embeddings(z, temperature, neighbours.shape, "environments")
    check_choice("reduction", reduction, InvarianceReduction)
    if log_normaliser is None:
        log_normaliser = _log_normaliser(z, temperature=temperature, include_self=include_self)
    return unchecked_invariance_loss(z, neighbours, log_normaliser, temperature, reduction)


def unchecked_invariance_loss(
    z: Tensor, environments: Groups, log_normaliser: Tensor, temperature: float, reduction: InvarianceReduction
) -> Tensor:
    """Compute :func:`invariance_loss` of valid arguments."""
    with torch.autocast(z.device.type, enabled=False):
        of_environment, n_own = environments.sums(z), environments.counts[environments.codes] - 1
        own, other = of_environment - z, z.sum(0) - of_environment
        excess = copy_to(z.device, 2 * n_own - (len(z) - 1))
        difference = (z * (own - other)).sum(1) / temperature - excess * log_normaliser
        if reduction == "formula":
            return difference.abs().sum()
        return difference.abs().mean() / len(z)


# second name of the function log_normaliser, for use in functions that have an argument of the same name
_log_normaliser = log_normaliser


def collapsed_loss(batch_size: int, *, include_self: bool = True) -> float:
    """Return the supervised contrastive loss of a batch in which all embeddings are the same point.

    For batch size ``B``, the value is ``log B``, or ``log(B - 1)`` with ``include_self=False``. If the loss of a
    trained embedding stays at this value, the embedding has collapsed and does not distinguish labels.

    Examples
    --------
    >>> round(collapsed_loss(512), 3)
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
    r"""Compute the attained proportion of the possible reduction of the supervised contrastive loss.

    This proportion is called normalised supervised information. It is 0 if all embeddings are the same point (a
    collapsed embedding) and 1 if the loss reaches its target. It is negative if the loss is larger than the loss of a
    collapsed embedding.

    The loss is compared with the loss of a collapsed embedding (:func:`collapsed_loss`). In a collapsed embedding, a
    cell (the anchor) of label :math:`u` is matched with its own label as often as this label occurs in the batch, with
    probability :math:`\pi_u`. The target of the loss is a match with probability :math:`m_u = 1 - \varepsilon +
    \varepsilon\,(n_u - 1) / (B - 1)`, with :math:`\varepsilon` the label smoothing, :math:`n_u` the number of cells of
    the label and :math:`B` the batch size. The loss of an embedding that reaches the target is smaller than the loss of
    a collapsed embedding. The difference is a Kullback-Leibler divergence, the mean over anchors of

    .. math:: m_u \log \frac{m_u}{\pi_u} + (1 - m_u) \log \frac{1 - m_u}{1 - \pi_u}.

    Without smoothing, this divergence is the entropy of the labels. The normalised supervised information is the loss
    of a collapsed embedding minus the loss of the given embedding, divided by this divergence.

    Anchors whose label no other cell of the batch has carry no information. They are excluded from the numerator and
    the denominator. In shuffled batches with many labels, most cells are the only one of their label. Such batches
    nevertheless give the same value as batches in which every label has several cells, provided that labels are equally
    rare.

    The rarer the labels, the lower is the value of the same embedding. If the embedding matches an anchor :math:`w`
    times as readily with a cell of its label as with another cell, the value is :math:`1 - \mathrm{KL}(m_u \| P_u) /
    \mathrm{KL}(m_u \| \pi_u)` with :math:`P_u = w \pi_u / (1 + (w - 1) \pi_u)`. Compare only values of batches that are
    drawn in the same way.

    Parameters
    ----------
    loss
        Result of :func:`supervised_contrastive_loss` for these labels, with ``reduction="mean"``.
    labels
        Integer labels, shape ``(B,)``, or their :class:`Groups`.
    smoothing, include_self, anchors
        The values with which ``loss`` was computed by :func:`supervised_contrastive_loss`.

    Returns
    -------
    The normalised supervised information, a scalar. It is 0 if labels carry no information (all cells have one label,
    or each cell has its own label) and if there is no anchor.

    Examples
    --------
    >>> gene = torch.arange(64) % 4
    >>> z = torch.nn.functional.one_hot(gene, 4).float()  # one unit vector per gene
    >>> loss = scbd.nn.supervised_contrastive_loss(z, gene)
    >>> round(float(normalised_supervised_information(loss, gene)), 2)
    1.0
    """
    groups = Groups.of(labels)
    n_positives, size = groups.counts[groups.codes] - 1, len(groups)
    chosen = np.ones(size, dtype=bool) if anchors is None else anchors.cpu().numpy()
    asked = 1 - smoothing + smoothing * n_positives / (size - 1)
    frequency = (n_positives + 1) / size if include_self else n_positives / (size - 1)
    partnered = chosen & (n_positives > 0)
    informative = partnered & (frequency < 1)
    if not informative.any():
        return torch.zeros_like(loss)
    asked, frequency = asked[informative], frequency[informative]
    divergence = xlogy(asked, asked / frequency) + xlogy(1 - asked, (1 - asked) / (1 - frequency))
    most = divergence.sum() / chosen.sum()
    of_a_point = partnered.sum() / chosen.sum() * collapsed_loss(size, include_self=include_self)
    return (float(of_a_point) - loss) / float(most)


# largest tolerated deviation of an embedding's length from 1; rounding to half precision changes the length of unit
# vectors by less
_LENGTH_TOLERANCE = 0.01


def check_smoothing(smoothing: float) -> None:
    """Raise ``ValueError`` unless ``smoothing``, the strength of label smoothing, is at least 0 and below 1."""
    if not 0 <= smoothing < 1:
        msg = f"smoothing is a probability below 1, at which labels say nothing; got {smoothing}."
        raise ValueError(msg)


def check_temperature(temperature: float) -> None:
    """Raise ``ValueError`` unless the temperature is finite and above 1/350, so that exponentials do not overflow."""
    if not MIN_TEMPERATURE < temperature < math.inf:
        msg = (
            f"temperature must be a number above {MIN_TEMPERATURE:.4f} (exp(1/temperature) overflows), got "
            f"{temperature}."
        )
        raise ValueError(msg)


def validate_embeddings(z: Tensor, temperature: float, shape: torch.Size | None = None, name: str = "") -> Tensor:
    """Check the inputs of a contrastive loss, and return the embeddings ``z (B, D)`` in float32 or float64.

    ``ValueError`` is raised if the embeddings, the temperature or the ``shape`` of the labels are invalid. ``name`` is
    the name of the argument with the labels, for the message. Half precision is converted to float32.
    """
    if z.ndim != 2 or (shape is not None and shape != z.shape[:1]):
        msg = f"z must be (B, D), got {tuple(z.shape)}."
        if shape is not None:
            msg = f"z must be (B, D) and {name} (B,), got {tuple(z.shape)} and {tuple(shape)}."
        raise ValueError(msg)
    if len(z) < 2:
        msg = f"A contrastive loss compares examples with each other: the batch holds {len(z)}, give it at least 2."
        raise ValueError(msg)
    check_temperature(temperature)
    # lengths are checked only on the CPU: on a GPU, the check would make the CPU wait for the GPU
    if z.device.type == "cpu":
        lengths = torch.linalg.vector_norm(z.detach().float(), dim=1)
        off, row = (lengths - 1).abs().max(0)
        if off > _LENGTH_TOLERANCE:  # not true for NaN, which gives a NaN loss instead of an error
            msg = (
                f"z must hold vectors of unit length, that of row {int(row)} is {float(lengths[row]):.3g}: use "
                "torch.nn.functional.normalize(z, dim=1)."
            )
            raise ValueError(msg)
    return z.to(torch.promote_types(z.dtype, torch.float32))


def total_variance(z: Tensor) -> float:
    r"""Compute the total variance of embeddings of unit length: the sum of the variances of all dimensions.

    It equals :math:`1 - \lVert \bar z \rVert^2`, with :math:`\bar z` the mean embedding.

    The value is 0 if all embeddings are the same point, and 1 if the mean embedding is the zero vector.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(N, D)``.

    Examples
    --------
    >>> total_variance(torch.eye(4)[:1].repeat(10, 1))  # ten embeddings at one point
    0.0
    """
    z = z.double()
    return float((z - z.mean(0)).square().sum(1).mean())


def effective_rank(z: Tensor) -> float:
    """Compute the effective number of directions in which embeddings vary.

    It is the exponential of the entropy of the covariance's eigenvalues, which are scaled to a sum of 1.

    Parameters
    ----------
    z
        Embeddings, shape ``(N, D)``.

    Returns
    -------
    The effective number of directions, between 1 (all embeddings on a line) and ``D`` (the same variance in all
    directions). It is 0 if all embeddings are one point, and NaN if any value is not finite.

    References
    ----------
    Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    Examples
    --------
    >>> round(scbd.nn.effective_rank(torch.cat([torch.eye(4), -torch.eye(4)])), 3)
    4.0
    """
    # half precision is converted to float32, since NumPy has no bfloat16
    as_came = torch.promote_types(z.dtype, torch.float32)
    return linear_maps.effective_rank(z.detach().to(as_came).cpu().numpy())
