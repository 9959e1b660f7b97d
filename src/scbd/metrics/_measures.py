"""What each score of a report is about, and which way it is good."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Side = Literal["biology", "batch", "shape"]
Better = Literal["higher", "lower", "nearer to chance", ""]


class Measure(NamedTuple):
    """How a score is read."""

    side: Side
    """What it tells of."""
    better: Better
    """Which way is good; empty where neither is."""


_BIOLOGY, _READ = Measure("biology", "higher"), Measure("batch", "lower")
_MIXED = Measure("batch", "nearer to chance")
_MEASURES = {
    r"(relationship|retrieval|y_probe|replicate)_.*": _BIOLOGY,
    r"e_probe_.*": _READ,
    r"ilisi": Measure("batch", "higher"),
    r"same_environment_neighbours|silhouette": _MIXED,
}


def measure_of(metric: str) -> Measure:
    """How a metric of :func:`scbd.metrics.benchmark` is read."""
    for pattern, measure in _MEASURES.items():
        if re.fullmatch(pattern, metric):
            return measure
    return Measure("shape", "")
