"""Scores that measure how well embeddings of cells carry biology, and how much of the batch they retain.

The scores are:

- probes, which are classifiers that predict perturbation or environment from an embedding
- mixing of environments among nearest neighbours
- retrieval of replicates, and of perturbations with the same mechanism
- agreement of gene profiles with known relationships between genes
- effects of single perturbations relative to controls
- fractions of variance that factors such as environment and perturbation explain

:func:`benchmark` computes most scores in one call.

The package is built on numpy, pandas, scipy and scikit-learn. It imports neither scvi-tools nor a model.
"""

from scbd.metrics._benchmark import benchmark, rank, styled, summarise
from scbd.metrics._complexes import complex_table
from scbd.metrics._effects import perturbation_effects
from scbd.metrics._mixing import batch_mixing
from scbd.metrics._probes import batch_probe, label_probe, predict_labels
from scbd.metrics._profiles import aggregate
from scbd.metrics._relationships import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_interval,
    relationship_recall,
)
from scbd.metrics._retrieval import Retrieval, replicate_retrieval, retrieval
from scbd.metrics._variance_explained import variance_table

__all__ = [
    "Relations",
    "Retrieval",
    "aggregate",
    "batch_mixing",
    "batch_probe",
    "benchmark",
    "complex_table",
    "label_probe",
    "perturbation_effects",
    "predict_labels",
    "rank",
    "relationship_area",
    "relationship_average_precision",
    "relationship_curve",
    "relationship_interval",
    "relationship_recall",
    "replicate_retrieval",
    "retrieval",
    "styled",
    "summarise",
    "variance_table",
]
