"""All metrics over several embeddings, as one tidy frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from scbd._labels import as_columns
from scbd._linear_maps import effective_rank
from scbd._seen import seen_rows, warn_of_seen
from scbd.metrics._aggregate import aggregate
from scbd.metrics._design import probe_groups
from scbd.metrics._embeddings import Embedding, Embeddings, named_embeddings
from scbd.metrics._measures import measure_of
from scbd.metrics._readers import check_kinds
from scbd.metrics._relationships import Relations
from scbd.metrics._replicates import replicate_retrieval
from scbd.metrics._retrieval import retrieval
from scbd.metrics._scored import (
    Scored,
    mixing_scores,
    prefixed,
    probe_scores,
    relationship_scores,
    replicate_scores,
    retrieval_scores,
)
from scbd.metrics._summary import check_reference
from scbd.metrics._table import label_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.metrics._readers import Kind

_LEVEL = 0.95


class Measured(NamedTuple):
    """An embedding with its scores."""

    embedding: Embedding
    scores: dict[str, Scored]


def benchmark(
    adata: AnnData,
    embeddings: Embeddings,
    *,
    y_key: str | None = None,
    e_key: str | Sequence[str] | None = None,
    gene_key: str | None = None,
    guide_key: str | None = None,
    group_key: str | Sequence[str] | Literal["auto"] | None = "auto",
    control: str | Sequence[str] | None = "nontargeting",
    net: pd.DataFrame | Mapping[str, pd.DataFrame] | None = None,
    max_set_size: int | None = None,
    label_key: str | Sequence[str] | None = None,
    replicates: bool = False,
    position_key: str | Sequence[str] | None = None,
    n_pcs: int | None = None,
    kinds: Sequence[Kind] = ("linear", "quadratic"),
    n_neighbors: int = 90,
    max_cells: int | None = 100_000,
    n_bootstrap: int = 0,
    reference: str | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Score embeddings for biology and for batch effects.

    What is asked for decides what is measured: ``net`` with ``gene_key`` gives the relationship metrics, ``y_key`` a
    probe of the perturbation, ``e_key`` probes of the environment and its mixing, ``label_key`` retrieval of mechanisms
    and the like, ``replicates`` that of replicates.

    Parameters
    ----------
    adata
        Embedded cells.
    embeddings
        Keys of ``obsm``; or names of representations with their key, or with several keys, such as those of several
        training seeds. In place of a key, an array, or the path of a file that ``embed_to`` wrote of these cells, see
        :func:`scbd.data.open_embedding`.
    y_key, e_key, gene_key, guide_key
        Columns of ``obs``.
    group_key
        What the probe of the perturbation holds out as a whole: a column of ``obs``, several for their cross, or `None`
        to split cells one by one. A probe that saw other cells of a well can recognise the well. Where a well holds one
        gene, it then predicts the gene from an embedding without any biology. By default, ``"auto"``, environments are
        held out where most hold one perturbation, guides where these belong to one, and otherwise nothing; see
        :func:`label_probe`.
    control
        Value of ``gene_key`` for unperturbed cells, or several, or `None`: see :func:`aggregate`. The same of ``y_key``
        for retrieval.
    net
        Frame with ``source`` and ``target``; or several by name, which their rows then have.
    max_set_size
        Larger sets are left out, see :class:`Relations`.
    label_key
        Columns of ``obs`` with the mechanism or target of a perturbation, see :func:`retrieval`; with ``y_key``.
    replicates
        Whether rows are wells that should find their replicates in other environments, see
        :func:`replicate_retrieval`; with ``y_key``, ``e_key`` and ``control``. Not for millions of cells.
    position_key
        Columns of ``obs`` with the position on a plate, for the floor of replicates.
    n_pcs
        Reduce wider embeddings (CellProfiler features) to so many principal components; the paper uses 64.
    kinds
        Probes of the environment, of those of :func:`label_probe`. Environments that a linear probe cannot predict may
        still differ in their variance, which ``"quadratic"`` detects. ``"neighbours"`` takes far longer where cells are
        many, and mixing asks nearly the same.
    n_neighbors
        Of the mixing metrics.
    max_cells
        Probes and mixing use a random subset of this size; `None` for all cells.
    n_bootstrap
        Resamples for confidence intervals: of complexes for relations, of whole mechanisms for retrieval of these, of
        perturbations for that of replicates, of what was held out for the F1 and accuracy of probes. They say what
        other complexes or cells would have given, not another training seed. Those of probes hold for the probes as
        they were trained, and not for others that learn from other cells: of labels with a few cells, intervals of the
        F1 are too narrow and p values too small, so read the accuracy. 200 are enough; with five thousand genes they
        take a minute an embedding. Intervals and p values of probes and retrieval are those of Student's t for as many
        units as were drawn, with the standard error of the resamples; for those of relations see
        :func:`relationship_interval`. NaN where nothing drawn differs, but for an accuracy of 0 or 1, which has the
        bound of Clopper and Pearson.
    reference
        A representation that all are compared with, over the same resamples: its keys with theirs in their order, or
        its only key with all.
    seed
        Seed of probes, subsets, components and resamples.

    Returns
    -------
    Tidy frame, one row a metric and embedding: ``metric``, ``representation``, ``key``, ``value``, ``chance`` (what an
    embedding that says nothing gets in the same design, or NaN), ``better`` (``"higher"``, ``"lower"``, ``"nearer to
    chance"``, or empty). With ``n_bootstrap`` also ``low`` and ``high``, a 95 % interval, or NaN. With ``reference``
    also ``difference``, ``difference_low``, ``difference_high`` and ``p_value``. Scores of the linear probe of the
    environment are ``e_probe_f1`` and so on, those of another ``e_probe_quadratic_f1`` and so on; ``effective_rank`` is
    the number of directions in use, 0 for a point.

    Raises
    ------
    ValueError
        If there are no cells, nothing is asked for, something lacks its key, a file is of other cells, a reference has
        no resamples, or see the metrics.
    KeyError
        If a key is missing.

    Warns
    -----
    UserWarning
        If perturbations and environments nest so that the probe of the perturbation may read the environment, or
        replicates are scored of perturbations that ``obs["scbd_seen"]`` says were trained on.

    Notes
    -----
    Score cells that the embedding was not trained on. Probes learn from a part of the cells that they are given, and
    are tested on the rest; :func:`scbd.workflows.evaluate` has probes that learn from the cells of the training, which
    are more, so that its scores are higher. Linear and quadratic probes standardise components, the one of neighbours
    and retrieval go by cosine, and mixing by Euclidean distance, as it was published.

    Examples
    --------
    >>> adata.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(adata, n_components=16)
    >>> embeddings = {"SCBD": "X_scbd_c", "pixels": "X_pixel_pca"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> frame.columns.to_list()
    ['metric', 'representation', 'key', 'value', 'chance', 'better']
    """
    from anndata import AnnData

    if adata.n_obs == 0:
        msg = (
            "adata has no rows to score: train(train_size=0.7) holds cells out; by default, the linear encoder of "
            "features holds out none."
        )
        raise ValueError(msg)
    nets = nets_by_name(net)
    labels = () if label_key is None else as_columns(label_key)
    _check_asked(y_key, e_key, gene_key, control, nets, labels, replicates, position_key)
    check_kinds(*kinds)
    compared = named_embeddings(adata, embeddings)
    check_reference_of(reference, [embedding.representation for embedding in compared], n_bootstrap)
    groups = None if y_key is None else probe_groups(adata, y_key, e_key, guide_key, group_key)
    drawn = {"n_bootstrap": n_bootstrap, "seed": seed}
    measured = []
    for embedding in compared:
        table = AnnData(obs=adata.obs, obsm={"x": reduced(embedding.values, n_pcs, seed)})
        scores = {"effective_rank": Scored(effective_rank(table.obsm["x"]))}
        if nets and gene_key is not None:
            profiles = aggregate(table, "x", gene_key=gene_key, guide_key=guide_key, control=control)
            relations = {name: Relations(profiles, known, max_set_size=max_set_size) for name, known in nets.items()}
            scores |= _of_relations(relations, **drawn)
        if y_key is not None:
            probe: dict[str, Any] = {"kind": "linear", "groups": groups, "max_cells": max_cells}
            scores |= prefixed("y_probe", probe_scores(table.obsm["x"], label_names(adata, y_key), **probe, **drawn))
            scores |= _of_labels(table, labels, y_key, control or (), **drawn)
        if replicates and y_key is not None and e_key is not None:
            keys: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "position_key": position_key, "control": control}
            replicated = replicate_retrieval(table, "x", **keys, seed=seed)
            names = label_names(adata, y_key)
            warn_of_seen(names, seen_rows(adata.obs, embedding.values), replicated.table.index)
            scores |= prefixed("replicate", replicate_scores(replicated, **drawn))
        if e_key is not None:
            scores |= _of_environments(table, e_key, kinds, max_cells, **drawn)
            scores |= mixing_scores(table, "x", e_key, n_neighbors=n_neighbors, max_cells=max_cells, seed=seed)
        measured.append(Measured(embedding, scores))
    return _frame(measured, n_bootstrap, reference)


