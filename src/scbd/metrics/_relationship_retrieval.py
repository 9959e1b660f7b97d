"""Whether each gene finds those that it is known to be related to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd.metrics._average_precision import Null, chance, score_queries, unit_rows
from scbd.metrics._relations import Relations, Universe, relations_of
from scbd.metrics._resampling import blocks_of
from scbd.metrics._retrieval_result import Retrieval, by_label

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anndata import AnnData

    from scbd.metrics._known_pairs import NetKind


def relationship_retrieval(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None = None,
    *,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
    max_set_size: int | None = None,
    n_permutations: int = 10_000,
    seed: int = 0,
) -> Retrieval:
    """Average precision with which each gene finds those that it is known to be related to.

    Each gene ranks all others by cosine, and its known partners should come first. The mean over genes gives each the
    same weight, where :func:`relationship_average_precision` gives it to each pair: there, the genes of the largest
    complexes decide. One-tailed, similar and not opposite.

    Parameters
    ----------
    profiles, net, net_kind, gene_key
        See :func:`relationship_curve`.
    universe
        Among which others: ``"annotated"``, the default, those with a known partner; ``"profiles"``, all. Genes without
        a known partner are not scored.
    max_set_size
        See :class:`Relations`; whose relations are all of larger sets is then a gene without a known partner.
    n_permutations
        Random orders for p values, of which none is below ``1 / (n_permutations + 1)``: with more than a twentieth as
        many genes, a single one cannot be called.
    seed
        Seed of these orders.

    Returns
    -------
    :class:`Retrieval`: a table with a row a gene, its mean, and how many are called. Orders of equal cosines are
    averaged over.

    Raises
    ------
    ValueError
        If no gene has both a known partner and another gene, or see :func:`relationship_curve`.

    References
    ----------
    Kalinin et al. (2025), A versatile information retrieval framework for evaluating profile strength and similarity.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> found = scbd.metrics.relationship_retrieval(profiles, net, n_permutations=100)
    >>> found.table[["n_positives", "n_negatives"]].drop_duplicates().values.tolist()  # two complexes of two genes
    [[1.0, 2.0]]
    >>> found.scores().keys()
    dict_keys(['mean_average_precision', 'chance', 'n_called'])
    """
    check_count("n_permutations", n_permutations)
    relations = relations_of(profiles, net, net_kind, gene_key, universe, max_set_size)
    known, genes = relations.known, relations.genes
    everyone = np.arange(len(genes))

    def negatives(rows: np.ndarray) -> np.ndarray:
        return ~(known[rows].toarray() | (rows[:, None] == everyone))

    unit = unit_rows(relations.unit)
    scores = score_queries(unit, everyone, everyone, lambda row: known[[row]].indices, negatives)
    if not len(scores.rows):
        msg = "Every gene is related to every other: there is none that it should not find. Give universe='profiles'."
        raise ValueError(msg)
    table = by_label(scores, everyone, Null(n_permutations, seed))
    table.index = pd.Index(genes[table.index], name="gene")
    left_out = tuple(genes[np.setdiff1d(everyone, scores.rows)])
    return Retrieval(table, left_out, units=blocks_of(known)[scores.rows])


def scores_of_sets(relations: Relations, sets: Iterable[np.ndarray]) -> np.ndarray:
    """Average precision of each set, and that of chance, ``(S, 2)``; NaN where there is nothing else to find.

    The mean over the genes of the set, of which each should find the others before all genes that are related to none
    of the set.

    Parameters
    ----------
    relations
        Of the map.
    sets
        Rows of the genes of each set, at least two.
    """
    unit, everyone = unit_rows(relations.unit), np.arange(len(relations.genes))
    found = []
    for rows in sets:
        others = np.setdiff1d(everyone, np.append(relations.known[rows].indices, rows))
        scores = _of_set(unit, rows, others)
        found.append((scores.mean(), chance(len(rows) - 1, len(others))) if len(scores) else (np.nan, np.nan))
    return np.array(found)


def _of_set(unit: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    return score_queries(
        unit,
        rows,
        others,
        positives=lambda row: rows[rows != row],
        negatives=lambda queries: np.ones((len(queries), len(others)), dtype=bool),
    ).average_precision
