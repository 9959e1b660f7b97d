"""Compute losses with double loops over the formulas, and as in the listing printed in the paper."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def log_probabilities(z: Tensor, temperature: float, include_self: bool) -> list[list[Tensor]]:
    """Return log P_ij of every pair, computed with one exponential at a time."""
    n = len(z)
    rows = []
    for i in range(n):
        there = [a for a in range(n) if a != i]
        total = sum((torch.exp(z[i] @ z[a] / temperature) for a in there + [i] * include_self), start=z[i].sum() * 0)
        rows.append([z[i] @ z[j] / temperature - torch.log(total) for j in range(n)])
    return rows


def supervised(
    z: Tensor,
    labels: Tensor,
    temperature: float,
    include_self: bool,
    smoothing: float = 0.0,
) -> list[Tensor]:
    """Return the loss of each anchor."""
    log_p = log_probabilities(z, temperature, include_self)
    per_anchor = []
    for i in range(len(z)):
        there = [j for j in range(len(z)) if j != i]
        zero = z[i].sum() * 0
        terms = [log_p[i][j] for j in there if labels[j] == labels[i]]
        if not terms:  # an anchor without positives does not contribute
            per_anchor.append(zero)
            continue
        anyone = -torch.stack([log_p[i][j] for j in there]).mean()
        per_anchor.append(-(1 - smoothing) * torch.stack(terms).mean() + smoothing * anyone)
    return per_anchor


def invariance(z: Tensor, e: Tensor, temperature: float, include_self: bool, reduction: str) -> Tensor:
    """Return the invariance loss in one of its two reductions."""
    log_p = log_probabilities(z, temperature, include_self)
    n = len(z)
    zero = total = z.sum() * 0
    for i in range(n):
        own = [log_p[i][j] for j in range(n) if j != i and e[j] == e[i]]
        other = [log_p[i][j] for j in range(n) if e[j] != e[i]]
        total = total + abs(sum(own, start=zero) - sum(other, start=zero))
    return {"formula": total, "listing": total / n**2}[reduction]


def listing_supervised(z: Tensor, u: Tensor, temperature: float) -> Tensor:
    """The printed listing (paper, appendix B), step for step, in the dtype of z."""
    positive = (u[:, None] == u[None, :]).to(z.dtype) * (1 - torch.eye(len(z), dtype=z.dtype, device=z.device))
    p = positive / positive.sum(1, keepdim=True).clamp(min=1)
    return F.cross_entropy(F.log_softmax(z @ z.T / temperature, dim=1), p)


def listing_invariance(z: Tensor, e: Tensor, temperature: float) -> Tensor:
    """The printed listing (paper, appendix B), step for step, in the dtype of z."""
    same = (e[:, None] == e[None, :]).to(z.dtype)
    other, own = 1 - same, same * (1 - torch.eye(len(z), dtype=z.dtype, device=z.device))
    q = F.log_softmax(z @ z.T / temperature, dim=1)
    return ((q * own).mean(1) - (q * other).mean(1)).abs().mean()
