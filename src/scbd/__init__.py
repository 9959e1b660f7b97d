"""Supervised Contrastive Block Disentanglement (SCBD): batch-corrected embeddings of images of perturbed cells.

The modules that define the public names are imported when a name is first used, so that ``import scbd`` is fast.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from scbd._shared.lazy import lazy_names

if TYPE_CHECKING:
    from scbd import baselines, corrections, data, datasets, metrics, model, nn, pl
    from scbd._workflows.compare import compare, evaluate
    from scbd._workflows.cross_fit import cross_fit
    from scbd._workflows.run import run
    from scbd._workflows.select_alpha import check_assumption, select_alpha
    from scbd.model import SCBDModel

__version__ = version("scbd")
__all__ = [
    "SCBDModel",
    "baselines",
    "check_assumption",
    "compare",
    "corrections",
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
    "run": "scbd._workflows.run",
    "compare": "scbd._workflows.compare",
    "evaluate": "scbd._workflows.compare",
    "cross_fit": "scbd._workflows.cross_fit",
    "check_assumption": "scbd._workflows.select_alpha",
    "select_alpha": "scbd._workflows.select_alpha",
}

__getattr__, __dir__ = lazy_names(__name__, {name: f"scbd.{name}" for name in __all__} | _HOMES)
