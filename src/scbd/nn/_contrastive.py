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

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scbd import _linear_maps
from scbd._checks import check_choice

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    collapsed to one point cost exactly :math:`\log B` an anchor, or :math:`\log(B-1)` without self-similarity.

    **Label smoothing** (Szegedy et al., 2016) with :math:`\varepsilon` asks for a match with a partner of the label
    with probability :math:`1 - \varepsilon`, and with anyone else otherwise:

    .. math:: -\sum_i \Bigl[ \frac{1 - \varepsilon}{|P(i)|} \sum_{p \in P(i)} \log P_{ip} +
              \frac{\varepsilon}{B - 1} \sum_{a \ne i} \log P_{ia} \Bigr].

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
    >>> round(float(point), 3) == round(float(np.log(8)), 3)
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
        .. math:: \frac{1}{B} \sum_i \frac{1}{B} \Bigl|\sum_{p \in P_e(i)} \log P_{ip} -
                  \sum_{n \in N_e(i)} \log P_{in}\Bigr|
    ``"formula"`` (the paper's equation, summed over anchors)
        .. math:: \sum_i \Bigl|\sum_{p \in P_e(i)} \log P_{ip} - \sum_{n \in N_e(i)} \log P_{in}\Bigr|
    ``"mean"`` (per-term means)
        .. math:: \frac{1}{B} \sum_i \Bigl|\tfrac{1}{n_i^+} \sum_{p} \log P_{ip} - \tfrac{1}{n_i^-} \sum_{n}
                  \log P_{in}\Bigr| = \frac{1}{B} \sum_i |z_i \cdot (\mu_i^+ - \mu_i^-)| / \tau
    ``"mass"`` (probability mass against frequency)
        .. math:: \frac{1}{B} \sum_i \Bigl|\log \sum_p P_{ip} - \log \sum_n P_{in} - \log \frac{n_i^+}{n_i^-}\Bigr|

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
    >>> sorted_by_well = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])  # the embedding says which well it is
    >>> float(scbd.nn.invariance_loss(z, mixed)) < 1 < float(scbd.nn.invariance_loss(z, sorted_by_well))
    True
    """
    neighbours = Groups.of(environments)
    z = checked_batch(z, temperature, neighbours.labels, "environments")
    check_choice("reduction", reduction, InvarianceReduction)
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


def contrastive_ceiling(batch_size: int, *, include_self: bool = True) -> float:
    """Supervised contrastive loss of a batch whose embeddings are one point: ``log B`` (``log(B - 1)`` without self).

    A trained embedding whose loss stays at this value has collapsed: it tells nothing apart.

    Examples
    --------
    >>> round(contrastive_ceiling(512), 3)
    6.238
    """
    return math.log(batch_size if include_self else batch_size - 1)


def share_learned(
    loss: Tensor,
    labels: Tensor | Groups,
    *,
    smoothing: float = 0.0,
    include_self: bool = True,
    anchors: Tensor | None = None,
) -> Tensor:
    r"""Share of the information in labels that an embedding has: 0 for a single point, 1 at best, below 0 if worse.

    A point matches a cell (the anchor) of label :math:`u` with its own as often as that occurs, :math:`\pi_u`. The loss
    asks for :math:`m_u = 1 - \varepsilon + \varepsilon\,(n_u - 1) / (B - 1)`. An embedding that does what is asked is
    below the point (:func:`contrastive_ceiling`) by a Kullback-Leibler divergence, the mean over anchors of

    .. math:: m_u \log \frac{m_u}{\pi_u} + (1 - m_u) \log \frac{1 - m_u}{1 - \pi_u},

    which without smoothing is the entropy of the labels. The share is what a loss is lower by, in units of that.
    Anchors without a partner say nothing, on either side: shuffled batches of many labels, in which most cells have
    none, and those in which all have one give the same embedding one share, as long as labels are equally rare.

    Where they are rarer, the same embedding tells less of what they say. If it matches an anchor with one of its label
    :math:`w` times as readily as with another, its share is
    :math:`1 - \mathrm{KL}(m_u \| P_u) / \mathrm{KL}(m_u \| \pi_u)` with :math:`P_u = w \pi_u / (1 + (w - 1) \pi_u)`.
    Compare shares of batches that are drawn alike.

    Parameters
    ----------
    loss
        What :func:`supervised_contrastive_loss` returned for these labels, with ``reduction="mean"``.
    labels
        Integer labels, shape ``(B,)``, or their :class:`Groups`.
    smoothing, include_self, anchors
        As in the loss.

    Returns
    -------
    A scalar; 0 where all cells have one label, or each its own, which says nothing; or where there is no anchor.

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
    of_a_point = with_partner * contrastive_ceiling(size, include_self=include_self)
    return torch.where(informative.any(), (of_a_point - loss) / most, 0.0)


