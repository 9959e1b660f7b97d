"""Draw points around the centre of their label."""

from __future__ import annotations

import numpy as np


def blobs(n: int = 600, n_labels: int = 4, distance: float = 6.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_labels, size=n)
    return rng.normal(size=(n, 8)) + distance * np.eye(8)[labels], np.array([f"w{i}" for i in labels])
