"""The scvi-tools contract around the method."""

from scbd.model._alpha import AutoAlpha
from scbd.model._base import ImageModel
from scbd.model._divergence import TrainingDiverged
from scbd.model._plan import TrainingPlan
from scbd.model._scbd import SCBDModel

__all__ = ["AutoAlpha", "ImageModel", "SCBDModel", "TrainingDiverged", "TrainingPlan"]

# for other packages of scbd; no part of the API
from scbd.model._alpha import Alpha as Alpha
