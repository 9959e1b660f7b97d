"""One seed for everything that draws at random, set without a word."""

from __future__ import annotations

import logging

from scbd._checks import check_count


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch as scvi-tools does, which would say so for every run of a grid.

    Raises
    ------
    ValueError
        If the seed is no whole number, or negative.
    """
    import scvi

    check_count("seed", seed, 0)

    note = logging.getLogger("lightning.fabric.utilities.seed")
    level = note.level
    note.setLevel(logging.WARNING)
    try:
        scvi.settings.seed = seed
    finally:
        note.setLevel(level)
