"""Tensors in, tensors out: losses, networks, preprocessing. Knows nothing of AnnData, scvi-tools or Lightning."""

from scbd.nn.decoders import AdditiveDecoder
from scbd.nn.distributed import gather
from scbd.nn.encoders import ENCODERS, Block, Features, Representation, build_encoder
from scbd.nn.groups import Groups
from scbd.nn.health import effective_rank, spread
from scbd.nn.losses import (
    contrastive_ceiling,
    invariance_loss,
    log_normaliser,
    share_learned,
    supervised_contrastive_loss,
)
from scbd.nn.preprocess import Preprocess, random_orientation
from scbd.nn.variance import explained_variance, invariance_statistic

__all__ = [
    "ENCODERS",
    "AdditiveDecoder",
    "Block",
    "Features",
    "Groups",
    "Preprocess",
    "Representation",
    "build_encoder",
    "contrastive_ceiling",
    "effective_rank",
    "explained_variance",
    "gather",
    "invariance_loss",
    "invariance_statistic",
    "log_normaliser",
    "random_orientation",
    "spread",
    "share_learned",
    "supervised_contrastive_loss",
]
