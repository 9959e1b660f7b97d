"""Places in the order of many values, of which only those near what is asked for are put in order.

To sort 200 million cosines takes ten times as long as to make them. Here they are counted in narrow bins, which gives
the place of each bin's first value. Values are put in order in those bins alone that hold one that is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

# from -1 to 1, narrow enough for most bins to hold none of the values that are asked about
_N_BINS = 1 << 23
# values counted at a time, in the processor's cache
_BLOCK = 1 << 16
_PERCENTILES = np.arange(101) / 100


class Ranks:
    """Stands for cosines in rising order: its methods and items are those of the sorted array.

    Parameters
    ----------
    values
        Float ``(P,)``, about -1 to 1, kept as they are; in any order.
    asked
        Values whose places will be asked for, ``(Q,)``. Those of percentiles are always thought of; for any others all
        values are read once more.
    """

    def __init__(self, values: np.ndarray, asked: np.ndarray) -> None:
        self._values, self.dtype = values, values.dtype
        # the smaller, the more of it stays in the processor's cache
        counts = np.zeros(_N_BINS, dtype=np.int32 if len(values) < 1 << 31 else np.int64)
        one = counts.dtype.type(1)
        for block in self._blocks():
            np.add.at(counts, _bins(block), one)
        self._first = np.append(0, np.cumsum(counts, dtype=np.int64))
        # a square of all cosines has ones on its diagonal, which move its percentiles by as many places as it has rows
        size = int(np.sqrt(2 * len(values))) + 2
        around = np.clip(_PERCENTILES[:, None] * (len(values) - 1) + [-size, size], 0, len(values) - 1).astype(int)
        self._in_order = np.zeros(_N_BINS, dtype=bool)
        self._ordered, self._start = values[:0], np.zeros(_N_BINS + 1, dtype=np.int64)
        near = [np.arange(low, high + 1) for low, high in self._bins_of_places(around)]
        self._put_in_order(np.concatenate([_bins(asked), *near]))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, places: Any) -> np.ndarray:
        """Values at some places, integers of any shape."""
        places = np.asarray(places)
        bins = self._bins_of_places(places)
        self._put_in_order(bins)
        return self._ordered[self._start[bins] + places - self._first[bins]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.sort(self._values).astype(dtype or self.dtype, copy=False)

    def searchsorted(self, values: Any, side: Any = "left") -> np.ndarray:
        """Before how many values these belong, as in numpy."""
        values = np.asarray(values, dtype=self.dtype)
        bins = _bins(values)
        self._put_in_order(bins)
        return self._first[bins] + self._ordered.searchsorted(values, side=side) - self._start[bins]

    def _bins_of_places(self, places: np.ndarray) -> np.ndarray:
        return self._first.searchsorted(places, side="right") - 1

    def _put_in_order(self, bins: np.ndarray) -> None:
        """Values of some bins, beside those of the bins before."""
        counts = np.diff(self._first)
        missing = np.zeros(_N_BINS, dtype=bool)
        missing[bins.ravel()] = True
        missing &= ~self._in_order & (counts > 0)
        if not missing.any():
            return
        found = [block.compress(missing.take(_bins(block), mode="clip")) for block in self._blocks()]
        self._ordered = np.concatenate([self._ordered, *found])
        self._ordered.sort()
        self._in_order |= missing
        np.cumsum(np.where(self._in_order, counts, 0), out=self._start[1:])

    def _blocks(self) -> Iterator[np.ndarray]:
        return (self._values[start : start + _BLOCK] for start in range(0, len(self._values), _BLOCK))


def _bins(values: np.ndarray) -> np.ndarray:
    """Never lower for a higher value, whatever the rounding; cosines may be a little beyond 1."""
    half = _N_BINS // 2
    scaled = values * values.dtype.type(half)
    scaled += half
    return np.clip(scaled, 0, _N_BINS - 1).astype(np.intp)
