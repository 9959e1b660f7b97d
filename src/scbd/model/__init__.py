"""Models with the interface of scvi-tools: set-up, training, embedding, saving."""

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
