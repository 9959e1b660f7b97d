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


def error(f: Tensor, e: Tensor, y: Tensor, partners: str) -> Tensor:
    """How far the share scatters by chance: alike cells, and differences that the batch can tell."""
    n = len(f)
    f = f - f.mean(0)
    f = f / torch.sqrt((f**2).mean(0) + 1e-8)
    residuals = []
    for i in range(n):
        others = _of_label(f, y, i)
        # from the mean of k others a cell is farther than from the true mean, by the variance of that mean
        residuals.append(
            (f[i] - torch.stack(others).mean(0)) * (len(others) / (len(others) + 1)) ** 0.5 if others else f[i] * 0
        )
    alike = sum(residuals[i].dot(residuals[j]) ** 2 for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return torch.sqrt(2 * _differences(e, y, partners) * alike) / f.numel()


def _differences(e: Tensor, y: Tensor, partners: str) -> Tensor:
    """In each group of cells that are compared, environments less one, each for what its cells can tell."""
    cells = range(len(e))
    label = y if partners == "within" else torch.zeros_like(y)
    k = [sum(j != i and e[j] == e[i] and label[j] == label[i] for j in cells) for i in cells]
    weight = [float(n) / (float(n) + 1) for n in k]
    total = torch.zeros((), dtype=torch.float64)
    for i in cells:
        group = [weight[j] for j in cells if label[j] == label[i]]
        mean = sum(group) / len(group)
        total += weight[i] * (1 - weight[i]) - 2 * weight[i] ** 2 / len(group) + mean**2 / len(group)
    return total.clamp(min=0)


def _of_label(f: Tensor, y: Tensor, i: int) -> list[Tensor]:
    return [f[j] for j in range(len(f)) if j != i and y[j] == y[i]]
