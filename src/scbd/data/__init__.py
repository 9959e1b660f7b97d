"""Cells at rest and on their way to a batch: fields, sources, splits, samplers, the data module."""

from scbd.data.fields import ImageField
from scbd.data.label_field import LabelField
from scbd.data.loading import BatchLoader, ImageDataModule
from scbd.data.prefetch import prefetch
from scbd.data.resizing import resize_images
from scbd.data.samplers import BatchSampler, PerturbationSampler, ShuffleSampler
from scbd.data.sources import ArraySource, ImageSource, SlicedSource, ZarrSource
from scbd.data.splits import Split, hold_out_environments, split_by_column, stratified_split
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
from scbd.data.tensors import TensorSource, read_tensor

__all__ = [
    "ArraySource",
    "BatchLoader",
    "BatchSampler",
    "Crops",
    "SlicedSource",
    "ImageDataModule",
    "ImageField",
    "ImageSource",
    "LabelField",
    "PerturbationSampler",
    "ShuffleSampler",
    "Split",
    "TensorSource",
    "ZarrSource",
    "add_to_screen",
    "hold_out_environments",
    "memory_map_h5ad",
    "open_embedding",
    "open_screen",
    "prefetch",
    "read_crops",
    "read_tensor",
    "resize_images",
    "split_by_column",
    "stratified_split",
    "verify_screen",
    "write_screen",
]
