"""Networks of known relations between genes, read from tables of pairs or of sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._shared.checks import check_choice, check_count, join_first
from scbd._shared.labels import label_text

if TYPE_CHECKING:
    pass


Kind = Literal["pairs", "sets"]


NetKind = Literal["auto", "pairs", "sets"]
# a network holds sets if at most this fraction of its sources are genes, and pairs if at least 1 minus this fraction
# are; otherwise its kind is not clear
_MAX_FRACTION_OF_GENES_AMONG_SET_NAMES = 0.05


class GeneNetwork(NamedTuple):
    """Network of relations without duplicate rows, and its kind."""

    rows: pd.DataFrame
    """Text columns ``source`` and ``target``."""
    kind: Kind
    """Kind of the sources: genes (``"pairs"``) or names of sets (``"sets"``)."""


def read_network(
    net: pd.DataFrame, genes: np.ndarray, net_kind: NetKind = "auto", max_set_size: int | None = None
) -> GeneNetwork:
    """Read a network, and determine whether it holds pairs of genes or members of sets; see :class:`Relations`.

    ``genes`` are the symbols of the profiles, ``(G,)``. They help to distinguish genes from names of sets.
    """
    missing = {"source", "target"} - set(net.columns)
    if missing:
        msg = f"net lacks {' and '.join(sorted(missing))} (its columns: {', '.join(map(str, net.columns))})."
        raise KeyError(msg)
    check_choice("net_kind", net_kind, NetKind)
    said = net.attrs.get("kind", "auto") if net_kind == "auto" else net_kind
    check_choice("net.attrs['kind']", said, NetKind)
    rows = net[["source", "target"]].dropna().astype(object).map(label_text).drop_duplicates()
    if rows.empty:
        msg = "net has no rows: it needs one for each gene of each set, or one for each pair of genes."
        raise ValueError(msg)
    kind = _infer_network_kind(rows, genes) if said == "auto" else said
    return GeneNetwork(rows if max_set_size is None else _drop_large_sets(rows, kind, genes, max_set_size), kind)


def _drop_large_sets(rows: pd.DataFrame, kind: Kind, genes: np.ndarray, most: int) -> pd.DataFrame:
    """Remove sets with more than ``most`` genes that have a profile; genes without a profile are not counted."""
    check_count("max_set_size", most, least=2)
    if kind == "pairs":
        msg = f"max_set_size={most} is of sets of genes, and net holds pairs: leave it out, or say net_kind='sets'."
        raise ValueError(msg)
    size = rows["target"].isin(genes).groupby(rows["source"]).sum()
    large = size.index[size > most]
    if len(large) and not (size.drop(large) > 1).any():
        msg = f"Each set that has two profiled genes has more than max_set_size={most}: allow larger ones."
        raise ValueError(msg)
    return rows[~rows["source"].isin(large)]


def _infer_network_kind(rows: pd.DataFrame, genes: np.ndarray) -> Kind:
    """Return ``"pairs"`` if nearly all sources are genes, ``"sets"`` if nearly none is; raise an error otherwise."""
    sources = pd.Index(rows["source"].unique())
    known = sources[sources.isin(rows["target"]) | sources.isin(genes)]
    share = len(known) / len(sources)
    if _MAX_FRACTION_OF_GENES_AMONG_SET_NAMES < share < 1 - _MAX_FRACTION_OF_GENES_AMONG_SET_NAMES:
        msg = (
            f"net may hold pairs of genes or sets of genes: {len(known):,} of its {len(sources):,} sources are genes "
            f"themselves (such as {join_first(known, 3)}). Say which it is with net_kind='pairs' or net_kind='sets'."
        )
        raise ValueError(msg)
    return "pairs" if share > _MAX_FRACTION_OF_GENES_AMONG_SET_NAMES else "sets"


def related_genes(genes: np.ndarray, network: GeneNetwork) -> sparse.csr_array:
    """Return the sparse boolean matrix of related genes, ``(G, G)``, symmetric and without diagonal."""
    row = pd.Series(np.arange(len(genes)), index=genes)
    inside = network.rows[network.rows["target"].isin(row.index)]
    n = len(genes)
    if network.kind == "pairs":
        inside = inside[inside["source"].isin(row.index)]
        one, two = row[inside["source"]].to_numpy(), row[inside["target"]].to_numpy()
        related = sparse.csr_array((np.ones(len(one), dtype=bool), (one, two)), shape=(n, n))
        related = related + related.T
    else:
        of_set, names = pd.factorize(inside["source"])
        ones = np.ones(len(inside), dtype=np.int32)
        member = sparse.csr_array((ones, (row[inside["target"]].to_numpy(), of_set)), shape=(n, len(names)))
        related = (member @ member.T).astype(bool)
    related = sparse.csr_array(related)
    related.setdiag(False)
    related.eliminate_zeros()
    if not related.nnz:
        msg = (
            f"No two of the {n} profiles are related in net, which is read as {network.kind} (profiles: "
            f"{join_first(genes, 3)}; net: {join_first(network.rows['target'], 3)}): name the column of gene symbols "
            "with gene_key, or give net_kind."
        )
        raise ValueError(msg)
    return related
