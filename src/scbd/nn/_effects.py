"""What environments do to a batch's cells: how surely, and whether it is the same to all labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from scbd.nn._design import Design
from scbd.nn._variance import Explained, explained_by, in_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from scbd.nn._design import Environments
    from scbd.nn._groups import Groups

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

    With :math:`\omega^2_c = T_c / (g_c D)` of :func:`explained_variance`'s sums of squares, for each circle :math:`c`
    of partners, where :math:`g_c` is what an effect of the environment alone would add to :math:`T_c` if it were all of
    a feature's variance: a batch in which most cells have no partner counts as what it is. Both circles see what an
    environment does to all cells alike; those within a label see what it does to that label, too. So

    .. math:: \max_s \big( \omega^2_{s, within} - \omega^2_{s, across} - 2\,\mathrm{sd} \big)_+

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
    >>> [round(float(scbd.nn.environment_effects([x], well, gene).interaction), 1) for x in (alike, differently)]
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
    for circles, of_circle in zip(design.circles, explained.circles, strict=True):
        within, across = (of_circle[name].per_gain(circles[name]) for name in ("within", "across"))
        error = (within.scatter.square() + across.scatter.square()).sqrt()
        seen = (within.between - across.between - _BY_CHANCE * error).clamp(min=0)
        found.append(torch.where(circles["within"].tells & circles["across"].tells, seen, 0.0))
    return torch.stack(found).max() / explained.n_features