def _of_relations(by_net: Mapping[str, Relations], **drawn: int) -> dict[str, Scored]:
    """Scores of each network, whose name their names have."""
    scores: dict[str, Scored] = {}
    for name, relations in by_net.items():
        found = relationship_scores(relations, **drawn)
        scores |= {of_net(f"relationship_{score}", name): found[score] for score in found}
    return scores


def nets_by_name(net: pd.DataFrame | Mapping[str, pd.DataFrame] | None) -> Mapping[str, pd.DataFrame]:
    """Networks as :func:`benchmark` takes them; one alone has no name."""
    return net if isinstance(net, Mapping) else {} if net is None else {"": net}


def of_net(metric: str, name: str) -> str:
    """What a metric of the network of this name is called."""
    return f"{metric} ({name})" if name else metric


def _of_labels(
    table: AnnData, labels: Sequence[str], y_key: str, control: str | Sequence[str], **drawn: int
) -> dict[str, Scored]:
    """How well perturbations find others of their mechanism or target."""
    scores: dict[str, Scored] = {}
    for label in labels:
        found = retrieval(table, "x", label_key=label, y_key=y_key, control=control, seed=drawn["seed"])
        scores |= prefixed(f"retrieval_{label}", retrieval_scores(found, **drawn))
    return scores


