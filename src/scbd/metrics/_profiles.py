"""Profiles of perturbed genes: mean embeddings of their cells, relative to the mean embedding of the controls."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._shared.checks import check_choice, check_finite_rows, join_first
from scbd._shared.labels import check_control_labels
from scbd.metrics._arguments import encode_label_column, get_embedding, warn_if_models_are_mixed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)

Average = Literal["mean", "median"]
Standardize = Literal["with_control", "genes"]
# number of cells that are read into memory and averaged at once
_CELLS_PER_BLOCK = 65_536


def aggregate(
    adata: AnnData,
    embedding_key: str,
    *,
    gene_key: str,
    guide_key: str | None = None,
    control: object | Sequence[object] | None = "nontargeting",
    average: Average = "mean",
    standardize: Standardize | None = "with_control",
    min_cells: int = 1,
    min_guides: int = 1,
) -> AnnData:
    """Average cells to guides and guides to genes, subtract the control, and standardise each component over genes.

    The protocol is that of Makino et al. (2025; appendix, CORUM prediction). All guides of a gene have the same weight,
    whatever their numbers of cells. Embeddings are read in blocks, so that the memory for a memory-map does not grow
    with the number of cells. With ``average="median"``, all cells of one guide are read at once.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key of ``obsm``, a layer, or ``"X"``, ``(N, D)``.
    gene_key
        Column of ``obs`` with the perturbed gene.
    guide_key
        Column of ``obs`` with the guide. Without it, cells are averaged to genes directly.
    control
        Value of ``gene_key`` for unperturbed cells. Several values are merged into one control, which has the guides of
        all of them. `None`: nothing is subtracted, and components are standardised over genes.
    average
        Average of the cells of a guide, ``"mean"`` or ``"median"``. Guides are always averaged by their mean.
    standardize
        Rows from which the mean and the standard deviation of each component are computed. ``"with_control"``: genes
        and the control, whose row is zero after subtraction, as in the script published with the paper. ``"genes"``:
        genes alone. `None`: no standardisation, values are differences from the control.
    min_cells
        Minimum number of cells per guide; guides with fewer cells are dropped.
    min_guides
        Minimum number of guides per gene, after guides were dropped; genes with fewer guides are dropped. A value above
        1 requires ``guide_key``.

    Returns
    -------
    AnnData ``(genes, D)``, float32, without the control. ``obs`` holds ``n_cells`` and ``n_guides``, and
    ``uns["aggregate"]`` holds the settings and the names of the dropped guides and genes.

    Raises
    ------
    KeyError
        If a key is missing.
    TypeError
        If the embedding is a DataFrame with a column that is not numeric.
    ValueError
        If there is no control, labels are missing, the embedding is sparse or not finite, or fewer than two genes
        remain.

    Warns
    -----
    UserWarning
        If rows of several models of :func:`scbd.cross_fit` are compared.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> profiles.shape  # genes × components; the controls' row is dropped
    (4, 64)
    """
    from anndata import AnnData

    check_choice("average", average, Average)
    check_choice("standardize", standardize, (*get_args(Standardize), None))
    if min_guides > 1 and guide_key is None:
        msg = f"min_guides={min_guides} counts the guides of a gene: name their column with guide_key."
        raise ValueError(msg)
    embedding = get_embedding(adata, embedding_key)
    gene = encode_label_column(adata, gene_key)
    warn_if_models_are_mixed(adata)
    controls = [] if control is None else check_control_labels(control, gene[0], gene_key)
    guides, code = _merge_controls_and_count_guides(
        *gene, None if guide_key is None else encode_label_column(adata, guide_key), controls
    )
    means = _average_groups(embedding, code, len(guides), average)
    guides_kept = guides["n_cells"] >= min_cells
    of_gene = guides[guides_kept].groupby("gene", sort=True, observed=True)
    genes = of_gene.agg(n_cells=("n_cells", "sum"), n_guides=("guide", "size"))
    genes_kept = (genes["n_guides"] >= min_guides) | genes.index.isin(controls)
    values = pd.DataFrame(means[guides_kept.to_numpy()]).groupby(guides.loc[guides_kept, "gene"].to_numpy()).mean()
    genes, values = genes[genes_kept], values.loc[genes.index[genes_kept]]
    # Name of the row of the control. There is at most one such row, because all controls were merged.
    reference = values.index.intersection(controls)
    if len(reference) != min(1, len(controls)) or len(values) < 2 + len(reference):
        msg = (
            f"Too few genes are left ({join_first(values.index) or 'none'}): profiles need two, and the control where "
            f"one is given. Lower min_cells={min_cells} or min_guides={min_guides}."
        )
        raise ValueError(msg)
    dropped = {
        "guides": sorted(guides.loc[~guides_kept, "guide"].astype(str)),
        "genes": sorted(set(guides["gene"].astype(str)) - set(values.index.astype(str))),
    }
    if dropped["guides"] or dropped["genes"]:
        logger.warning("Dropped %d guides and %d genes with too few cells.", *map(len, dropped.values()))
    if len(reference):
        values = values - values.loc[reference[0]]
    genes, profiles = genes.drop(reference), values.drop(reference)
    if standardize is not None:
        scaled_over = values if standardize == "with_control" else profiles
        sd = scaled_over.std(ddof=1)
        profiles = (profiles - scaled_over.mean()) / sd.where(sd > 0, 1.0)
    settings = {
        "control": controls[0] if len(controls) == 1 else controls,
        "average": average,
        "standardize": str(standardize),
        "dropped": dropped,
    }
    return AnnData(
        X=profiles.to_numpy(np.float32, copy=True),
        obs=genes.set_index(genes.index.astype(str)),
        var=pd.DataFrame(index=[f"{embedding_key}_{i}" for i in range(profiles.shape[1])]),
        uns={"aggregate": settings},
    )


def _merge_controls_and_count_guides(
    genes: np.ndarray, gene: np.ndarray, guides: tuple[np.ndarray, np.ndarray] | None, controls: list[str]
) -> tuple[pd.DataFrame, np.ndarray]:
    """Merge all controls into one gene, and count the cells of each guide.

    Parameters
    ----------
    genes, gene
        Distinct names of genes, and the index of the gene of each cell among these names.
    guides
        Distinct names of guides, and the index of the guide of each cell among these names. `None`: each gene has one
        guide.
    controls
        Names of genes that are controls. All controls are replaced by the first control in ``genes``.

    Returns
    -------
    Frame with one row per combination of gene and guide, and the columns ``gene``, ``guide`` and ``n_cells`` (number of
    cells). In addition, the row number of each cell in this frame.
    """
    is_control = np.isin(genes, controls)
    one = np.arange(len(genes))
    one[is_control] = is_control.argmax()
    gene = one[gene]
    names, guide = (genes, gene) if guides is None else guides
    pairs, code, n_cells = np.unique(gene * len(names) + guide, return_inverse=True, return_counts=True)
    frame = {"gene": genes[pairs // len(names)], "guide": names[pairs % len(names)]}
    return pd.DataFrame(frame).astype(str).assign(n_cells=n_cells), code


def _average_groups(embedding: Any, code: np.ndarray, n: int, average: Average) -> np.ndarray:
    """Return the mean or the median embedding of each of ``n`` groups of cells, float64 ``(n, D)``.

    ``code`` is the group of each cell, an integer from 0 to ``n - 1``.
    """
    out = np.zeros((n, embedding.shape[1]))
    if average == "median":
        order = np.argsort(code, kind="stable")
        for group, rows in enumerate(np.split(order, np.cumsum(np.bincount(code, minlength=n))[:-1])):
            out[group] = np.median(_to_finite_float64(embedding[np.sort(rows)]), axis=0)
        return out
    for start in range(0, len(code), _CELLS_PER_BLOCK):
        block = _to_finite_float64(embedding[start : start + _CELLS_PER_BLOCK])
        rows = code[start : start + _CELLS_PER_BLOCK]
        member = sparse.csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(n, len(rows)))
        out += member @ block
    return out / np.bincount(code, minlength=n)[:, None]


def _to_finite_float64(block: Any) -> np.ndarray:
    block = np.asarray(block, dtype=np.float64)
    check_finite_rows(block, "The embedding of cells that are read together")
    return block
