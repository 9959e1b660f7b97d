"""Numbers about embeddings. Stands on numpy, pandas and scikit-learn; imports neither scvi-tools nor a model."""

from scbd.metrics.probes import batch_probe, label_probe, predict_labels

__all__ = ["batch_probe", "label_probe", "predict_labels"]
