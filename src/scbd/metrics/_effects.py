"""How far a perturbation moves cells, and how alike its replicates are: each beside what chance gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd.metrics._average_precision import unit_rows
from scbd.metrics._permutations import permuted_within
from scbd.metrics._table import control_names, label_names, representation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

# random assignments that are worked on at once
_BLOCK = 100


def perturbation_effects(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    y_key: str | Sequence[str],
    control: object | Sequence[object],
    e_key: str | Sequence[str] | None = None,
    max_cells: int = 500,
    n_permutations: int = 1_000,
    seed: int = 0,
) -> pd.DataFrame:
    r"""Magnitude and consistency of each perturbation, with p values from labels that were permuted.

    **Magnitude** is the energy distance to the controls, :math:`2 \mathbb{E} \lVert x - c \rVert -
    \mathbb{E} \lVert x - x' \rVert - \mathbb{E} \lVert c - c' \rVert`, no row being compared with itself: 0 on average
    where a perturbation does nothing. **Consistency** is the mean cosine of two of its rows, seen from the mean of the
    controls. They ask different things: a strong effect may differ from cell to cell, a weak one be the same in all.
    Where all plates have one layout, positions have effects of their own, which this does not tell from those of
    perturbations: see :func:`replicate_retrieval` for a floor.

    Parameters
    ----------
    adata
        Wells, or cells.
    rep
        Key of ``obsm``, or an array ``(N, D)``, for example ``adata.X``.
    y_key
        Column of ``obs`` with the perturbation, or several for their cross.
    control
        Value or values of ``y_key`` for what was not perturbed.
    e_key
        Column of ``obs`` with the environment, or several. Labels are then permuted within environments, so that these
        explain nothing, and consistency is that of rows from different environments.
    max_cells
        Rows of each perturbation, and of all controls, drawn at random where there are more.
    n_permutations
        Random labels; no p value is below ``1 / (n_permutations + 1)``.
    seed
        Seed of draws and permutations.

    Returns
    -------
    Frame indexed by perturbation, sorted by name: ``n`` (rows that scores are of, ``max_cells`` at most),
    ``magnitude``, ``magnitude_p``, ``magnitude_q``, ``consistency``, ``consistency_p``, ``consistency_q``; q values by
    Benjamini and Hochberg. A single row has no consistency, and a magnitude without its second term.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, or there are fewer than two controls, or nothing but controls.

    References
    ----------
    Székely and Rizzo (2013), Energy statistics. Celik et al. (2024), Building, benchmarking, and exploring perturbative
    maps of transcriptional and morphological data.

    Examples
    --------
    >>> how = {"y_key": "gene", "control": "nontargeting", "n_permutations": 50}
    >>> effects = scbd.metrics.perturbation_effects(adata, "X_scbd_c", e_key="well", **how)
    >>> effects[["magnitude", "consistency"]].shape
    (4, 2)
    """
    check_count("max_cells", max_cells)
    check_count("n_permutations", n_permutations)
    x, y = np.asarray(representation(adata, rep), dtype=np.float64), label_names(adata, y_key)
    e = np.zeros(len(x), dtype=int) if e_key is None else np.unique(label_names(adata, e_key), return_inverse=True)[1]
    is_control = np.isin(y, control_names(control, y, y_key))
    if is_control.sum() < 2 or is_control.all():
        msg = f"{is_control.sum()} of {len(y)} rows are controls: effects need two controls, and perturbations."
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    rows = {name: _some(np.flatnonzero(y == name), max_cells, rng) for name in np.unique(y[~is_control])}
    controls = _some(np.flatnonzero(is_control), max_cells, rng)
    table = pd.DataFrame({"n": {name: len(of) for name, of in rows.items()}}, index=pd.Index(rows, name="perturbation"))
    found = [_magnitude(x, e, of, controls, n_permutations, rng) for of in rows.values()]
    table[["magnitude", "magnitude_p"]] = found
    table["magnitude_q"] = _q_values(table["magnitude_p"].to_numpy())
    unit = unit_rows(x - x[is_control].mean(0))
    table["consistency"], table["consistency_p"] = _consistencies(unit, e, list(rows.values()), n_permutations, rng)
    table["consistency_q"] = _q_values(table["consistency_p"].to_numpy())
    return table


def _some(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    return rows if len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))


def _magnitude(
    x: np.ndarray, e: np.ndarray, rows: np.ndarray, controls: np.ndarray, n_permutations: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Energy distance to controls, and its p value."""
    from scipy.spatial.distance import pdist, squareform

    both = np.concatenate([rows, controls])
    distance = squareform(pdist(x[both]))
    is_perturbed = np.zeros((1, len(both)))
    is_perturbed[0, : len(rows)] = 1
    observed = _energy_distances(distance, is_perturbed)[0]
    n_larger = 0
    for start in range(0, n_permutations, _BLOCK):
        labels = permuted_within(is_perturbed[0], e[both], min(_BLOCK, n_permutations - start), rng)
        null = _energy_distances(distance, labels)
        n_larger += int(np.count_nonzero(null >= observed - 1e-9 * abs(observed)))
    return float(observed), (1 + n_larger) / (1 + n_permutations)


