"""Whether environments have one distribution, moments of all orders: maximum mean discrepancy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._checks import check_count
from scbd.metrics._permutations import permuted_within
from scbd.metrics._table import label_names, representation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

# of a kernel between 0 and 1, below which two sums differ by rounding
_ROUNDING = 1e-9


def environment_mmd(
    adata: AnnData,
    rep: str | ArrayLike,
    e_key: str | Sequence[str],
    *,
    y_key: str | Sequence[str] | None = None,
    max_cells: int = 2_000,
    n_permutations: int = 200,
    seed: int = 0,
) -> dict[str, float]:
    r"""Squared maximum mean discrepancy between environments, with its value for environments at random.

    A linear probe sees that environments differ in their means; this sees any difference between their distributions.
    With the kernel :math:`k(x, x') = \exp(-\lVert x - x' \rVert^2 / s)`, where s is the median squared distance, it is
    the mean over pairs of environments of

    .. math:: \mathbb{E} k(a, a') + \mathbb{E} k(b, b') - 2 \mathbb{E} k(a, b),

    no cell being compared with itself: 0 for equal distributions, on average, and exactly for a point.

    Parameters
    ----------
    adata
        Embedded cells, or wells.
    rep
        Key of ``obsm``, or an array ``(N, D)``.
    e_key
        Column of ``obs``, or several for their cross.
    y_key
        Column of the perturbation, or several. Environments are then permuted within perturbations: where some
        environments have more cells of one of them, that is no discrepancy.
    max_cells
        Of all, drawn at random; the kernel is quadratic in them. Environments with a single one are left out.
    n_permutations
        Random assignments of cells to environments.
    seed
        Seed of draws and permutations.

    Returns
    -------
    ``mmd``; ``expected``, its mean over permutations; and ``p_value``, the share of permutations with as large a value,
    at least ``1 / (n_permutations + 1)``.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, or there are no two environments with two cells each.

    References
    ----------
    Gretton et al. (2012), A kernel two-sample test.

    Examples
    --------
    >>> found = scbd.metrics.environment_mmd(adata, "X_scbd_c", "well", y_key="gene", n_permutations=50)
    >>> sorted(found)
    ['expected', 'mmd', 'p_value']
    """
    check_count("max_cells", max_cells)
    check_count("n_permutations", n_permutations)
    x, rng = representation(adata, rep), np.random.default_rng(seed)
    names = label_names(adata, e_key)
    groups = (
        np.zeros(len(x), dtype=int) if y_key is None else np.unique(label_names(adata, y_key), return_inverse=True)[1]
    )
    rows = np.sort(rng.permutation(len(x))[:max_cells])
    environments, counts = np.unique(names[rows], return_counts=True)
    rows = rows[np.isin(names[rows], environments[counts > 1])]
    codes = np.unique(names[rows], return_inverse=True)[1]
    if not len(rows) or codes.max() < 1:
        msg = f"No two environments of {e_key!r} have two of the {len(x):,} cells: there is nothing to compare."
        raise ValueError(msg)
    kernel = _kernel(np.asarray(x[rows], dtype=np.float64))
    observed = _discrepancy(kernel, codes)
    orders = permuted_within(codes, groups[rows], n_permutations, rng)
    null = np.array([_discrepancy(kernel, permuted) for permuted in orders])
    p_value = (1 + np.count_nonzero(null >= observed - _ROUNDING)) / (1 + n_permutations)
    return {"mmd": observed, "expected": float(null.mean()), "p_value": float(p_value)}


def _kernel(x: np.ndarray) -> np.ndarray:
    """``(N, N)``, 0 on the diagonal."""
    from scipy.spatial.distance import pdist, squareform

    squared = pdist(x, "sqeuclidean")
    scale = np.median(squared) or squared.mean()
    kernel = squareform(np.exp(-squared / scale) if scale else np.ones_like(squared))
    return np.asarray(kernel, dtype=np.float32)


def _discrepancy(kernel: np.ndarray, codes: np.ndarray) -> float:
    """Mean over pairs of environments, each as likely as any other."""
    member = np.eye(codes.max() + 1, dtype=np.float32)[codes]
    sums = np.asarray(member.T @ (kernel @ member), dtype=np.float64)
    counts = member.sum(0, dtype=np.float64)
    n = len(counts)
    within = np.diag(sums) / (counts * (counts - 1))
    between = sums / np.outer(counts, counts)
    return float(2 * (within.mean() - (between.sum() - np.trace(between)) / (n * (n - 1))))
