"""Is an embedding alive? Two numbers that tell a point, or a line, from an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scbd import _linear_maps

if TYPE_CHECKING:
    from torch import Tensor


def spread(z: Tensor) -> float:
    r"""Total variance of unit vectors, :math:`1 - \lVert \bar z \rVert^2`.

    Zero when all embeddings are one point, one when they are centred on the sphere.

    Parameters
    ----------
    z
        Embeddings of unit length, shape ``(N, D)``.

    Examples
    --------
    >>> scbd.nn.spread(torch.eye(4)[:1].repeat(10, 1))  # a point
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
    return _linear_maps.effective_rank(z.detach().double().cpu().numpy())
