"""UMAPs of both blocks, side by side."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._keys import CONTENT_KEY, STYLE_KEY
from scbd._matrices import dense
from scbd._threads import torch_threads_kept
from scbd.pl._looks import legend_below
from scbd.pl._names import inches, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers; then matplotlib's for more labels
_FEW = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_LEGEND_LABELS = 20
# in inches, of a line of a title
_TITLE_HEIGHT = 0.18
_MISSING = "0.8"
# up to here every distance is computed
_EXACT_CELLS = 100_000
# its layout of fewer begins with more axes than they have
_FEWEST_CELLS = 4
# rows that are hashed at once
_HASHED = 65_536


def umap_blocks(
    adata: AnnData,
    color: str | Sequence[str],
    *,
    blocks: Mapping[str, str] | None = None,
    max_cells: int = 10_000,
    seed: int = 0,
    keep: bool = False,
) -> np.ndarray:
    """Draw UMAPs of the embeddings, one row a block, one column a label.

    In a good z_c, cells of a perturbation lie together and environments are mixed; in z_s, the other way round.

    Parameters
    ----------
    adata
        Embedded cells. A UMAP in ``obsm["<key>_umap"]`` is drawn: one of your own as it is, one that was kept as long
        as cells and embedding are the same. Otherwise it is computed.
    color
        Columns of ``obs``. Labels have a colour each, and a legend up to 20 of them; more than 20 different numbers
        have a colour bar. Cells without a value are grey, and called missing in a legend.
    blocks
        Title and ``obsm`` key of each row; z_c and z_s by default.
    max_cells
        Draw a random subset of this size.
    seed
        Seed of subset and UMAP.
    keep
        Compute UMAPs of all cells, and keep them in ``obsm["<key>_umap"]``, with a digest of the embedding in
        ``uns["<key>_umap_of"]``.

    Returns
    -------
    Axes, ``(len(blocks), len(color))``. The legend of a column stands below it.

    Raises
    ------
    KeyError
        If an embedding or a column is missing.
    TypeError
        If an embedding is a DataFrame, and a column holds no numbers.
    ValueError
        If an embedding is sparse, or a UMAP of fewer than four cells has to be computed.

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
    maps = [_points(adata, key, rows, seed, keep) for key in blocks.values()]
    size = (3.3 * len(color), 2.9 * len(blocks))
    figure, axes = plt.subplots(len(blocks), len(color), figsize=size, squeeze=False, layout="constrained")
    titles = 0
    for line, title, points in zip(axes, blocks, maps, strict=True):
        for ax, column in zip(line, color, strict=True):
            values = adata.obs[column]
            n_unnamed = ""
            if _is_measured(values):
                _scatter_numbers(ax, points, values.iloc[rows].to_numpy(np.float64))
            else:
                palette = _palette(adata, column)
                _scatter(ax, points, values.iloc[rows], palette)
                if len(palette) > _LEGEND_LABELS:
                    n_unnamed = f" ({len(palette)} labels)"
            ax.set_title(wrapped(f"{title} by {column}{n_unnamed}", inches(ax)[0]), fontsize="medium")
        titles += max(ax.get_title().count("\n") for ax in line)
    # colours are the same in all rows
    below = max(_legend(ax, adata, column, rows) for ax, column in zip(axes[-1], color, strict=True))
    figure.set_figheight(figure.get_figheight() + below + _TITLE_HEIGHT * titles)
    return axes


def _points(adata: AnnData, key: str, rows: np.ndarray, seed: int, keep: bool) -> np.ndarray:
    """Where these rows lie in the UMAP of an embedding, which is kept or computed."""
    place, digest = f"{key}_umap", f"{key}_umap_of"
    embedding = dense(adata.obsm[key], f"obsm[{key!r}]")
    # without a digest it is the user's own
    if place in adata.obsm and (digest not in adata.uns or adata.uns[digest] == _digest(embedding)):
        return np.asarray(adata.obsm[place])[rows]
    if not keep:
        return umap(np.asarray(embedding)[rows], seed=seed)
    adata.obsm[place], adata.uns[digest] = umap(np.asarray(embedding), seed=seed), _digest(embedding)
    return adata.obsm[place][rows]


