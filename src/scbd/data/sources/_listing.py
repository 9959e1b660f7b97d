"""Which files of many are not listed in their folders, each of which is listed once."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# names that are looked up at once
_AT_ONCE = 65_536


def unlisted_files(folders: Sequence[str], folder_of: np.ndarray, names: Iterable[bytes]) -> np.ndarray:
    """Places of files that no list has, in their order.

    Parameters
    ----------
    folders
        Paths.
    folder_of
        Of each file its folder, int ``(N,)``.
    names
        Of each file its name in there.
    """
    # eight bytes a name; where two have one hash, a missing file is found when it is read
    hashes = np.fromiter(map(hash, names), np.int64, len(folder_of))
    order = np.argsort(folder_of, kind="stable")
    starts = np.flatnonzero(np.diff(folder_of[order], prepend=-1))
    unlisted = []
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        listed = _listed(folders[folder_of[order[start]]])
        for first in range(start, stop, _AT_ONCE):
            files = order[first : min(first + _AT_ONCE, stop)]
            unlisted.append(files[~_is_in(hashes[files], listed)])
    return np.sort(np.concatenate(unlisted))


def _is_in(hashes: np.ndarray, listed: np.ndarray) -> np.ndarray:
    if not len(listed):
        return np.zeros(len(hashes), dtype=bool)
    return listed[np.searchsorted(listed, hashes).clip(max=len(listed) - 1)] == hashes


def _listed(folder: str) -> np.ndarray:
    """Sorted hashes of the names of files in there; none where it cannot be listed."""
    try:
        with os.scandir(os.fsencode(folder)) as entries:
            hashes = np.frombuffer(array("q", (hash(entry.name) for entry in entries if entry.is_file())), np.int64)
    except OSError:
        return np.empty(0, np.int64)
    hashes.sort()
    return hashes