def _energy_distances(distance: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Of the rows that are chosen, ``(B, N)`` of 0 and 1, to all others, ``(B,)``."""
    n = chosen.sum(1)
    m = chosen.shape[1] - n
    inside = ((chosen @ distance) * chosen).sum(1)
    across = chosen @ distance.sum(1) - inside
    outside = distance.sum() - 2 * across - inside
    return 2 * across / (n * m) - inside / np.maximum(n * (n - 1), 1) - outside / (m * (m - 1))


def _consistencies(
    unit: np.ndarray, e: np.ndarray, rows: list[np.ndarray], n_permutations: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Mean cosine of two rows of each perturbation, in different environments if there are several, and p values."""
    members, labels = np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(of) for of in rows])
    elsewhere = np.ptp(e) > 0
    unit, e = unit[members], e[members]
    observed = _mean_cosines(unit, e, labels, len(rows), elsewhere)
    n_larger = np.zeros(len(rows))
    for _ in range(n_permutations):
        n_larger += (
            _mean_cosines(unit, e, permuted_within(labels, e, 1, rng)[0], len(rows), elsewhere) >= observed - 1e-12
        )
    p = (1 + n_larger) / (1 + n_permutations)
    return observed, np.where(np.isnan(observed), np.nan, p)


def _mean_cosines(unit: np.ndarray, e: np.ndarray, labels: np.ndarray, n_labels: int, elsewhere: bool) -> np.ndarray:
    """For each label, over pairs of its rows; of those that are in different environments, with ``elsewhere``."""
    whole, n = _sums(unit, labels, n_labels)
    if not elsewhere:
        same, n_same = np.bincount(labels, np.square(unit).sum(1), n_labels), n
    else:
        pair, of_row = np.unique(np.stack([labels, e]), axis=1, return_inverse=True)
        parts, n_parts = _sums(unit, of_row.ravel(), pair.shape[1])
        same, n_same = (np.bincount(pair[0], w, n_labels) for w in (np.square(parts).sum(1), n_parts**2))
    n_pairs = n**2 - n_same
    return np.divide(np.square(whole).sum(1) - same, n_pairs, out=np.full(n_labels, np.nan), where=n_pairs > 0)


def _sums(values: np.ndarray, codes: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the rows of each code ``(n, D)``, and their number."""
    from scipy import sparse

    member = sparse.csr_array((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(n, len(codes)))
    return member @ values, np.bincount(codes, minlength=n).astype(float)


def _q_values(p: np.ndarray) -> np.ndarray:
    from scipy.stats import false_discovery_control

    q, known = np.full(len(p), np.nan), np.isfinite(p)
    q[known] = false_discovery_control(p[known]) if known.any() else []
    return q
