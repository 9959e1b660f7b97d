"""The scvi-tools contract around the method."""

from scbd.model._alpha import Alpha, AutoAlpha
from scbd.model._base import ImageModel
from scbd.model._divergence import TrainingDiverged
from scbd.model._scbd import SCBDModel

__all__ = ["Alpha", "AutoAlpha", "ImageModel", "SCBDModel", "TrainingDiverged"]
