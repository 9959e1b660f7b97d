"""Tensors in, tensors out: losses, networks, preprocessing. Knows nothing of AnnData, scvi-tools or Lightning."""

from scbd.nn._decoders import AdditiveDecoder
from scbd.nn._distributed import gather
from scbd.nn._effects import environment_effects
from scbd.nn._encoders import Block, Features, Representation
from scbd.nn._groups import Groups
from scbd.nn._health import effective_rank, spread
from scbd.nn._learned import contrastive_ceiling, share_learned
from scbd.nn._losses import invariance_loss, log_normaliser, supervised_contrastive_loss
from scbd.nn._networks import ENCODERS, build_encoder
from scbd.nn._numbers import Numbers
from scbd.nn._preprocess import Preprocess, random_orientation
from scbd.nn._scaling import FeatureScaling
from scbd.nn._transform import InputTransform
from scbd.nn._variance import explained_variance, invariance_statistic

__all__ = [
    "ENCODERS",
    "AdditiveDecoder",
    "Block",
    "FeatureScaling",
    "Features",
    "Groups",
    "InputTransform",
    "Numbers",
    "Preprocess",
    "Representation",
    "build_encoder",
    "contrastive_ceiling",
    "effective_rank",
    "environment_effects",
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

# for other packages of scbd; no part of the API
from scbd.nn._alignment import Alignment as Alignment
from scbd.nn._alignment import ChannelSums as ChannelSums
from scbd.nn._alignment import Moments as Moments
from scbd.nn._alignment import align as align
from scbd.nn._decoders import Likelihood as Likelihood
from scbd.nn._design import Environments as Environments
from scbd.nn._distributed import agree_on_buffers as agree_on_buffers
from scbd.nn._distributed import wait_for_all as wait_for_all
from scbd.nn._distributed import world as world
from scbd.nn._groups import pair_codes as pair_codes
from scbd.nn._loss_inputs import check_smoothing as check_smoothing
from scbd.nn._loss_inputs import check_temperature as check_temperature
from scbd.nn._losses import InvarianceReduction as InvarianceReduction
from scbd.nn._networks import FEATURE_ENCODERS as FEATURE_ENCODERS
from scbd.nn._networks import IdentityLinear as IdentityLinear
from scbd.nn._networks import Norm as Norm
from scbd.nn._preprocess import Intensity as Intensity
from scbd.nn._transform import Whitening as Whitening
