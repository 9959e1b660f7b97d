"""Frames or AnnData in, matplotlib Axes out; nothing is ever shown."""

from scbd.pl._benchmark import benchmark, biology_against_batch, ranking
from scbd.pl._counterfactuals import counterfactuals
from scbd.pl._history import history
from scbd.pl._images import cells
from scbd.pl._inferred import inferred_environments
from scbd.pl._latent import latent_health
from scbd.pl._relationships import complexes, relationship_curve
from scbd.pl._sweeps import alpha_curve, by_group, in_against_out, sweep, trade_off
from scbd.pl._traverse import traverse
from scbd.pl._umap import umap, umap_blocks
from scbd.pl._variance import variance

__all__ = [
    "alpha_curve",
    "benchmark",
    "biology_against_batch",
    "by_group",
    "cells",
    "complexes",
    "counterfactuals",
    "history",
    "in_against_out",
    "inferred_environments",
    "latent_health",
    "ranking",
    "relationship_curve",
    "sweep",
    "trade_off",
    "traverse",
    "umap",
    "umap_blocks",
    "variance",
]
