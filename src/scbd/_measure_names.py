"""Scores of a report in words, for tables and figures."""

from __future__ import annotations

_NAMES = {
    "relationship_area": "area, known relations",
    "relationship_recall": "recall of known relations",
    "relationship_average_precision": "average precision, known relations",
    "replicate_map": "average precision of replicates",
    "replicate_floor": "the same of positions alone",
    "replicate_floor_corrected": "replicates beyond position",
    "replicate_cross_position": "replicates across positions",
    "y_probe_f1": "F1 of the perturbation",
    "e_probe_f1": "F1 of the environment",
    "e_probe_quadratic_f1": "F1 of the environment, quadratic",
    "e_probe_neighbours_f1": "F1 of the environment, neighbours",
    "ilisi": "mixing of environments (iLISI)",
    "same_environment_neighbours": "neighbours of the same environment",
    "silhouette": "silhouette by environment",
    "effective_rank": "directions in use",
}


def measure_name(metric: str) -> str:
    """A metric of ``scbd.metrics.benchmark`` in words.

    Parameters
    ----------
    metric
        Its name in the frame, such as ``"e_probe_f1"``, or ``"relationship_area (corum)"`` where networks have names.

    Returns
    -------
    The words, with the name of the network behind them; of a metric that has none, its name without underscores.

    Examples
    --------
    >>> from scbd._measure_names import measure_name
    >>> measure_name("relationship_area (corum)"), measure_name("y_probe_auroc")
    ('area, known relations (corum)', 'y probe auroc')
    """
    plain, bracket, network = metric.partition(" (")
    return _NAMES.get(plain, plain.replace("_", " ")) + bracket + network
