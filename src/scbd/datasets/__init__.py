"""Named data sets as AnnData, networks of known relations as frames, and a simulated screen."""

from scbd.datasets._digits import colored_digits, colored_mnist, colorize
from scbd.datasets._networks import corum, gene_pairs, gene_sets, known_pairs
from scbd.datasets._simulated import simulated_screen

__all__ = [
    "colored_digits",
    "colored_mnist",
    "colorize",
    "corum",
    "gene_pairs",
    "gene_sets",
    "known_pairs",
    "simulated_screen",
]
