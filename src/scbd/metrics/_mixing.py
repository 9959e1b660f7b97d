"""Whether environments are mixed among a cell's neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._threads import torch_threads_kept
from scbd.metrics._table import check_keys, embedding_and_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

_EXACT_CELLS = 20_000
_SILHOUETTE_CELLS = 5_000


def batch_mixing(
    adata: AnnData,
    embedding_key: str,
    e_key: str | Sequence[str],
    *,
    y_key: str | None = None,
    n_neighbors: int = 90,
    seed: int = 0,
) -> dict[str, float]:
    """How well environments are mixed in an embedding.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key in ``obsm``.
    e_key
        Column of ``obs``, or several for their cross.
    y_key
        Where perturbations are unequally spread over environments, a good embedding is not mixed over all cells: with
        this column, neighbours are looked for among cells of the same perturbation, and results averaged over cells.
        Perturbations with fewer than ``3 * n_neighbors`` cells, or in one environment only, are left out.
    n_neighbors
        Neighbours of a cell. They are exact up to 20,000 cells, approximate (pynndescent) beyond.
    seed
        Seed of the approximate search and of the silhouette's subset.

    Returns
    -------
    ``ilisi``: median inverse Simpson index of the neighbours' environments (perplexity ``n_neighbors / 3``), scaled
    to 0 (one environment) … 1 (all equally); ``same_environment_neighbours`` and ``expected``: fraction of
    neighbours from the cell's own environment, and what it would be if environments were mixed at random;
    ``silhouette``: mean silhouette width by environment on at most 5,000 cells, near 0 if mixed, towards 1 if apart.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If there is one environment only, fewer cells than neighbours, or the embedding is not finite.

    References
    ----------
    Korsunsky et al. (2019), Harmony (LISI); Luecken et al. (2022), scIB (its scaling).

    Examples
    --------
    >>> scores = scbd.metrics.batch_mixing(adata, "X_scbd_c", "well", n_neighbors=30)
    >>> sorted(scores)  # neighbours of the same well, beside what chance would give
    ['expected', 'ilisi', 'same_environment_neighbours', 'silhouette']
    """
    x, environments = embedding_and_labels(adata, embedding_key, e_key)
    codes, names = pd.factorize(environments)
    if len(names) < 2:
        msg = f"Every cell is in the one environment {names[0]!r}: there is nothing to mix."
        raise ValueError(msg)
    n_bad = int((~np.isfinite(x).all(axis=1)).sum())
    if n_bad:
        msg = f"The embedding has NaN or infinite values in {n_bad} of {len(x)} cells: drop them."
        raise ValueError(msg)
    groups = [np.arange(len(x))] if y_key is None else _groups(adata, y_key, 3 * n_neighbors)
    if not groups:
        msg = f"No {y_key} has the {3 * n_neighbors} cells that n_neighbors={n_neighbors} asks for: lower n_neighbors."
        raise ValueError(msg)
    if len(x) <= n_neighbors:
        msg = f"n_neighbors={n_neighbors} asks for more cells than there are ({len(x)}): lower n_neighbors."
        raise ValueError(msg)
    parts = [_mixing(x[rows], codes[rows], n_neighbors, seed) for rows in groups if len(np.unique(codes[rows])) > 1]
    if not parts:
        msg = f"Within each {y_key} there is one environment only: y and e cannot be told apart here."
        raise ValueError(msg)
    frame = pd.DataFrame(parts)
    weight = frame.pop("n_cells")
    return {name: float(np.average(values, weights=weight)) for name, values in frame.items()}


def _groups(adata: AnnData, y_key: str, at_least: int) -> list[np.ndarray]:
    check_keys(adata, [], [y_key])
    return [rows for rows in adata.obs.groupby(y_key, observed=True).indices.values() if len(rows) >= at_least]


def _mixing(x: np.ndarray, codes: np.ndarray, n_neighbors: int, seed: int) -> dict[str, float]:
    from sklearn.metrics import silhouette_score

    codes, n_environments = np.unique(codes, return_inverse=True)[1], len(np.unique(codes))
    distances, neighbors = nearest_neighbors(x, n_neighbors, seed)
    frequency = np.bincount(codes)
    # a cell is not its own neighbour
    expected = ((frequency[codes] - 1) / (len(codes) - 1)).mean()
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(x))[:_SILHOUETTE_CELLS]
    several = 1 < len(np.unique(codes[rows])) < len(rows)
    return {
        "ilisi": (float(np.median(lisi(distances, codes[neighbors], n_neighbors / 3))) - 1) / (n_environments - 1),
        "same_environment_neighbours": float((codes[neighbors] == codes[:, None]).mean()),
        "expected": float(expected),
        "silhouette": float(silhouette_score(x[rows], codes[rows])) if several else np.nan,
        "n_cells": len(x),
    }


def nearest_neighbors(x: np.ndarray, n_neighbors: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Euclidean distances to, and row numbers of, the nearest other cells, each ``(N, n_neighbors)``."""
    if len(x) <= _EXACT_CELLS:
        from sklearn.neighbors import NearestNeighbors

        # without a query, a cell is not its own neighbour
        return NearestNeighbors(n_neighbors=n_neighbors, algorithm="brute").fit(x).kneighbors()
    from pynndescent import NNDescent

    with torch_threads_kept():
        index, distances = NNDescent(x, n_neighbors=n_neighbors + 1, random_state=seed).neighbor_graph
    # the cell itself is its first neighbour, but for duplicates, of which any may be
    own = index == np.arange(len(x))[:, None]
    own[~own.any(axis=1), -1] = True
    return distances[~own].reshape(len(x), -1), index[~own].reshape(len(x), -1)


def lisi(distances: np.ndarray, labels: ArrayLike, perplexity: float, tolerance: float = 1e-5) -> np.ndarray:
    """Inverse Simpson index of the neighbours' labels under a Gaussian kernel of a given perplexity.

    Parameters
    ----------
    distances
        To the neighbours, ``(N, K)``.
    labels
        Integer labels of the neighbours, ``(N, K)``.
    perplexity
        Effective number of neighbours.
    tolerance
        On the entropy, in nats.

    Returns
    -------
    Effective number of labels around each cell, ``(N,)``.
    """
    labels = np.asarray(labels)
    # one bandwidth a cell, by bisection on all cells at once; distances to the first neighbour cancel in the kernel
    d = distances - distances[:, :1]
    beta = np.ones(len(d))
    low, high = np.full(len(d), -np.inf), np.full(len(d), np.inf)
    for _ in range(50):
        p = np.exp(-d * beta[:, None])
        p /= p.sum(axis=1, keepdims=True)
        entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1)
        excess = entropy - np.log(perplexity)
        if (np.abs(excess) < tolerance).all():
            break
        low, high = np.where(excess > 0, beta, low), np.where(excess > 0, high, beta)
        middle = np.where(np.isinf(high), beta * 2, np.where(np.isinf(low), beta / 2, (low + high) / 2))
        beta = np.where(np.abs(excess) < tolerance, beta, middle)
    n_labels = int(labels.max()) + 1
    mass = np.zeros((len(d), n_labels))
    for label in range(n_labels):
        mass[:, label] = np.where(labels == label, p, 0).sum(axis=1)
    return 1 / np.square(mass).sum(axis=1)
