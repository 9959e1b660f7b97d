"""From cells to guides to genes: the profiles that relationships are read from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd

from scbd.metrics._table import coded_labels, control_names, stored_embedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)

Average = Literal["mean", "median"]
Standardize = Literal["with_control", "genes"]

_BLOCK = 65_536


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
    """Average cells to guides and guides to genes, subtract the control, standardise each component over genes.

    The paper's protocol (appendix, CORUM prediction). A guide counts as much as another of its gene, however many cells
    it has. Embeddings are read in blocks, so that one that lies on disk (a memory-map) takes constant memory; the
    median reads one guide at a time.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key in ``obsm``, ``(N, D)``.
    gene_key
        Column of ``obs`` with the perturbed gene.
    guide_key
        Column of ``obs`` with the guide; without it, cells are averaged to genes directly.
    control
        Value of ``gene_key`` for cells that were not perturbed; several, such as nontargeting and intergenic guides,
        are one control with the guides of all. `None` subtracts nothing, and standardises over genes.
    average
        ``"mean"`` or ``"median"`` of cells; guides are always averaged by their mean.
    standardize
        ``"with_control"``: the control's row of zeros takes part, as in the published script; ``"genes"``: over genes
        alone; `None` leaves values as differences from the control.
    min_cells
        Drop guides with fewer cells.
    min_guides
        Drop genes with fewer guides (after guides were dropped); asks for ``guide_key``.

    Returns
    -------
    AnnData ``(genes, D)`` float32 without the control; ``obs``: ``n_cells``, ``n_guides``; ``uns["aggregate"]``: the
    settings, and the guides and genes that were dropped.

    Raises
    ------
    KeyError
        If a key is missing.
    TypeError
        If the embedding is a DataFrame, and a column holds no numbers.
    ValueError
        If there is no control, labels are missing, the embedding is sparse or not finite, or fewer than two genes are
        left.

    Examples
    --------
    >>> profiles = scbd.metrics.aggregate(adata, "X_scbd_c", gene_key="gene", guide_key="sgRNA")
    >>> profiles.shape  # genes × components; the controls' row is dropped
    (4, 64)
    """
    from anndata import AnnData

    if average not in get_args(Average):
        msg = f"average={average!r} is not known: use 'mean' or 'median'."
        raise ValueError(msg)
    if standardize is not None and standardize not in get_args(Standardize):
        msg = f"standardize={standardize!r} is not known: use 'with_control', 'genes' or None."
        raise ValueError(msg)
    if min_guides > 1 and guide_key is None:
        msg = f"min_guides={min_guides} counts the guides of a gene: name their column with guide_key."
        raise ValueError(msg)
    embedding = stored_embedding(adata, embedding_key)
    gene = coded_labels(adata, gene_key)
    controls = [] if control is None else control_names(control, gene[0], gene_key)
    guides, code = _guides(*gene, None if guide_key is None else coded_labels(adata, guide_key), controls)
    means = _averages(embedding, code, len(guides), average)
    guides_kept = guides["n_cells"] >= min_cells
    of_gene = guides[guides_kept].groupby("gene", sort=True, observed=True)
    genes = of_gene.agg(n_cells=("n_cells", "sum"), n_guides=("guide", "size"))
    genes_kept = (genes["n_guides"] >= min_guides) | genes.index.isin(controls)
    values = pd.DataFrame(means[guides_kept.to_numpy()]).groupby(guides.loc[guides_kept, "gene"].to_numpy()).mean()
    genes, values = genes[genes_kept], values.loc[genes.index[genes_kept]]
    reference = values.index.intersection(controls)  # one, whatever its name
    if len(reference) != min(1, len(controls)) or len(values) < 2 + len(reference):
        msg = (
            f"After dropping guides with fewer than {min_cells} cells and genes with fewer than {min_guides} guides, "
            f"{len(values)} genes are left, {_said(reference, controls)}: lower the thresholds."
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
    profiles = _standardized(values, reference, standardize)
    genes = genes.drop(reference)
    settings = {
        "control": controls[0] if len(controls) == 1 else controls,
        "average": average,
        "standardize": str(standardize),
        "dropped": dropped,
    }
    return AnnData(
        X=profiles.to_numpy(np.float32),
        obs=genes.set_index(genes.index.astype(str)),
        var=pd.DataFrame(index=[f"{embedding_key}_{i}" for i in range(profiles.shape[1])]),
        uns={"aggregate": settings},
    )


def _said(reference: pd.Index, controls: list[str]) -> str:
    if not controls:
        return "where profiles need two"
    return f"the control {'among' if len(reference) else 'not among'} them"


def _guides(
    genes: np.ndarray, gene: np.ndarray, guides: tuple[np.ndarray, np.ndarray] | None, controls: list[str]
) -> tuple[pd.DataFrame, np.ndarray]:
    """Gene, name and number of cells of each guide, and the guide of each cell as a row number of that frame.

    Parameters
    ----------
    genes, gene
        Names of genes, and the place of each cell's among them; all controls become the first.
    guides
        The same of guides; `None`: each gene is one.
    controls
        Which genes are controls.
    """
    is_control = np.isin(genes, controls)
    one = np.arange(len(genes))
    one[is_control] = is_control.argmax()
    gene = one[gene]
    names, guide = (genes, gene) if guides is None else guides
    pairs, code, n_cells = np.unique(gene * len(names) + guide, return_inverse=True, return_counts=True)
    frame = {"gene": genes[pairs // len(names)], "guide": names[pairs % len(names)]}
    return pd.DataFrame(frame).astype(str).assign(n_cells=n_cells), code


def _averages(embedding: Any, code: np.ndarray, n: int, average: Average) -> np.ndarray:
    """Mean or median of each group's rows, float64 ``(n, D)``."""
    out = np.zeros((n, embedding.shape[1]))
    if average == "median":
        order = np.argsort(code, kind="stable")
        for group, rows in enumerate(np.split(order, np.cumsum(np.bincount(code, minlength=n))[:-1])):
            out[group] = np.median(_finite(embedding[np.sort(rows)]), axis=0)
        return out
    from scipy import sparse

    for start in range(0, len(code), _BLOCK):
        block = _finite(embedding[start : start + _BLOCK])
        rows = code[start : start + _BLOCK]
        member = sparse.csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(n, len(rows)))
        out += member @ block
    return out / np.bincount(code, minlength=n)[:, None]


def _finite(block: Any) -> np.ndarray:
    block = np.asarray(block, dtype=np.float64)
    bad = ~np.isfinite(block).all(axis=1)
    if bad.any():
        msg = (
            f"The embedding holds NaN or infinity in {bad.sum()} cells of a block of {len(block)}: drop or repair them."
        )
        raise ValueError(msg)
    return block


def _standardized(profiles: pd.DataFrame, control: pd.Index, standardize: Standardize | None) -> pd.DataFrame:
    genes = profiles.drop(control)
    if standardize is None:
        return genes
    reference = profiles if standardize == "with_control" else genes
    sd = reference.std(ddof=1)
    return (genes - reference.mean()) / sd.where(sd > 0, 1.0)
