"""Numbers about embeddings. Stands on numpy, pandas and scikit-learn; imports neither scvi-tools nor a model."""

from scbd.metrics._aggregate import aggregate
from scbd.metrics._batch_probes import batch_probe, batch_probe_table
from scbd.metrics._complexes import complex_table
from scbd.metrics._effects import perturbation_effects
from scbd.metrics._generalization import generalization
from scbd.metrics._mixing import batch_mixing
from scbd.metrics._mmd import environment_mmd
from scbd.metrics._novelty import novelty
from scbd.metrics._odd_environments import odd_environments
from scbd.metrics._probes import label_probe, predict_labels
from scbd.metrics._proximity import proximity_bias
from scbd.metrics._relations import Relations
from scbd.metrics._relationship_chance import relationship_chance
from scbd.metrics._relationship_interval import RelationshipDifference, relationship_difference, relationship_interval
from scbd.metrics._relationship_retrieval import relationship_retrieval
from scbd.metrics._relationships import (
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_recall,
)
from scbd.metrics._replicates import replicate_retrieval
from scbd.metrics._report import benchmark
from scbd.metrics._retrieval import retrieval
from scbd.metrics._retrieval_result import ReplicateRetrieval, Retrieval
from scbd.metrics._scib import scib_scores
from scbd.metrics._summary import rank, styled, summarise
from scbd.metrics._uncertainty import profile_uncertainty
from scbd.metrics._variance import variance_table

__all__ = [
    "Relations",
    "RelationshipDifference",
    "ReplicateRetrieval",
    "Retrieval",
    "aggregate",
    "batch_mixing",
    "batch_probe",
    "batch_probe_table",
    "benchmark",
    "complex_table",
    "environment_mmd",
    "generalization",
    "label_probe",
    "novelty",
    "odd_environments",
    "perturbation_effects",
    "predict_labels",
    "profile_uncertainty",
    "proximity_bias",
    "rank",
    "relationship_area",
    "relationship_average_precision",
    "relationship_chance",
    "relationship_curve",
    "relationship_difference",
    "relationship_interval",
    "relationship_recall",
    "relationship_retrieval",
    "replicate_retrieval",
    "retrieval",
    "scib_scores",
    "styled",
    "summarise",
    "variance_table",
]

# for other packages of scbd; no part of the API
from scbd.metrics._design import probe_groups as probe_groups
from scbd.metrics._embeddings import Embeddings as Embeddings
from scbd.metrics._embeddings import named_embeddings as named_embeddings
from scbd.metrics._probes import Classifier as Classifier
from scbd.metrics._report import check_reference_of as check_reference_of
from scbd.metrics._report import nets_by_name as nets_by_name
from scbd.metrics._report import of_net as of_net
from scbd.metrics._report import reduced as reduced
from scbd.metrics._table import check_keys as check_keys
from scbd.metrics._table import label_names as label_names
from scbd.metrics._table import stored_embedding as stored_embedding
from scbd.metrics._table import trained_rows as trained_rows
