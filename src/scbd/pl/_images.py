"""Looking at cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._keys import IMAGE_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


def cells(
    adata: AnnData,
    *,
    label: str | None = None,
    rows: Sequence[int] | None = None,
    image_key: str = IMAGE_KEY,
    seed: int = 0,
) -> np.ndarray:
    """Draw some cells: three channels as colour, others one line a channel in grey.

    Parameters
    ----------
    adata
        Cells with images in ``obsm``.
    label
        Column of ``obs`` to write above each cell.
    rows
        Which cells; ten random ones by default.
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
        If there are no such images.

    Examples
    --------
    >>> axes = scbd.pl.cells(adata, label="well")
    """
    import matplotlib.pyplot as plt

    if image_key not in adata.obsm:
        msg = f"obsm has no {image_key!r} to draw (its keys: {', '.join(adata.obsm.keys()) or 'none'})."
        raise KeyError(msg)
    if rows is None:
        rows = np.random.default_rng(seed).choice(adata.n_obs, min(10, adata.n_obs), replace=False)
    images = np.asarray(adata.obsm[image_key][np.asarray(rows)], dtype=np.float32)
    n, c = images.shape[:2]
    top = images.max((0, 2, 3), keepdims=True)
    images /= np.where(top > 0, top, 1)
    lines = [images.transpose(0, 2, 3, 1)] if c == 3 else list(images.transpose(1, 0, 2, 3))
    figure, axes = plt.subplots(len(lines), n, figsize=(1.2 * n, 1.3 * len(lines)), squeeze=False, layout="constrained")
    for line, drawn in zip(axes, lines, strict=True):
        for ax, image in zip(line, drawn, strict=True):
            ax.imshow(image, cmap="gray", vmin=0, vmax=1)
            ax.set_axis_off()
    if label is not None:
        for ax, row in zip(axes[0], rows, strict=True):
            ax.set_title(str(adata.obs[label].iloc[row]), fontsize="small")
    return axes
