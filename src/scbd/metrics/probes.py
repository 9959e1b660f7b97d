"""How well an embedding predicts a label: high for the perturbation, low for the environment."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

Classifier = Literal["linear", "nearest_mean"]


def predict_labels(
    train_embedding: np.ndarray, train_labels: ArrayLike, embedding: np.ndarray, *, classifier: Classifier = "linear"
) -> np.ndarray:
    """Learn labels from one embedding, predict those of another.

    Parameters
    ----------
    train_embedding, embedding
        ``(N, D)`` and ``(M, D)``.
    train_labels
        Labels of the first, ``(N,)``.
    classifier
        ``"linear"``: multinomial logistic regression on standardised components; ``"nearest_mean"``: the label whose
        mean is nearest, which asks whether the embedding *as it is* separates the labels.

    Returns
    -------
    Predicted labels, ``(M,)``.

    Raises
    ------
    ValueError
        If the embedding is not finite, or there is one label only.
    """
    return _fitted(np.asarray(train_embedding), np.asarray(train_labels), classifier).predict(np.asarray(embedding))


def label_probe(
    embedding: np.ndarray,
    labels: ArrayLike,
    *,
    train_fraction: float = 0.6,
    max_cells: int | None = 20_000,
    seed: int = 0,
) -> dict[str, float]:
    """Predict a label from an embedding by logistic regression, on cells that were not learned from.

    The paper's protocol (appendix, batch prediction): a random 60 % of cells to learn from, the score on the rest.

    Parameters
    ----------
    embedding
        ``(N, D)``.
    labels
        ``(N,)``; labels with a single cell are left out.
    train_fraction
        Fraction of cells to learn from.
    max_cells
        Use a random subset of this size; `None` for all.
    seed
        Seed of subset, split and permutation.

    Returns
    -------
    ``f1`` (macro), ``auroc`` (one against rest, macro), ``accuracy``, and ``chance_f1``: the macro F1 of a classifier
    that learned from permuted labels.

    Raises
    ------
    ValueError
        If the embedding is not finite or not of the labels' length, or fewer than two labels have two cells.
    """
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
    from sklearn.model_selection import train_test_split

    x, codes = _checked(embedding, labels)
    rng = np.random.default_rng(seed)
    if max_cells is not None and len(x) > max_cells:
        rows = rng.choice(len(x), max_cells, replace=False)
        x, codes = _checked(x[rows], codes[rows])
    train, test = train_test_split(
        np.arange(len(x)), train_size=train_fraction, random_state=seed, stratify=_strata(codes)
    )
    model = _fitted(x[train], codes[train])
    predicted, probability = model.predict(x[test]), model.predict_proba(x[test])
    chance = _fitted(x[train], rng.permutation(codes[train])).predict(x[test])
    seen = np.unique(codes[test])
    column = {label: i for i, label in enumerate(model.classes_)}
    # one against rest, over labels that occur on both sides
    areas = [roc_auc_score(codes[test] == label, probability[:, column[label]]) for label in seen if label in column]
    return {
        "f1": float(f1_score(codes[test], predicted, average="macro", zero_division=0.0)),
        "auroc": float(np.mean(areas)),
        "accuracy": float(accuracy_score(codes[test], predicted)),
        "chance_f1": float(f1_score(codes[test], chance, average="macro", zero_division=0.0)),
    }


def batch_probe(adata: AnnData, embedding_key: str, e_key: str | Sequence[str], **kwargs: float) -> dict[str, float]:
    """How well an embedding in ``obsm`` predicts the environment: low is good for z_c.

    Parameters
    ----------
    adata
        Annotated cells.
    embedding_key
        Key in ``obsm``.
    e_key
        Column of ``obs``, or several for their cross.
    **kwargs
        See :func:`label_probe`.

    Returns
    -------
    See :func:`label_probe`.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        See :func:`label_probe`.
    """
    columns = [e_key] if isinstance(e_key, str) else list(e_key)
    for slot, keys in (("obsm", [embedding_key]), ("obs", columns)):
        for key in keys:
            if key not in getattr(adata, slot):
                msg = f"{slot} has no {key!r} (its keys: {', '.join(getattr(adata, slot).keys()) or 'none'})."
                raise KeyError(msg)
    labels = adata.obs[columns].astype(str).agg("|".join, axis=1)
    return label_probe(np.asarray(adata.obsm[embedding_key]), labels, **kwargs)  # type: ignore[arg-type]


def _fitted(x: np.ndarray, labels: np.ndarray, classifier: Classifier = "linear"):
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import NearestCentroid
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(labels)) < 2:
        msg = "A probe needs at least two different labels to tell apart."
        raise ValueError(msg)
    if not np.isfinite(x).all():
        msg = f"The embedding has NaN or infinite values in {(~np.isfinite(x).all(axis=1)).sum()} of {len(x)} cells."
        raise ValueError(msg)
    if classifier == "nearest_mean":
        return NearestCentroid().fit(x, labels)
    if classifier != "linear":
        msg = f"classifier={classifier!r} is not known: use 'linear' or 'nearest_mean'."
        raise ValueError(msg)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    with warnings.catch_warnings():
        # a probe is not finer than its stopping rule
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(x, labels)


def _checked(embedding: np.ndarray, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Embedding and integer codes of the cells whose label occurs twice."""
    codes, names = pd.factorize(np.asarray(labels))
    if len(codes) != len(embedding):
        msg = f"There are {len(embedding)} embeddings and {len(codes)} labels."
        raise ValueError(msg)
    keep = np.bincount(codes, minlength=len(names))[codes] > 1
    if len(np.unique(codes[keep])) < 2:
        msg = "A probe needs at least two labels with two cells each, one to learn from and one to be tested on."
        raise ValueError(msg)
    return np.asarray(embedding)[keep], codes[keep]


def _strata(codes: np.ndarray) -> np.ndarray | None:
    """Stratify where every side of the split can hold every label."""
    n_labels = len(np.unique(codes))
    return codes if 0.4 * len(codes) >= 2 * n_labels else None
