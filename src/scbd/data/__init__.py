"""Cells on disk and on their way to a batch: fields, sources, splits, samplers, the data module.

Names that need torch, Lightning or scvi-tools load on first use: screens are written, opened and verified without them.
"""

from typing import TYPE_CHECKING

from scbd._lazy import lazy_names
from scbd.data._held_out import hold_out_environments, hold_out_perturbations
from scbd.data._inferred import InferredEnvironments, infer_environments
from scbd.data._mantispy import to_mantispy
from scbd.data._prefetch import prefetch
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler
from scbd.data._splits import Split, split_by_column, stratified_split
from scbd.data.fields import crop_cells, from_spatialdata, read_plate
from scbd.data.profiles import read_cellprofiler, read_profiles
from scbd.data.sources import FEATURES, IMAGES, ArraySource, ImageSource, SlicedSource, ZarrSource
from scbd.data.stores import (
    Crops,
    add_to_screen,
    memory_map_h5ad,
    open_embedding,
    open_screen,
    read_crops,
    verify_screen,
    write_screen,
)

if TYPE_CHECKING:
    from scbd.data._feature_field import FeatureField
    from scbd.data._feature_field import known_features as known_features
    from scbd.data._fields import ImageField
    from scbd.data._label_field import LabelField
    from scbd.data._loading import BatchLoader, ImageDataModule
    from scbd.data._loading import Stage as Stage
    from scbd.data._number_field import NumberField
    from scbd.data._resizing import resize_images
    from scbd.data._tensors import TensorSource, read_tensor

__all__ = [
    "FEATURES",
    "IMAGES",
    "ArraySource",
    "BatchLoader",
    "BatchSampler",
    "Crops",
    "FeatureField",
    "SlicedSource",
    "ImageDataModule",
    "ImageField",
    "ImageSource",
    "InferredEnvironments",
    "LabelField",
    "NumberField",
    "PerturbationSampler",
    "ShuffleSampler",
    "Split",
    "TensorSource",
    "ZarrSource",
    "add_to_screen",
    "crop_cells",
    "from_spatialdata",
    "hold_out_environments",
    "hold_out_perturbations",
    "infer_environments",
    "memory_map_h5ad",
    "open_embedding",
    "open_screen",
    "prefetch",
    "read_cellprofiler",
    "read_crops",
    "read_plate",
    "read_profiles",
    "read_tensor",
    "resize_images",
    "split_by_column",
    "stratified_split",
    "to_mantispy",
    "verify_screen",
    "write_screen",
]

# for other packages of scbd; no part of the API
from scbd.data._channels import check_channel_names as check_channel_names
from scbd.data._digests import digest_cells as digest_cells
from scbd.data._formats import image_columns as image_columns
from scbd.data._formats import kind_of as kind_of
from scbd.data._frames import read_frame as read_frame
from scbd.data._inferred import INFERRED as INFERRED
from scbd.data._inputs import Inputs as Inputs
from scbd.data._inputs import check_like_registered as check_like_registered
from scbd.data._inputs import image_source as image_source
from scbd.data.fields._opening import open_field as open_field
from scbd.data.stores import image_keys as image_keys

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BatchLoader": "scbd.data._loading",
        "FeatureField": "scbd.data._feature_field",
        "ImageDataModule": "scbd.data._loading",
        "ImageField": "scbd.data._fields",
        "LabelField": "scbd.data._label_field",
        "NumberField": "scbd.data._number_field",
        "Stage": "scbd.data._loading",
        "TensorSource": "scbd.data._tensors",
        "known_features": "scbd.data._feature_field",
        "read_tensor": "scbd.data._tensors",
        "resize_images": "scbd.data._resizing",
    },
)
