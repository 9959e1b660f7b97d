"""Compute the relationship metrics with loops over pairs of genes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from reference.retrieval import of_wells


def related_by(net: pd.DataFrame) -> Callable[[str, str], bool]:
    """Return a function that returns whether two genes share a set."""
    sets = [set(targets) for _, targets in net.groupby("source")["target"]]
    return lambda a, b: any(a in s and b in s for s in sets)


def pairs(x: np.ndarray, genes: list[str], net: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the matrix of cosines, and cosine and relation of each pair, for genes with a known partner."""
    related = related_by(net)
    keep = [i for i, a in enumerate(genes) if any(related(a, b) for b in genes if b != a)]
    x, genes = x[keep], [genes[i] for i in keep]
    square = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in x] for a in x])
    both = [(i, j) for i in range(len(genes)) for j in range(i + 1, len(genes))]
    return square, np.array([square[p] for p in both]), np.array([related(genes[i], genes[j]) for i, j in both])


def curve(x: np.ndarray, genes: list[str], net: pd.DataFrame, percentiles: list[int]) -> list[tuple[float, float]]:
    """Return precision and recall at each percentile of the square matrix."""
    square, cosine, truth = pairs(x, genes, net)
    points = []
    for i in percentiles:
        high, low = np.percentile(square, i), np.percentile(square, 100 - i)
        hits = [t for c, t in zip(cosine, truth, strict=True) if c >= high or c <= low]
        points.append((sum(hits) / len(hits) if hits else np.nan, sum(hits) / sum(truth)))
    return points


def limits(cosine: np.ndarray, grid: np.ndarray, n_genes: int | None) -> np.ndarray:
    """Return percentiles of all pairs, or of the square matrix with each pair twice and the diagonal."""
    square = cosine if n_genes is None else np.concatenate([cosine, cosine, np.ones(n_genes)])
    return np.percentile(square, grid)


def of_genes(x: np.ndarray, genes: list[str], net: pd.DataFrame) -> dict[str, float]:
    """Return the average precision with which each gene retrieves its partners among all other genes."""
    related = related_by(net)
    found = of_wells(
        x,
        range(len(genes)),
        lambda q, i: i != q and related(genes[q], genes[i]),
        lambda q, i: i != q and not related(genes[q], genes[i]),
    )
    return {genes[q]: score for q, score in found.items()}


def of_sets(x: np.ndarray, genes: list[str], net: pd.DataFrame) -> dict[str, float]:
    """Return the mean average precision with which genes of a set retrieve each other, among genes unrelated to it."""
    related, found = related_by(net), {}
    for name, targets in net.groupby("source")["target"]:
        members = [i for i, gene in enumerate(genes) if gene in set(targets)]
        others = [
            i
            for i, gene in enumerate(genes)
            if i not in members and not any(related(gene, genes[member]) for member in members)
        ]
        if len(members) > 1 and others:
            scores = of_wells(x, members, lambda q, i: i != q and i in members, lambda q, i: i in others)  # noqa: B023
            found[str(name)] = float(np.mean(list(scores.values())))
    return found
