"""Cells unlike any that were learned from, by how far known cells that were held out are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._checks import check_count
from scbd._linear_maps import mean_and_factor
from scbd.metrics._table import chosen_rows, representation, trained_rows

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

_BLOCK = 8_192
# of the largest component, what float32 may make of one value
_ROUNDING = 1e-6


def novelty(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    trained_on: str | ArrayLike,
    held_out: ArrayLike,
    n_neighbors: int = 10,
    max_cells: int = 20_000,
    seed: int = 0,
) -> np.ndarray:
    """How likely a known cell is to be as far from the training cells: small for cells unlike any seen.

    A cell's distance is the mean of those to its nearest training cells, in components of one scale; infinite, where a
    component that is the same in all training cells is another in this one. It is compared
    with distances of cells of the same kind that were not trained on, so that of such cells a share of p has a value of
    p or less, whatever the embedding (conformal p values). Nothing follows from a large value: an encoder may be blind
    to what is new.

    Give it r_c (``get_latent_representation(representation="intermediate")``). On a simulated screen it told exchanged
    channels and noise (70 to 97 % of the cells below 0.05), two cells in a crop and empty crops in part, and neither
    blur nor dim light (:doc:`/archive/lab_book`, 40); z_c, which puts every cell with some perturbation, told less.

    Parameters
    ----------
    adata
        Cells, those that were trained on among them.
    rep
        Key of ``obsm``, or an array ``(N, D)``.
    trained_on
        What the encoder was trained on: a mask ``(N,)``, row numbers (``model.train_indices``), or a column of ``obs``
        that says ``True`` or ``"train"`` there.
    held_out
        Known cells that were not trained on, from the same plates: a mask or row numbers
        (``model.validation_indices``).
    n_neighbors
        Training cells that a distance is the mean of.
    max_cells
        Training cells that are compared with, drawn at random.
    seed
        Seed of the draw.

    Returns
    -------
    float64 ``(N,)``: the share of held-out cells that are as far or farther, the cell itself counted in, from
    ``1 / (n + 1)`` for n of them to 1. Of the training cells it says nothing: they are their own neighbours.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If the embedding is not finite, no cell was held out or some of these were trained on, or there are fewer
        training cells than neighbours.

    References
    ----------
    Vovk, Gammerman and Shafer (2005), Algorithmic learning in a random world; Bates et al. (2023), Testing for outliers
    with conformal p-values.

    Examples
    --------
    >>> r = model.get_latent_representation(representation="intermediate")
    >>> p = scbd.metrics.novelty(adata, r, trained_on=model.train_indices, held_out=model.validation_indices)
    >>> p.shape
    (240,)
    """
    from sklearn.neighbors import NearestNeighbors

    check_count("n_neighbors", n_neighbors)
    check_count("max_cells", max_cells)
    x = representation(adata, rep)
    train, known = np.flatnonzero(trained_rows(adata, trained_on)), chosen_rows("held_out", held_out, len(x))
    if not known.any() or known[train].any():
        what = "no cell" if not known.any() else f"{known[train].sum():,} cells that were trained on"
        msg = f"held_out names {what}: give cells that were not trained on, such as model.validation_indices."
        raise ValueError(msg)
    train = np.sort(np.random.default_rng(seed).permutation(train)[:max_cells])
    if len(train) < n_neighbors:
        msg = f"There are {len(train)} training cells, and n_neighbors={n_neighbors}: give fewer neighbours."
        raise ValueError(msg)
    mean, factor = mean_and_factor(x[train])
    nearest = NearestNeighbors(n_neighbors=n_neighbors).fit((x[train] - mean) * factor)
    constant = factor == 0
    # of a component itself, which may have small units; one that is 0 has no units but those of the others
    unit = np.abs(mean[constant])
    rounding = _ROUNDING * np.where(unit > 0, unit, np.abs(x[train]).max())
    distances = np.empty(len(x))
    for start in range(0, len(x), _BLOCK):
        part = slice(start, start + _BLOCK)
        distances[part] = nearest.kneighbors((x[part] - mean) * factor)[0].mean(1)
        # no scale says how far a component is from what all training cells have
        distances[part][(np.abs(x[part][:, constant] - mean[constant]) > rounding).any(1)] = np.inf
    of_known = np.sort(distances[known])
    as_far = len(of_known) - np.searchsorted(of_known, distances, side="left")
    # a held-out cell is among them already
    return (as_far + ~known) / (len(of_known) + ~known)
