"""Compute average precision with loops over pairs of wells, and over all orders of ties."""

from __future__ import annotations

import itertools

import numpy as np


def average_precision(relevant: list[bool]) -> float:
    """Return the average precision of one ranked list."""
    hits = [sum(relevant[: i + 1]) / (i + 1) for i, found in enumerate(relevant) if found]
    return sum(hits) / len(hits)


def over_all_orders(similarity: list[float], relevant: list[bool]) -> float:
    """Return the mean average precision over all orders in which ties may be ranked."""
    orders = itertools.permutations(range(len(similarity)))
    ranked = [o for o in orders if all(similarity[i] >= similarity[j] for i, j in itertools.pairwise(o))]
    return float(np.mean([average_precision([relevant[i] for i in order]) for order in ranked]))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def of_wells(x, queries, is_positive, is_negative) -> dict[int, float]:
    """Return the average precision of each query with positives and negatives, without ties."""
    found = {}
    for q in queries:
        ranked = sorted(
            ((cosine(x[q], x[i]), is_positive(q, i)) for i in range(len(x)) if is_positive(q, i) or is_negative(q, i)),
            reverse=True,
        )
        relevant = [positive for _, positive in ranked]
        if any(relevant) and not all(relevant):
            found[q] = average_precision(relevant)
    return found


def per_label(scores: dict[int, float], labels) -> dict[str, float]:
    """Return the mean over the queries of each label."""
    names = sorted({labels[q] for q in scores})
    return {name: float(np.mean([s for q, s in scores.items() if labels[q] == name])) for name in names}


def replicates(x, y, e, control, queries) -> dict[int, float]:
    """Retrieve the same perturbation in other environments, among controls of these environments."""
    return of_wells(
        x,
        queries,
        lambda q, i: y[i] == y[q] and e[i] != e[q],
        lambda q, i: y[i] == control and e[i] != e[q] and e[i] in e[y == y[q]],
    )


def floor(x, y, e, position, control, environments) -> dict[int, float]:
    """Retrieve controls at the same position in other environments, among controls at other positions there."""
    return of_wells(
        x,
        [i for i in range(len(x)) if y[i] == control and e[i] in environments],
        lambda q, i: y[i] == control and e[i] != e[q] and position[i] == position[q],
        lambda q, i: (
            y[i] == control
            and e[i] != e[q]
            and position[i] != position[q]
            and e[i] in e[(y == control) & (position == position[q])]
        ),
    )


def across_positions(x, y, e, position, control, queries) -> dict[int, float]:
    """Retrieve the same perturbation at another position and environment, among others of its environments."""
    return of_wells(
        x,
        queries,
        lambda q, i: y[i] == y[q] and e[i] != e[q] and position[i] != position[q],
        lambda q, i: y[i] not in (y[q], control) and e[i] in e[y == y[q]],
    )


def against_perturbations(x, y, e, control, queries, *, everywhere) -> dict[int, float]:
    """Retrieve the same perturbation in another environment, among others of its or of all environments."""
    return of_wells(
        x,
        queries,
        lambda q, i: y[i] == y[q] and e[i] != e[q],
        lambda q, i: y[i] not in (y[q], control) and (everywhere or e[i] in e[y == y[q]]),
    )


def related(x, labels: list[set[str]]) -> dict[int, float]:
    """Retrieve consensus profiles that share a label, among those that do not; exclude profiles without a label."""
    return of_wells(
        x,
        [q for q, own in enumerate(labels) if own],
        lambda q, i: i != q and bool(labels[q] & labels[i]),
        lambda q, i: i != q and bool(labels[i]) and not labels[q] & labels[i],
    )