# how far from 1 a length may be: half precision rounds unit vectors by less
_OFF = 0.01


def check_smoothing(smoothing: float) -> None:
    """Raise ``ValueError`` unless labels still say something."""
    if not 0 <= smoothing < 1:
        msg = f"smoothing is a probability below 1, at which labels say nothing; got {smoothing}."
        raise ValueError(msg)


def check_temperature(temperature: float) -> None:
    """Raise ``ValueError`` unless logits are finite."""
    if not LOWEST_TEMPERATURE < temperature < math.inf:
        msg = (
            f"temperature must be a number above {LOWEST_TEMPERATURE:.4f} (exp(1/temperature) overflows), got "
            f"{temperature}."
        )
        raise ValueError(msg)


def checked_batch(z: Tensor, temperature: float, labels: Tensor | None = None, name: str = "") -> Tensor:
    """``z`` in float32 or wider, if everything is as it should be."""
    if z.ndim != 2 or (labels is not None and labels.shape != z.shape[:1]):
        msg = f"z must be (B, D), got {tuple(z.shape)}."
        if labels is not None:
            msg = f"z must be (B, D) and {name} (B,), got {tuple(z.shape)} and {tuple(labels.shape)}."
        raise ValueError(msg)
    if len(z) < 2:
        msg = f"A contrastive loss compares examples with each other: the batch holds {len(z)}, give it at least 2."
        raise ValueError(msg)
    check_temperature(temperature)
    if z.device.type == "cpu":  # elsewhere, looking would make the processor wait for the device
        lengths = torch.linalg.vector_norm(z.detach().float(), dim=1)
        off, row = (lengths - 1).abs().max(0)
        if off > _OFF:  # NaN is not: of that, the loss is NaN
            msg = (
                f"z must hold vectors of unit length, that of row {int(row)} is {float(lengths[row]):.3g}: use "
                "torch.nn.functional.normalize(z, dim=1)."
            )
            raise ValueError(msg)
    return z.to(torch.promote_types(z.dtype, torch.float32))


def sum_over(values: Tensor, anchors: Tensor | None) -> Tensor:
    """Sum of those of the ``values (B,)`` that are of anchors, boolean ``(B,)``; by default of all.

    To choose them by ``values[anchors]``, the processor would wait to hear how many there are.
    """
    return values.sum() if anchors is None else torch.where(anchors, values, 0.0).sum()


def mean_over(values: Tensor, anchors: Tensor | None) -> Tensor:
    """Their mean; 0 where there is none."""
    return values.mean() if anchors is None else sum_over(values, anchors) / anchors.sum().clamp(min=1)


