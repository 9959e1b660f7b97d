"""Scores of an embedding in environments that were held out: the label, and what is left of the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from paper.datasets import in_part
from paper.scores import PROBE_KINDS
from scbd._shared.labels import label_values
from scbd.metrics import label_probe

if TYPE_CHECKING:
    from anndata import AnnData

    from paper.datasets import Dataset


def held_out_scores(adata: AnnData, embedding: np.ndarray, dataset: Dataset, name: str) -> dict[str, float]:
    """Compute how well a label is predicted in held-out environments, and the environment of new cells.

    Both classifiers learn from the cells that the embedding was trained on.

    Parameters
    ----------
    adata
        Cells with ``obs["split"]``: ``"test"`` cells are those of held-out environments or plates.
    embedding
        ``(N, D)``.
    dataset
        Columns of label, environment and controls.
    name
        Name of the embedding, which is added to the names of the scores.

    Returns
    -------
    ``<name> held out``: balanced accuracy of a logistic regression in test cells that are not controls, with equal
    weights of all labels in training; ``<name> environment, <kind>``: macro F1 with which a probe of this kind predicts
    the environment of cells that were not trained on, and ``environment chance, <kind>``, the F1 of the same probe
    after training on permuted environments. Only controls are probed if the data set has controls, because labels and
    environments may depend on each other. Environments without training cells are not probed.
    """
    y, e = (label_values(adata.obs, key).astype(str).to_numpy() for key in (dataset.y_key, dataset.e_key))
    train, z = in_part(adata, "train"), np.asarray(embedding)
    is_control = y == dataset.control
    scored = in_part(adata, "test") & ~is_control
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, class_weight="balanced", max_iter=1_000))
    predicted = classifier.fit(z[train], y[train]).predict(z[scored])
    seen = np.isin(y[scored], y[train])
    scores = {f"{name} held out": float(balanced_accuracy_score(y[scored][seen], predicted[seen]))}
    probed = (is_control if is_control.any() else np.ones(len(y), dtype=bool)) & np.isin(e, e[train])
    for kind in PROBE_KINDS:
        probe = label_probe(z[probed], e[probed], kind=kind, train=train[probed])
        scores[f"{name} environment, {kind}"] = probe["f1"]
        scores[f"environment chance, {kind}"] = probe["chance_f1"]
    return scores
