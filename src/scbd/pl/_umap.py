"""UMAPs of both blocks, side by side, by scanpy."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from scbd._anndata import CONTENT_KEY, STYLE_KEY, check_anndata
from scbd._checks import check_finite_rows, missing_key
from scbd._files import torch_threads_kept
from scbd.pl._looks import COLORS, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

# more labels than this have no legend
_LEGEND_LABELS = 20


def umap_blocks(
    adata: AnnData,
    color: str | Sequence[str],
    *,
    blocks: Mapping[str, str] | None = None,
    max_cells: int = 10_000,
    seed: int = 0,
) -> np.ndarray:
    """Draw UMAPs of the embeddings, one row a block, one column a label.

    In a good z_c, cells of a perturbation lie together and environments are mixed; in z_s, the other way round.

    Parameters
    ----------
    adata
        Embedded cells. A UMAP of your own in ``obsm["<key>_umap"]`` is drawn as it is; otherwise scanpy computes one.
    color
        Columns of ``obs``: labels, with a legend up to 20 of them, or numbers.
    blocks
        Title and ``obsm`` key of each row; z_c and z_s by default.
    max_cells
        Draw a random subset of this size.
    seed
        Seed of subset and UMAP.

    Returns
    -------
    Axes, ``(len(blocks), len(color))``.

    Raises
    ------
    KeyError
        If an embedding or a column is missing.
    ValueError
        If an embedding is not finite.

    Examples
    --------
    >>> axes = scbd.pl.umap_blocks(adata, ["gene", "well"], blocks={"z_c": "X_scbd_c"})
    """
    import matplotlib.pyplot as plt
    import scanpy as sc
    from anndata import AnnData
    from pandas.api.types import is_numeric_dtype

    check_anndata(adata)
    blocks = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY} if blocks is None else blocks
    color = [color] if isinstance(color, str) else list(color)
    for slot, keys in (("obsm", blocks.values()), ("obs", color)):
        for key in keys:
            if key not in getattr(adata, slot):
                raise KeyError(missing_key(slot, key, getattr(adata, slot).keys()))
    # shuffled: no label is drawn on top of all others
    rows = np.random.default_rng(seed).permutation(adata.n_obs)[:max_cells]
    colors = {f"{column}_colors": adata.uns[f"{column}_colors"] for column in color if f"{column}_colors" in adata.uns}
    drawn = AnnData(obs=adata.obs[color].iloc[rows], uns=colors)
    named = 0
    for column in color:
        if not is_numeric_dtype(drawn.obs[column]):
            labels = drawn.obs[column].astype("category")
            short = [wrapped(name) for name in labels.cat.categories]
            drawn.obs[column] = labels.cat.rename_categories(short) if len(set(short)) == len(short) else labels
            if len(short) <= _LEGEND_LABELS:
                named = max([named, *(len(line) for name in short for line in name.split("\n"))])
    size = ((3.2 + 0.08 * named) * len(color), 2.9 * len(blocks))
    _, axes = plt.subplots(len(blocks), len(color), figsize=size, squeeze=False, layout="constrained")
    for line, (title, key) in zip(axes, blocks.items(), strict=True):
        if f"{key}_umap" in adata.obsm:
            drawn.obsm["X_umap"] = np.asarray(adata.obsm[f"{key}_umap"])[rows]
        else:
            drawn.obsm["embedding"] = np.asarray(adata.obsm[key])[rows]
            check_finite_rows(drawn.obsm["embedding"], f"obsm[{key!r}]")
            # of a few thousand cells, scikit-learn is done before scanpy's own search has compiled itself
            near = {"n_neighbors": min(15, len(rows) - 1), "transformer": "sklearn"}
            _keep_compiled()
            with torch_threads_kept():
                sc.pp.neighbors(drawn, use_rep="embedding", **near)
                sc.tl.umap(drawn, random_state=seed)
        for ax, column in zip(line, color, strict=True):
            many = drawn.obs[column].dtype == "category" and drawn.obs[column].nunique() > _LEGEND_LABELS
            legend = "none" if many else "right margin"
            # scanpy takes these colours where there are no more labels than colours
            with plt.rc_context({"axes.prop_cycle": plt.cycler(color=COLORS)}):
                sc.pl.umap(drawn, color=column, ax=ax, show=False, legend_loc=legend, legend_fontsize="small")
            ax.set_title(wrapped(f"{title} by {column}", 22), fontsize="medium")
    return axes


@cache
def _keep_compiled() -> None:
    """Have numba keep on disk what umap-learn compiles: to compile it takes longer than all else, in each process."""
    with warnings.catch_warnings():  # of what else it could do
        warnings.simplefilter("ignore")
        from umap import layouts, umap_

    functions = [(umap_, "smooth_knn_dist"), (umap_, "compute_membership_strengths")]
    functions += [(layouts, "_nb_optimize_layout_euclidean_single_epoch")]
    for module, name in functions:
        # another version of umap-learn may have no such function, and a disk no place for it
        with suppress(AttributeError, RuntimeError):
            getattr(module, name).enable_caching()
