"""Corrections of features and embeddings for effects of environments (batches), without training a network.

The corrections run in numpy. They can be called as functions, or by name with :func:`correct`.
"""

from scbd.corrections._correct import correct
from scbd.corrections._external import combat, harmony
from scbd.corrections._standardize import standardize_by_environment
from scbd.corrections._whitening import lda, plda, sphering, tvn, wccn

__all__ = [
    "combat",
    "correct",
    "harmony",
    "lda",
    "plda",
    "sphering",
    "standardize_by_environment",
    "tvn",
    "wccn",
]
