"""Baselines for comparison with SCBD: classifiers, variational autoencoders and principal components of pixels.

The classifiers and the variational autoencoders have the same interface as :class:`scbd.SCBDModel`.
"""

from scbd.baselines._classifiers import CORALModel, DANNModel, ERMModel, FishModel, GroupDROModel, IRMModel
from scbd.baselines._latent import IVAEModel, MCVAEModel, VAEModel
from scbd.baselines._pixel_pca import pixel_pca

__all__ = [
    "CORALModel",
    "DANNModel",
    "ERMModel",
    "FishModel",
    "GroupDROModel",
    "IRMModel",
    "IVAEModel",
    "MCVAEModel",
    "VAEModel",
    "pixel_pca",
]
