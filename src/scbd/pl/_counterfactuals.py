"""One block of a cell, the other of another: the paper's grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.pl._names import LARGEST
from scbd.pl._pictures import channels_shown, draw_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


def counterfactuals(
    model: Any,
    rows: Sequence[int] | np.ndarray,
    *,
    partners: Sequence[int] | np.ndarray | None = None,
    adata: AnnData | None = None,
    channels: Sequence[int] | int | None = None,
    adapt_key: str | Sequence[str] | None = None,
) -> np.ndarray:
    """Draw cells, their reconstructions, and what they become with the content, or the style, of their partners.

    Parameters
    ----------
    model
        With a decoder: ``model.train_decoder()``.
    rows
        Cells, one a column: row numbers, or a boolean mask.
    partners
        Whose block each gets, as many; by default the next one's.
    adata
        The cells; the training data by default.
    channels
        Three channels to show as red, green and blue, or one to show in grey. By default all of three, or the first.
    adapt_key
        Show cells of new plates by what ``model.adapt`` learned of them.

    Returns
    -------
    Axes ``(5, len(rows))``: original, partner, reconstruction, content of the partner, style of the partner.

    Raises
    ------
    ValueError
        If the model has no decoder or a single block or is one of features, there are no cells, partners are not as
        many, or channels not one or three of its own.

    Examples
    --------
    >>> axes = scbd.pl.counterfactuals(model, rows=[3, 5, 8, 9], channels=[0, 1, 2])
    """
    import matplotlib.pyplot as plt

    originals = model.get_intensities(adata, rows)
    shown = channels_shown(channels, originals)
    own = _numbers(rows)
    others = np.roll(own, -1) if partners is None else partners
    if len(_numbers(others)) != len(own):
        msg = f"There are {len(own)} cells and {len(_numbers(others))} partners: each cell has one."
        raise ValueError(msg)
    # first, as it refuses a model of a single block
    swapped = {
        "content of partner": model.swap_blocks(others, own, adata, adapt_key=adapt_key),
        "style of partner": model.swap_blocks(own, others, adata, adapt_key=adapt_key),
    }
    lines = {
        "original": originals,
        "partner": model.get_intensities(adata, others),
        "reconstruction": model.reconstruct(adata, own, adapt_key=adapt_key),
        **swapped,
    }
    everything = np.concatenate([lines["original"], lines["reconstruction"]])[:, shown]
    low, high = (everything.min((0, 2, 3)), everything.max((0, 2, 3)))
    figure, axes = plt.subplots(
        len(lines), len(own), figsize=(0.85 * len(own) + 1.5, 0.9 * len(lines)), squeeze=False, layout="constrained"
    )
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for ax, image in zip(line, images, strict=True):
            draw_picture(ax, image[shown], low, high)
        line[0].set_ylabel(name.replace(" of ", "\nof "), rotation=0, ha="right", va="center", fontsize=LARGEST)
    return axes


def _numbers(rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row numbers of a mask; others as they are."""
    rows = np.asarray(rows)
    return np.flatnonzero(rows) if rows.dtype == bool else rows
