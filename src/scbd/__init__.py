"""Supervised Contrastive Block Disentanglement: batch-corrected image embeddings of perturbed cells.

Public names load on first use, so that ``import scbd`` costs next to nothing.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from scbd._lazy import lazy_names

if TYPE_CHECKING:
    from scbd import baselines, data, datasets, experiments, metrics, model, nn, paper, pl, workflows
    from scbd.model import SCBDModel
    from scbd.workflows import select_alpha

__version__ = version("scbd")
__all__ = [
    "SCBDModel",
    "baselines",
    "data",
    "datasets",
    "experiments",
    "metrics",
    "model",
    "nn",
    "paper",
    "pl",
    "select_alpha",
    "workflows",
]

_HOMES = {"SCBDModel": "scbd.model", "select_alpha": "scbd.workflows"}

__getattr__, __dir__ = lazy_names(__name__, {name: f"scbd.{name}" for name in __all__} | _HOMES)
