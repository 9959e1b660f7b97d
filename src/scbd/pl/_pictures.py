"""Decoded pictures beside each other, all in one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


def channels_shown(channels: Sequence[int] | None, n_channels: int) -> list[int]:
    """Three channels for colours or one for grey: those asked for, else all of three, or the first.

    Raises
    ------
    ValueError
        If others than one or three are asked for.
    """
    shown = list(channels) if channels is not None else list(range(3)) if n_channels == 3 else [0]
    if len(shown) not in (1, 3):
        msg = f"channels={shown}: name one channel to show in grey, or three as red, green and blue."
        raise ValueError(msg)
    return shown


def draw_picture(ax: Axes, image: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """An image ``(1 or 3, H, W)``, black at ``low`` and full at ``high``, one number a channel."""
    picture = (image.transpose(1, 2, 0) - low) / np.where(high > low, high - low, 1)
    ax.imshow(np.clip(picture, 0, 1).squeeze(), cmap="gray", vmin=0, vmax=1)
    bare(ax)


def bare(ax: Axes) -> None:
    """No ticks and no frame."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
