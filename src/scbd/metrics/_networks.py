"""Networks of known relations between genes, read from tables of gene pairs or of gene sets such as complexes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._shared.checks import check_choice, check_count, join_first
from scbd._shared.labels import label_text

Kind = Literal["pairs", "sets"]
NetKind = Literal["auto", "pairs", "sets"]
# Maximum fraction of genes among the sources of a network of gene sets, whose sources are names of sets. If at least
# 95 % of the sources are genes, the network holds gene pairs. With a fraction in between, the kind of the network is
# not clear, and an error is raised.
_MAX_FRACTION_OF_GENES_AMONG_SET_NAMES = 0.05


def read_network(
    net: pd.DataFrame, genes: np.ndarray, net_kind: NetKind = "auto", max_set_size: int | None = None
) -> tuple[pd.DataFrame, Kind]:
    """Read a network of gene relations from a frame, and determine whether it holds gene pairs or gene sets.

    :class:`Relations` describes both kinds of networks, and ``max_set_size``. ``genes`` are the gene symbols of the
    profiles, ``(G,)``, which help to distinguish genes from names of sets.

    Returns
    -------
    Frame with one row per relation, without duplicates; and the kind of the relations, ``"pairs"`` or ``"sets"``. The
    frame has the text columns ``source`` (gene or name of a gene set) and ``target`` (gene). In a network of pairs,
    sources are genes that are related to their targets. In a network of sets, targets are the genes of the sets.
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
    return rows if max_set_size is None else _drop_large_sets(rows, kind, genes, max_set_size), kind


def _drop_large_sets(rows: pd.DataFrame, kind: Kind, genes: np.ndarray, most: int) -> pd.DataFrame:
    """Remove each gene set in which more than ``most`` genes have a profile."""
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
    """Return ``"pairs"`` if at least 95 % of the sources of a network are genes, and ``"sets"`` if at most 5 % are.

    Otherwise, raise a ``ValueError``.
    """
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


def related_genes(genes: np.ndarray, rows: pd.DataFrame, kind: Kind) -> sparse.csr_array:
    """Return the matrix of related genes of a network, sparse boolean ``(G, G)``, symmetric, with an empty diagonal.

    Rows and columns are the ``genes``. Two genes are related if the network, which :func:`read_network` has read, holds
    them as a pair or as members of one set.
    """
    row = pd.Series(np.arange(len(genes)), index=genes)
    inside = rows[rows["target"].isin(row.index)]
    n = len(genes)
    if kind == "pairs":
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
            f"No two of the {n} profiles are related in net, which is read as {kind} (profiles: "
            f"{join_first(genes, 3)}; net: {join_first(rows['target'], 3)}): name the column of gene symbols "
            "with gene_key, or give net_kind."
        )
        raise ValueError(msg)
    return related
