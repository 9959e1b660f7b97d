"""Scores of gene profiles against networks of known relations: genes that work together should have similar profiles.

The similarity of two profiles is their cosine. Most scores of this module predict a relation for high *and* for low
cosines, because genes of one complex may have opposite effects. Only the average precision uses high cosines alone.

A network is a frame with the columns ``source`` and ``target``. It holds one of two kinds of relations:

- sets: sources are names of complexes or pathways, and two targets are related if they share a source
- pairs: sources are genes, and each source is related to its target

References
----------
Makino et al. (2025), appendix, CORUM prediction; Celik et al. (2024), Building, benchmarking, and exploring
perturbative maps of transcriptional and morphological data.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._shared.checks import check_choice, check_count, check_unmasked, join_first
from scbd._shared.labels import label_text
from scbd.metrics._average_precision import scale_to_unit_length, score_queries
from scbd.metrics._networks import NetKind, read_network, related_genes
from scbd.metrics._resampling import (
    Resampled,
    ScoreName,
    bootstrap_interval,
    divide_into_blocks,
    draw_units,
    is_in_a_tail,
    weight_outside,
    weighted_percentiles,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
Universe = Literal["annotated", "profiles"]

# Percentiles of the cosine that are thresholds of the precision-recall curve, from 80 to 99 as in the script published
# with the paper. The text of the paper goes up to percentile 100, at which only the least similar pair of genes is
# predicted to be related.
PERCENTILES = tuple(range(80, 100))
# maximum number of cosines that are computed at once, as a block of the matrix of cosines between all genes
_MAX_COSINES_IN_MEMORY = 1 << 24


class Relations:
    """Cosines of all pairs of genes, and the pairs that are known to be related.

    Parameters
    ----------
    profiles
        Profiles, one row per gene, see :func:`scbd.metrics.aggregate`. Their values are used without standardising or
        centring them.
    net
        Frame with columns ``source`` and ``target``.
    net_kind
        Kind of the network, which determines the genes that are related:

        - ``"sets"``: sources are names of sets, and targets that share a source are related.
        - ``"pairs"``: sources are genes, which are related to their targets.
        - ``"auto"``: the kind in ``net.attrs["kind"]``, which the loaders of :mod:`scbd.datasets` set. Without this
          entry, the kind is inferred: a source counts as a gene if it is also a target or has a profile, and the
          network holds pairs if at least 95 % of its sources are genes, and sets if at most 5 % are. Otherwise an error
          is raised.
    gene_key
        Column of ``obs`` with the gene symbols; ``obs_names`` by default.
    universe
        Genes whose pairs are scored. ``"annotated"``, the default: genes that are related to another profile, as in the
        paper. ``"profiles"``: all genes, as in published benchmarks of maps. Scores of annotated genes cannot be
        compared with scores of all genes.
    max_set_size
        Maximum number of genes with a profile in a set; larger sets are removed before pairs are formed. The number of
        pairs grows with the square of the size of a set, so that a few large sets may hold most of the pairs.

    Attributes
    ----------
    genes
        Symbols of the genes whose pairs are scored, ``(G,)``.
    net_kind
        Kind of the network, ``"pairs"`` or ``"sets"``.
    max_set_size
        Maximum number of genes with a profile in a set, or `None`.
    profiled
        Gene symbols of all profiles, ``(N,)``, including genes that are not in ``genes``.
    unit
        Profiles of ``genes``, scaled to unit length, ``(G, D)``; a profile of zeros stays unchanged.
    known
        Matrix of related genes, sparse boolean ``(G, G)``, symmetric, without diagonal.

    Raises
    ------
    KeyError
        If ``net`` lacks a column, or ``obs`` lacks ``gene_key``.
    ValueError
        If the kind of ``net`` is not clear, no two genes are related, genes are repeated, profiles are not finite,
        ``max_set_size`` is given for a network of pairs, or all sets are larger than ``max_set_size``.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> scbd.metrics.Relations(profiles, net, max_set_size=30)
    Relations of 4 genes: 2 of 6 pairs are known (net of sets of up to 30 genes)
    """

    def __init__(
        self,
        profiles: AnnData,
        net: pd.DataFrame,
        *,
        net_kind: NetKind = "auto",
        gene_key: str | None = None,
        universe: Universe = "annotated",
        max_set_size: int | None = None,
    ) -> None:
        check_choice("universe", universe, Universe)
        genes, x = _profiles(profiles, gene_key)
        rows, self.net_kind = read_network(net, genes, net_kind, max_set_size)
        self.profiled, self.max_set_size = genes, max_set_size
        known = related_genes(genes, rows, self.net_kind)
        if universe == "annotated":
            keep = np.flatnonzero(np.diff(known.indptr))
            genes, x, known = genes[keep], x[keep], known[keep][:, keep]
        self.genes, self.known = genes, known
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        self.unit = x / np.where(norm > 0, norm, 1)

    def __repr__(self) -> str:
        """Return a short text with the numbers of genes, of related pairs and of all pairs."""
        n, n_known = len(self.genes), self.known.nnz // 2
        net = self.net_kind if self.max_set_size is None else f"sets of up to {self.max_set_size} genes"
        return f"Relations of {n:,} genes: {n_known:,} of {n * (n - 1) // 2:,} pairs are known (net of {net})"

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosine of each pair of genes, and a mask of the related pairs, both ``(G (G - 1) / 2,)``.

        Each pair occurs once. Pairs are in the order of the upper triangle of the matrix of genes, row by row.
        """
        n = len(self.genes)
        cosine = np.empty(n * (n - 1) // 2, dtype=self.unit.dtype)
        size = max(1, _MAX_COSINES_IN_MEMORY // n)
        end = 0
        for start in range(0, n, size):
            block = self.unit[start : start + size] @ self.unit[start:].T
            for i, row in enumerate(block, start=1):
                begin, end = end, end + len(row) - i
                cosine[begin:end] = row[i:]
        one, two = (side.astype(np.int64) for side in sparse.triu(self.known, k=1).nonzero())
        related = np.zeros(len(cosine), dtype=bool)
        related[one * n - one * (one + 1) // 2 + two - one - 1] = True
        return cosine, related

    @cached_property
    def ranked(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosines of all pairs of genes, and cosines of the related pairs, each in ascending order.

        All scores of gene relations are computed from both arrays of cosines.
        """
        cosine, related = self.pairs()
        known = np.sort(cosine[related])
        cosine.sort()
        return cosine, known


def _profiles(profiles: AnnData, gene_key: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the gene symbols and the values of profiles, after checking that symbols are unique and values finite."""
    if gene_key is not None and gene_key not in profiles.obs:
        msg = f"obs of the profiles has no {gene_key!r} (its keys: {', '.join(profiles.obs.columns) or 'none'})."
        raise KeyError(msg)
    genes = profiles.obs_names if gene_key is None else profiles.obs[gene_key]
    genes = np.array([label_text(gene) for gene in genes], dtype=str)
    names, counts = np.unique(genes, return_counts=True)
    if (counts > 1).any():
        msg = (
            f"{(counts > 1).sum()} genes have several profiles ({join_first(names[counts > 1])}): average them, for "
            "example with scbd.metrics.aggregate."
        )
        raise ValueError(msg)
    check_unmasked("X of the profiles", profiles.X)
    values: Any = profiles.X
    x = values.toarray() if hasattr(values, "toarray") else np.asarray(values)
    bad = ~np.isfinite(x).all(axis=1)
    if bad.any():
        msg = f"{bad.sum()} profiles hold NaN or infinity ({join_first(genes[bad])}): drop them or repair them."
        raise ValueError(msg)
    return genes, x.astype(np.promote_types(x.dtype, np.float32))


def get_relations(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
    max_set_size: int | None = None,
) -> Relations:
    """Return the given :class:`Relations` unchanged, or build :class:`Relations` from profiles and a network.

    Raise a ``ValueError`` if :class:`Relations` are given together with an argument that they already contain.
    """
    if isinstance(profiles, Relations):
        asked = {"net": net is not None, "net_kind": net_kind != "auto", "gene_key": gene_key, "universe": universe}
        asked |= {"max_set_size": max_set_size is not None}
        if said := [name for name, given in asked.items() if given]:
            msg = f"{' and '.join(said)} cannot be given together with Relations, which have their own: drop it."
            raise ValueError(msg)
        return profiles
    if net is None:
        msg = "net is missing: give a frame with source and target, for example scbd.datasets.corum()."
        raise ValueError(msg)
    kept: Universe = universe or "annotated"
    return Relations(profiles, net, net_kind=net_kind, gene_key=gene_key, universe=kept, max_set_size=max_set_size)


def relationship_curve(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    diagonal: bool = True,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
) -> pd.DataFrame:
    """Compute precision and recall of known gene relations at several thresholds of the cosine.

    The protocol is that of Makino et al. (2025). High and low cosines both predict a relation. At percentile ``i``, a
    pair is predicted to be related if its cosine is at least the ``i``-th percentile of all cosines, or at most the
    ``100 - i``-th percentile.

    Parameters
    ----------
    profiles
        Profiles, one row per gene; or :class:`Relations`, which can be computed once for several scores.
    net
        Frame with columns ``source`` and ``target``.
    percentiles
        Thresholds of the cosine, as percentiles; 80 to 99 by default, as in the script published with the paper.
    diagonal
        If `True`, percentiles are those of the full square matrix of cosines, including the cosine of 1 of each gene
        with itself, as in the published script. If `False`, percentiles are those of pairs of different genes.
    net_kind, gene_key, universe
        See :class:`Relations`. They cannot be combined with :class:`Relations`, which already contain them.

    Returns
    -------
    Frame with the columns ``percentile``, ``precision`` and ``recall``. For an embedding without information, the
    expected precision is the prevalence of relations, and the expected recall is ``2 (100 - percentile) / 100``.

    Raises
    ------
    ValueError
        If a percentile is not between 0 and 100, if ``net`` or another argument is combined with :class:`Relations`,
        which already contain it, or if :class:`Relations` cannot be built.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> curve = scbd.metrics.relationship_curve(profiles, net)
    >>> curve.columns.to_list()
    ['percentile', 'precision', 'recall']
    """
    relations = get_relations(profiles, net, net_kind, gene_key, universe)
    ordered, known = relations.ranked
    grid = np.asarray(percentiles, dtype=float)
    limits = _cosine_limits(relations, grid, diagonal)
    n_predicted, n_found = weight_outside(ordered, *limits), weight_outside(known, *limits)
    with np.errstate(invalid="ignore"):
        precision = np.where(n_predicted > 0, n_found / n_predicted, np.nan)
    return pd.DataFrame({"percentile": grid, "precision": precision, "recall": n_found / len(known)})


def _cosine_limits(relations: Relations, grid: np.ndarray, diagonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return a lower and an upper limit of the cosine for each percentile in ``grid``.

    Pairs of genes are predicted to be related if their cosine is at most the lower limit, or at least the upper limit.
    """
    if not ((grid >= 0) & (grid <= 100)).all():
        msg = f"percentiles={grid.tolist()} must lie between 0 and 100."
        raise ValueError(msg)
    n_genes = len(relations.genes) if diagonal else None
    ordered = relations.ranked[0]
    return weighted_percentiles(ordered, 100 - grid, n_genes), weighted_percentiles(ordered, grid, n_genes)


def relationship_area(curve: pd.DataFrame) -> float:
    """Compute the area under a precision-recall curve of known gene relations by the trapezoid rule.

    The area covers only the range of recalls of the curve. With the default percentiles, the curve of an embedding
    without information covers recalls from 0.02 to 0.40, and its area is 0.38 times the prevalence of relations.

    Parameters
    ----------
    curve
        Result of :func:`relationship_curve`.

    Raises
    ------
    ValueError
        If the curve has fewer than two points.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> curve = scbd.metrics.relationship_curve(profiles, net)
    >>> 0 <= scbd.metrics.relationship_area(curve) <= 1
    True
    """
    # Points of the curve are sorted by descending percentile, so that recall increases. Sorting by recall would not
    # define the order of points with equal recall.
    curve = curve.dropna().sort_values("percentile", ascending=False)
    if len(curve) < 2:
        msg = f"An area needs at least two points of a curve, there are {len(curve)}: give more percentiles."
        raise ValueError(msg)
    return float(np.trapezoid(curve["precision"], curve["recall"]))


def relationship_recall(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    tail: float = 0.05,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
) -> float:
    """Compute the fraction of known gene relations whose cosine is in the lower or the upper tail of all cosines.

    Cosines are those of all pairs of different genes. Pairs with equal cosines count as being in a tail only if the
    tail is large enough to hold all of them. Published benchmarks of maps report this score over all profiles, which is
    ``universe="profiles"`` here.

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`relationship_curve`.
    tail
        Size of each tail, as a fraction of all pairs. An embedding without information has an expected recall of
        ``2 tail``.

    Raises
    ------
    ValueError
        If ``tail`` is not between 0 and 0.5, or for the reasons that :func:`relationship_curve` lists.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> 0 <= scbd.metrics.relationship_recall(profiles, net, tail=0.05) <= 1
    True
    """
    _check_tail(tail)
    ordered, known = get_relations(profiles, net, net_kind, gene_key, universe).ranked
    first = ordered.searchsorted(known, side="left")
    last = ordered.searchsorted(known, side="right") - 1
    return float(np.mean(is_in_a_tail(first, last, len(ordered), tail)))


def relationship_average_precision(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
) -> float:
    """Compute the average precision with which known gene relations rank first among all pairs, sorted by cosine.

    Only *high* cosines predict a relation. In contrast, :func:`relationship_curve` and :func:`relationship_recall` also
    use low cosines. For an embedding without information, the average precision is about the prevalence of relations.

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`relationship_curve`.

    Raises
    ------
    ValueError
        See :func:`relationship_curve`.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> 0 <= scbd.metrics.relationship_average_precision(profiles, net) <= 1
    True
    """
    ordered, known = get_relations(profiles, net, net_kind, gene_key, universe).ranked
    # The precision at a known relation is computed among all pairs with at least the cosine of this relation. Relations
    # with equal cosines share one threshold, as in scikit-learn.
    values = np.unique(known)
    n_at_least = len(ordered) - ordered.searchsorted(values, side="left")
    n_known = len(known) - np.searchsorted(known, values, side="left")
    gained = n_known - np.append(n_known[1:], 0)
    return float(np.sum(gained * n_known / n_at_least) / len(known))


def expected_relationship_scores(
    relations: Relations, *, percentiles: Sequence[float] = PERCENTILES, tail: float = 0.05
) -> dict[str, float]:
    """Compute the scores of known gene relations that are expected if as many random pairs of genes were related.

    The profiles stay unchanged. The expected values are exact, without drawing random pairs. Equal cosines are handled
    as in the scores themselves, so that the scores of identical profiles are equal to their expected values.

    Parameters
    ----------
    relations
        Profiles and known relations. Only the cosines of the profiles and the number of relations are used.
    percentiles
        See :func:`relationship_curve`.
    tail
        See :func:`relationship_recall`.

    Returns
    -------
    Dictionary with ``area`` (about 0.38 times the prevalence of relations with the default percentiles, NaN if the
    curve has fewer than two points), ``recall`` (about ``2 tail``) and ``average_precision`` (the prevalence, or more
    if there are few pairs).
    """
    _check_tail(tail)
    ordered, known = relations.ranked
    n = len(ordered)
    # probability that a random pair is a known relation, given that another pair is a known relation
    other = (len(known) - 1) / max(1, n - 1)
    # Pairs with equal cosines form a group. Each group has the index of its first pair, in ascending order of cosines,
    # and a number of pairs.
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    size = np.diff(np.append(first, n))
    in_a_tail = is_in_a_tail(first, first + size - 1, n, tail)
    # Expected contribution of a known relation to the precision at this relation. The precision is computed among all
    # pairs with at least the cosine of the relation, which include the relation itself.
    itself = float(np.sum(size / (n - first)) / n)
    grid = np.sort(np.asarray(percentiles, dtype=float))[::-1]
    n_predicted = weight_outside(ordered, *_cosine_limits(relations, grid, diagonal=True))
    return {
        "area": _expected_area(n_predicted[n_predicted > 0], n, other),
        "recall": float(size[in_a_tail].sum() / n),
        "average_precision": itself + other * (1 - itself),
    }


def _expected_area(n_predicted: np.ndarray, n: int, other: float) -> float:
    """Compute the expected area under the precision-recall curve of random relations.

    ``n_predicted`` is the number of pairs that are predicted to be related at each point of the curve, in ascending
    order. ``n`` is the number of all pairs, and ``other`` is the probability that a random pair is a known relation,
    given that another pair is a known relation.
    """
    if len(n_predicted) < 2:
        return float("nan")
    # expected number of known relations among the predicted pairs, given that one predicted pair is a known relation
    found = 1 + (n_predicted - 1) * other
    before, after = found[:-1], found[1:]
    return float(np.sum(2 * after - before - n_predicted[:-1] / n_predicted[1:] * after) / (2 * n))


def relationship_interval(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    other: AnnData | Relations | None = None,
    score: ScoreName = "average_precision",
    tail: float = 0.05,
    level: float = 0.95,
    n_bootstrap: int = 200,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute a confidence interval of a score of known gene relations, by a bootstrap over complexes.

    Genes of one complex are not independent, so that the bootstrap draws whole complexes with replacement, and not
    single genes. Complexes that share genes are drawn together. In a network of pairs, a gene is drawn together with
    its partners.

    The ends of the interval are quantiles of the bootstrap samples, widened by Student's t for the effective number of
    complexes. If a few large complexes hold most relations, the effective number is small, and the interval is wide.
    The parameter ``max_set_size`` of :class:`Relations` excludes such complexes.

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`relationship_curve`.
    other
        Profiles of another embedding, with the same genes in the same order. If it is given, the interval is that of
        the difference between the score of ``profiles`` and the score of ``other``, over the same bootstrap samples.
        Complexes that are easy for one embedding are often easy for another, so that a difference may be significant
        although the intervals of both embeddings overlap.
    score
        Score of the interval: ``"area"`` (:func:`relationship_area`), ``"recall"`` (:func:`relationship_recall` with
        ``tail``) or ``"average_precision"`` (:func:`relationship_average_precision`).
    tail
        See :func:`relationship_recall`.
    level
        Coverage of the interval.
    n_bootstrap
        Number of bootstrap samples.
    seed
        Seed of the bootstrap samples.

    Returns
    -------
    Lower and upper end of the interval.

    Raises
    ------
    ValueError
        If the score is unknown, all relations lie in one complex, genes or relations of ``profiles`` and ``other``
        differ, or for the reasons that :func:`relationship_curve` lists.

    References
    ----------
    Hesterberg (2015), What teachers should know about the bootstrap.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> low, high = scbd.metrics.relationship_interval(profiles, net, n_bootstrap=20)
    >>> low <= high
    True
    """
    several = [get_relations(one, net, net_kind, gene_key, universe) for one in (profiles, other) if one is not None]
    one, two = several[0], several[-1]
    differing: Any = one.known != two.known if list(one.genes) == list(two.genes) else None
    if differing is None or differing.nnz:
        msg = (
            f"The genes or relations of profiles and other differ ({len(one.genes):,} and {len(two.genes):,} genes): "
            "give profiles of the same genes in the same order, with one net and one universe."
        )
        raise ValueError(msg)
    values, n_effective = resampled_scores(several, score, tail, n_bootstrap, seed)
    return bootstrap_interval((values[0] if other is None else values[0] - values[1])[1:], level, n_effective)


def resampled_scores(
    several: list[Relations], score: ScoreName, tail: float, n_bootstrap: int, seed: int
) -> tuple[list[np.ndarray], float]:
    """Compute one score of known gene relations for several embeddings, over the same bootstrap samples of complexes.

    Returns
    -------
    For each embedding, an array ``(1 + n_bootstrap,)`` with the score of the data, followed by the scores of the
    bootstrap samples; and the effective number of complexes.
    """
    check_choice("score", score, ScoreName)
    _check_tail(tail)
    check_count("n_bootstrap", n_bootstrap)
    blocks = divide_into_blocks(several[0].known)
    n = int(blocks.max()) + 1
    drawn = list(draw_units(n, n_bootstrap, seed))
    values = []
    for relations in several:
        pairs = Resampled(*relations.pairs(), blocks, tail=tail, percentiles=PERCENTILES)
        n_effective = pairs.n_effective()
        if n_effective <= 1:
            msg = "All relations are of one complex: how much others would differ, it cannot tell. Give a larger net."
            raise ValueError(msg)
        values.append(
            np.array([pairs.score(np.ones(n), score), *(pairs.score(row, score, n / (n - 1)) for row in drawn)])
        )
    return values, n_effective


def partner_average_precision(relations: Relations) -> pd.DataFrame:
    """Compute the average precision with which each gene retrieves its known partners among all other genes.

    Partners of a gene are the genes that are known to be related to it. The result is a frame with one row per gene.
    Genes without partners, and genes that are partners of all other genes, are excluded. The columns are
    ``average_precision`` and ``chance`` (average precision of a random order). All genes have the same weight, whereas
    scores over pairs of genes are dominated by the largest complexes.
    """
    everyone, known = np.arange(len(relations.genes)), relations.known
    scores = score_queries(
        scale_to_unit_length(relations.unit),
        everyone,
        everyone,
        positives=lambda row: known[[row]].indices,
        negatives=lambda rows: ~(known[rows].toarray() | (rows[:, None] == everyone)),
    )
    scores.index = pd.Index(relations.genes[scores.index], name="gene")
    return scores[["average_precision", "chance"]]


def _check_tail(tail: float) -> None:
    """Raise ``ValueError`` unless ``tail``, the fraction of pairs in each tail of the cosines, is between 0 and 0.5."""
    if not 0 < tail < 0.5:
        msg = f"tail={tail} must lie between 0 and 0.5: the fraction of pairs in each tail."
        raise ValueError(msg)
