"""Other systems to compare with, under the same contract."""

from scbd.baselines._cellprofiler import cellprofiler_pca
from scbd.baselines._coral import CORALModel
from scbd.baselines._corrections import standardize_by_environment, tvn
from scbd.baselines._dann import DANNModel
from scbd.baselines._erm import ERMModel
from scbd.baselines._fish import FishModel
from scbd.baselines._group_dro import GroupDROModel
from scbd.baselines._irm import IRMModel
from scbd.baselines._ivae import IVAEModel
from scbd.baselines._mcvae import MCVAEModel
from scbd.baselines._pixel_pca import pixel_pca
from scbd.baselines._vae import VAEModel

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
    "pixel_pca",
    "standardize_by_environment",
    "tvn",
]
