"""PyTorch functions and modules of the method: losses, encoders, a decoder and the preprocessing of inputs.

They take tensors and do not depend on AnnData, scvi-tools or Lightning.
"""

from scbd.nn._contrastive import effective_rank, invariance_loss, log_normaliser, supervised_contrastive_loss
from scbd.nn._decoders import AdditiveDecoder
from scbd.nn._encoders import Block, Encoder, build_encoder
from scbd.nn._explained_variance import explained_variance, invariance_statistic
from scbd.nn._feature_scaling import FeatureScaling
from scbd.nn._groups import Groups
from scbd.nn._image_preprocessing import Preprocess
from scbd.nn._input_transform import InputTransform

__all__ = [
    "AdditiveDecoder",
    "Block",
    "Encoder",
    "FeatureScaling",
    "Groups",
    "InputTransform",
    "Preprocess",
    "build_encoder",
    "effective_rank",
    "explained_variance",
    "invariance_loss",
    "invariance_statistic",
    "log_normaliser",
    "supervised_contrastive_loss",
]
