"""Which complexes a map finds."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from scbd._checks import check_count
from scbd.metrics._known_pairs import NetKind, read_network
from scbd.metrics._random_sets import mean_cosine, sequential_p_values
from scbd.metrics._relations import Relations, Universe, relations_of
from scbd.metrics._relationship_retrieval import scores_of_sets

if TYPE_CHECKING:
    from anndata import AnnData

# false discovery rate at which a complex counts as found
_CALLED_AT = 0.05


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
    """How similar the genes of each complex are, against random sets of genes of its size.

    One-tailed: similar, not opposite. Random sets are drawn from all profiles by default, other than the scores over
    pairs, which leave out genes without a known partner.

    Parameters
    ----------
    profiles
        One row a gene, see :class:`~scbd.metrics.Relations`.
    net
        Frame with ``source`` (complex) and ``target`` (gene).
    net_kind, gene_key, universe, max_set_size
        See :class:`~scbd.metrics.Relations`; the universe is ``"profiles"`` by default. Given :class:`Relations`, sets
        are drawn from their genes, those that are too large for them are left out, and none but ``net_kind`` can be
        given.
    n_permutations
        Random sets of each size to begin with. Complexes that fewer than 20 of them reach are compared with more.
    max_permutations
        Random sets of a size at most; no p value is below ``1 / (max_permutations + 1)``. By default 20 for each
        complex, so that one found alone among all has a false discovery rate below 5 %.
    seed
        Seed of the random sets.

    Returns
    -------
    Frame indexed by complex, most significant first: ``size`` (genes with a profile, at least two), ``mean_cosine``
    over its pairs, ``p_value`` (one-sided, by sequential permutation; never too small, however early it ended),
    ``fdr`` (Benjamini and Hochberg), ``average_precision`` (mean over its genes, of which each should find the others
    before all genes that are related to none of them), its ``chance`` in a random order, ``genes``.

    Raises
    ------
    ValueError
        If ``net`` holds pairs rather than complexes, or no complex has two genes with profiles.

    Warns
    -----
    UserWarning
        If ``max_permutations`` is too small for a complex to be found alone.

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
        relations = relations_of(profiles, None, gene_key=gene_key, universe=universe, max_set_size=max_set_size)
    else:
        relations = relations_of(profiles, net, net_kind, gene_key, universe or "profiles", max_set_size)
        net_kind = relations.net_kind
    sets = _sets(net, relations, net_kind)
    most = _ceiling(max_permutations, n_permutations, len(sets))
    unit = relations.unit.astype(np.float64)
    sizes = np.array([len(rows) for rows in sets.values()])
    observed = np.array([mean_cosine(unit[rows]) for rows in sets.values()])
    p = sequential_p_values(unit, sizes, observed, min(n_permutations, most), most, np.random.default_rng(seed))
    precision, by_chance = scores_of_sets(relations, sets.values()).T
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


def _sets(net: pd.DataFrame, relations: Relations, net_kind: NetKind) -> dict[str, np.ndarray]:
    """Rows of the genes of each set that has at least two."""
    genes = relations.genes
    network = read_network(net, relations.profiled, net_kind, relations.max_set_size)
    if network.kind == "pairs":
        msg = (
            "net holds pairs of genes; a table of complexes needs sets: source is the complex, target the gene. "
            "If that is what they are, say net_kind='sets'."
        )
        raise ValueError(msg)
    row = pd.Series(np.arange(len(genes)), index=genes)
    members = network.rows[network.rows["target"].isin(row.index)].groupby("source")["target"]
    sets = {str(name): row[targets].to_numpy() for name, targets in members if len(targets) > 1}
    if not sets:
        msg = f"No complex of net has two of the {len(genes)} genes: were the Relations made with another net?"
        raise ValueError(msg)
    return sets


def _ceiling(asked: int | None, n_first: int, n_sets: int) -> int:
    """How many permutations at most: by default so many that a single set can be called."""
    needed = math.ceil(n_sets / _CALLED_AT) - 1
    if asked is None:
        return max(n_first, needed)
    check_count("max_permutations", asked)
    if asked < needed:
        best = min(1, n_sets / (asked + 1))
        msg = (
            f"max_permutations={asked:,} is few for {n_sets:,} complexes: if only one of them were found, its false "
            f"discovery rate would be {best:.2g} at best. Give {needed:,} for {_CALLED_AT:g}."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    return asked
