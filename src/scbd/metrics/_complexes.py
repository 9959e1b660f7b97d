"""Scores of single gene sets, such as protein complexes: similarity of the profiles of their genes.

:func:`complex_table` returns one row per complex, with a p value and the average precision of its genes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from scbd._shared.checks import check_count
from scbd._shared.messages import warn_user
from scbd.metrics._average_precision import scale_to_unit_length, score_queries
from scbd.metrics._networks import NetKind, read_network
from scbd.metrics._relationships import Relations, Universe, get_relations
from scbd.metrics._resampling import mean_cosine, sequential_p_values

if TYPE_CHECKING:
    from anndata import AnnData
    from scipy import sparse

# largest false discovery rate at which a protein complex (or other gene set) counts as significant
_MAX_FALSE_DISCOVERY_RATE = 0.05


def complex_table(
    profiles: AnnData | Relations,
    net: pd.DataFrame,
    *,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
    max_set_size: int | None = None,
    n_permutations: int = 1000,
    max_permutations: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Test how similar the gene profiles of each complex are, compared with random sets of the same number of genes.

    The test is one-sided: profiles of a complex should be similar, not opposite. By default, random sets are drawn from
    the genes of all profiles. In contrast, scores over pairs of genes, such as :func:`relationship_recall`, exclude
    genes without a known partner by default.

    Parameters
    ----------
    profiles
        Profiles, one row per gene, see :func:`aggregate`; or :class:`Relations`, which contain profiles.
    net
        Frame with columns ``source`` (complex) and ``target`` (gene).
    net_kind, gene_key, universe, max_set_size
        See :class:`Relations`; the default universe is ``"profiles"``. If ``profiles`` are :class:`Relations`, only
        ``net_kind`` can be given. Random sets are then drawn from the genes of the :class:`Relations`, and complexes
        with more genes than the ``max_set_size`` of the :class:`Relations` are excluded.
    n_permutations
        Number of random sets of each size in the first round. A complex is compared with more random sets in further
        rounds, as long as fewer than 20 random sets have at least its mean cosine.
    max_permutations
        Maximum number of random sets of each size. No p value is below ``1 / (max_permutations + 1)``. The default is
        about 20 times the number of complexes. Even if only one complex is significant, it can then reach a false
        discovery rate of 5 %.
    seed
        Seed of the random sets.

    Returns
    -------
    Frame with one row per complex, the most significant first, and these columns:

    - ``size``: number of genes of the complex that have a profile, at least two
    - ``mean_cosine``: mean cosine between the profiles of two genes, over all pairs of genes of the complex
    - ``p_value``: one-sided p value of the mean cosine, by a sequential permutation test. It is valid although the test
      stops drawing random sets early.
    - ``fdr``: false discovery rate (Benjamini and Hochberg)
    - ``average_precision``: mean over the genes of the complex. Each gene is a query that should rank the other genes
      of the complex before all genes that are related to no gene of the complex.
    - ``chance``: average precision of a random order. ``average_precision`` and ``chance`` are NaN if every gene is in
      the complex or related to one of its genes.
    - ``genes``: symbols of the genes of the complex

    Raises
    ------
    ValueError
        If ``net`` holds pairs instead of complexes, or no complex has two genes with profiles.

    Warns
    -----
    UserWarning
        If ``max_permutations`` is so small that no complex can reach a false discovery rate of 5 % if it is the only
        significant complex.

    References
    ----------
    Besag and Clifford (1991), Sequential Monte Carlo p-values.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> table = scbd.metrics.complex_table(profiles, net, n_permutations=50)
    >>> sorted(table.index)
    ['complex_1', 'complex_2']
    """
    check_count("n_permutations", n_permutations)
    if isinstance(profiles, Relations):
        relations = get_relations(profiles, None, gene_key=gene_key, universe=universe, max_set_size=max_set_size)
    else:
        relations = get_relations(profiles, net, net_kind, gene_key, universe or "profiles", max_set_size)
        net_kind = relations.net_kind
    sets = _genes_of_sets(net, relations, net_kind)
    most = _max_permutations(max_permutations, n_permutations, len(sets))
    unit = relations.unit.astype(np.float64)
    sizes = np.array([len(rows) for rows in sets.values()])
    observed = np.array([mean_cosine(unit[rows]) for rows in sets.values()])
    p = sequential_p_values(unit, sizes, observed, min(n_permutations, most), most, np.random.default_rng(seed))
    of_length_1 = scale_to_unit_length(relations.unit)
    precision, by_chance = zip(*(_score_set(of_length_1, relations.known, rows) for rows in sets.values()), strict=True)
    table = pd.DataFrame(
        {
            "size": sizes,
            "mean_cosine": observed,
            "p_value": p,
            "fdr": false_discovery_control(p),
            "average_precision": precision,
            "chance": by_chance,
            "genes": [" ".join(relations.genes[rows]) for rows in sets.values()],
        },
        index=pd.Index(sets, name="complex"),
    )
    return table.sort_values(["p_value", "mean_cosine"], ascending=[True, False])


