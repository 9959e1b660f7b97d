"""One block of a cell, the other of another: the paper's grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


def counterfactuals(
    model: Any,
    rows: Sequence[int],
    *,
    partners: Sequence[int] | None = None,
    adata: AnnData | None = None,
    channels: Sequence[int] | None = None,
) -> np.ndarray:
    """Draw cells, their reconstructions, and what they become with the content, or the style, of their partners.

    Parameters
    ----------
    model
        With a decoder: ``model.train_decoder()``.
    rows
        Cells, one a column.
    partners
        Whose block each gets; by default the next one's.
    adata
        The cells; the training data by default.
    channels
        Three channels to show as red, green and blue, or one to show in grey. By default all of three, or the first.

    Returns
    -------
    Axes ``(5, len(rows))``: original, partner, reconstruction, content of the partner, style of the partner.

    Raises
    ------
    ValueError
        If the model has no decoder or a single block, partners are not as many as cells, or channels not one or three.

    Examples
    --------
    >>> axes = scbd.pl.counterfactuals(model, rows=[3, 5, 8, 9], channels=[0, 1, 2])
    """
    import matplotlib.pyplot as plt

    rows = list(rows)
    others = list(np.roll(rows, -1)) if partners is None else list(partners)
    if len(others) != len(rows):
        msg = f"There are {len(rows)} cells and {len(others)} partners: each cell has one."
        raise ValueError(msg)
    lines = {
        "original": model.get_intensities(adata, rows),
        "partner": model.get_intensities(adata, others),
        "reconstruction": model.reconstruct(adata, rows),
        "content of partner": model.swap_blocks(others, rows, adata),
        "style of partner": model.swap_blocks(rows, others, adata),
    }
    n_channels = lines["original"].shape[1]
    shown = list(channels) if channels is not None else list(range(3)) if n_channels == 3 else [0]
    if len(shown) not in (1, 3):
        msg = f"channels={shown}: name one channel to show in grey, or three as red, green and blue."
        raise ValueError(msg)
    everything = np.concatenate([lines["original"], lines["reconstruction"]])[:, shown]
    low, high = (everything.min((0, 2, 3)), everything.max((0, 2, 3)))
    figure, axes = plt.subplots(
        len(lines), len(rows), figsize=(0.9 * len(rows) + 1.4, 0.95 * len(lines)), squeeze=False, layout="constrained"
    )
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for ax, image in zip(line, images, strict=True):
            picture = (image[shown].transpose(1, 2, 0) - low) / np.where(high > low, high - low, 1)
            ax.imshow(np.clip(picture, 0, 1).squeeze(), cmap="gray", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return axes
