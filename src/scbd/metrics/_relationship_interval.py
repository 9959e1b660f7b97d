"""How sure a score of known relations is, and how sure the difference of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from scbd._checks import check_count
from scbd.metrics._relations import Relations, Universe, relations_of
from scbd.metrics._relationships import check_tail
from scbd.metrics._resampling import Resampled, Score, blocks_of, interval

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

    from scbd.metrics._known_pairs import NetKind


class RelationshipDifference(NamedTuple):
    """How much higher a score is for one embedding than for another: see :func:`relationship_difference`.

    Examples
    --------
    >>> found = scbd.metrics.RelationshipDifference(difference=0.04, low=0.01, high=0.07)
    >>> found.low > 0  # the first is better
    True
    """

    difference: float
    """Score of the first minus that of the other."""
    low: float
    """Lower end of the confidence interval."""
    high: float
    """Upper end."""


def relationship_interval(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    score: Score = "average_precision",
    tail: float = 0.05,
    level: float = 0.95,
    n_bootstrap: int = 200,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Confidence interval of a score by bootstrap over complexes: what other complexes would have given.

    Genes of one complex are no independent evidence, so that whole complexes are drawn with replacement, never single
    genes. Complexes that share genes are drawn as one; of pairs, a gene and its partners are. The quantiles are those
    of Student's t for as many complexes as hold the relations: where a few large ones hold most, the interval is wide,
    as it should be. Of 400 simulated maps each, intervals of 95 % held the true value in 94.5 % (average precision, 20
    complexes of 12 genes), 95.8 % (60 of 4), 96.0 % (recall, 60 of 4) and 93.0 % (area, 40 of 4).

    One group of 221 genes holds most relations of CORUM among the genes of Funk et al., as if there were fewer than two
    complexes. Intervals are very wide then: 0.05 to 0.31 for an average precision of 0.197. Without the complexes of
    more than 30 genes, ``Relations(profiles, net, max_set_size=30)``, it is as if there were ten: 0.06 to 0.17 for
    0.105.

    Parameters
    ----------
    profiles, net, net_kind, gene_key, universe
        See :func:`~scbd.metrics.relationship_curve`.
    score
        ``"area"``, ``"recall"`` (with ``tail``) or ``"average_precision"``.
    tail
        See :func:`~scbd.metrics.relationship_recall`.
    level
        Coverage.
    n_bootstrap
        Number of resamples.
    seed
        Seed of the resamples.

    Returns
    -------
    Lower and upper end.

    Raises
    ------
    ValueError
        If the score is not known, all relations are of one complex, or see :func:`~scbd.metrics.relationship_curve`.

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
    relations = relations_of(profiles, net, net_kind, gene_key, universe)
    (values,), n_effective = resampled_scores([relations], score, tail, n_bootstrap, seed)
    return interval(values[1:], level, n_effective)


def relationship_difference(
    profiles: Relations,
    other: Relations,
    *,
    score: Score = "average_precision",
    tail: float = 0.05,
    level: float = 0.95,
    n_bootstrap: int = 200,
    seed: int = 0,
) -> RelationshipDifference:
    """How much higher a score is for one embedding than for another, over the same draws of complexes.

    Complexes that are easy are easy for most embeddings. The difference is therefore surer than the scores: it may be
    clear where the intervals of the two overlap.

    Of 400 to 1,200 simulated pairs of maps for each design of :func:`relationship_interval`, intervals of 95 % held the
    true difference in 94.1 to 96.3 % where complexes differ in strength between the two, in 94.5 to 95.3 % where the
    other map is the first with noise, and in 95.0 to 98.5 % where both are the same but for noise (standard errors 0.6
    to 1.2 %).

    Parameters
    ----------
    profiles, other
        Of the same genes in the same order, with the same network.
    score, tail, level, n_bootstrap, seed
        See :func:`relationship_interval`.

    Returns
    -------
    :class:`RelationshipDifference`: ``difference`` (score of the first minus that of the other), ``low``, ``high``.

    Raises
    ------
    TypeError
        If one of the two is no :class:`Relations`.
    ValueError
        If genes or relations of the two differ, or see :func:`relationship_interval`.

    Examples
    --------
    >>> keys = {"gene_key": "gene", "guide_key": "sgRNA"}
    >>> z_c, z_s = (scbd.metrics.aggregate(adata, f"X_scbd_{block}", **keys) for block in "cs")
    >>> one, two = scbd.metrics.Relations(z_c, net), scbd.metrics.Relations(z_s, net)
    >>> found = scbd.metrics.relationship_difference(one, two, n_bootstrap=20)
    >>> found.low <= found.high
    True
    """
    for given in (profiles, other):
        if not isinstance(given, Relations):
            msg = f"Differences are of two Relations, not of {type(given).__name__}: make Relations(profiles, net)."
            raise TypeError(msg)
    if list(profiles.genes) != list(other.genes) or (profiles.known != other.known).nnz:
        msg = (
            f"The genes or relations of the two differ ({len(profiles.genes):,} and {len(other.genes):,} genes): make "
            "both Relations from profiles of the same genes in the same order, with one net and one universe."
        )
        raise ValueError(msg)
    (one, two), n_effective = resampled_scores([profiles, other], score, tail, n_bootstrap, seed)
    low, high = interval(one[1:] - two[1:], level, n_effective)
    return RelationshipDifference(float(one[0] - two[0]), low, high)


def resampled_scores(
    several: list[Relations], score: Score, tail: float, n_bootstrap: int, seed: int
) -> tuple[list[np.ndarray], float]:
    """The score of each, first as it is, then of the same resamples; and among how many complexes relations spread."""
    if score not in get_args(Score):
        msg = f"score={score!r} is not known: use one of {', '.join(get_args(Score))}."
        raise ValueError(msg)
    check_tail(tail)
    check_count("n_bootstrap", n_bootstrap)
    blocks = blocks_of(several[0].known)
    n = int(blocks.max()) + 1
    rng = np.random.default_rng(seed)
    drawn = [np.bincount(rng.integers(n, size=n), minlength=n).astype(float) for _ in range(n_bootstrap)]
    values = []
    for relations in several:
        pairs = Resampled(relations, blocks)
        n_effective = pairs.n_effective()
        if n_effective <= 1:
            msg = "All relations are of one complex: how much others would differ, it cannot tell. Give a larger net."
            raise ValueError(msg)
        itself = pairs.score(np.ones(n), score, tail)
        values.append(np.array([itself, *(pairs.score(row, score, tail, n / (n - 1)) for row in drawn)]))
    return values, n_effective
