"""Cells on the way from one perturbation to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.pl._names import LARGEST, wrapped
from scbd.pl._pictures import bare, channels_shown, draw_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

# in inches, of a picture and of a line of text
_PICTURE, _LINE = 0.8, 0.2


def traverse(
    model: Any,
    rows: Sequence[int] | np.ndarray,
    to: str | float,
    *,
    adata: AnnData | None = None,
    n_steps: int = 5,
    channels: Sequence[int] | int | None = None,
    adapt_key: str | Sequence[str] | None = None,
) -> np.ndarray:
    """Draw what a perturbation does to cells, such as controls, each in its own well.

    Parameters
    ----------
    model
        With a decoder: ``model.train_decoder()``.
    rows
        Cells, one a line: row numbers, or a boolean mask.
    to
        The perturbation, a label of ``y_key``.
    adata
        The cells; the training data by default.
    n_steps
        Pictures on the way, see :meth:`scbd.SCBDModel.traverse`.
    channels
        Three channels to show as red, green and blue, or one to show in grey. By default all of three, or the first.
    adapt_key
        Show cells of new plates by what ``model.adapt`` learned of them.

    Returns
    -------
    Axes ``(len(rows), n_steps + 2)``: the cell; the pictures on the way, the first of which is its reconstruction; and
    what has changed in the end, the mean of the channels shown: brighter is red, darker is blue.

    Raises
    ------
    KeyError
        If no cell has the perturbation.
    ValueError
        If the model has no decoder or is one of features, there are no cells, or channels are not one or
        three of its own.

    Examples
    --------
    >>> axes = scbd.pl.traverse(model, rows=[3, 5], to="g0_1", channels=[0, 1, 2])  # doctest: +SKIP
    """
    import matplotlib.pyplot as plt

    originals = model.get_intensities(adata, rows)
    shown = channels_shown(channels, originals)
    paths = model.traverse(rows, to, adata, n_steps=n_steps, adapt_key=adapt_key)
    originals, paths = originals[:, shown], paths[:, :, shown]
    everything = np.concatenate([originals, paths.reshape(-1, *paths.shape[2:])])
    low, high = everything.min((0, 2, 3)), everything.max((0, 2, 3))
    change = (paths[:, -1] - paths[:, 0]).mean(1)
    most = np.abs(change).max() or 1.0
    n, width = paths.shape[0], n_steps + 2
    goal = wrapped(to, _PICTURE, LARGEST)
    above = 0.3 + _LINE * goal.count("\n")
    figure, axes = plt.subplots(n, width, figsize=(0.95 * width, 1.0 * n + above), squeeze=False, layout="constrained")
    for line, original, path, difference in zip(axes, originals, paths, change, strict=True):
        for ax, image in zip(line, [original, *path], strict=False):
            draw_picture(ax, image, low, high)
        line[-1].imshow(difference, cmap="RdBu_r", vmin=-most, vmax=most)
        bare(line[-1])
    for ax, name in zip(axes[0, [0, 1, -2, -1]], ("cell", "decoded", goal, "change"), strict=True):
        ax.set_title(name, fontsize=LARGEST)
    return axes
