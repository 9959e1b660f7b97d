"""Whole jobs: the main run on a user's cells, the demo, and the paper's experiments."""

from scbd.experiments._assumption import check_assumption, in_out_correlation
from scbd.experiments._choice import AlphaSelection, choose_alpha, selection_regret
from scbd.experiments._counterfactuals import counterfactual_scores
from scbd.experiments._datasets import DATASETS
from scbd.experiments._demo import demo
from scbd.experiments._grid import run_trials
from scbd.experiments._protocols import PROTOCOLS
from scbd.experiments._reproduce import EXPERIMENTS, reproduce
from scbd.experiments._run import evaluate, run
from scbd.experiments._scores import generalization_scores
from scbd.experiments._search import MODEL_SPACE, TRAINING_SPACE, Selection, select
from scbd.experiments._selection import select_alpha
from scbd.experiments._systems import SYSTEMS
from scbd.experiments._trials import Results, Trial

__all__ = [
    "DATASETS",
    "EXPERIMENTS",
    "PROTOCOLS",
    "MODEL_SPACE",
    "SYSTEMS",
    "TRAINING_SPACE",
    "AlphaSelection",
    "Results",
    "Selection",
    "Trial",
    "check_assumption",
    "choose_alpha",
    "counterfactual_scores",
    "demo",
    "evaluate",
    "generalization_scores",
    "in_out_correlation",
    "reproduce",
    "run",
    "run_trials",
    "select",
    "select_alpha",
    "selection_regret",
]
