"""Cells on disk and on their way to a batch: fields, sources, splits, samplers, the data module.

Names that need torch, Lightning or scvi-tools load on first use: screens are written, opened and verified without them.
"""

from typing import TYPE_CHECKING

from scbd._lazy import lazy_names
from scbd.data._crop_cells import crop_cells
from scbd.data._inferred import InferredEnvironments, infer_environments
from scbd.data._profiles import read_profiles
from scbd.data._readers import Crops, read_crops
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler
from scbd.data._screens import open_embedding, open_screen, verify_screen, write_screen
from scbd.data._sources import ArraySource, ImageSource, ZarrSource
from scbd.data._splits import Split, hold_out_environments, hold_out_perturbations, stratified_split

if TYPE_CHECKING:
    from scbd.data._loading import ImageDataModule, resize_images

__all__ = [
    "ArraySource",
    "BatchSampler",
    "Crops",
    "ImageDataModule",
    "ImageSource",
    "InferredEnvironments",
    "PerturbationSampler",
    "ShuffleSampler",
    "Split",
    "ZarrSource",
    "crop_cells",
    "hold_out_environments",
    "hold_out_perturbations",
    "infer_environments",
    "open_embedding",
    "open_screen",
    "read_crops",
    "read_profiles",
    "resize_images",
    "stratified_split",
    "verify_screen",
    "write_screen",
]


__getattr__, __dir__ = lazy_names(
    __name__, {"ImageDataModule": "scbd.data._loading", "resize_images": "scbd.data._loading"}
)
