"""UMAPs of both blocks, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._keys import CONTENT_KEY, STYLE_KEY
from scbd._threads import torch_threads_kept

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from anndata import AnnData
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers; then matplotlib's for more labels
_FEW = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_LEGEND_LABELS = 20
# up to here every distance is computed
_EXACT_CELLS = 100_000


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
        Embedded cells. A UMAP that is already in ``obsm["<key>_umap"]`` is used; otherwise it is computed.
    color
        Columns of ``obs``.
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

    Examples
    --------
    >>> axes = scbd.pl.umap_blocks(adata, ["gene", "well"], blocks={"z_c": "X_scbd_c"})
    """
    import matplotlib.pyplot as plt

    blocks = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY} if blocks is None else blocks
    color = [color] if isinstance(color, str) else list(color)
    for slot, keys in (("obsm", blocks.values()), ("obs", color)):
        for key in keys:
            if key not in getattr(adata, slot):
                msg = f"{slot} has no {key!r} to draw (its keys: {', '.join(getattr(adata, slot).keys()) or 'none'})."
                raise KeyError(msg)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(adata.n_obs)[:max_cells]  # shuffled: no label is drawn on top of all others
    size = (5.2 * len(color), 4 * len(blocks))
    figure, axes = plt.subplots(len(blocks), len(color), figsize=size, squeeze=False, layout="constrained")
    for line, (title, key) in zip(axes, blocks.items(), strict=True):
        there = f"{key}_umap" in adata.obsm
        points = (
            np.asarray(adata.obsm[f"{key}_umap"])[rows] if there else umap(np.asarray(adata.obsm[key])[rows], seed=seed)
        )
        for ax, column in zip(line, color, strict=True):
            _scatter(ax, points, adata.obs[column].iloc[rows], _palette(adata, column))
            ax.set_title(f"{title} by {column}")
    return axes


def umap(embedding: np.ndarray, *, n_neighbors: int = 15, seed: int = 0) -> np.ndarray:
    """UMAP of an embedding with scanpy's settings, float32 ``(N, 2)``.

    Parameters
    ----------
    embedding
        ``(N, D)``.
    n_neighbors
        Neighbours of a cell, at most ``N - 1``.
    seed
        Seed of the layout.
    """
    import warnings

    from sklearn.neighbors import NearestNeighbors

    with warnings.catch_warnings():
        # said on import by umap-learn and numba of their own dependencies
        warnings.simplefilter("ignore")
        from umap import UMAP

    points = np.asarray(embedding, dtype=np.float32)
    n_neighbors = min(n_neighbors, len(points) - 1)
    neighbors = (None, None, None)
    if len(points) <= _EXACT_CELLS:
        # a tenth of a second, where umap-learn's own search spends twenty on compiling itself
        distances, indices = NearestNeighbors(n_neighbors=n_neighbors, algorithm="brute").fit(points).kneighbors(points)
        neighbors = (indices, distances, None)
    # scanpy's minimal distance; with a seed, umap-learn runs in one thread, and says so unless it is told to
    model = UMAP(n_neighbors=n_neighbors, min_dist=0.5, random_state=seed, n_jobs=1, precomputed_knn=neighbors)
    with warnings.catch_warnings(), torch_threads_kept():
        warnings.filterwarnings("ignore", category=UserWarning, module="umap")
        warnings.filterwarnings("ignore", category=FutureWarning, module="sklearn")
        return model.fit_transform(points)


def _palette(adata: AnnData, column: str) -> dict[Any, Any]:
    """A colour a label: those in ``uns["<column>_colors"]``, where scanpy keeps them, or a palette of ours."""
    from matplotlib import colormaps

    names = adata.obs[column].astype("category").cat.categories
    n = len(names)
    colors: Any
    if len(adata.uns.get(f"{column}_colors", ())) == n:
        colors = adata.uns[f"{column}_colors"]
    elif n <= len(_FEW):
        colors = _FEW
    else:
        colors = colormaps["tab10" if n <= 10 else "tab20" if n <= 20 else "turbo"](np.linspace(0, 1, n))
    return dict(zip(names, colors, strict=False))


def _scatter(ax: Axes, points: np.ndarray, labels: pd.Series, palette: dict[Any, Any]) -> None:
    size = float(np.clip(20_000 / len(points), 1, 14))
    ax.scatter(
        points[:, 0], points[:, 1], c=[palette[label] for label in labels], s=size, linewidths=0, rasterized=True
    )
    ax.set(xticks=[], yticks=[], xlabel="UMAP 1", ylabel="UMAP 2")
    if len(palette) <= _LEGEND_LABELS:
        for name, shade in palette.items():
            ax.scatter([], [], color=shade, label=str(name), s=20)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
