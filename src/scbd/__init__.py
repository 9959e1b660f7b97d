"""Supervised Contrastive Block Disentanglement (SCBD): batch-corrected embeddings of images of perturbed cells.

Each public name is imported when it is first used, so that ``import scbd`` is fast.
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
