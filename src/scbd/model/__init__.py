"""The scvi-tools contract around the method.

Names load on first use: the command line asks for the settings of training, and waits for nothing else.
"""

from typing import TYPE_CHECKING

from scbd._lazy import lazy_names

if TYPE_CHECKING:
    from scbd.model._alpha import Alpha as Alpha
    from scbd.model._alpha import AutoAlpha
    from scbd.model._base import ImageModel
    from scbd.model._confounding import contrasts_told as contrasts_told
    from scbd.model._contract import EmbeddingModule, Losses, Objective, Sample
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
    "Sample",
    "TrainSettings",
    "TrainingDiverged",
    "TrainingPlan",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Alpha": "scbd.model._alpha",  # for other packages of scbd; no part of the API
        "AutoAlpha": "scbd.model._alpha",
        "EmbeddingModule": "scbd.model._contract",
        "ImageModel": "scbd.model._base",
        "Losses": "scbd.model._contract",
        "Objective": "scbd.model._contract",
        "SCBDModel": "scbd.model._scbd",
        "Sample": "scbd.model._contract",
        "TrainSettings": "scbd.model._settings",
        "TrainingDiverged": "scbd.model._divergence",
        "contrasts_told": "scbd.model._confounding",  # for other packages of scbd; no part of the API
        "TrainingPlan": "scbd.model._plan",
    },
)
