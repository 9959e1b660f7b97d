"""The environment's share of the variance, one cell at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def explained_variance(f: Tensor, e: Tensor, y: Tensor, partners: str) -> Tensor:
    """Each cell against others of its environment, of its label or of any."""
    n = len(f)
    f = f - f.mean(0)
    f = f / torch.sqrt((f**2).mean(0) + 1e-8)
    total = f.sum() * 0
    for i in range(n):
        if not _of_label(f, y, i):
            continue
        base = torch.stack(_of_label(f, y, i)).mean(0)
        others = []
        for j in range(n):
            if j != i and y[j] == y[i] and e[j] == e[i]:
                others.append(f[j] - base)
            elif partners == "across" and e[j] == e[i] and j != i:
                label = _of_label(f, y, j)
                others.append(f[j] - torch.stack(label).mean(0) if label else f[j] * 0)
        if others:
            k = len(others)
            total = total + k / (k + 1) * ((f[i] - base) * torch.stack(others).mean(0)).mean()
    return total / n


def _of_label(f: Tensor, y: Tensor, i: int) -> list[Tensor]:
    return [f[j] for j in range(len(f)) if j != i and y[j] == y[i]]
