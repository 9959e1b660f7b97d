"""Supervised Contrastive Block Disentanglement: batch-corrected image embeddings of perturbed cells.

Public names load on first use, so that ``import scbd`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"scbd.{name}")
    msg = f"module 'scbd' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
