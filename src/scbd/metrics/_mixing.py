"""Scores of how well environments, such as batches, are mixed in an embedding.

Two scores are computed from the nearest neighbours of each cell: iLISI, and the fraction of neighbours from the same
environment. A third score is the silhouette of environments.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._shared.checks import check_finite_rows
from scbd._shared.linear_maps import relative_rounding_error
from scbd._shared.messages import warn_user
from scbd._shared.threads import keep_torch_threads
from scbd.metrics._arguments import get_embedding, get_label_texts, random_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

# Maximum number of cells for which the search for nearest neighbours is exact. With more cells, the search is
# approximate.
_MAX_CELLS_EXACT_NEIGHBOURS = 100_000
# Maximum number of cells from which the silhouette is computed. With more cells, a random subset is used.
_MAX_CELLS_SILHOUETTE = 5_000
# number of cells for which the weights of their neighbours are computed at once
_ROWS_PER_BLOCK_OF_NEIGHBOURS = 1 << 13
# Standard deviation of the random shift that separates cells with identical embeddings. It is a fraction of the median
# distance between a cell and the centre of all cells. The shift is smaller than numerical errors of an embedding
# computed in float32, and larger than rounding errors of distances.
_DUPLICATE_SHIFT = 1e-6
_MIXING_SCORES = ("ilisi", "same_environment_neighbours", "silhouette")


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
    """Compute how well environments are mixed in an embedding, with the values that random mixing would give.

    Cells with exactly the same embedding are ranked as neighbours in a random order, independent of the order of rows.
    If at least half of the cells have the same embedding, neighbours have no meaning, and the scores are NaN.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key of ``obsm``, a layer, or ``"X"``.
    e_key
        Column of ``obs`` with the environment, or several columns for their cross.
    y_key
        Column of ``obs`` with the perturbation. If it is given, neighbours are searched among cells of the same
        perturbation, and the scores of perturbations are averaged with their numbers of cells as weights. Give this
        column if perturbations are distributed unequally over environments. Perturbations with fewer than
        ``3 * n_neighbors`` cells, or in one environment only, are excluded. The number of excluded perturbations is
        logged and returned.
    n_neighbors
        Number of neighbours per cell. Neighbours are exact for up to 100,000 cells, and approximate (pynndescent) for
        more.
    max_cells
        Maximum number of cells; a random subset is used if there are more. `None` uses all cells.
    seed
        Seed of the random subset of cells, the approximate search for neighbours, the subset for the silhouette, the
        permuted environments, and the order of cells with the same embedding.

    Returns
    -------
    Dictionary of these scores:

    - ``ilisi``: median inverse Simpson index of the neighbours' environments (perplexity ``n_neighbors / 3``), scaled
      so that it is 0 if all neighbours come from one environment
    - ``ilisi_expected``: value of ``ilisi`` after environments were permuted over the cells; it is below 1
    - ``same_environment_neighbours``: fraction of neighbours from the cell's own environment
    - ``same_environment_expected``: expected value of ``same_environment_neighbours`` if neighbours were drawn at
      random
    - ``silhouette``: mean silhouette width of at most 5,000 cells, with environments as clusters; near 1 if
      environments are separated
    - ``silhouette_expected``: value of ``silhouette`` after environments were permuted over the cells; it is below 0
    - ``n_left_out``, with ``y_key`` only: number of excluded perturbations

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If there is only one environment, ``n_neighbors`` is not smaller than the number of cells, the embedding is not
        finite, or ``y_key`` is given and no perturbation has enough cells in several environments.

    Warns
    -----
    UserWarning
        If at least half of the cells have the same embedding.

    References
    ----------
    Korsunsky et al. (2019), Harmony (LISI); Luecken et al. (2022), scIB (scaling of LISI).

    Examples
    --------
    >>> scores = scbd.metrics.batch_mixing(adata, "X_scbd_c", "well", n_neighbors=30)
    >>> sorted(scores)[:2]  # mixing of the wells, and its value for permuted wells
    ['ilisi', 'ilisi_expected']
    """
    x, environments = np.asarray(get_embedding(adata, embedding_key)), get_label_texts(adata, e_key)
    rng = np.random.default_rng([seed, len(x)])
    rows = random_rows(len(x), max_cells, rng)
    x, (codes, names) = x[rows], pd.factorize(environments[rows])
    if len(names) < 2:
        msg = f"Every cell is in the one environment {names[0]!r}: there is nothing to mix."
        raise ValueError(msg)
    check_finite_rows(x)
    groups = [np.arange(len(x))]
    if y_key is not None:
        y = get_label_texts(adata, y_key)[rows]
        groups, n_left_out = _rows_of_scorable_perturbations(y, codes, y_key, 3 * n_neighbors)
    if len(x) <= n_neighbors:
        msg = f"n_neighbors={n_neighbors} needs more cells than there are ({len(x)}): lower n_neighbors."
        raise ValueError(msg)
    x_apart, is_point = separate_duplicates(x, rng)
    frame = pd.DataFrame([_mixing_scores(x_apart[group], codes[group], n_neighbors, seed) for group in groups])
    weight = [len(group) for group in groups]
    scores = {str(name): float(np.average(values, weights=weight)) for name, values in frame.items()}
    if is_point:
        msg = (
            f"Half of the cells or more lie at one place of obsm[{embedding_key!r}], which has collapsed: "
            f"{', '.join(_MIXING_SCORES)} are NaN."
        )
        warn_user(msg)
        scores |= dict.fromkeys(_MIXING_SCORES, np.nan)
    return scores if y_key is None else scores | {"n_left_out": float(n_left_out)}


def _rows_of_scorable_perturbations(
    labels: np.ndarray, codes: np.ndarray, y_key: str, at_least: int
) -> tuple[list[np.ndarray], int]:
    """Return the rows of each perturbation within which mixing can be measured.

    The number of perturbations for which mixing cannot be measured is returned as well.

    Mixing can be measured within a perturbation if it has at least ``at_least`` cells, from more than one environment.
    """
    rows = list(pd.Series(labels).groupby(labels).indices.values())
    large = [group for group in rows if len(group) >= at_least]
    if not large:
        msg = f"No {y_key} has the {at_least} cells that n_neighbors={at_least // 3} needs: lower n_neighbors."
        raise ValueError(msg)
    kept = [group for group in large if len(np.unique(codes[group])) > 1]
    if not kept:
        msg = f"Each {y_key} is in one environment only: effects of y and e cannot be distinguished."
        raise ValueError(msg)
    n_left_out = len(rows) - len(kept)
    if n_left_out:
        msg = "Mixing excludes %d of %d values of %s, which have fewer than %d cells or are in one environment only."
        logger.warning(msg, n_left_out, len(rows), y_key, at_least)
    return kept, n_left_out


def separate_duplicates(x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, bool]:
    """Shift each cell by a tiny random vector, so that cells with identical embeddings are ranked in a random order.

    The shifts are too small to change the order of neighbours, except among cells with identical embeddings. Without
    shifts, such cells would be neighbours in the order of their rows. Permuting the rows would not help, because all
    cells would then list cells with identical embeddings in one common order. With shifts, each cell has an order of
    its own.

    Returns
    -------
    The embedding of the shifted cells; and `True` if the embedding has collapsed, that is, if at least half of the
    cells have the same embedding.
    """
    rounding = relative_rounding_error(x.dtype)
    # The centre is the median of each component of the embedding. If more than half of the cells have the same
    # embedding, the centre is equal to this embedding.
    centre = np.median(x, axis=0).astype(np.float64)
    x = x - centre
    spread = float(np.median(np.linalg.norm(x, axis=1)))
    is_point = spread <= rounding * np.linalg.norm(centre)
    return x + _DUPLICATE_SHIFT * (1.0 if is_point else spread) * rng.normal(size=x.shape), bool(is_point)


def _mixing_scores(x: np.ndarray, codes: np.ndarray, n_neighbors: int, seed: int) -> dict[str, float]:
    names, codes = np.unique(codes, return_inverse=True)
    distances, neighbors = nearest_neighbors(x, n_neighbors, seed)
    frequency = np.bincount(codes)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(x))[:_MAX_CELLS_SILHOUETTE]
    permuted = rng.permutation(codes)
    effective = np.median(lisi(distances, neighbors, [codes, permuted], n_neighbors / 3), axis=1)
    ilisi, ilisi_expected = (effective - 1) / (len(names) - 1)
    return {
        "ilisi": float(ilisi),
        "ilisi_expected": float(ilisi_expected),
        "same_environment_neighbours": float(np.mean([(codes[column] == codes).mean() for column in neighbors.T])),
        # Mean probability that a randomly chosen different cell has the same environment as the cell. 1 is subtracted
        # from both numbers of cells, because a cell is not its own neighbour.
        "same_environment_expected": float(((frequency[codes] - 1) / (len(codes) - 1)).mean()),
        "silhouette": _silhouette(x[rows], codes[rows]),
        "silhouette_expected": _silhouette(x[rows], permuted[rows]),
    }


def _silhouette(x: np.ndarray, codes: np.ndarray) -> float:
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(x, codes)) if 1 < len(np.unique(codes)) < len(codes) else np.nan


def nearest_neighbors(x: np.ndarray, n_neighbors: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest other cells of each cell, by Euclidean distance.

    Return the distances to these neighbours and their row numbers, each ``(N, n_neighbors)``.
    """
    if len(x) <= _MAX_CELLS_EXACT_NEIGHBOURS:
        from sklearn.neighbors import NearestNeighbors

        # kneighbors() without an argument excludes each cell from its own list of neighbours
        return NearestNeighbors(n_neighbors=n_neighbors, algorithm="brute").fit(x).kneighbors()
    from pynndescent import NNDescent

    with keep_torch_threads():
        index, distances = NNDescent(x, n_neighbors=n_neighbors + 1, random_state=seed).neighbor_graph
    # NNDescent includes each cell in its own list of neighbours, from which the cell is removed. If other cells with
    # the same embedding have displaced a cell from its own list, the last neighbour of the list is removed instead.
    own = index == np.arange(len(x))[:, None]
    own[~own.any(axis=1), -1] = True
    return distances[~own].reshape(len(x), -1), index[~own].reshape(len(x), -1)


