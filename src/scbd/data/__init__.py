"""Cells at rest and on their way to a batch: fields, sources, splits, samplers, the data module."""

from scbd.data.fields import ImageField, LabelField
from scbd.data.loading import ImageDataModule
from scbd.data.samplers import BatchSampler, PerturbationSampler, ShuffleSampler
from scbd.data.sources import ArraySource, ImageSource, memory_map_h5ad, open_screen
from scbd.data.splits import Split, hold_out_environments, split_by_column, stratified_split

__all__ = [
    "ArraySource",
    "BatchSampler",
    "ImageDataModule",
    "ImageField",
    "ImageSource",
    "LabelField",
    "PerturbationSampler",
    "ShuffleSampler",
    "Split",
    "hold_out_environments",
    "memory_map_h5ad",
    "open_screen",
    "split_by_column",
    "stratified_split",
]
