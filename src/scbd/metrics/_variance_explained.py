"""Fraction of an embedding's variance that is explained by factors such as environment, position or perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._shared.checks import check_count
from scbd._shared.labels import as_columns
from scbd._shared.linear_maps import column_means, mean_and_inverse_deviation, relative_rounding_error
from scbd._shared.numeric_tables import is_numeric_column, read_numeric_column
from scbd.metrics._arguments import (
    Embeddings,
    check_keys,
    get_finite_embedding,
    get_label_texts,
    get_named_embeddings,
    random_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# Maximum eigenvalue that counts as 0. The eigenvalues are those of the matrix of products between the columns of the
# design matrix. The columns have length 1 before the factor with the most labels is removed. An eigenvalue up to this
# value is a rounding error, because some columns are linear combinations of other columns.
_EIGENVALUE_TOLERANCE = 1e-9


def variance_table(
    adata: AnnData,
    embeddings: Embeddings,
    factors: Sequence[str] | Mapping[str, str | Sequence[str]],
    *,
    max_cells: int | None = 100_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Compute the fraction of an embedding's variance that each factor explains, alone and beyond all other factors.

    The variance is summed over the components of the embedding without scaling them, so that a component with larger
    values counts for more. A factor with labels, for example the environment, explains the variance of the means of its
    labels (analysis of variance). A factor with numbers, for example row and column of a plate, explains the variance
    that a polynomial of degree 2 fits.

    Parameters
    ----------
    adata
        Embedded cells or wells.
    embeddings
        Keys of ``obsm``; or a mapping from the name of a representation to its key, or to several keys, for example one
        per training seed.
    factors
        Columns of ``obs``; or a mapping from the name of a factor to its column, or to several columns. Several columns
        of numbers form one surface, for example row and column of a plate. If one of several columns holds labels, the
        labels of the factor are the combinations of values of all its columns. Integers count as numbers: convert
        plates that are called 1, 2, 3 to text.
    max_cells
        Maximum number of cells; a random subset is used if there are more. `None` uses all cells.
    seed
        Seed of the random subset.

    Returns
    -------
    Tidy frame with one row per ``obsm`` key and factor, and these columns:

    - ``representation``, ``key`` and ``factor``: names of the embedding and of the factor
    - ``kind``: kind of the factor, ``"labels"`` or ``"numbers"``
    - ``share``: fraction of the variance that the factor explains, from 0 to 1; NaN if all rows of the embedding are
      equal
    - ``chance``: expected ``share`` of the factor if its values were permuted over cells
    - ``alone``: fraction of the variance that is lost if the factor is removed from a model of all factors. It is
      usually smaller than ``share`` if factors are correlated. NaN if all rows of the embedding are equal.

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
    >>> bool(z_c.loc["perturbation", "alone"] < 1e-9)  # the guide of a cell determines its gene
    True
    """
    compared, n = get_named_embeddings(adata, embeddings), adata.n_obs
    if max_cells is not None:
        check_count("max_cells", max_cells, least=3)
    if n < 3 or not len(factors):
        msg = f"There are {n} cells and {len(factors)} factors: give three cells or more, and a factor."
        raise ValueError(msg)
    rows = random_rows(n, max_cells, np.random.default_rng(seed))
    columns = factors if isinstance(factors, Mapping) else {name: name for name in factors}
    read = [_read_factor(adata, str(name), as_columns(column), rows) for name, column in columns.items()]
    found = []
    for name, key, values in compared:
        shares = _explained_fractions(get_finite_embedding(adata, values)[rows], read)
        found += [
            {"representation": name, "key": key, "factor": factor.name, "kind": factor.kind}
            | {"share": share, "chance": factor.n_free / (len(rows) - 1), "alone": alone}
            for factor, (share, alone) in zip(read, shares, strict=True)
        ]
    return pd.DataFrame(found)


class _Factor(NamedTuple):
    """Factor whose explained variance is computed, with its columns of the design matrix of a linear model."""

    name: str
    kind: str
    columns: sparse.csr_array
    """Columns of the design matrix, ``(N, P)``.

    A factor with labels has one indicator column per label. A factor with numbers has the centred terms of a
    polynomial.
    """
    n_free: int
    """Degrees of freedom: number of columns that are linearly independent of each other and of the mean."""


def _read_factor(adata: AnnData, name: str, columns: Sequence[str], rows: np.ndarray) -> _Factor:
    check_keys(adata, [], columns)
    if all(is_numeric_column(adata.obs[column]) for column in columns):
        values = [read_numeric_column(adata.obs, column)[rows] for column in columns]
        terms = _polynomial_columns(np.stack(values, axis=1))
        return _Factor(name, "numbers", sparse.csr_array(terms), terms.shape[1])
    codes = pd.factorize(get_label_texts(adata, columns)[rows])[0]
    n_labels = int(codes.max()) + 1
    ones = sparse.csr_array((np.ones(len(codes)), (np.arange(len(codes)), codes)), shape=(len(codes), n_labels))
    return _Factor(name, "labels", ones, n_labels - 1)


def _polynomial_columns(x: np.ndarray) -> np.ndarray:
    """Return columns that span all polynomials of degree 1 and 2 in ``K`` variables, orthonormal and with mean 0.

    ``x`` holds the values of the variables for each cell, ``(N, K)``. Linearly dependent terms are dropped.
    """
    mean, factor = mean_and_inverse_deviation(x)
    z = (x - mean) * factor
    one, other = np.triu_indices(z.shape[1])
    terms = np.concatenate([z, z[:, one] * z[:, other]], axis=1)
    terms -= terms.mean(0)
    axes, length, _ = np.linalg.svd(terms, full_matrices=False)
    return axes[:, length > 1e-6 * np.sqrt(len(x))]


def _explained_fractions(x: np.ndarray, factors: list[_Factor]) -> list[tuple[float, float]]:
    """Compute two fractions of the embedding's variance for each factor.

    The first is the fraction that the factor explains alone. The second is the fraction that is lost if the factor is
    removed from a model of all factors. Both fractions are NaN if all rows of the embedding are equal up to rounding.
    """
    mean = column_means(x)
    centred = x - mean
    total = np.square(centred).sum()
    if total <= len(x) * np.square(relative_rounding_error(x.dtype) * np.linalg.norm(mean)):
        return [(np.nan, np.nan)] * len(factors)
    together = _explained_sum_of_squares(centred, factors)
    found = []
    for factor in factors:
        by_factor = _explained_sum_of_squares(centred, [factor])
        by_others = _explained_sum_of_squares(centred, [other for other in factors if other is not factor])
        found.append((by_factor / total, max(0.0, together - by_others) / total))
    return found


def _explained_sum_of_squares(x: np.ndarray, factors: list[_Factor]) -> float:
    """Compute the sum of squares of a centred embedding ``(N, D)`` that a linear model of all ``factors`` explains.

    The factor with the most labels, which may be thousands, is removed exactly by subtracting the means of its labels
    from the embedding and from the design matrix. Least squares is then solved for the remaining columns of all other
    factors.
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
    kept = values > _EIGENVALUE_TOLERANCE
    explained += float((np.square(axes[:, kept].T @ (sums / length[:, None])).sum(1) / values[kept]).sum())
    return explained
