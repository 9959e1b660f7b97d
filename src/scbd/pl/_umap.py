"""UMAPs of embeddings such as z_c and z_s, drawn by scanpy, with one row of panels per embedding."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.sparse import SparseEfficiencyWarning

from scbd._shared.checks import check_finite_rows, missing_key_message, suggest_name
from scbd._shared.keys import CONTENT_KEY, STYLE_KEY
from scbd._shared.labels import check_anndata, control_label_texts, label_text, label_values
from scbd._shared.threads import keep_torch_threads
from scbd.pl._style import COLORS, escape_dollars, wrap_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

# Maximum number of labels in a column of obs for which every label has its own colour.
_MAX_COLORED_LABELS = 20
# Number of labels that are coloured if a column of obs has more than _MAX_COLORED_LABELS labels.
_N_HIGHLIGHTED = 10
# Colours of highlighted labels in a UMAP in which all other cells are grey. They are the colours of the common palette
# without black and grey, followed by wine, indigo, olive and black.
_HIGHLIGHT_COLORS = (*COLORS[:4], *COLORS[5:7], "#882255", "#332288", "#999933", "k")
_CONTROL_COLOR, _OTHER_COLOR = "0.5", "0.87"
# height of a line of the legend, in inches
_LINE_HEIGHT = 0.14
# _POINT_AREA: total area of all points of a UMAP, as in scanpy. The area of one point is this total divided by the
# number of cells. _MAX_POINT_AREA: maximum area of one point. The points of few cells would otherwise be so large that
# they cover each other.
_POINT_AREA, _MAX_POINT_AREA = 120_000, 50


def umap_blocks(
    adata: AnnData,
    color: str | Sequence[str],
    *,
    blocks: Mapping[str, str] | None = None,
    highlight: Sequence[object] | None = None,
    control: object | Sequence[object] = (),
    max_cells: int = 10_000,
    seed: int = 0,
) -> np.ndarray:
    """Draw UMAPs of embeddings (blocks), one row of panels per embedding and one column of panels per label.

    In a good z_c, cells of one perturbation lie together, and environments are mixed. In z_s, cells of one environment
    lie together.

    If a column of ``obs`` has up to 20 labels, each label has a colour. If it has more labels, ten of them are
    coloured, controls are drawn in grey, and all other cells in light grey beneath them.

    Parameters
    ----------
    adata
        Cells with embeddings in ``obsm``. If UMAP coordinates of the embedding ``key`` exist in ``obsm["<key>_umap"]``,
        they are drawn; otherwise scanpy computes a UMAP.
    color
        Columns of ``obs`` with labels or numbers by which cells are coloured. A column of numbers has a colour bar,
        unless one of its numbers is named in ``highlight`` or ``control``; its numbers are then labels.
    blocks
        Mapping from the title of each row of panels to the ``obsm`` key of its embedding. Default: z_c and z_s.
    highlight
        Labels to colour, in the order of the legend. Colour-blind readers can distinguish up to ten colours. The choice
        applies to each column of ``obs`` in which one of these labels occurs. Default: all labels of a column with up
        to 20 labels, otherwise the ten labels with the most cells (controls excluded).
    control
        Label or labels of controls, which are all drawn in the same grey.
    max_cells
        Maximum number of cells to draw. If ``adata`` has more cells, some are drawn at random.
    seed
        Seed of the random choice of cells and of the UMAP.

    Returns
    -------
    Array of axes, shape ``(len(blocks), len(color))``.

    Raises
    ------
    KeyError
        If an embedding or a column is missing.
    ValueError
        If an embedding has values that are not finite, or if a label in ``highlight`` or ``control`` occurs in no
        column.

    Examples
    --------
    >>> axes = scbd.pl.umap_blocks(adata, ["gene", "well"], blocks={"z_c": "X_scbd_c"}, control="nontargeting")
    """
    import matplotlib.pyplot as plt
    import scanpy as sc
    from anndata import AnnData
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    check_anndata(adata)
    blocks = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY} if blocks is None else blocks
    color = [color] if isinstance(color, str) else list(color)
    for slot, keys in (("obsm", blocks.values()), ("obs", color)):
        for key in keys:
            if key not in getattr(adata, slot):
                raise KeyError(missing_key_message(slot, key, getattr(adata, slot).keys()))
    highlighted, controls = (control_label_texts(() if names is None else names) for names in (highlight, control))
    labels = {
        key: label_values(adata.obs, key, allow_missing=True)
        for key, values in adata.obs[color].items()
        if not is_numeric_dtype(values)
        or is_bool_dtype(values)
        or not {*highlighted, *controls}.isdisjoint(map(label_text, values.unique()))
    }
    known = [label_text(name) for values in labels.values() for name in values.cat.categories]
    for argument, wanted in (("highlight", highlighted), ("control", controls)):
        for name in wanted:
            if name not in known:
                msg = f"{argument}={name!r}: none of the columns {color} has this label.{suggest_name(name, known)}"
                raise ValueError(msg)
    # Cells are drawn in random order, so that cells of one label do not cover all other cells.
    rows = np.random.default_rng(seed).permutation(adata.n_obs)[:max_cells]
    drawn = AnnData(obs=adata.obs[color].iloc[rows])
    palettes: dict[str, dict[str, str]] = {}
    n_letters, legend_height = 0, 0.0
    for column, values in labels.items():
        drawn.obs[column], palettes[column] = _group_labels(values.iloc[rows], values, highlighted, controls)
        own_colors = adata.uns.get(f"{column}_colors")
        if not palettes[column] and own_colors is not None and len(own_colors) == len(values.cat.categories):
            drawn.uns[f"{column}_colors"] = own_colors
        lines = [str(name).split("\n") for name in drawn.obs[column].cat.categories]
        n_letters = max([n_letters, *(len(line) for name in lines for line in name)])
        # The legend is half as high for more than 14 labels, because scanpy then arranges them in two columns.
        entries = sum(_LINE_HEIGHT * (len(name) + 0.5) for name in lines) / (1 if len(lines) <= 14 else 2)
        legend_height = max(legend_height, entries)
    size = ((3.2 + 0.08 * n_letters) * len(color), max(2.9, legend_height + 0.3) * len(blocks))
    _, axes = plt.subplots(len(blocks), len(color), figsize=size, squeeze=False, layout="constrained")
    for line, (title, key) in zip(axes, blocks.items(), strict=True):
        if f"{key}_umap" in adata.obsm:
            drawn.obsm["X_umap"] = np.asarray(adata.obsm[f"{key}_umap"])[rows]
        else:
            embedding = np.asarray(adata.obsm[key])[rows]
            check_finite_rows(embedding, f"obsm[{key!r}]")
            drawn.obsm["X_umap"] = compute_umap(embedding, seed)
        for ax, column in zip(line, color, strict=True):
            palette = palettes.get(column) or None
            # Cells with coloured labels are drawn last, on top of controls and of cells with all other labels.
            order = np.argsort(-drawn.obs[column].cat.codes, kind="stable") if palette else slice(None)
            # The colour cycle of matplotlib is set to the common palette. scanpy uses this cycle for columns of obs
            # with at most as many labels as the cycle has colours.
            with plt.rc_context({"axes.prop_cycle": plt.cycler(color=COLORS)}):
                how: dict[str, Any] = {"legend_loc": "right margin", "legend_fontsize": "small", "palette": palette}
                how["size"] = min(_POINT_AREA / max(len(rows), 1), _MAX_POINT_AREA)
                sc.pl.umap(drawn[order].copy(), color=column, ax=ax, show=False, **how)
            ax.set_title(wrap_name(f"{title} by {column}", 22), fontsize="medium")
    return axes


def compute_umap(embedding: np.ndarray, seed: int = 0) -> np.ndarray:
    """Compute UMAP coordinates ``(N, 2)`` of an embedding ``(N, D)`` with scanpy, from 15 neighbours of each cell.

    With 15 or fewer cells, all other cells are neighbours.
    """
    import scanpy as sc
    from anndata import AnnData

    cells = AnnData(obs=pd.DataFrame(index=pd.RangeIndex(len(embedding)).astype(str)), obsm={"embedding": embedding})
    _cache_compiled_functions()
    with keep_torch_threads(), warnings.catch_warnings():
        # scipy warns if cells have identical embeddings. They are expected in a collapsed z_c, so that the warning is
        # hidden.
        warnings.simplefilter("ignore", SparseEfficiencyWarning)
        # For a few thousand cells, the neighbour search of scikit-learn is faster than scanpy's default search, which
        # must first be compiled.
        sc.pp.neighbors(
            cells,
            n_neighbors=min(15, len(embedding) - 1),
            use_rep="embedding",
            transformer="sklearn",
            random_state=seed,
        )
        sc.tl.umap(cells, random_state=seed)
    return cells.obsm["X_umap"]


def _group_labels(
    drawn: pd.Series, values: pd.Series, highlight: Sequence[str], controls: Sequence[str]
) -> tuple[pd.Series, dict[str, str]]:
    """Choose the colours of the labels in a UMAP, and merge labels that have the same colour into one label.

    All controls have the same grey, and all labels that are not coloured have the same light grey.

    Parameters
    ----------
    drawn, values
        Labels of the cells to draw, and labels of all cells.
    highlight, controls
        Texts of the labels to colour, and of the labels of controls, see :func:`umap_blocks`.

    Returns
    -------
    Categorical labels of the cells to draw, with the texts and the order of the legend; and a mapping from each of
    these labels to its colour. The mapping is empty if each label has a colour of its own and there are no controls:
    scanpy then chooses the colours.
    """
    from scanpy.plotting.palettes import default_20, default_28, default_102

    names = [label_text(name) for name in values.cat.categories]
    grey = [name for name in controls if name in names]
    colored = [name for name in highlight if name in names]
    # If the user chose no labels that occur in this column, the labels to colour are chosen here.
    if not colored:
        colored = [name for name in names if name not in grey]
        if len(names) > _MAX_COLORED_LABELS:
            n_cells = dict(zip(names, values.value_counts(sort=False), strict=True))
            # The labels with the most cells come first. Labels with equal numbers of cells keep their order, because
            # sorted is stable.
            colored = sorted(colored, key=lambda name: -n_cells[name])[:_N_HIGHLIGHTED]
    colored = [name for name in colored if name not in grey]
    others = [name for name in names if name not in colored and name not in grey]
    short = [wrap_name(name) for name in colored]
    short = short if len(set(short)) == len(short) else list(map(escape_dollars, colored))
    if not grey and not others:
        names_of_colors = dict(zip(colored, short, strict=True))
        return drawn.cat.rename_categories([names_of_colors[name] for name in names]), {}
    palettes = (_HIGHLIGHT_COLORS, default_20, default_28, default_102)
    palette = cycle(next((colors for colors in palettes if len(colored) <= len(colors)), default_102))
    colors = list(islice(palette, len(colored)))
    place = {name: number for number, name in enumerate(colored)}
    for merged, color, title in ((grey, _CONTROL_COLOR, "controls"), (others, _OTHER_COLOR, "others")):
        if merged:
            place |= dict.fromkeys(merged, len(short))
            short = [*short, wrap_name(merged[0]) if len(merged) == 1 else f"{len(merged)} {title}"]
            colors.append(color)
    # A cell with a missing label has the code -1. This code selects the last entry of the array, which is also -1.
    codes = np.array([*(place[name] for name in names), -1])[drawn.cat.codes]
    grouped = pd.Series(pd.Categorical.from_codes(codes, short), index=drawn.index)
    return grouped, dict(zip(short, colors, strict=True))


@cache
def _cache_compiled_functions() -> None:
    """Let numba store compiled functions of umap-learn on disk, for later processes.

    Compiling the functions takes longer than computing a UMAP.
    """
    # The warnings of umap-learn at its import are hidden, because they are about tensorflow, which is not needed here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from umap import layouts, umap_

    functions = [(umap_, "smooth_knn_dist"), (umap_, "compute_membership_strengths")]
    functions += [(layouts, "_nb_optimize_layout_euclidean_single_epoch")]
    for module, name in functions:
        # Errors are ignored, because caching is optional: another version of umap-learn may lack the function
        # (AttributeError), and the disk may be full or read-only (RuntimeError).
        with suppress(AttributeError, RuntimeError):
            getattr(module, name).enable_caching()
