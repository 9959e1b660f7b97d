"""Models with the interface of scvi-tools: set-up, training, embedding, saving."""

from scbd.model._base import ImageModel
from scbd.model._contract import AutoAlpha, EmbeddingModule, Losses
from scbd.model._plan import TrainingPlan
from scbd.model._scbd import SCBDModel
from scbd.model._train import TrainingDiverged

__all__ = [
    "AutoAlpha",
    "EmbeddingModule",
    "ImageModel",
    "Losses",
    "SCBDModel",
    "TrainingDiverged",
    "TrainingPlan",
]
