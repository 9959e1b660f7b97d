"""Whole jobs on a user's cells, choosing settings for them, and grids of runs that are kept and gone on with."""

from scbd.workflows._alpha_rule import AlphaSelection, choose_alpha, selection_regret
from scbd.workflows._assumption import check_assumption, in_out_correlation
from scbd.workflows._compare import compare
from scbd.workflows._counterfactual_scores import counterfactual_scores
from scbd.workflows._datasets import DATASETS
from scbd.workflows._effect_picture_scores import effect_picture_scores
from scbd.workflows._evaluate import evaluate
from scbd.workflows._inspect import inspect
from scbd.workflows._protocols import PROTOCOLS
from scbd.workflows._run import run
from scbd.workflows._runner import run_trials
from scbd.workflows._scores import embedding_scores, generalization_scores
from scbd.workflows._select_alpha import select_alpha
from scbd.workflows._select_system import MODEL_SPACE, TRAINING_SPACE, Selection, select
from scbd.workflows._systems import SYSTEMS
from scbd.workflows._trials import Results, Trial

__all__ = [
    "DATASETS",
    "MODEL_SPACE",
    "PROTOCOLS",
    "SYSTEMS",
    "TRAINING_SPACE",
    "AlphaSelection",
    "Results",
    "Selection",
    "Trial",
    "check_assumption",
    "choose_alpha",
    "compare",
    "counterfactual_scores",
    "effect_picture_scores",
    "evaluate",
    "embedding_scores",
    "generalization_scores",
    "in_out_correlation",
    "inspect",
    "run",
    "run_trials",
    "select",
    "select_alpha",
    "selection_regret",
]

# for other packages of scbd; no part of the API
from scbd.workflows._inspect import UNREADABLE as UNREADABLE
from scbd.workflows._opening import open_cells as open_cells
from scbd.workflows._seeding import seed_everything as seed_everything
from scbd.workflows._select_system import settings_of as settings_of
from scbd.workflows._selection_rule import best_setting as best_setting
from scbd.workflows._systems import UNTRAINED as UNTRAINED
from scbd.workflows._variants import CHANCE as CHANCE
from scbd.workflows._variants import SEPARATOR as SEPARATOR
from scbd.workflows._weights import with_weights as with_weights
