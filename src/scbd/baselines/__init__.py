"""Baseline models with the same interface as SCBD, and batch corrections of features and embeddings."""

from scbd.baselines._classifiers import CORALModel, DANNModel, ERMModel, FishModel, GroupDROModel, IRMModel
from scbd.baselines._corrections import (
    combat,
    correct,
    harmony,
    lda,
    plda,
    sphering,
    standardize_by_environment,
    tvn,
    wccn,
)
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
    "combat",
    "correct",
    "harmony",
    "lda",
    "pixel_pca",
    "plda",
    "sphering",
    "standardize_by_environment",
    "tvn",
    "wccn",
]