def _of_environments(
    table: AnnData, e_key: str | Sequence[str], kinds: Sequence[Kind], max_cells: int | None, **drawn: int
) -> dict[str, Scored]:
    """What each probe reads of the environment; the linear one has the plain name."""
    scores: dict[str, Scored] = {}
    for kind in kinds:
        how: dict[str, Any] = {"kind": kind, "groups": None, "max_cells": max_cells}
        found = probe_scores(table.obsm["x"], label_names(table, e_key), **how, **drawn)
        scores |= prefixed("e_probe" if kind == "linear" else f"e_probe_{kind}", found)
    return scores


def reduced(x: Any, n_pcs: int | None, seed: int) -> Any:
    """An embedding ``(N, D)``, of at most ``n_pcs`` components."""
    if n_pcs is None or x.shape[1] <= n_pcs:
        return x
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    x = PCA(n_pcs, random_state=seed).fit_transform(StandardScaler().fit_transform(np.asarray(x)))
    return x.astype(np.float32)


def _check_asked(
    y_key: Any,
    e_key: Any,
    gene_key: Any,
    control: Any,
    nets: Mapping[str, Any],
    labels: Any,
    replicates: bool,
    position_key: Any,
) -> None:
    """Raise unless something is asked for, with the columns that it needs."""
    if not nets and y_key is None and e_key is None:
        msg = "Nothing to measure: give e_key, y_key, or net with gene_key."
        raise ValueError(msg)
    if nets and gene_key is None:
        msg = "net needs gene_key, the column of obs with the perturbed gene."
        raise ValueError(msg)
    if labels and y_key is None:
        msg = f"label_key={labels[0]!r} needs y_key, the column of obs with the perturbation."
        raise ValueError(msg)
    if replicates and (y_key is None or e_key is None or control is None):
        msg = (
            "replicates=True needs y_key, e_key and control: replicates are looked for among controls of other plates."
        )
        raise ValueError(msg)
    if position_key is not None and not replicates:
        msg = "position_key is for the floor of replicates: give replicates=True, or leave it out."
        raise ValueError(msg)


def check_reference_of(reference: str | None, representations: Sequence[str], n_bootstrap: int) -> None:
    """Raise unless each of these, the representation of every embedding, has one of the reference's beside it."""
    if reference is None:
        return
    if not n_bootstrap:
        msg = "reference needs n_bootstrap, such as 200: differences are tested over resamples."
        raise ValueError(msg)
    n_keys = pd.Series(representations).value_counts(sort=False)
    check_reference(reference, n_keys.index)
    if n_keys[reference] > 1 and (odd := n_keys[n_keys != n_keys[reference]]).size:
        msg = (
            f"{odd.index[0]!r} has {odd.iloc[0]} keys and the reference {reference!r} has {n_keys[reference]}: give as "
            "many of both, or one of the reference."
        )
        raise ValueError(msg)


def _frame(measured: Sequence[Measured], n_bootstrap: int, reference: str | None) -> pd.DataFrame:
    """One row a score."""
    others = [one.scores for one in measured if one.embedding.representation == reference]
    places: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for (representation, key, _), scores in measured:
        place = places[representation] = places.get(representation, -1) + 1
        for metric, score in scores.items():
            row = {"metric": metric, "representation": representation, "key": key, "value": score.value}
            row |= {"chance": score.chance, "better": measure_of(metric).better}
            if n_bootstrap:
                # whatever is drawn again is a share
                row |= dict(zip(("low", "high"), np.clip(score.interval(_LEVEL), 0, 1), strict=True))
            if others:
                apart = score.minus(others[min(place, len(others) - 1)][metric])
                low, high = apart.interval(_LEVEL)
                row |= {"difference": apart.value, "difference_low": low, "difference_high": high}
                row |= {"p_value": apart.p_value()}
            rows.append(row)
    return pd.DataFrame(rows)
