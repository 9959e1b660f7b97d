"""What a network says of some genes: which of them are known to be related, or why none is."""

from __future__ import annotations

import difflib
import logging
from typing import Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._checks import check_count
from scbd._labels import label_text
from scbd._messages import head

logger = logging.getLogger(__name__)

Kind = Literal["pairs", "sets"]
NetKind = Literal["auto", "pairs", "sets"]

# sources among genes up to which they are plainly names of sets; and as far below all, plainly genes
_FEW = 0.05


class Network(NamedTuple):
    """Rows of a network, each once, and how they are read."""

    rows: pd.DataFrame
    """Text columns ``source`` and ``target``."""
    kind: Kind
    """Whether sources are genes (pairs) or names of sets."""


def read_network(
    net: pd.DataFrame, genes: np.ndarray, net_kind: NetKind = "auto", max_set_size: int | None = None
) -> Network:
    """Rows of a network, and whether they are pairs of genes or members of sets.

    Parameters
    ----------
    net
        Frame with ``source`` and ``target``; rows that lack one of them say nothing.
    genes
        Symbols of the profiles, ``(G,)``: they help to tell genes from names of sets.
    net_kind
        As said; ``"auto"``: as ``net.attrs["kind"]`` says, or else as is plain.
    max_set_size
        Sets that have more of ``genes`` are left out.

    Raises
    ------
    KeyError
        If ``net`` lacks a column.
    ValueError
        If it has no rows, it is not plain what they are, or all sets are too large.
    """
    missing = {"source", "target"} - set(net.columns)
    if missing:
        msg = f"net lacks {' and '.join(sorted(missing))} (its columns: {', '.join(map(str, net.columns))})."
        raise KeyError(msg)
    if net_kind not in get_args(NetKind):
        msg = f"net_kind={net_kind!r} is not known: use 'auto', 'pairs' or 'sets'."
        raise ValueError(msg)
    said = net.attrs.get("kind", "auto") if net_kind == "auto" else net_kind
    if said not in get_args(NetKind):
        msg = f"net.attrs['kind'] is {said!r}, which is not known: set it to 'pairs' or 'sets', or give net_kind."
        raise ValueError(msg)
    rows = net[["source", "target"]].dropna().astype(object).map(label_text).drop_duplicates()
    if rows.empty:
        msg = "net has no rows: it needs one for each gene of each set, or one for each pair of genes."
        raise ValueError(msg)
    network = Network(rows, _plain_kind(rows, genes) if said == "auto" else said)
    return network if max_set_size is None else _of_small_sets(network, genes, max_set_size)


def _of_small_sets(network: Network, genes: np.ndarray, most: int) -> Network:
    """Without sets that have more genes with a profile; what else is in a set does not count."""
    check_count("max_set_size", most, least=2)
    if network.kind == "pairs":
        msg = (
            f"max_set_size={most} is of sets of genes, and net holds pairs: leave it out. If its sources are names of "
            "sets, say net_kind='sets'."
        )
        raise ValueError(msg)
    rows = network.rows
    size = rows["target"].isin(genes).groupby(rows["source"]).sum()
    large = size.index[size > most]
    if len(large) and not (size.drop(large) > 1).any():
        msg = f"Each set that has two profiled genes has more than max_set_size={most}: allow larger ones."
        raise ValueError(msg)
    logger.info("%d of %d sets have more than %d profiled genes, and are left out.", len(large), len(size), most)
    return Network(rows[~rows["source"].isin(large)], network.kind)


def _plain_kind(rows: pd.DataFrame, genes: np.ndarray) -> Kind:
    """Pairs if nearly all sources are genes, sets if nearly none is; between them nobody can tell."""
    sources = pd.Index(rows["source"].unique())
    known = sources[sources.isin(rows["target"]) | sources.isin(genes)]
    share = len(known) / len(sources)
    if _FEW < share < 1 - _FEW:
        msg = (
            f"net may hold pairs of genes or sets of genes: {len(known):,} of its {len(sources):,} sources are genes "
            f"themselves (such as {head(known, 3)}). Say which it is with net_kind='pairs' or net_kind='sets', or once "
            "for all with net.attrs['kind'] = 'pairs' or 'sets'."
        )
        raise ValueError(msg)
    kind: Kind = "pairs" if share > _FEW else "sets"
    logger.info("net is read as %s: %d of its %d sources are genes.", kind, len(known), len(sources))
    return kind


def related_genes(genes: np.ndarray, network: Network) -> sparse.csr_array:
    """Which genes are known to be related, boolean ``(G, G)``, symmetric, without diagonal.

    Parameters
    ----------
    genes
        Symbols, ``(G,)``.
    network
        From :func:`read_network`.

    Raises
    ------
    ValueError
        If no two of the genes are related.
    """
    row = pd.Series(np.arange(len(genes)), index=genes)
    inside = network.rows[network.rows["target"].isin(row.index)]
    n = len(genes)
    if network.kind == "pairs":
        inside = inside[inside["source"].isin(row.index)]
        one, two = row[inside["source"]].to_numpy(), row[inside["target"]].to_numpy()
        related = sparse.csr_array((np.ones(len(one), dtype=bool), (one, two)), shape=(n, n))
        related = related + related.T
    else:
        of_set = pd.factorize(inside["source"])[0]
        shape = (n, of_set.max(initial=-1) + 1)
        member = sparse.csr_array(
            (np.ones(len(inside), dtype=np.int32), (row[inside["target"]].to_numpy(), of_set)), shape=shape
        )
        related = (member @ member.T).astype(bool)
    related = sparse.csr_array(related)
    related.setdiag(False)
    related.eliminate_zeros()
    if not related.nnz:
        raise ValueError(_why_none(genes, network))
    return related


def _why_none(genes: np.ndarray, network: Network) -> str:
    """Say which mismatch of symbols it looks like when nothing matches."""
    pairs = network.kind == "pairs"
    targets = set(network.rows["target"]) | (set(network.rows["source"]) if pairs else set())
    said = f"None of the {len(genes)} profiles has a known partner among the {len(targets)} genes of net"
    there = len(set(genes) & targets)
    if there and pairs:
        return f"{said}, though {there} of the symbols are there: no pair has profiles of both of its genes."
    if there:
        return (
            f"{said}, though {there} of the symbols are there: each is alone in its set (for pairs: net_kind='pairs')."
        )
    upper = {gene.upper() for gene in genes}
    if upper & {t.upper() for t in targets}:
        return f"{said}: they differ in upper and lower case (profiles: {genes[0]!r}, net: {next(iter(targets))!r})."
    if sum(gene.startswith("ENS") for gene in genes) > len(genes) / 2:
        return f"{said}: the profiles carry Ensembl identifiers, net carries symbols like {next(iter(targets))!r}."
    if sum(gene.isdigit() for gene in genes) > len(genes) / 2:
        return f"{said}: the profiles carry numbers (Entrez identifiers?), net symbols like {next(iter(targets))!r}."
    close = difflib.get_close_matches(str(genes[0]), list(targets), n=1)
    hint = f" (the nearest to {genes[0]!r} is {close[0]!r})" if close else f" (for example {genes[0]!r})"
    return f"{said}{hint}: name the column of gene symbols with gene_key, or map aliases to symbols first."
