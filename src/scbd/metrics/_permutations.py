"""Labels at random, where some of what they go with stays."""

from __future__ import annotations

import numpy as np


def permuted_within(labels: np.ndarray, groups: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Labels ``(N,)`` in ``n`` random orders, each within groups of integer codes ``(N,)``: ``(n, N)``."""
    order = np.argsort(rng.random((n, len(groups))) + groups, axis=1)
    permuted = np.empty((n, len(groups)), dtype=labels.dtype)
    np.put_along_axis(permuted, order, labels[np.argsort(groups, kind="stable")][None], axis=1)
    return permuted
