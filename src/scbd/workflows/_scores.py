"""How a trained model does: in and out of distribution, biology and batch, how blind, how alive."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._labels import label_values
from scbd.data import split_by_column
from scbd.metrics import benchmark, label_probe, predict_labels
from scbd.model import SCBDModel
from scbd.workflows._authors_probe import unstandardised_f1

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from anndata import AnnData

    from scbd.data import Split
    from scbd.metrics import Classifier
    from scbd.model import ImageModel

# of the probes of the environment: enough for the second digit
_PROBE_CELLS = 20_000
# of an accuracy that a setting is chosen by
_SELECTION_CELLS = 100_000


def generalization_scores(
    adata: AnnData,
    model: ImageModel,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    split_key: str = "split",
) -> dict[str, float]:
    """Accuracy of y in and out of distribution, and how blind and how alive the content block is.

    Parameters
    ----------
    adata
        Cells of all three parts; cells of any other part are left out.
    model
        Trained on the ``train`` cells.
    y_key, e_key
        Columns of the label and of the environment.
    split_key
        Column with ``train``, ``validation`` (in distribution) and ``test`` (out of distribution), see
        :func:`scbd.data.split_by_column`.

    Returns
    -------
    ``r_c in``, ``r_c out``: a linear head that is fitted afterwards, on the frozen r_c of training cells; ``own in``,
    ``own out``: the linear head that learned with the encoder, if there is one, that of a classifier or that of
    ``train(online_head=True)``, which is what the paper's authors report; ``z_c in``, ``z_c out``: the nearest class
    mean on z_c itself, for contrastive models; ``e from r_c``, ``e from z_c``: accuracy of a linear probe of the
    environment in training and validation cells, and ``e chance``, that of naming the largest; ``e from r_c, new``,
    ``e from z_c, new``, ``e chance, new``: the same in validation cells alone; and what ``model.health`` says.

    Notes
    -----
    Of its training cells an encoder may know the label by heart, and then hardly shows what else it sees in them: the
    environment is harder to read from them than from new cells. Where the two probes differ, believe that of new ones.

    Raises
    ------
    ValueError
        If the model was trained on cells of ``test``.

    Examples
    --------
    >>> parts = np.full(adata.n_obs, "test", dtype=object)  # as train(split="split") took them
    >>> parts[model.train_indices], parts[model.validation_indices[::2]] = "train", "val"
    >>> adata.obs["split"] = parts
    >>> scores = scbd.workflows.generalization_scores(adata, model, y_key="gene", e_key="well")
    >>> 0 <= scores["z_c out"] <= 1
    True
    """
    scores: dict[str, Any] = {}
    parts = _parts(adata, split_key)
    n_known = np.isin(parts.test, model.train_indices).sum()
    if n_known:
        msg = (
            f"The model was trained on {n_known:,} of {len(parts.test):,} test cells: train(split={split_key!r}) first."
        )
        raise ValueError(msg)
    for name, representation, classifier in _blocks(model):
        embedding = model.get_latent_representation(representation=representation)
        keys: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "split_key": split_key}
        scores |= embedding_scores(adata, embedding, name=name, classifier=classifier, **keys)
    if model.can_predict:
        scores |= _accuracies("own", model.predict(), label_values(adata.obs, y_key).to_numpy(), parts)
    return scores | health_scores(model)


def embedding_scores(
    adata: AnnData,
    embedding: np.ndarray,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    split_key: str = "split",
    name: str = "r_c",
    classifier: Classifier = "linear",
) -> dict[str, float]:
    """Accuracy of y in and out of distribution, and of the environment, read from an embedding of any kind.

    Parameters
    ----------
    adata
        The cells.
    embedding
        ``(N, D)``.
    y_key, e_key, split_key
        See :func:`generalization_scores`.
    name
        Of the embedding, in the names of the scores: those of features that know no label are their r_c.
    classifier
        What reads y from it.

    Returns
    -------
    For the name ``r_c``: ``r_c in`` and ``r_c out``, ``e from r_c`` and ``e chance``, ``e from r_c, new`` and
    ``e chance, new``, as of a model.

    Examples
    --------
    >>> adata.obs["split"] = np.resize(["train", "train", "validation", "test"], adata.n_obs)
    >>> train = (adata.obs["split"] == "train").to_numpy()
    >>> pixels = scbd.baselines.pixel_pca(adata, n_components=16, fit=train)
    >>> scores = scbd.workflows.embedding_scores(adata, pixels, y_key="gene", e_key="well")
    >>> list(scores)
    ['r_c in', 'r_c out', 'e from r_c', 'e chance', 'e from r_c, new', 'e chance, new']
    """
    y, e = (label_values(adata.obs, key).to_numpy() for key in (y_key, e_key))
    parts = _parts(adata, split_key)
    predicted = predict_labels(embedding[parts.train], y[parts.train], embedding, classifier=classifier)
    scores = _accuracies(name, predicted, y, parts)
    for suffix, rows in {"": np.union1d(parts.train, parts.validation), ", new": parts.validation}.items():
        scores |= {
            f"e from {name}{suffix}": _readable(embedding[rows], e[rows]),
            f"e chance{suffix}": _largest_share(e[rows]),
        }
    return scores


def selection_scores(
    adata: AnnData, model: ImageModel, scored: np.ndarray, *, y_key: str | Sequence[str], e_key: str | Sequence[str]
) -> dict[str, float]:
    """Accuracy of y on cells that were not learned from, and how blind and how alive the content block is.

    Parameters
    ----------
    adata
        The cells.
    model
        Trained on some of them.
    scored
        Rows to predict y of; 100,000 of them at random if they are more, and so for training cells.
    y_key, e_key
        Columns of the label and of the environment.

    Returns
    -------
    ``accuracy``: the model's own classifier, or without one the nearest class mean on z_c; ``chance``: that of the
    most frequent class; ``cells``: how many were scored; ``e from r_c`` and, for contrastive models, ``e from z_c``:
    accuracy of a linear probe of the environment on validation cells, new ones of known environments (see
    :func:`generalization_scores`); ``e chance``; and what ``model.health`` says.

    Raises
    ------
    ValueError
        If no cell is left to score.
    """
    if not len(scored):
        msg = "There are no validation cells to choose by: lower train_size, or mark some in the split column."
        raise ValueError(msg)
    y, e = (label_values(adata.obs, key).to_numpy() for key in (y_key, e_key))
    train, scored, new = map(_some, (model.train_indices, scored, model.validation_indices))
    name, representation, _ = _blocks(model)[-1]
    if model.can_predict and name != "z_c":
        predicted = model.predict(indices=scored)
    else:
        of_train, of_scored = (
            model.get_latent_representation(indices=rows, representation=representation) for rows in (train, scored)
        )
        predicted = predict_labels(of_train, y[train], of_scored, classifier="nearest_mean")
    scores = {
        "accuracy": float(np.mean(predicted == y[scored])),
        "chance": _largest_share(y[scored]),
        "cells": float(len(scored)),
        "e chance": _largest_share(e[new]),
    }
    for name, representation, _ in _blocks(model):
        embedding = model.get_latent_representation(indices=new, representation=representation)
        scores[f"e from {name}"] = _readable(embedding, e[new])
    return scores | health_scores(model)


def health_scores(model: ImageModel) -> dict[str, float]:
    """What ``model.health`` says, for a contrastive model."""
    return dict(model.health) if isinstance(model, SCBDModel) else {}


def _blocks(model: ImageModel) -> list[tuple[str, str, Classifier]]:
    """Name, representation and classifier of what is scored: r_c, and of contrastive models z_c, which differs."""
    blocks: list[tuple[str, str, Classifier]] = [("r_c", "intermediate", "linear")]
    return [*blocks, ("z_c", "embedding", "nearest_mean")] if isinstance(model, SCBDModel) else blocks


def _some(rows: np.ndarray) -> np.ndarray:
    if len(rows) <= _SELECTION_CELLS:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, _SELECTION_CELLS, replace=False))


def correction_scores(
    adata: AnnData,
    embedding: np.ndarray,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    guide_key: str | None,
    net: pd.DataFrame | None,
) -> dict[str, float]:
    """Biology and batch in an embedding of all cells: the metrics of :func:`scbd.metrics.benchmark`.

    And the F1 of the environment as the paper's authors measure it, ``e_probe_f1_unstandardised``.

    Parameters
    ----------
    adata
        The cells.
    embedding
        ``(N, D)``.
    y_key, e_key, guide_key
        Columns of gene, well and guide. Where cells have no such column of guides, genes are averaged cell by cell.
    net
        Known relations between genes.
    """
    from anndata import AnnData

    table = AnnData(obs=adata.obs, obsm={"embedding": embedding})
    guides = guide_key if guide_key in adata.obs else None
    keys: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "gene_key": y_key, "guide_key": guides}
    # the paper's protocol, and what all rows mean: cells are split one by one, and environments read by a linear probe
    frame = benchmark(table, ["embedding"], **keys, group_key=None, kinds=["linear"], net=net)
    scores = frame.set_index("metric")
    chance = {f"{probe}_probe_chance_f1": scores.loc[f"{probe}_probe_f1", "chance"] for probe in "ye"}
    theirs = {"e_probe_f1_unstandardised": unstandardised_f1(embedding, label_values(adata.obs, e_key).cat.codes)}
    # of the embedding of all cells, where the model's own health has that of a batch
    return scores["value"].drop("effective_rank").to_dict() | chance | theirs


def _parts(adata: AnnData, split_key: str) -> Split:
    """As ``train(split=…)`` takes them, which has said what it leaves out.

    A further part, such as WILDS' unseen validation environment, is neither in nor out of distribution.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*name no part of a split", UserWarning)
        return split_by_column(adata.obs, split_key)


def _readable(embedding: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy of a linear probe; NaN where there are no two labels to tell apart."""
    if (np.unique(labels.astype(str), return_counts=True)[1] > 1).sum() < 2:
        return float("nan")
    return label_probe(embedding, labels, max_cells=_PROBE_CELLS)["accuracy"]


def _largest_share(labels: np.ndarray) -> float:
    """Accuracy of always naming the most frequent label; NaN without cells."""
    return (
        float(np.unique(labels.astype(str), return_counts=True)[1].max() / len(labels)) if len(labels) else float("nan")
    )


def _accuracies(name: str, predicted: np.ndarray, y: np.ndarray, parts: Split) -> dict[str, float]:
    """NaN of a part without cells."""
    return {
        f"{name} {shown}": float(np.mean(predicted[rows] == y[rows])) if len(rows) else float("nan")
        for shown, rows in {"in": parts.validation, "out": parts.test}.items()
    }
