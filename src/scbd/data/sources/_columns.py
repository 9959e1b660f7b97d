"""Some features of a table, in an order of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd.data.sources._arrays import target_of

if TYPE_CHECKING:
    from scbd.data.sources._arrays import ImageSource


class ColumnSource:
    """Columns of a source of features ``(N, F)``: a model reads those that it knows, wherever they lie in a table.

    Parameters
    ----------
    source
        Features.
    columns
        Places of those to read, integer ``(K,)``.
    """

    def __init__(self, source: ImageSource, columns: np.ndarray) -> None:
        self._source = source
        self._columns = columns
        self.shape = (source.shape[0], len(columns))
        self.dtype = source.dtype
        self.in_memory = source.in_memory

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Features of these rows, in this order, as stored and free to change."""
        out = target_of(self, rows, out)
        return np.take(self._source.read(rows), self._columns, axis=1, out=out, mode="clip")