def _genes_of_sets(net: pd.DataFrame, relations: Relations, net_kind: NetKind) -> dict[str, np.ndarray]:
    """Return, for each gene set of a network, the indices of its genes in ``relations.genes``.

    Sets with fewer than two genes in ``relations.genes`` are omitted.
    """
    genes = relations.genes
    rows, kind = read_network(net, relations.profiled, net_kind, relations.max_set_size)
    if kind == "pairs":
        msg = (
            "net holds pairs of genes: a table of complexes needs sets, whose source is the complex (net_kind='sets')."
        )
        raise ValueError(msg)
    row = pd.Series(np.arange(len(genes)), index=genes)
    members = rows[rows["target"].isin(row.index)].groupby("source")["target"]
    sets = {str(name): row[targets].to_numpy() for name, targets in members if len(targets) > 1}
    if not sets:
        msg = f"No complex of net has two of the {len(genes)} genes: give the net that the Relations were made with."
        raise ValueError(msg)
    return sets


def _max_permutations(asked: int | None, n_first: int, n_sets: int) -> int:
    """Return the maximum number of random sets that each gene set is compared with.

    The default is large enough that a gene set can reach a false discovery rate of 5 % even if no other set is
    significant. A warning is given if the requested number is too small for this.
    """
    needed = math.ceil(n_sets / _MAX_FALSE_DISCOVERY_RATE) - 1
    if asked is None:
        return max(n_first, needed)
    check_count("max_permutations", asked)
    if asked < needed:
        msg = (
            f"max_permutations={asked:,} is few for {n_sets:,} complexes: one found alone has a false discovery rate "
            f"of {min(1, n_sets / (asked + 1)):.2g} at best. Give {needed:,} for {_MAX_FALSE_DISCOVERY_RATE:g}."
        )
        warn_user(msg)
    return asked


def _score_set(unit: np.ndarray, known: sparse.csr_array, rows: np.ndarray) -> tuple[float, float]:
    """Return the average precision of a gene set, and the average precision of a random order.

    Each gene of the set is a query: the other genes of the set are the positives, and the genes that are related to no
    gene of the set are the negatives. Both values are NaN for a set without negatives. ``unit`` holds the profiles of
    all genes as rows of length 1, ``known`` is the matrix of related genes, and ``rows`` are the genes of the set.
    """
    others = np.setdiff1d(np.arange(len(unit)), np.append(known[rows].indices, rows))
    scores = score_queries(
        unit,
        rows,
        others,
        positives=lambda row: rows[rows != row],
        negatives=lambda queries: np.ones((len(queries), len(others)), dtype=bool),
    )
    if scores.empty:
        return np.nan, np.nan
    return scores["average_precision"].to_numpy().mean(), scores["chance"].iloc[0]
