"""What a network says of some genes: which of them are known to be related, or why none is."""

from __future__ import annotations

import difflib

import numpy as np
import pandas as pd
from scipy import sparse


def related_genes(genes: np.ndarray, net: pd.DataFrame) -> sparse.csr_array:
    """Which genes are known to be related, boolean ``(G, G)``, symmetric, without diagonal.

    Parameters
    ----------
    genes
        Symbols, ``(G,)``.
    net
        Frame with ``source`` and ``target``.

    Raises
    ------
    KeyError
        If ``net`` lacks a column.
    ValueError
        If no two of the genes are related.
    """
    missing = {"source", "target"} - set(net.columns)
    if missing:
        msg = f"net lacks {' and '.join(sorted(missing))} (its columns: {', '.join(map(str, net.columns))})."
        raise KeyError(msg)
    row = pd.Series(np.arange(len(genes)), index=genes)
    net = net[["source", "target"]].astype(str).drop_duplicates()
    inside = net[net["target"].isin(row.index)]
    n = len(genes)
    if is_pairs(net):
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
        raise ValueError(_why_none(genes, net))
    return related


def is_pairs(net: pd.DataFrame) -> bool:
    """Whether sources are genes like the targets (pairs) rather than names of sets."""
    return bool(net["source"].isin(net["target"]).mean() > 0.5)


def _why_none(genes: np.ndarray, net: pd.DataFrame) -> str:
    """Say which mismatch of symbols it looks like when nothing matches."""
    said = f"None of the {len(genes)} profiles has a known partner among the {net['target'].nunique()} genes of net"
    targets = set(net["target"])
    if set(genes) & targets:
        return f"{said}, though {len(set(genes) & targets)} of the symbols are there: each is alone in its set."
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
