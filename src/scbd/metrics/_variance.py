"""Which share of an embedding's variance goes with environment, position, cell count and perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._anndata import as_columns, is_number, number_values
from scbd._checks import check_count
from scbd._linear_maps import column_means, mean_and_factor, resolution
from scbd.metrics._table import Embeddings, check_keys, label_names, named_embeddings, representation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# of columns of length 1: what other factors leave of one, below which it is rounding
_DEPENDENT = 1e-9


def variance_table(
    adata: AnnData,
    embeddings: Embeddings,
    factors: Sequence[str] | Mapping[str, str | Sequence[str]],
    *,
    max_cells: int | None = 100_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Which share of an embedding's variance each factor explains, by itself and beyond the others.

    Variance is summed over components as they are: one that is scaled up counts for more. Labels explain what their
    means do (analysis of variance), numbers what a polynomial of degree 2 does.

    Parameters
    ----------
    adata
        Embedded cells, or wells.
    embeddings
        Keys of ``obsm``; or names of representations with their key, or with several keys, such as those of several
        training seeds.
    factors
        Columns of ``obs``; or names of factors with their column, or with several. Several columns of numbers make one
        surface, such as row and column of a plate; if one of them holds labels, the factor is their cross. Integers are
        numbers: make text of plates that are called 1, 2, 3.
    max_cells
        Use a random subset of this size; `None` for all.
    seed
        Seed of the subset.

    Returns
    -------
    Tidy frame, one row an ``obsm`` key and factor: ``representation, key, factor, kind`` (``"labels"`` or
    ``"numbers"``); ``share`` of the variance that the factor explains, from 0 to 1; ``chance``, what it would explain
    if it were permuted; and ``alone``, the share that is lost if it is left out of all factors, which is mostly less
    where factors go together. NaN where all cells lie at one point.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If no factor is named, values are missing, there are fewer than three cells, or an embedding is not finite.

    References
    ----------
    Hays (1963), Statistics for psychologists.

    Examples
    --------
    >>> factors = {"well": "well", "perturbation": "gene", "guide": "sgRNA"}
    >>> table = scbd.metrics.variance_table(adata, {"z_c": "X_scbd_c", "z_s": "X_scbd_s"}, factors)
    >>> table.columns.to_list()
    ['representation', 'key', 'factor', 'kind', 'share', 'chance', 'alone']
    >>> z_c = table[table["representation"] == "z_c"].set_index("factor")
    >>> bool(z_c.loc["perturbation", "alone"] < 1e-9)  # a guide belongs to one gene, and says all of it
    True
    """
    compared, n = named_embeddings(adata, embeddings), adata.n_obs
    if max_cells is not None:
        check_count("max_cells", max_cells, least=3)
    if n < 3 or not len(factors):
        msg = f"There are {n} cells and {len(factors)} factors: give three cells or more, and a factor."
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    rows = np.arange(n) if max_cells is None or n <= max_cells else np.sort(rng.choice(n, max_cells, replace=False))
    columns = factors if isinstance(factors, Mapping) else {name: name for name in factors}
    read = [_factor(adata, str(name), as_columns(column), rows) for name, column in columns.items()]
    found = []
    for name, key, values in compared:
        shares = _shares(representation(adata, values)[rows], read)
        found += [
            {"representation": name, "key": key, "factor": factor.name, "kind": factor.kind}
            | {"share": share, "chance": factor.n_free / (len(rows) - 1), "alone": alone}
            for factor, (share, alone) in zip(read, shares, strict=True)
        ]
    return pd.DataFrame(found)


class _Factor(NamedTuple):
    name: str
    kind: str
    columns: sparse.csr_array
    """Of a linear model, ``(N, P)``: one for each label, or terms of a polynomial, centred."""
    n_free: int
    """How many of them say something beside the mean and the others."""


def _factor(adata: AnnData, name: str, columns: Sequence[str], rows: np.ndarray) -> _Factor:
    check_keys(adata, [], columns)
    if all(is_number(adata.obs[column]) for column in columns):
        terms = _polynomial(np.stack([number_values(adata.obs, column)[rows] for column in columns], axis=1))
        return _Factor(name, "numbers", sparse.csr_array(terms), terms.shape[1])
    codes = pd.factorize(label_names(adata, columns)[rows])[0]
    n_labels = int(codes.max()) + 1
    ones = sparse.csr_array((np.ones(len(codes)), (np.arange(len(codes)), codes)), shape=(len(codes), n_labels))
    return _Factor(name, "labels", ones, n_labels - 1)


def _polynomial(x: np.ndarray) -> np.ndarray:
    """Terms of degree 1 and 2 of numbers ``(N, K)``, as orthonormal columns around 0, as many as are independent."""
    mean, factor = mean_and_factor(x)
    z = (x - mean) * factor
    one, other = np.triu_indices(z.shape[1])
    terms = np.concatenate([z, z[:, one] * z[:, other]], axis=1)
    terms -= terms.mean(0)
    axes, length, _ = np.linalg.svd(terms, full_matrices=False)
    return axes[:, length > 1e-6 * np.sqrt(len(x))]


def _shares(x: np.ndarray, factors: list[_Factor]) -> list[tuple[float, float]]:
    """Of each factor its share of the variance, and the share that is lost without it."""
    mean = column_means(x)
    centred = x - mean
    total = np.square(centred).sum()
    if total <= len(x) * np.square(resolution(x.dtype) * np.linalg.norm(mean)):
        return [(np.nan, np.nan)] * len(factors)
    together = _explained(centred, factors)
    without = [_explained(centred, [other for other in factors if other is not factor]) for factor in factors]
    return [
        (_explained(centred, [factor]) / total, max(0.0, together - rest) / total)
        for factor, rest in zip(factors, without, strict=True)
    ]


def _explained(x: np.ndarray, factors: list[_Factor]) -> float:
    """Sum of squares of centred ``(N, D)`` that a linear model of all factors explains.

    The factor of most labels, which may be thousands, is taken out exactly by its means; least squares are then over
    what it leaves of the columns of all others.
    """
    labels = [factor for factor in factors if factor.kind == "labels"]
    largest = max(labels, key=lambda factor: factor.n_free, default=None)
    explained = 0.0
    others = [factor.columns for factor in factors if factor is not largest]
    columns = sparse.hstack(others, format="csr") if others else sparse.csr_array((len(x), 0))
    products, sums = (columns.T @ columns).toarray(), columns.T @ x
    length = np.sqrt(products.diagonal())
    if largest is not None:
        counts, of_label = largest.columns.sum(0), largest.columns.T @ x
        explained += float((np.square(of_label).sum(1) / counts).sum())
        crossed = (columns.T @ largest.columns) / np.sqrt(counts)
        products -= (crossed @ crossed.T).toarray()
        sums -= crossed @ (of_label / np.sqrt(counts)[:, None])
    values, axes = np.linalg.eigh(products / np.outer(length, length))
    kept = values > _DEPENDENT
    explained += float((np.square(axes[:, kept].T @ (sums / length[:, None])).sum(1) / values[kept]).sum())
    return explained