def lisi(distances: np.ndarray, neighbors: np.ndarray, labels: Sequence[ArrayLike], perplexity: float) -> np.ndarray:
    """Compute the local inverse Simpson index (LISI): the effective number of labels among each cell's neighbours.

    The weight of a neighbour decreases exponentially with its distance. The decay rate is chosen for each cell, so that
    the weights of its neighbours have the given perplexity.

    Parameters
    ----------
    distances, neighbors
        Distances from each of ``N`` cells to its ``K`` neighbours, and the row numbers of these neighbours, each
        ``(N, K)``.
    labels
        List of one or several arrays of integer labels, for example environments. Each array ``(M,)`` holds one label
        for each of the ``M`` rows that ``neighbors`` refers to.
    perplexity
        Effective number of neighbours that have weight.

    Returns
    -------
    Effective number of labels around each cell, ``(len(labels), N)``.
    """
    found = np.empty((len(labels), len(distances)))
    for start in range(0, len(distances), _ROWS_PER_BLOCK_OF_NEIGHBOURS):
        block = slice(start, start + _ROWS_PER_BLOCK_OF_NEIGHBOURS)
        weights = _neighbour_weights(distances[block], perplexity)
        for codes, effective in zip(map(np.asarray, labels), found, strict=True):
            n_labels = int(codes.max()) + 1
            place = np.arange(len(weights))[:, None] * n_labels + codes[neighbors[block]]
            mass = np.bincount(place.ravel(), weights.ravel(), minlength=len(weights) * n_labels)
            effective[block] = 1 / np.square(mass.reshape(-1, n_labels)).sum(axis=1)
    return found


def _neighbour_weights(distances: np.ndarray, perplexity: float, tolerance: float = 1e-5) -> np.ndarray:
    """Compute the weights of each cell's neighbours, ``(N, K)``, from their distances.

    The weights of a cell sum to 1, and their perplexity (exponential of the entropy) is ``perplexity``. ``tolerance``
    is the largest accepted difference between the entropy and the logarithm of ``perplexity``, in nats.
    """
    # The weights of each cell have their own decay rate (beta), which is found by bisection for all cells at once.
    # Subtracting the distance to the first neighbour does not change the normalised weights.
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
