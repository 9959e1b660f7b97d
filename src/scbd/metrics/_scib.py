"""The scores of single-cell integration, as the package scib-metrics has them."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd.metrics._mixing import apart, nearest_neighbors
from scbd.metrics._table import label_names, representation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from anndata import AnnData
    from numpy.typing import ArrayLike

ScibScore = Literal[
    "clisi", "graph_connectivity", "silhouette", "kmeans", "leiden", "ilisi", "kbet", "bras", "pcr_comparison"
]
# of perturbations, which are permuted over all cells; the others are of environments, within perturbations
_OF_Y = ("clisi", "graph_connectivity", "silhouette", "kmeans", "leiden")
# neighbours of a cell, itself among them, where the package's own pipeline has other numbers than for LISI
_FEW, _KBET = 15, 50


def scib_scores(
    adata: AnnData,
    embedding_key: str,
    *,
    y_key: str,
    e_key: str | Sequence[str],
    features: str | ArrayLike | None = None,
    scores: Sequence[ScibScore] | None = None,
    n_neighbors: int = 90,
    max_cells: int | None = 10_000,
    seed: int = 0,
) -> dict[str, float]:
    """Scores of single-cell integration, computed by scib-metrics, with what permuted labels give beside each.

    They were made for a few cell types of many cells each. In a screen, where perturbations are hundreds and each has
    few cells, their usual reading misleads, and that of ``…_expected`` does not. Of *noise* with 100 perturbations of
    20 cells in 10 environments:

    - ``clisi`` is 0.89: a neighbourhood of 90 has cells of most perturbations whatever the embedding is, and the scale
      counts those that are missing.
    - ``kmeans_nmi`` is 0.37, as so many clusters always agree in part. ``kmeans_ari`` is 0: read that one.
    - ``kbet`` is 0, though the environments are mixed perfectly: 20 cells that are spread out are not connected, which
      it counts as rejected. Where cells are connected and few, it has too little power to reject.
    - ``graph_connectivity`` is 0.07, and 1 for perturbations of a single cell: 15 neighbours hold no other one.
    - ``silhouette`` is 0.45 and not 0, being scaled; ``ilisi`` is 0.56 and not 1, see :func:`batch_mixing`.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key in ``obsm``.
    y_key, e_key
        Columns of ``obs`` with the perturbation and with the environment, the latter one or several for their cross.
    features
        What the embedding was made from, such as CellProfiler features: a key of ``obsm``, or an array ``(N, F)``. The
        comparison by principal components needs it.
    scores
        Which to compute: ``"clisi"``, ``"graph_connectivity"``, ``"silhouette"``, ``"kmeans"``, ``"leiden"`` (are
        perturbations apart?), ``"ilisi"``, ``"kbet"``, ``"bras"``, ``"pcr_comparison"`` (are environments mixed?). All
        by default. ``"kbet"`` is compiled anew for each number of cells that a perturbation has: it may take minutes.
    n_neighbors
        Of cLISI and iLISI, a cell itself among them; 50 of kBET, 15 of graph connectivity and Leiden, or fewer.
    max_cells
        Use a random subset of this size; `None` for all cells.
    seed
        Of the subset, the approximate neighbours of more than 100,000 cells, Leiden, and permuted labels. K-means has a
        seed of its own.

    Returns
    -------
    A score by name, ``kmeans_nmi``, ``kmeans_ari``, ``leiden_nmi`` and ``leiden_ari`` among them, each with
    ``…_expected``, its value for perturbations that are permuted, or for environments that are permuted within
    perturbations. High is good. ``pcr_comparison`` has none: 0 if environments explain as much variance as in the
    features, or more, and 1 if they explain nothing. If half of the cells or more lie at one place, what is of
    environments is NaN; and so is kBET where no perturbation has 10 cells.

    Raises
    ------
    ImportError
        If scib-metrics is not installed.
    KeyError
        If a key is missing.
    ValueError
        If a score is not known or lacks features, there are fewer than two perturbations, no perturbation is in two
        environments, there are fewer cells than neighbours, or the embedding is not finite.

    Warns
    -----
    UserWarning
        If half of the cells or more lie at one place.

    References
    ----------
    Luecken et al. (2022), Benchmarking atlas-level data integration in single-cell genomics. Rautenstrauch and Ohler
    (2025), Shortcomings of silhouette in single-cell integration benchmarking (BRAS).

    Examples
    --------
    >>> how = {"y_key": "gene", "e_key": "well", "features": "X_cellprofiler"}
    >>> scbd.metrics.scib_scores(adata, "X_scbd_c", **how)  # doctest: +SKIP
    """
    chosen = _chosen(scores, features is not None)
    scib = _scib_metrics()
    check_count("n_neighbors", n_neighbors, least=2)
    n, rng = adata.n_obs, np.random.default_rng(seed)
    rows = np.arange(n) if max_cells is None or n <= max_cells else np.sort(rng.choice(n, max_cells, replace=False))
    y, e = (label_names(adata, key)[rows].astype(str) for key in (y_key, e_key))
    _check(y, e, n_neighbors, y_key, e_key)
    x = representation(adata, embedding_key)[rows]
    before = None if features is None else representation(adata, features)[rows]
    moved, is_point = apart(x, rng)
    cells = _Cells(x.astype(np.float32), before, _graphs(scib, moved, n_neighbors, seed), seed)
    of_y, of_e = rng.permutation(y), pd.Series(e).groupby(y).transform(rng.permutation).to_numpy()
    found: dict[str, float] = {}
    for name in chosen:
        measured = _named(name, SCORES[name](scib, cells, y, e))
        found |= dict.fromkeys(measured, np.nan) if is_point and name not in _OF_Y else measured
        if name != "pcr_comparison":  # a ratio of two that permuted environments bring to 0
            permuted = SCORES[name](scib, cells, of_y, e) if name in _OF_Y else SCORES[name](scib, cells, y, of_e)
            found |= {f"{key}_expected": value for key, value in _named(name, permuted).items()}
    if is_point:
        msg = (
            f"Half of the cells or more lie at one place of obsm[{embedding_key!r}]: the embedding has collapsed, and "
            "says nothing about mixing. Scores of environments are NaN."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    return found


class _Cells(NamedTuple):
    x: np.ndarray
    before: np.ndarray | None
    graphs: dict[str, Any]
    seed: int


def _kbet(scib: ModuleType, cells: _Cells, y: np.ndarray, e: np.ndarray) -> float:
    log = logging.getLogger("scib_metrics")
    level = log.level
    log.setLevel(logging.WARNING)  # it has a line for each label of fewer than ten cells
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)  # where there is no other
            return scib.kbet_per_label(cells.graphs["kbet"], e, y)
    finally:
        log.setLevel(level)


def _pcr(scib: ModuleType, cells: _Cells, y: np.ndarray, e: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PCR comparison score is negative", UserWarning)  # 0, then
        return scib.pcr_comparison(cells.before, cells.x, e, categorical=True)


SCORES: dict[str, Callable[[ModuleType, _Cells, np.ndarray, np.ndarray], float | dict[str, float]]] = {
    "clisi": lambda scib, cells, y, e: scib.clisi_knn(cells.graphs["lisi"], y),
    "graph_connectivity": lambda scib, cells, y, e: scib.graph_connectivity(cells.graphs["few"], y),
    "silhouette": lambda scib, cells, y, e: scib.silhouette_label(cells.x, y),
    "kmeans": lambda scib, cells, y, e: scib.nmi_ari_cluster_labels_kmeans(cells.x, y),
    "leiden": lambda scib, cells, y, e: scib.nmi_ari_cluster_labels_leiden(cells.graphs["few"], y, seed=cells.seed),
    "ilisi": lambda scib, cells, y, e: scib.ilisi_knn(cells.graphs["lisi"], e),
    "kbet": _kbet,
    "bras": lambda scib, cells, y, e: scib.bras(cells.x, y, e),
    "pcr_comparison": _pcr,
}


def _named(name: str, value: float | dict[str, float]) -> dict[str, float]:
    return (
        {f"{name}_{part}": float(of) for part, of in value.items()} if isinstance(value, dict) else {name: float(value)}
    )


def _chosen(scores: Sequence[ScibScore] | None, with_features: bool) -> list[str]:
    known = list(get_args(ScibScore))
    if scores is None:
        return known if with_features else [name for name in known if name != "pcr_comparison"]
    for name in scores:
        if name not in known:
            msg = f"The score {name!r} is not known: use some of {', '.join(map(repr, known))}."
            raise ValueError(msg)
    if "pcr_comparison" in scores and not with_features:
        msg = "pcr_comparison compares the embedding with what it was made from: give features."
        raise ValueError(msg)
    return list(scores)


def _check(y: np.ndarray, e: np.ndarray, n_neighbors: int, y_key: str, e_key: str | Sequence[str]) -> None:
    if len(y) <= n_neighbors:
        msg = f"n_neighbors={n_neighbors} asks for more cells than there are ({len(y)}): lower n_neighbors."
        raise ValueError(msg)
    if len(np.unique(y)) < 2:
        msg = f"Every cell has the one perturbation {str(y[0])!r}: there is nothing to tell apart."
        raise ValueError(msg)
    environments = pd.Series(e).groupby(y).agg(["nunique", "size"])
    if not ((environments["nunique"] > 1) & (environments["nunique"] < environments["size"])).any():
        msg = f"No {y_key} has several cells in one environment of {e_key!r} and some in another: nothing can be mixed."
        raise ValueError(msg)


def _graphs(scib: ModuleType, x: np.ndarray, n_neighbors: int, seed: int) -> dict[str, Any]:
    """Neighbours as the package wants them, where a cell is its own first."""
    distances, indices = nearest_neighbors(x, n_neighbors - 1, seed)
    own = np.arange(len(x))[:, None]
    whole = scib.nearest_neighbors.NeighborsResults(
        indices=np.hstack([own, indices]), distances=np.hstack([np.zeros_like(own, dtype=distances.dtype), distances])
    )
    sizes = {"lisi": n_neighbors, "kbet": min(_KBET, n_neighbors), "few": min(_FEW, n_neighbors)}
    return {name: whole.subset_neighbors(size) for name, size in sizes.items()}


def _scib_metrics() -> ModuleType:
    try:
        import scib_metrics
    except ImportError as error:
        msg = "These scores need one more package: pip install scib-metrics (which brings jax)."
        raise ImportError(msg) from error
    return scib_metrics