def _digest(embedding: Any) -> str:
    digest = hashlib.sha256(repr(embedding.shape).encode())
    for start in range(0, len(embedding), _HASHED):
        digest.update(np.ascontiguousarray(embedding[start : start + _HASHED], np.float32).tobytes())
    return digest.hexdigest()


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

    Raises
    ------
    ValueError
        If there are fewer than four cells.
    """
    import warnings

    from sklearn.neighbors import NearestNeighbors

    with warnings.catch_warnings():
        # said on import by umap-learn and numba of their own dependencies
        warnings.simplefilter("ignore")
        from umap import UMAP

    points = np.asarray(embedding, dtype=np.float32)
    if len(points) < _FEWEST_CELLS:
        msg = f"A UMAP takes {_FEWEST_CELLS} cells or more, there are {len(points)}: draw more, or a map of your own."
        raise ValueError(msg)
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
    """A colour a label that cells have: scanpy's in ``uns["<column>_colors"]``, or one of a palette of ours."""
    from matplotlib import colormaps

    labels = adata.obs[column].astype("category").cat
    used = labels.remove_unused_categories().cat.categories
    kept = adata.uns.get(f"{column}_colors", ())
    if len(kept) == len(labels.categories):  # of labels that no cell has, too
        return {name: color for name, color in zip(labels.categories, kept, strict=True) if name in used}
    n = len(used)
    colors: Any = _FEW
    if n > len(_FEW):
        colors = colormaps["tab10" if n <= 10 else "tab20" if n <= 20 else "turbo"](np.linspace(0, 1, n))
        light_grey = (np.ptp(colors[:, :3], axis=1) == 0) & (colors[:, 0] > 0.6)
        colors[light_grey, :3] = 0  # that is for cells without a label
    return dict(zip(used, colors, strict=False))


def _is_measured(values: pd.Series) -> bool:
    """Numbers of which each is no label of its own."""
    number = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    return bool(number) and values.nunique() > _LEGEND_LABELS


def _scatter_numbers(ax: Axes, points: np.ndarray, values: np.ndarray) -> None:
    known = np.isfinite(values)
    how: dict[str, Any] = {"s": _size(points), "linewidths": 0, "rasterized": True}
    ax.scatter(points[~known, 0], points[~known, 1], color=_MISSING, **how)
    drawn = ax.scatter(points[known, 0], points[known, 1], c=values[known], cmap="viridis", **how)
    ax.figure.colorbar(drawn, ax=ax)
    ax.set(xticks=[], yticks=[], xlabel="UMAP 1", ylabel="UMAP 2")


def _size(points: np.ndarray) -> float:
    return float(np.clip(20_000 / len(points), 1, 14))


def _scatter(ax: Axes, points: np.ndarray, labels: pd.Series, palette: dict[Any, Any]) -> None:
    shades = [palette.get(label, _MISSING) for label in labels]
    ax.scatter(points[:, 0], points[:, 1], c=shades, s=_size(points), linewidths=0, rasterized=True)
    ax.set(xticks=[], yticks=[], xlabel="UMAP 1", ylabel="UMAP 2")


def _legend(ax: Axes, adata: AnnData, column: str, rows: np.ndarray) -> float:
    """What colours stand for: its height, in inches. Below the axes: beside them, it would take half of a phone."""
    values = adata.obs[column].iloc[rows]
    names, missing = {}, values.isna()
    if _is_measured(adata.obs[column]):
        missing = ~np.isfinite(values.to_numpy(np.float64))
    else:
        palette = _palette(adata, column)
        names = palette if len(palette) <= _LEGEND_LABELS else {}
    if missing.any():
        names = names | {"missing": _MISSING}
    for name, shade in names.items():
        ax.scatter([], [], color=shade, label=str(name), s=20)
    return legend_below(ax) if names else 0
