"""Whole jobs: the main run on a user's cells, and the demo."""

from scbd.experiments._demo import demo
from scbd.experiments._run import evaluate, run

__all__ = ["demo", "evaluate", "run"]
