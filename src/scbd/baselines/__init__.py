"""Other systems to compare with, under the same contract; and what features and embeddings are corrected by."""

from scbd.baselines._cellprofiler import cellprofiler_pca
from scbd.baselines._combat import combat
from scbd.baselines._coral import CORALModel
from scbd.baselines._correct import correct
from scbd.baselines._dann import DANNModel
from scbd.baselines._discriminants import lda, plda
from scbd.baselines._erm import ERMModel
from scbd.baselines._fish import FishModel
from scbd.baselines._group_dro import GroupDROModel
from scbd.baselines._harmony import harmony
from scbd.baselines._irm import IRMModel
from scbd.baselines._ivae import IVAEModel
from scbd.baselines._mcvae import MCVAEModel
from scbd.baselines._pixel_pca import pixel_pca
from scbd.baselines._sphering import sphering
from scbd.baselines._standardize import standardize_by_environment
from scbd.baselines._tvn import tvn
from scbd.baselines._vae import VAEModel
from scbd.baselines._wccn import wccn

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
    "cellprofiler_pca",
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

# for other packages of scbd; no part of the API
from scbd.baselines._correct import CORRECTIONS as CORRECTIONS
from scbd.baselines._correct import check_correction as check_correction