class Groups:
    """Which cells share a label: counted once a batch, and read by all losses on it.

    Parameters
    ----------
    labels
        Integer labels, ``(B,)``.

    Attributes
    ----------
    labels
        The same, int64.
    n_others
        How many others share a cell's label, ``(B,)``.

    Examples
    --------
    >>> gene = scbd.nn.Groups(torch.tensor([0, 1, 1, 1]))
    >>> gene.n_others
    tensor([0, 2, 2, 2])
    >>> z = torch.nn.functional.normalize(torch.randn(4, 8, generator=torch.manual_seed(0)), dim=1)
    >>> loss = scbd.nn.supervised_contrastive_loss(z, gene)  # counts nothing again
    """

    def __init__(self, labels: Tensor) -> None:
        labels = labels.long()  # codes of pairs outgrow the few bits that pandas gives few categories
        # to count, the processor waits for the device
        _, self._index, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        self._n_groups = len(counts)
        self._crossed: tuple[Groups, Groups] | None = None
        self.labels = labels
        self.n_others = counts[self._index] - 1

    @classmethod
    def of(cls, labels: Tensor | Groups) -> Groups:
        """Those of a loss's argument, counted here if they were not before."""
        return labels if isinstance(labels, Groups) else cls(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def crossed(self, others: Groups) -> Groups:
        """Which cells share this label and another one: remembered, since several losses ask for the same pair."""
        if self._crossed is None or self._crossed[0] is not others:
            self._crossed = others, Groups(pair_codes(self.labels, others.labels))
        return self._crossed[1]

    def table(self, others: Groups) -> Tensor:
        """How many cells have a label and another one, ``(labels, other labels)``, in the order of their codes."""
        size = self._n_groups * others._n_groups
        counts = torch.bincount(self._index * others._n_groups + others._index, minlength=size)
        return counts.view(self._n_groups, others._n_groups)

    def in_sets(self, values: Tensor, size: int) -> tuple[Tensor, Groups]:
        """Means of ``values (B, D)`` over sets of cells of one label, ``(S, D)``, and the labels of the sets.

        A label has as many sets as it has times ``size`` cells, and two at least where it has two cells; its cells are
        dealt out evenly, in the order of the batch.
        """
        counts = torch.bincount(self._index)
        n_sets = torch.maximum(counts // size, counts.clamp(max=2))
        order = torch.argsort(self._index, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self._index[order]]
        first_set = (n_sets.cumsum(0) - n_sets)[self._index]
        of_set = first_set + place * n_sets[self._index] // counts[self._index]
        labels = self.first(self.labels[:, None])[:, 0].repeat_interleave(n_sets)
        sums = torch.zeros(len(labels), values.shape[1], dtype=values.dtype, device=values.device)
        return sums.index_add(0, of_set, values) / torch.bincount(of_set)[:, None], Groups(labels)

    def first(self, values: Tensor) -> Tensor:
        """One of the ``values (B, D)`` of each label, ``(labels, D)``: for what all of its cells share."""
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_copy(0, self._index, values)

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values (B, D)`` over all cells of a cell's label, itself included, ``(B, D)``."""
        empty = torch.zeros(self._n_groups, values.shape[1], dtype=values.dtype, device=values.device)
        return empty.index_add(0, self._index, values).index_select(0, self._index)


def pair_codes(labels: Tensor, environments: Tensor) -> Tensor:
    """A code for each pair of label and environment, of int64 ``(B,)``, int64 ``(B,)``."""
    environments = environments - environments.min()
    return labels * (environments.max() + 1) + environments


def exact(device: torch.device) -> torch.dtype:
    """What a device can count in most exactly."""
    return torch.float32 if device.type == "mps" else torch.float64


# rows and columns of a tile: one that stays in a core's cache; where launching costs more than computing, a large one
_TILE = {"cpu": (128, 2048)}
_LARGE_TILE = (2048, 8192)
# exponentials kept for the backward pass rather than computed again: most of the triangle at a batch of 2,048
_KEPT_BYTES = 7 * 2**20
# float32 holds exp(±40) and sums of it; below this temperature similarities of unit vectors ask for float64 …
_FLOAT32_LIMIT = 40.0
# … and below 1/350 for more than that
LOWEST_TEMPERATURE = 1 / 350


def log_sums(z: Tensor, temperature: float, labels: Tensor | None = None) -> tuple[Tensor, ...]:
    """Log-sum-exp of each anchor's logits over all others, or apart over those of its label and of other labels.

    Memory is O(B·D) beyond a fixed number of exponentials, whatever the batch.

    Parameters
    ----------
    z
        Embeddings of unit length, float32 or float64 ``(B, D)``.
    temperature
        At least ``LOWEST_TEMPERATURE``.
    labels
        Integer labels ``(B,)``.

    Returns
    -------
    Without labels one tensor ``(B,)``, with labels two; −inf where there is nothing to sum.
    """
    if z.dtype == torch.float32 and 1 / temperature > _FLOAT32_LIMIT:
        return tuple(part.float() for part in _LogSums.apply(z.double(), temperature, labels))
    return _LogSums.apply(z, temperature, labels)


class _LogSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float, labels: Tensor | None) -> tuple[Tensor, ...]:
        sums = z.new_zeros(1 if labels is None else 2, len(z))
        kept: list[Tensor] = []
        room = _KEPT_BYTES if ctx.needs_input_grad[0] else 0
        scaled = z / temperature
        for rows, columns, new in _tiles(z):
            tile = _exponentials(scaled, z, rows, columns)
            room -= tile.nbytes
            if room >= 0:
                kept.append(tile)
            for total, part in zip(sums, _parts(tile, labels, rows, columns), strict=True):
                total[rows] += part.sum(1)
                total[columns][new] += part[:, new].sum(0)
        ctx.save_for_backward(z, sums, labels)
        ctx.temperature, ctx.kept = temperature, kept
        return tuple(sums.log())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        z, sums, labels = ctx.saved_tensors
        # an anchor without partners has an empty sum, and no gradient
        weights = torch.stack(gradients) / sums.clamp(min=torch.finfo(z.dtype).tiny)
        scaled = z / ctx.temperature
        kept = iter(ctx.kept)
        gradient = torch.zeros_like(z)
        for rows, columns, new in _tiles(z):
            tile = next(kept, None)
            if tile is None:
                tile = _exponentials(scaled, z, rows, columns)
            terms = [
                (w[rows, None] + w[columns]).mul_(part)
                for w, part in zip(weights, _parts(tile, labels, rows, columns), strict=True)
            ]
            product = terms[0] if len(terms) == 1 else terms[0].add_(terms[1])
            gradient[rows].addmm_(product, scaled[columns])
            gradient[columns][new].addmm_(product[:, new].T, scaled[rows])
        return gradient, None, None


def _tiles(z: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows and columns of the tiles on and above the diagonal, and which of a tile's columns are not its rows."""
    n = len(z)
    height, width = _TILE.get(z.device.type, _LARGE_TILE)
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        for left in range(start, n, width):
            new = slice(rows.stop - rows.start if left == start else 0, None)
            yield rows, slice(left, min(left + width, n)), new


def _exponentials(scaled: Tensor, z: Tensor, rows: slice, columns: slice) -> Tensor:
    """``exp(s)`` of a tile, zero for an anchor with itself."""
    tile = torch.mm(scaled[rows], z[columns].T).exp_()
    return tile.fill_diagonal_(0) if rows.start == columns.start else tile


def _parts(tile: Tensor, labels: Tensor | None, rows: slice, columns: slice) -> tuple[Tensor, ...]:
    """The tile, or what of it lies inside and outside of the anchors' labels."""
    if labels is None:
        return (tile,)
    same = labels[rows, None] == labels[columns]
    return tile * same, tile * ~same


def spread(z: Tensor) -> float:
    r"""Total variance of unit vectors, :math:`1 - \lVert \bar z \rVert^2`.

    Zero when all embeddings are one point, one when they are centred on the sphere.

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
    r"""Number of directions an embedding uses: the exponential of the entropy of its covariance spectrum.

    Between 1 (a line) and ``D`` (isotropic); a point has effective rank 0 here, and what is not finite NaN.

    Parameters
    ----------
    z
        Embeddings, shape ``(N, D)``.

    References
    ----------
    Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    Examples
    --------
    >>> round(scbd.nn.effective_rank(torch.cat([torch.eye(4), -torch.eye(4)])), 3)
    4.0
    """
    as_came = torch.promote_types(z.dtype, torch.float32)  # numpy knows fewer
    return _linear_maps.effective_rank(z.detach().to(as_came).cpu().numpy())
