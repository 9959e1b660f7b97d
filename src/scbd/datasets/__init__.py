"""Named data sets as AnnData, networks of known relations as frames, and simulated ones."""

from scbd.datasets._colors import colorize
from scbd.datasets._digits import colored_digits, colored_mnist
from scbd.datasets._domains import PACS_DOMAINS, VLCS_DOMAINS, pacs, vlcs
from scbd.datasets._funk22 import funk22, funk22_cellprofiler, funk22_guides, funk22_profiles
from scbd.datasets._networks import corum, gene_pairs, gene_sets, known_pairs
from scbd.datasets._profiles import breinig2015, cpjump1
from scbd.datasets._simulated import HARD_SCREEN, simulated_screen
from scbd.datasets._simulated_effects import simulated_effect
from scbd.datasets._simulated_fields import simulated_plate
from scbd.datasets._simulated_profiles import simulated_profiles
from scbd.datasets._wilds import camelyon17, rxrx1

__all__ = [
    "HARD_SCREEN",
    "PACS_DOMAINS",
    "VLCS_DOMAINS",
    "breinig2015",
    "camelyon17",
    "colored_digits",
    "colored_mnist",
    "colorize",
    "corum",
    "cpjump1",
    "funk22",
    "funk22_cellprofiler",
    "funk22_guides",
    "funk22_profiles",
    "gene_pairs",
    "gene_sets",
    "known_pairs",
    "pacs",
    "rxrx1",
    "simulated_plate",
    "simulated_effect",
    "simulated_profiles",
    "simulated_screen",
    "vlcs",
]
