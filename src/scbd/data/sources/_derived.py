"""What is made of another source as it is read: some of its columns or channels, or its images on another canvas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.data.sources._arrays import target_of
from scbd.data.sources._fitting import centred

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data.sources._arrays import ImageSource


class DerivedSource(ABC):
    """Rows of another source, with something done to each.

    Parameters
    ----------
    source
        Features or images.
    shape
        Of a row.
    said
        What is done, in numbers: two that say the same do the same.

    Attributes
    ----------
    source, said
        As given.
    """

    def __init__(self, source: ImageSource, shape: Sequence[int], said: list[int]) -> None:
        self.source = source
        self.shape = (source.shape[0], *shape)
        self.said = [*said, *getattr(source, "said", [])]
        self.dtype = source.dtype
        self.in_memory = source.in_memory

    def __getattr__(self, name: str) -> Any:
        """How rows lie together, and whether threads may share it, is what it is of the source."""
        if name in ("chunk_rows", "concurrent", "glimpse"):
            return getattr(self.source, name)
        raise AttributeError(name)

    def read(self, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """Features or images of these rows, in this order, free to change."""
        out = target_of(self, rows, out)
        self._make(self.source.read(rows), out)
        return out

    @abstractmethod
    def _make(self, read: np.ndarray, out: np.ndarray) -> None:
        """What becomes of rows."""


class ColumnSource(DerivedSource):
    """Some columns of features ``(N, F)``, or channels of images ``(N, C, H, W)``, wherever they lie.

    Parameters
    ----------
    source
        Features or images.
    columns
        Places of those to read, K integers.
    """

    def __init__(self, source: ImageSource, columns: Sequence[int] | np.ndarray) -> None:
        self._columns = np.asarray(columns)
        super().__init__(source, (len(self._columns), *source.shape[2:]), self._columns.tolist())

    def _make(self, read: np.ndarray, out: np.ndarray) -> None:
        np.take(read, self._columns, axis=1, out=out, mode="clip")


class CentredSource(DerivedSource):
    """Images on a canvas of another size: padded with zeros, cut, or both.

    Parameters
    ----------
    source
        Images.
    size
        Height and width.
    """

    def __init__(self, source: ImageSource, size: tuple[int, int]) -> None:
        super().__init__(source, (source.shape[1], *size), list(size))

    def _make(self, read: np.ndarray, out: np.ndarray) -> None:
        out[...] = centred(read, out.shape[2:])


def columns_of(source: ImageSource, columns: Sequence[int]) -> ImageSource:
    """Those columns; the source itself where they are all that it has, in its order."""
    return source if list(columns) == list(range(source.shape[1])) else ColumnSource(source, columns)


def source_at_rest(source: ImageSource) -> ImageSource:
    """What is read in the end, whatever is made of it."""
    return source_at_rest(source.source) if isinstance(source, DerivedSource) else source
