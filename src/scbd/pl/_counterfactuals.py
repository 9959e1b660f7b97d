"""One block of a cell, the other of another: the paper's grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.pl._pictures import channels_shown, draw_picture

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
    shown = channels_shown(channels, lines["original"].shape[1])
    everything = np.concatenate([lines["original"], lines["reconstruction"]])[:, shown]
    low, high = (everything.min((0, 2, 3)), everything.max((0, 2, 3)))
    figure, axes = plt.subplots(
        len(lines), len(rows), figsize=(0.85 * len(rows) + 1.2, 0.9 * len(lines)), squeeze=False, layout="constrained"
    )
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for ax, image in zip(line, images, strict=True):
            draw_picture(ax, image[shown], low, high)
        line[0].set_ylabel(name.replace(" of ", "\nof "), rotation=0, ha="right", va="center")
    return axes
