"""Cosines of all pairs of genes, and which of them a network knows to be related.

A network is a frame with ``source`` and ``target``, as decoupler and mantispy use them. It is read in one of two ways.
Where sources are names of sets (complexes, pathways), two targets are related if they share a source; where they are
genes themselves (pairs), source and target are related. Networks of :mod:`scbd.datasets` say which they are.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.spatial.distance import squareform

from scbd._labels import label_text
from scbd.metrics._known_pairs import NetKind, read_network, related_genes
from scbd.metrics._ranks import Ranks

if TYPE_CHECKING:
    from anndata import AnnData

Universe = Literal["annotated", "profiles"]

# cosines of a product that are held beside those that are kept
_BLOCK = 1 << 24
# cosines that are simply sorted; of more, only the places that are asked for are found
_SORTED = 1 << 24


class Relations:
    """Cosines of all pairs of genes, and which of them are known to be related.

    Parameters
    ----------
    profiles
        One row a gene, values used as they are: see :func:`scbd.metrics.aggregate`.
    net
        Frame with ``source`` and ``target``.
    net_kind
        ``"sets"``: sources are names of sets, and targets that share one are related; ``"pairs"``: sources are genes,
        related to their targets; ``"auto"``: as ``net.attrs["kind"]`` says, which the loaders of :mod:`scbd.datasets`
        set. A network that says nothing is read as pairs if at least 95 % of its sources are genes (targets too, or
        profiled), as sets if at most 5 % are, and is refused between. So a list of pairs whose sources are neither
        targets nor profiled looks like sets, and regulons that are named by their factor look like pairs: say it there.
    gene_key
        Column of ``obs`` with the gene symbols; ``obs_names`` by default.
    universe
        ``"annotated"``, the default: genes with at least one known partner among the profiles, the paper's choice;
        ``"profiles"``: every gene given, the choice of published map benchmarks. Scores of the two do not compare.
    max_set_size
        Leave out sets that have more genes among the profiles, before relations are made. Pairs grow with the square of
        a set: of CORUM among the genes of Funk et al., the 8 sets of more than 30 genes hold two thirds of all.

    Attributes
    ----------
    genes
        Symbols, ``(G,)``.
    net_kind
        How the network was read, ``"pairs"`` or ``"sets"``.
    max_set_size
        As given.
    profiled
        Symbols of all profiles, ``(N,)``, be they among ``genes`` or not.
    unit
        Profiles of unit length, ``(G, D)``; a profile of zeros stays one.
    known
        Which genes are related, sparse boolean ``(G, G)``, symmetric, without diagonal.

    Raises
    ------
    KeyError
        If ``net`` lacks a column, or ``obs`` lacks ``gene_key``.
    ValueError
        If it is not plain what ``net`` holds, no gene has a known partner, genes repeat, profiles are not finite,
        ``max_set_size`` is given for pairs, or all sets are larger.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> scbd.metrics.Relations(profiles, net)
    Relations of 4 genes: 2 of 6 pairs are known (net of sets)
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
        if universe not in get_args(Universe):
            msg = f"universe={universe!r} is not known: use 'annotated' or 'profiles'."
            raise ValueError(msg)
        genes, x = _profiles(profiles, gene_key)
        network = read_network(net, genes, net_kind, max_set_size)
        self.profiled, self.max_set_size = genes, max_set_size
        related = related_genes(genes, network)
        if universe == "annotated":
            keep = np.flatnonzero(np.diff(related.indptr))
            genes, x, related = genes[keep], x[keep], related[keep][:, keep]
        self.genes, self.net_kind = genes, network.kind
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        self.unit = x / np.where(norm > 0, norm, 1)
        self.known = related

    def __repr__(self) -> str:
        """Numbers of genes and pairs, for a person."""
        n, n_known = len(self.genes), self.known.nnz // 2
        net = self.net_kind if self.max_set_size is None else f"sets of up to {self.max_set_size} genes"
        return f"Relations of {n:,} genes: {n_known:,} of {n * (n - 1) // 2:,} pairs are known (net of {net})"

    @cached_property
    def cosine(self) -> np.ndarray:
        """Of each gene with each, ``(G, G)``."""
        square = squareform(self._cosines(), checks=False)
        np.fill_diagonal(square, np.einsum("gd,gd->g", self.unit, self.unit))
        return square

    @cached_property
    def related(self) -> np.ndarray:
        """Whether two genes are known to be related, bool ``(G, G)``."""
        return self.known.toarray()

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and relation of each pair once, both ``(G (G - 1) / 2,)``."""
        cosine = self._cosines()
        related = np.zeros(len(cosine), dtype=bool)
        related[self._known_places()] = True
        return cosine, related

    @cached_property
    def ranked(self) -> tuple[np.ndarray | Ranks, np.ndarray]:
        """Cosines of all pairs and of the known ones, both in ascending order. All scores are computed from these."""
        cosine = self._cosines()
        known = np.sort(cosine[self._known_places()])
        if len(cosine) > _SORTED:
            return Ranks(cosine, known), known
        cosine.sort()
        return cosine, known

    def _cosines(self) -> np.ndarray:
        """Of each pair once, row by row of the upper triangle."""
        n = len(self.genes)
        cosine = np.empty(n * (n - 1) // 2, dtype=self.unit.dtype)
        size = max(1, _BLOCK // n)
        end = 0
        for start in range(0, n, size):
            block = self.unit[start : start + size] @ self.unit[start:].T
            for i, row in enumerate(block, start=1):
                begin, end = end, end + len(row) - i
                cosine[begin:end] = row[i:]
        return cosine

    def _known_places(self) -> np.ndarray:
        """Where the known pairs are among all."""
        one, two = (side.astype(np.int64) for side in sparse.triu(self.known, k=1).nonzero())
        return one * len(self.genes) - one * (one + 1) // 2 + two - one - 1


def relations_of(
    profiles: AnnData | Relations,
    net: pd.DataFrame | None,
    net_kind: NetKind = "auto",
    gene_key: str | None = None,
    universe: Universe | None = None,
    max_set_size: int | None = None,
) -> Relations:
    """Relations as given, or made from profiles and a network."""
    if isinstance(profiles, Relations):
        asked = {"net": net is not None, "net_kind": net_kind != "auto", "gene_key": gene_key, "universe": universe}
        asked |= {"max_set_size": max_set_size is not None}
        if said := [name for name, given in asked.items() if given]:
            msg = (
                f"{' and '.join(said)} cannot be given beside Relations, which have their own: leave out what they "
                "were made with, or make other Relations."
            )
            raise ValueError(msg)
        return profiles
    if net is None:
        msg = "net is missing: give a frame with source and target, for example scbd.datasets.corum()."
        raise ValueError(msg)
    kept: Universe = universe or "annotated"
    return Relations(profiles, net, net_kind=net_kind, gene_key=gene_key, universe=kept, max_set_size=max_set_size)


def _profiles(profiles: AnnData, gene_key: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Symbols and finite values, one row a gene."""
    if gene_key is not None and gene_key not in profiles.obs:
        msg = f"obs of the profiles has no {gene_key!r} (its keys: {', '.join(profiles.obs.columns) or 'none'})."
        raise KeyError(msg)
    genes = profiles.obs_names if gene_key is None else profiles.obs[gene_key]
    genes = np.array([label_text(gene) for gene in genes], dtype=str)
    names, counts = np.unique(genes, return_counts=True)
    if (counts > 1).any():
        msg = (
            f"{(counts > 1).sum()} genes have several profiles ({', '.join(names[counts > 1][:5])}): average them, for "
            "example with scbd.metrics.aggregate."
        )
        raise ValueError(msg)
    x = profiles.X.toarray() if sparse.issparse(profiles.X) else np.asarray(profiles.X)
    bad = ~np.isfinite(x).all(axis=1)
    if bad.any():
        msg = f"{bad.sum()} profiles hold NaN or infinity ({', '.join(genes[bad][:5])}): drop them or repair them."
        raise ValueError(msg)
    return genes, x.astype(np.promote_types(x.dtype, np.float32))
