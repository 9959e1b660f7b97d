"""Public classes of ``scbd.model``: the model SCBD, and the base classes for models of other methods.

The models have the interface of scvi-tools: a table of cells is set up, and a model is trained on it, embeds cells, and
is saved.
"""

from scbd.model._auto_alpha import AutoAlpha
from scbd.model._base import ImageModel
from scbd.model._callbacks import TrainingDiverged
from scbd.model._interfaces import EmbeddingModule, Losses
from scbd.model._plan import TrainingPlan
from scbd.model._scbd import SCBDModel

__all__ = [
    "AutoAlpha",
    "EmbeddingModule",
    "ImageModel",
    "Losses",
    "SCBDModel",
    "TrainingDiverged",
    "TrainingPlan",
]
