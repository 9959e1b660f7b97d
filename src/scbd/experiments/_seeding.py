"""One seed for everything that draws at random, set without a word."""

from __future__ import annotations

import logging


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch as scvi-tools does, which would say so for every run of a grid."""
    import scvi

    note = logging.getLogger("lightning.fabric.utilities.seed")
    level = note.level
    note.setLevel(logging.WARNING)
    try:
        scvi.settings.seed = seed
    finally:
        note.setLevel(level)
