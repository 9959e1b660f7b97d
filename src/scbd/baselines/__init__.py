"""Other systems to compare with, under the same contract."""

from scbd.baselines._erm import ERMModel
from scbd.baselines._pixel_pca import pixel_pca

__all__ = ["ERMModel", "pixel_pca"]
