"""Compute the share of the variance explained by the environment, with matrices of cells and loops over them."""

from __future__ import annotations

import torch
from torch import Tensor


def explained_variance(f: Tensor, e: Tensor, y: Tensor, partners: str) -> Tensor:
    """Return the explained variance: products of cells of a group, without that of each cell's own square."""
    apart, _, _ = _apart(f, y)
    form = _form(e, y, partners)
    products = [form[i, j] * apart[i].dot(apart[j]) for i in range(len(f)) for j in range(len(f))]
    return torch.stack(products).sum() / f.numel()


def error(f: Tensor, e: Tensor, y: Tensor, partners: str) -> Tensor:
    """Return the standard deviation of the share by chance, given features with the covariance within labels."""
    apart, variance, freedom = _apart(f, y)
    scaled = apart / variance.sqrt()[:, None]
    products = torch.stack([scaled[i].dot(scaled[j]) for i in range(len(f)) for j in range(len(f))])
    squared = products.square().sum()
    by_chance = scaled.square().sum() ** 2 / max(freedom, 1)
    covariance = (squared - by_chance).clamp(min=0) / max((freedom - 1) * (freedom + 2), 1)
    mean = scaled.square().sum() / max(freedom * f.shape[1], 1)
    covariance = covariance / mean**2 if mean > 0 else covariance
    weighted = _form(e, y, partners).square() * variance[:, None] * variance
    return (2 * weighted.sum() * covariance).clamp(min=0).sqrt() / f.numel()


def gain(e: Tensor, y: Tensor, partners: str) -> Tensor:
    """Return the share explained in features that are the environment itself, with one column for each."""
    n = len(e)
    columns = torch.nn.functional.one_hot(e).double()
    apart = torch.stack([columns[i] - columns[y == y[i]].mean(0) for i in range(n)])
    return (apart.T @ _form(e, y, partners) @ apart).trace() / apart.square().sum(1).mean()


def _form(e: Tensor, y: Tensor, partners: str) -> Tensor:
    """Return the quadratic form ``(B, B)`` within labels, whose mean is zero for any variances of cells."""
    n = len(e)
    residual = torch.eye(n, dtype=torch.float64)
    for i in range(n):
        of_label = [j for j in range(n) if y[j] == y[i]]
        for j in of_label:
            residual[i, j] -= 1 / len(of_label)
    explained = _averaged(e, y, partners)
    squares = residual @ explained @ residual
    # subtract a multiple of each cell's square, so that the form of the features has a diagonal of zeros
    own = torch.linalg.lstsq(residual.square(), squares.diagonal()[:, None], driver="gelsd").solution[:, 0]
    form = squares - residual @ own.diag() @ residual
    return form if form.square().sum() > 1e-6 * (1 + explained.trace()) else 0 * form


def _averaged(e: Tensor, y: Tensor, partners: str) -> Tensor:
    """Return the matrix that averages over cells of an environment."""
    n = len(e)
    averaged = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        group = [j for j in range(n) if e[j] == e[i] and (partners == "across" or y[j] == y[i])]
        for j in group if len(group) > 1 else []:
            averaged[i, j] = 1 / len(group)
    return averaged


def _apart(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return cells minus the means of their labels, the variance of each cell's label, and total degrees of freedom."""
    n = len(f)
    f = f - f.mean(0)
    f = f / f.square().mean(0).sqrt()
    of_label = [[j for j in range(n) if y[j] == y[i]] for i in range(n)]
    apart = torch.stack([f[i] - f[of_label[i]].mean(0) for i in range(n)])
    freedom = float(sum(1 - 1 / len(others) for others in of_label))
    variance = apart.square().mean(1).sum() / max(freedom, 1)
    if variance < 1e-12:
        return 0 * apart, torch.ones(n, dtype=torch.float64), freedom
    own = [(apart[others].square().mean(1).sum() + variance) / len(others) for others in of_label]
    return apart, torch.stack(own), freedom
