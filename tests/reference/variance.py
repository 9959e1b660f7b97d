"""The environment's share of the variance, one cell at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def explained_variance(f: Tensor, e: Tensor, y: Tensor) -> Tensor:
    """Each cell against the others of its label, and of its label and environment."""
    n = len(f)
    f = f - f.mean(0)
    f = f / torch.sqrt((f**2).mean(0) + 1e-8)
    total = f.sum() * 0
    for i in range(n):
        label = [f[j] for j in range(n) if j != i and y[j] == y[i]]
        own = [f[j] for j in range(n) if j != i and y[j] == y[i] and e[j] == e[i]]
        if own:
            base = torch.stack(label).mean(0)
            k = len(own)
            total = total + k / (k + 1) * ((f[i] - base) * (torch.stack(own).mean(0) - base)).mean()
    return total / n
