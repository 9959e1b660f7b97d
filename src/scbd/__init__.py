"""Supervised Contrastive Block Disentanglement: batch-corrected image embeddings of perturbed cells.

Public names load on first use, so that ``import scbd`` costs next to nothing.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from scbd._lazy import lazy_names

if TYPE_CHECKING:
    from scbd import baselines, data, datasets, metrics, model, nn, pl
    from scbd._compare import compare, evaluate
    from scbd._cross_fit import cross_fit
    from scbd._run import run
    from scbd._select import check_assumption, select_alpha
    from scbd.model import SCBDModel

__version__ = version("scbd")
__all__ = [
    "SCBDModel",
    "baselines",
    "check_assumption",
    "compare",
    "cross_fit",
    "data",
    "datasets",
    "evaluate",
    "metrics",
    "model",
    "nn",
    "pl",
    "run",
    "select_alpha",
]

_HOMES = {
    "SCBDModel": "scbd.model",
    "run": "scbd._run",
    "compare": "scbd._compare",
    "evaluate": "scbd._compare",
    "cross_fit": "scbd._cross_fit",
    "check_assumption": "scbd._select",
    "select_alpha": "scbd._select",
}

__getattr__, __dir__ = lazy_names(__name__, {name: f"scbd.{name}" for name in __all__} | _HOMES)
