"""Decoded pictures beside each other, all in one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


def channels_shown(channels: Sequence[int] | int | None, images: np.ndarray) -> list[int]:
    """Three channels of images ``(N, C, H, W)`` for colours or one for grey: as asked, else all of three, or the first.

    Raises
    ------
    ValueError
        If others than one or three are asked for, or such that are not there; if these are features, or of no cell.
    """
    if images.ndim != 4:
        msg = "The model is one of features, which make no pictures: take the numbers from the model's own methods."
        raise ValueError(msg)
    require_cells(images)
    n = images.shape[1]
    if channels is None:
        return list(range(3)) if n == 3 else [0]
    shown = np.atleast_1d(channels)
    if shown.shape not in ((1,), (3,)) or shown.dtype.kind not in "iu" or not ((-n <= shown) & (shown < n)).all():
        msg = (
            f"channels={channels!r}: name one channel to show in grey, or three as red, green and blue, by their "
            f"numbers from 0 to {n - 1}."
        )
        raise ValueError(msg)
    return shown.tolist()


def require_cells(rows: np.ndarray) -> None:
    """Raise a ``ValueError`` if these are of no cell."""
    if not len(rows):
        msg = "rows names no cell: name one or more to draw."
        raise ValueError(msg)


def draw_picture(ax: Axes, image: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """An image ``(1 or 3, H, W)``, black at ``low`` and full at ``high``, one number a channel."""
    picture = (image.transpose(1, 2, 0) - low) / np.where(high > low, high - low, 1)
    ax.imshow(np.clip(picture, 0, 1).squeeze(), cmap="gray", vmin=0, vmax=1)
    bare(ax)


def bare(ax: Axes) -> None:
    """No ticks and no frame."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
