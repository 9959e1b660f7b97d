"""Named data sets as AnnData: real ones that are fetched or already there, and a simulated screen."""

from scbd.datasets._digits import colored_digits, colored_mnist, colorize
from scbd.datasets._simulated import simulated_screen

__all__ = ["colored_digits", "colored_mnist", "colorize", "simulated_screen"]
