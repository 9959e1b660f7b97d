"""Data sets: published screens, coloured digits and simulated screens, and networks of known gene relations.

Screens and digits are returned as AnnData, networks as data frames.
"""

from scbd.datasets._digits import colored_digits, colored_mnist
from scbd.datasets._networks import corum, gene_pairs, gene_sets
from scbd.datasets._published_screens import cpjump1, funk22
from scbd.datasets._simulated import HARD_SCREEN, simulated_screen
from scbd.datasets._simulated_profiles import simulated_profiles

__all__ = [
    "HARD_SCREEN",
    "colored_digits",
    "colored_mnist",
    "corum",
    "cpjump1",
    "funk22",
    "gene_pairs",
    "gene_sets",
    "simulated_profiles",
    "simulated_screen",
]
