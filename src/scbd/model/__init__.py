"""The scvi-tools contract around the method."""

from scbd.model._alpha import AutoAlpha
from scbd.model._base import ImageModel
from scbd.model._contract import EmbeddingModule, Losses, Objective
from scbd.model._divergence import TrainingDiverged
from scbd.model._plan import TrainingPlan
from scbd.model._scbd import SCBDModel
from scbd.model._settings import TrainSettings

__all__ = [
    "AutoAlpha",
    "EmbeddingModule",
    "ImageModel",
    "Losses",
    "Objective",
    "SCBDModel",
    "TrainSettings",
    "TrainingDiverged",
    "TrainingPlan",
]
