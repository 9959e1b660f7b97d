"""Whether environments are mixed among a cell's neighbours."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._checks import check_finite_rows
from scbd._files import torch_threads_kept
from scbd._linear_maps import resolution
from scbd.metrics._table import label_names, stored_embedding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

_EXACT_CELLS = 100_000
_SILHOUETTE_CELLS = 5_000
# cells whose neighbours are weighed at a time
_BLOCK = 1 << 13
# of the spread of the embedding: less than float32 tells apart in what was computed, more than distances are rounded by
_APART = 1e-6
_MEASURED = ("ilisi", "same_environment_neighbours", "silhouette")


def batch_mixing(
    adata: AnnData,
    embedding_key: str,
    e_key: str | Sequence[str],
    *,
    y_key: str | None = None,
    n_neighbors: int = 90,
    max_cells: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """How well environments are mixed in an embedding, beside what chance would give in the same design.

    Cells that lie at one place are neighbours in a random order, whatever the order of rows. An embedding of which half
    of the cells or more lie at one place has no neighbours to speak of: its scores are NaN.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key of ``obsm``, a layer, or ``"X"``.
    e_key
        Column of ``obs``, or several for their cross.
    y_key
        Look for neighbours among cells of the same perturbation, for designs in which these are unequally spread over
        environments, and average over cells. Perturbations with fewer than ``3 * n_neighbors`` cells, or in one
        environment only, are left out; how many is logged and returned.
    n_neighbors
        Neighbours of a cell. They are exact up to 100,000 cells, approximate (pynndescent) beyond.
    max_cells
        Use a random subset of this size.
    seed
        Seed of the subset, the approximate search, the silhouette's subset and the permuted environments.

    Returns
    -------
    ``ilisi``: median inverse Simpson index of the neighbours' environments (perplexity ``n_neighbors / 3``), scaled
    so that neighbours of one environment give 0; ``ilisi_expected`` is what environments permuted over the same
    neighbours give, which is below 1.
    ``same_environment_neighbours``: fraction of neighbours from the cell's own environment, with
    ``same_environment_expected`` of a random order. ``silhouette``: mean silhouette width by environment on at most
    5,000 cells, towards 1 if apart, with ``silhouette_expected`` of permuted environments, which is below 0. With
    ``y_key`` also ``n_left_out``, the number of perturbations that were left out.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If there is one environment only, fewer cells than neighbours, or the embedding is not finite.

    Warns
    -----
    UserWarning
        If half of the cells or more lie at one place.

    References
    ----------
    Korsunsky et al. (2019), Harmony (LISI); Luecken et al. (2022), scIB (its scaling).

    Examples
    --------
    >>> scores = scbd.metrics.batch_mixing(adata, "X_scbd_c", "well", n_neighbors=30)
    >>> sorted(scores)[:2]  # how mixed wells are, beside what permuted wells would be
    ['ilisi', 'ilisi_expected']
    """
    x, environments = np.asarray(stored_embedding(adata, embedding_key)), label_names(adata, e_key)
    rng = np.random.default_rng([seed, len(x)])
    if max_cells is not None and len(x) > max_cells:
        rows = np.sort(rng.choice(len(x), max_cells, replace=False))
    else:
        rows = np.arange(len(x))
    x, (codes, names) = x[rows], pd.factorize(environments[rows])
    if len(names) < 2:
        msg = f"Every cell is in the one environment {names[0]!r}: there is nothing to mix."
        raise ValueError(msg)
    check_finite_rows(x)
    groups = [np.arange(len(x))]
    if y_key is not None:
        groups, n_left_out = _groups(label_names(adata, y_key)[rows], codes, y_key, 3 * n_neighbors)
    if len(x) <= n_neighbors:
        msg = f"n_neighbors={n_neighbors} asks for more cells than there are ({len(x)}): lower n_neighbors."
        raise ValueError(msg)
    x_apart, is_point = apart(x, rng)
    frame = pd.DataFrame([_mixing(x_apart[group], codes[group], n_neighbors, seed) for group in groups])
    weight = [len(group) for group in groups]
    scores = {str(name): float(np.average(values, weights=weight)) for name, values in frame.items()}
    if is_point:
        msg = (
            f"Half of the cells or more lie at one place of obsm[{embedding_key!r}], which has collapsed: "
            f"{', '.join(_MEASURED)} are NaN."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
        scores |= dict.fromkeys(_MEASURED, np.nan)
    return scores if y_key is None else scores | {"n_left_out": float(n_left_out)}


def _groups(labels: np.ndarray, codes: np.ndarray, y_key: str, at_least: int) -> tuple[list[np.ndarray], int]:
    """Rows of each perturbation that mixing can be told within, and the number of those where it cannot."""
    rows = list(pd.Series(labels).groupby(labels).indices.values())
    large = [group for group in rows if len(group) >= at_least]
    if not large:
        msg = f"No {y_key} has the {at_least} cells that n_neighbors={at_least // 3} asks for: lower n_neighbors."
        raise ValueError(msg)
    kept = [group for group in large if len(np.unique(codes[group])) > 1]
    if not kept:
        msg = f"Within each {y_key} there is one environment only: y and e cannot be told apart here."
        raise ValueError(msg)
    n_left_out = len(rows) - len(kept)
    if n_left_out:
        logger.warning(
            "Mixing leaves out %d of %d values of %s, with fewer than %d cells or in one environment only.",
            *(n_left_out, len(rows), y_key, at_least),
        )
    return kept, n_left_out


def apart(x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, bool]:
    """Cells moved so little that only those of one place change their order; and whether half of them lie at one.

    Without it, cells of one place would be neighbours in the order of their rows. That of all cells must not be the
    same, which a permutation of rows would make it: each cell is moved for itself.
    """
    rounding = resolution(x.dtype)
    centre = np.median(x, axis=0).astype(np.float64)  # where half of the cells lie at one place, that place
    x = x - centre
    spread = float(np.median(np.linalg.norm(x, axis=1)))
    is_point = spread <= rounding * np.linalg.norm(centre)
    return x + _APART * (1.0 if is_point else spread) * rng.normal(size=x.shape), bool(is_point)


def _mixing(x: np.ndarray, codes: np.ndarray, n_neighbors: int, seed: int) -> dict[str, float]:
    names, codes = np.unique(codes, return_inverse=True)
    distances, neighbors = nearest_neighbors(x, n_neighbors, seed)
    frequency = np.bincount(codes)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(x))[:_SILHOUETTE_CELLS]
    permuted = rng.permutation(codes)
    effective = np.median(lisi(distances, neighbors, [codes, permuted], n_neighbors / 3), axis=1)
    ilisi, ilisi_expected = (effective - 1) / (len(names) - 1)
    return {
        "ilisi": float(ilisi),
        "ilisi_expected": float(ilisi_expected),
        "same_environment_neighbours": float(np.mean([(codes[column] == codes).mean() for column in neighbors.T])),
        # a cell is not its own neighbour
        "same_environment_expected": float(((frequency[codes] - 1) / (len(codes) - 1)).mean()),
        "silhouette": _silhouette(x[rows], codes[rows]),
        "silhouette_expected": _silhouette(x[rows], permuted[rows]),
    }


def _silhouette(x: np.ndarray, codes: np.ndarray) -> float:
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(x, codes)) if 1 < len(np.unique(codes)) < len(codes) else np.nan


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


def lisi(distances: np.ndarray, neighbors: np.ndarray, labels: Sequence[ArrayLike], perplexity: float) -> np.ndarray:
    """Inverse Simpson index of the neighbours' labels under a Gaussian kernel of a given perplexity.

    Parameters
    ----------
    distances, neighbors
        Distances to and row numbers of the neighbours, ``(N, K)``.
    labels
        One or several labelings of the same rows, each integers ``(M,)``.
    perplexity
        Effective number of neighbours.

    Returns
    -------
    Effective number of labels around each cell, ``(len(labels), N)``.
    """
    codes = [np.asarray(labeling) for labeling in labels]
    blocks = [np.stack(list(_simpson(distances[b], neighbors[b], codes, perplexity))) for b in _slices(len(distances))]
    return np.concatenate(blocks, axis=1)


def _slices(n: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, n, _BLOCK))


def _simpson(
    distances: np.ndarray, neighbors: np.ndarray, labels: Sequence[np.ndarray], perplexity: float
) -> Iterator[np.ndarray]:
    weights, n = _kernel(distances, perplexity), len(distances)
    for codes in labels:
        size = int(codes.max()) + 1
        place = np.arange(n)[:, None] * size + codes[neighbors]
        mass = np.bincount(place.ravel(), weights.ravel(), minlength=n * size).reshape(n, size)
        yield 1 / np.square(mass).sum(axis=1)


def _kernel(distances: np.ndarray, perplexity: float, tolerance: float = 1e-5) -> np.ndarray:
    """Weights of the neighbours, ``(N, K)``; their entropy is that of the perplexity, to a tolerance in nats."""
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
    return p
