"""Tools that read, store and split screens of perturbed cells, and draw batches of their cells for training.

The functions and classes of this package are imported when they are first used. Writing a screen (without resizing its
images), opening and verifying a screen therefore do not import torch, Lightning or scvi-tools, and inspecting tables
and folders of images does not import anndata.
"""

from typing import TYPE_CHECKING

from scbd._shared.lazy import lazy_names

if TYPE_CHECKING:
    from scbd.data._crop_cells import crop_cells
    from scbd.data._inferred import InferredEnvironments, infer_environments
    from scbd.data._loading import ImageDataModule, resize_images
    from scbd.data._profiles import read_profiles
    from scbd.data._readers import Crops, read_crops
    from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler
    from scbd.data._screens import open_embedding, open_screen, verify_screen, write_screen
    from scbd.data._sources import ArraySource, ImageSource
    from scbd.data._splits import Split, hold_out_environments, hold_out_perturbations, stratified_split
    from scbd.data._zarr_source import ZarrSource

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

_MODULES = {
    "_crop_cells": ["crop_cells"],
    "_inferred": ["InferredEnvironments", "infer_environments"],
    "_loading": ["ImageDataModule", "resize_images"],
    "_profiles": ["read_profiles"],
    "_readers": ["Crops", "read_crops"],
    "_samplers": ["BatchSampler", "PerturbationSampler", "ShuffleSampler"],
    "_screens": ["open_embedding", "open_screen", "verify_screen", "write_screen"],
    "_sources": ["ArraySource", "ImageSource"],
    "_zarr_source": ["ZarrSource"],
    "_splits": ["Split", "hold_out_environments", "hold_out_perturbations", "stratified_split"],
}

__getattr__, __dir__ = lazy_names(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
