"""Plots of training curves, embeddings, scores of embeddings, and images of cells.

All functions return the matplotlib Axes that they have drawn on, and never call ``plt.show``.
"""

from scbd.pl._history import history
from scbd.pl._images import cells, counterfactuals, traverse
from scbd.pl._scores import benchmark, biology_against_batch, complexes, ranking, relationship_curve, variance
from scbd.pl._umap import umap_blocks

__all__ = [
    "benchmark",
    "biology_against_batch",
    "cells",
    "complexes",
    "counterfactuals",
    "history",
    "ranking",
    "relationship_curve",
    "traverse",
    "umap_blocks",
    "variance",
]
