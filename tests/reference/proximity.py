"""Whether genes of one arm are nearer, as loops over three genes."""

from __future__ import annotations

import numpy as np


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return round(float(a @ b / norm), 9) if norm else 0.0


def of_genes(x: np.ndarray, arms: list[str]) -> dict[str, list[float]]:
    """Of each arm, for each of its genes: how often a gene of the arm is nearer than one of another."""
    found: dict[str, list[float]] = {}
    for g, arm in enumerate(arms):
        mates = [h for h in range(len(x)) if arms[h] == arm and h != g]
        others = [h for h in range(len(x)) if arms[h] != arm]
        if mates and others:
            near, far = ([cosine(x[g], x[h]) for h in genes] for genes in (mates, others))
            found.setdefault(arm, []).append(float(np.mean([(a > b) + 0.5 * (a == b) for a in near for b in far])))
    return found
