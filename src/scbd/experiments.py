"""The old place of :mod:`scbd.workflows` and :mod:`scbd.paper`; it goes with the next version."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_IN_PAPER = ["EXPERIMENTS", "demo", "reproduce"]
_IN_WORKFLOWS = (
    "DATASETS MODEL_SPACE PROTOCOLS SYSTEMS TRAINING_SPACE AlphaSelection Results Selection Trial check_assumption "
    "choose_alpha counterfactual_scores evaluate generalization_scores in_out_correlation run run_trials select "
    "select_alpha selection_regret"
).split()
__all__ = [*_IN_PAPER, *_IN_WORKFLOWS]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module 'scbd.experiments' has no attribute {name!r}"
        raise AttributeError(msg)
    home = "scbd.paper" if name in _IN_PAPER else "scbd.workflows"
    msg = f"scbd.experiments.{name} has moved: use {home}.{name}, this name goes with the next version of scbd."
    warnings.warn(msg, DeprecationWarning, stacklevel=2)
    value = globals()[name] = getattr(importlib.import_module(home), name)  # said once
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
