"""What a supervised contrastive loss says of an embedding: its value for a point, and how far below that it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from scbd.nn._anchors import mean_over
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from torch import Tensor


def contrastive_ceiling(batch_size: int, *, include_self: bool = True) -> float:
    """Supervised contrastive loss of a batch whose embeddings are one point: ``log B`` (``log(B - 1)`` without self).

    A trained embedding whose loss stays at this value has collapsed: it tells nothing apart.

    Examples
    --------
    >>> round(scbd.nn.contrastive_ceiling(512), 3)
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
    >>> round(float(scbd.nn.share_learned(loss, gene)), 2)
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
