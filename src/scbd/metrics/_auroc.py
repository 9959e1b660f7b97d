"""The area under the receiver operating characteristic of many labels, without a score of each cell and label."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def mean_auroc(blocks: Callable[[], Iterator[np.ndarray]], truth: np.ndarray, n_labels: int) -> float:
    """One label against the rest, mean over labels that some cells have and some have not; NaN if there are none.

    Exact, ties as one half. Only the score of each cell's own label is kept; blocks are asked for twice.

    Parameters
    ----------
    blocks
        Gives scores of consecutive cells, blocks of float ``(B, K)``.
    truth
        Label of each cell, ``(N,)``; those that are not ``0 … K - 1`` are of no label.
    n_labels
        ``K``.
    """
    own = np.concatenate([_of_label(block, label) for block, label in _with_labels(blocks, truth)])
    order = np.lexsort((own, truth))
    edges = np.searchsorted(truth[order], np.arange(n_labels + 1))
    positives = [own[order[edges[k] : edges[k + 1]]] for k in range(n_labels)]
    scored = [k for k in range(n_labels) if 0 < len(positives[k]) < len(truth)]
    # pairs of a cell with the label and any cell, in which the first has the higher score; a tie counts twice one half
    higher = np.zeros(n_labels)
    for block in blocks():
        of_label = np.ascontiguousarray(block.T)
        for k in scored:
            higher[k] += _twice_higher(positives[k], of_label[k]) / 2
    n = np.diff(edges)[scored].astype(float)
    # among themselves, half are higher
    areas = (higher[scored] - n * n / 2) / (n * (len(truth) - n))
    return float(areas.mean()) if len(areas) else np.nan


def _with_labels(
    blocks: Callable[[], Iterator[np.ndarray]], truth: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    start = 0
    for block in blocks():
        yield block, truth[start : start + len(block)]
        start += len(block)


def _of_label(block: np.ndarray, label: np.ndarray) -> np.ndarray:
    is_label = (label >= 0) & (label < block.shape[1])
    return block[np.arange(len(block)), np.where(is_label, label, 0)]


def _twice_higher(ordered: np.ndarray, values: np.ndarray) -> int:
    """Of pairs of one of each, twice those in which the first is higher, and those of equals."""
    others = values[values >= ordered[0]]
    n_below = (len(values) - len(others)) * len(ordered)
    at_most = np.searchsorted(ordered, others, side="left").sum() + np.searchsorted(ordered, others, side="right").sum()
    return 2 * n_below + 2 * len(others) * len(ordered) - int(at_most)
