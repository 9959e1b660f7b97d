"""What cells are, in one short text: two tables with the same labels and other pixels are told apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from scbd.data.sources import ImageSource

# enough that pictures which were corrected, exchanged or rescaled differ somewhere, few enough to be read in no time
_SAMPLED = 64
# rows whose hashes are in memory at once
_HASHED = 65_536


def digest_cells(source: ImageSource | None, table: pd.DataFrame) -> str:
    """SHA-256 of a table, all of it, and of the pixels of 64 cells that are always the same for so many cells.

    Parameters
    ----------
    source
        Images ``(N, C, H, W)`` of the rows of the table; `None` for none.
    table
        What is known of each cell; rows in another order, or columns of another name, are another table. Values count,
        not the codes of a categorical, nor its unused categories.

    Returns
    -------
    64 hexadecimal digits.

    Examples
    --------
    >>> source = scbd.data.ArraySource(adata.obsm["single_cell_images"])
    >>> labels = adata.obs[["gene", "well"]]
    >>> scbd.data.digest_cells(source, labels) == scbd.data.digest_cells(source, labels.iloc[::-1])
    False
    """
    digest = hashlib.sha256(repr([len(table), *map(str, table.columns)]).encode())
    for start in range(0, len(table), _HASHED):
        part = table.iloc[start : start + _HASHED]
        columns = {number: _alone(part.iloc[:, number]) for number in range(part.shape[1])}
        hashes = pd.util.hash_pandas_object(pd.DataFrame(columns, index=part.index))
        digest.update(hashes.to_numpy().tobytes())
    if source is not None:
        n = source.shape[0]
        rows = np.sort(np.random.default_rng(n).choice(n, min(n, _SAMPLED), replace=False))
        digest.update(repr([*source.shape, source.dtype.str]).encode())
        digest.update(source.read(rows).tobytes())
    return digest.hexdigest()


def _alone(column: pd.Series) -> pd.Series:
    """Without the categories of other rows: names of millions would all be hashed with every part."""
    return column.cat.remove_unused_categories() if isinstance(column.dtype, pd.CategoricalDtype) else column
