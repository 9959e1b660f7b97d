"""Looking at cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._keys import IMAGE_KEY
from scbd.pl._names import LARGEST, wrapped
from scbd.pl._pictures import require_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# in per cent of pixels
_DARKEST, _BRIGHTEST = 0.5, 99.5
# so many fit the width of a page, and can still be seen on a phone
_SHOWN = 6
# in inches, of a picture and of a line of text
_PICTURE, _LINE = 0.8, 0.2


def cells(
    adata: AnnData,
    *,
    label: str | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    image_key: str = IMAGE_KEY,
    seed: int = 0,
) -> np.ndarray:
    """Draw some cells: three channels as colour, others one line a channel in grey.

    Each channel is as bright as its brightest pixels but one in 200: a single hot one would leave all else black. Black
    is 0; where there are negative values, as in standardised images, the darkest pixels but one in 200. Where
    ``var`` has a row a channel, their names stand at the left.

    Parameters
    ----------
    adata
        Cells with images in ``obsm``.
    label
        Column of ``obs`` to write above each cell.
    rows
        Which cells, by number or as a boolean mask; six random ones by default.
    image_key
        Key of the images.
    seed
        Seed of the choice.

    Returns
    -------
    Axes, ``(lines, cells)``.

    Raises
    ------
    KeyError
        If there are no such images, or no such column.
    ValueError
        If there are no cells.

    Examples
    --------
    >>> axes = scbd.pl.cells(adata, label="well")
    """
    import matplotlib.pyplot as plt

    if image_key not in adata.obsm:
        msg = f"obsm has no {image_key!r} to draw (its keys: {', '.join(adata.obsm.keys()) or 'none'})."
        raise KeyError(msg)
    if label is not None and label not in adata.obs:
        msg = f"obs has no {label!r} to write (its keys: {', '.join(adata.obs.keys()) or 'none'})."
        raise KeyError(msg)
    if rows is None:
        rows = np.random.default_rng(seed).choice(adata.n_obs, min(_SHOWN, adata.n_obs), replace=False)
    asked = np.asarray(rows)
    chosen = np.arange(adata.n_obs)[asked if len(asked) else np.zeros(0, int)]
    require_cells(chosen)
    images = np.asarray(adata.obsm[image_key][chosen], dtype=np.float32)
    n, c = images.shape[:2]
    low, top = np.percentile(images, [_DARKEST, _BRIGHTEST], axis=(0, 2, 3), keepdims=True)
    low = np.minimum(low, 0)
    top = np.where(top > low, top, images.max((0, 2, 3), keepdims=True))  # a channel of few spots
    images = ((images - low) / np.where(top > low, top - low, 1)).clip(0, 1)
    lines = [images.transpose(0, 2, 3, 1)] if c == 3 else list(images.transpose(1, 0, 2, 3))
    named = adata.n_vars == c
    channels = [", ".join(map(str, adata.var_names))] if c == 3 else list(map(str, adata.var_names))
    names = [wrapped(name, _PICTURE, LARGEST) for name in channels] if named else []
    titles = [wrapped(name, _PICTURE, LARGEST) for name in _texts(adata, label, chosen)]
    beside, above = (_LINE * max((text.count("\n") + 1 for text in texts), default=0) for texts in (names, titles))
    figure, axes = plt.subplots(
        len(lines),
        n,
        figsize=(1.0 * n + 0.1 + beside, 1.1 * len(lines) + above),
        squeeze=False,
        layout="constrained",
    )
    for line, drawn in zip(axes, lines, strict=True):
        for ax, image in zip(line, drawn, strict=True):
            ax.imshow(image, cmap="gray", vmin=0, vmax=1)
            ax.set_axis_off()
    for ax, name in zip(axes[:, 0], names, strict=False):
        at: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "center", "transform": ax.transAxes}
        ax.text(-0.05, 0.5, name, fontsize=LARGEST, **at)
    for ax, title in zip(axes[0], titles, strict=False):
        ax.set_title(title, fontsize=LARGEST)
    return axes


def _texts(adata: AnnData, label: str | None, rows: np.ndarray) -> list[str]:
    """What to write above each cell, if anything."""
    if label is None:
        return []
    values = adata.obs[label].iloc[rows]
    return [str(value) if known else "missing" for value, known in zip(values, values.notna(), strict=True)]
