"""All metrics over several embeddings, as one tidy frame."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from scbd.metrics._aggregate import aggregate
from scbd.metrics._batch_probes import batch_probe
from scbd.metrics._design import groups_of_design
from scbd.metrics._embeddings import Embeddings, named_embeddings
from scbd.metrics._mixing import batch_mixing
from scbd.metrics._probes import label_probe
from scbd.metrics._readers import check_kinds
from scbd.metrics._relationships import (
    Relations,
    relationship_area,
    relationship_average_precision,
    relationship_curve,
    relationship_recall,
)
from scbd.metrics._table import label_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.metrics._readers import Kind

# which way is good: biology up, batch down
HIGHER_IS_BETTER = {
    "relationship_area": True,
    "relationship_recall": True,
    "relationship_average_precision": True,
    "y_probe_f1": True,
    "y_probe_auroc": True,
    "ilisi": True,
    **dict.fromkeys(["e_probe_f1", "e_probe_quadratic_f1", "e_probe_neighbours_f1"], False),
    **dict.fromkeys(["e_probe_auroc", "e_probe_quadratic_auroc", "e_probe_neighbours_auroc"], False),
}
# good where they are nearest to what chance gives in the same design: less is not better mixed
NEAREST = {"same_environment_neighbours": "same_environment_expected", "silhouette": "silhouette_expected"}


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
    net: pd.DataFrame | None = None,
    n_pcs: int | None = None,
    kinds: Sequence[Kind] = ("linear", "quadratic"),
    n_neighbors: int = 90,
    max_cells: int | None = 100_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Score embeddings for biology and for batch effects.

    What is asked for decides what is measured: ``net`` with ``gene_key`` gives the relationship metrics, ``y_key`` a
    probe of the perturbation, ``e_key`` a probe of the environment and its mixing.

    Parameters
    ----------
    adata
        Embedded cells.
    embeddings
        Keys of ``obsm``; or names of representations with their key, or with several keys, such as those of several
        training seeds.
    y_key, e_key, gene_key, guide_key
        Columns of ``obs``.
    group_key
        What the probe of the perturbation holds out as a whole: a column of ``obs``, several for their cross, or `None`
        to split cells one by one. A probe that saw other cells of a well reads the well, and where a well holds one
        gene, it so knows the gene from an embedding without any biology. By default, ``"auto"``, environments are held
        out where most hold one perturbation, guides where these belong to one, and otherwise nothing; see
        :func:`label_probe`.
    control
        Value of ``gene_key`` for unperturbed cells, or several, or `None`: see :func:`aggregate`.
    net
        Frame with ``source`` and ``target``.
    n_pcs
        Reduce wider embeddings (CellProfiler features) to so many principal components; the paper uses 64.
    kinds
        Probes of the environment, of those of :func:`label_probe`. An embedding that a linear one reads nothing from
        may still tell environments by their spread, which ``"quadratic"`` reads. ``"neighbours"`` takes far longer
        where cells are many, and mixing asks nearly the same.
    n_neighbors
        Of the mixing metrics.
    max_cells
        Probes and mixing use a random subset of this size; `None` for all cells.
    seed
        Seed of probes, subsets and components.

    Returns
    -------
    Tidy frame ``metric, representation, key, value``, one row a metric and ``obsm`` key. Scores of the linear probe of
    the environment are ``e_probe_f1`` and so on, those of another ``e_probe_quadratic_f1`` and so on.

    Raises
    ------
    ValueError
        If nothing is asked for, or see the metrics.
    KeyError
        If a key is missing.

    Warns
    -----
    UserWarning
        If perturbations and environments nest so that the probe of the perturbation may read the environment.

    Notes
    -----
    Nothing here knows which cells an embedding was trained on: score those that it was not.

    Examples
    --------
    >>> adata.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(adata, n_components=16)
    >>> embeddings = {"SCBD": "X_scbd_c", "pixels": "X_pixel_pca"}
    >>> frame = scbd.metrics.benchmark(adata, embeddings, y_key="gene", e_key="well", n_neighbors=30)
    >>> frame.columns.to_list()
    ['metric', 'representation', 'key', 'value']
    """
    if net is None and y_key is None and e_key is None:
        msg = "Nothing to measure: give e_key, y_key, or net with gene_key."
        raise ValueError(msg)
    if net is not None and gene_key is None:
        msg = "net needs gene_key, the column of obs with the perturbed gene."
        raise ValueError(msg)
    check_kinds(*kinds)
    compared = named_embeddings(adata, embeddings)
    groups = None if y_key is None else _probe_groups(adata, y_key, e_key, guide_key, group_key)
    rows = []
    for name, key, values in compared:
        table = _reduced(adata, key, values, n_pcs, seed)
        scores: dict[str, float] = {}
        if net is not None and gene_key is not None:
            profiles = aggregate(table, key, gene_key=gene_key, guide_key=guide_key, control=control)
            scores |= _relationships(Relations(profiles, net))
        if y_key is not None:
            probe = label_probe(table.obsm[key], adata.obs[y_key], groups=groups, max_cells=max_cells, seed=seed)
            scores |= {f"y_probe_{metric}": value for metric, value in probe.items()}
        if e_key is not None:
            for kind in kinds:
                probe = batch_probe(table, key, e_key, kind=kind, max_cells=max_cells, seed=seed)
                name_of = "e_probe" if kind == "linear" else f"e_probe_{kind}"
                scores |= {f"{name_of}_{metric}": value for metric, value in probe.items()}
            scores |= batch_mixing(table, key, e_key, n_neighbors=n_neighbors, max_cells=max_cells, seed=seed)
        rows += [{"metric": m, "representation": name, "key": key, "value": v} for m, v in scores.items()]
    return pd.DataFrame(rows, columns=["metric", "representation", "key", "value"])


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over the keys of each representation (training seeds).

    Parameters
    ----------
    frame
        From :func:`benchmark`; several such frames may be concatenated.

    Returns
    -------
    Frame ``metric, representation, mean, sd, n``; ``sd`` is NaN for a single key.

    Examples
    --------
    >>> frame = scbd.metrics.benchmark(adata, {"SCBD": "X_scbd_c"}, y_key="gene", e_key="well", n_neighbors=30)
    >>> scbd.metrics.summarise(frame).columns.to_list()
    ['metric', 'representation', 'mean', 'sd', 'n']
    """
    grouped = frame.groupby(["metric", "representation"], sort=False)["value"]
    return grouped.agg(mean="mean", sd="std", n="size").reset_index()


def styled(frame: pd.DataFrame) -> Any:
    """A table for notebooks: one row a representation, ``mean ± sd``, the best of each metric in bold.

    The best silhouette, and the best fraction of neighbours of the same environment, are nearest to what chance gives.

    Parameters
    ----------
    frame
        From :func:`benchmark`.

    Returns
    -------
    :class:`pandas.io.formats.style.Styler`

    Examples
    --------
    >>> frame = scbd.metrics.benchmark(adata, {"SCBD": "X_scbd_c"}, y_key="gene", e_key="well", n_neighbors=30)
    >>> table = scbd.metrics.styled(frame)  # the last line of a notebook's cell shows it
    """
    summary = summarise(frame)
    order = list(dict.fromkeys(summary["representation"]))
    mean = summary.pivot(index="representation", columns="metric", values="mean")
    mean = mean.loc[order, list(dict.fromkeys(summary["metric"]))]
    sd = summary.pivot(index="representation", columns="metric", values="sd").reindex_like(mean)
    text = mean.map("{:.3f}".format) + sd.map(lambda value: "" if np.isnan(value) else f" ± {value:.3f}")

    def bold(column: pd.Series) -> list[str]:
        badness = _badness(mean, str(column.name))
        return ["font-weight: bold" if value == badness.min() else "" for value in badness]

    return text.style.apply(bold)


def _badness(mean: pd.DataFrame, metric: str) -> pd.Series:
    """Lowest for the representation that is best by a metric; NaN where no value is better than another."""
    if metric in NEAREST:
        return (mean[metric] - mean.get(NEAREST[metric], 0.0)).abs()
    if metric not in HIGHER_IS_BETTER:
        return mean[metric] * np.nan
    return -mean[metric] if HIGHER_IS_BETTER[metric] else mean[metric]


def _relationships(relations: Relations) -> dict[str, float]:
    return {
        "relationship_area": relationship_area(relationship_curve(relations)),
        "relationship_recall": relationship_recall(relations),
        "relationship_average_precision": relationship_average_precision(relations),
    }


def _probe_groups(
    adata: AnnData,
    y_key: str,
    e_key: str | Sequence[str] | None,
    guide_key: str | None,
    group_key: str | Sequence[str] | None,
) -> np.ndarray | None:
    """What the probe of y holds out, ``(N,)``."""
    if group_key != "auto":
        return None if group_key is None else label_names(adata, group_key)
    e, guide = (None if key is None else label_names(adata, key) for key in (e_key, guide_key))
    groups, wrong = groups_of_design(label_names(adata, y_key), e, guide)
    if wrong is not None:
        msg = (
            f"Between y_key={y_key!r} and e_key={e_key!r}, {wrong}: an embedding that holds the environment alone "
            "tells the perturbation, too. y_probe_f1 and its like do not measure biology alone here."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    return groups


def _reduced(adata: AnnData, key: str, embedding: Any, n_pcs: int | None, seed: int) -> AnnData:
    """A table with the labels and one embedding, of at most ``n_pcs`` components."""
    from anndata import AnnData

    if n_pcs is not None and embedding.shape[1] > n_pcs:
        from sklearn.decomposition import PCA
        from sklearn.preprocessing import StandardScaler

        scaled = StandardScaler().fit_transform(np.asarray(embedding))
        embedding = PCA(n_pcs, random_state=seed).fit_transform(scaled).astype(np.float32)
    return AnnData(obs=adata.obs, obsm={key: embedding})
