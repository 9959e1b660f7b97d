"""A look at pixels before anything is made of them: NaN, and channels that show nothing."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from scbd._messages import head
from scbd.data.sources import non_finite_rows

if TYPE_CHECKING:
    from scbd.data.sources import ImageSource

# cells that are looked at: a few of any store can be read in no time
_SAMPLED = 64


def check_pixels(source: ImageSource, channels: list[str], image_key: str) -> None:
    """Look at images once: at all of them in memory, elsewhere at 64 cells that are always the same for so many.

    What the sample does not meet is met later: statistics of the channels, every training step and every embedding
    look at the pixels that they read.

    Raises
    ------
    ValueError
        If an image holds a NaN or an infinity, naming the rows.

    Warns
    -----
    UserWarning
        If a channel has the same value in all pixels of the sample: transparency, or an empty channel.
    """
    n = source.shape[0]
    rows = np.sort(np.random.default_rng(n).choice(n, min(n, _SAMPLED), replace=False))
    sample = source.read(rows)
    if source.in_memory:
        bad, among = non_finite_rows(source), f"{n} cells"
    else:
        bad, among = rows[~np.isfinite(sample).all(axis=(1, 2, 3))], f"{len(rows)} cells that were looked at"
    if bad.size:
        msg = (
            f"obsm[{image_key!r}] has NaN or infinite pixels in {bad.size} of {among} (rows {head(bad)}): drop these "
            "cells or repair their images."
        )
        raise ValueError(msg)
    low, high = sample.min(axis=(0, 2, 3)), sample.max(axis=(0, 2, 3))
    if len(rows) > 1 and (low == high).any():
        same = np.flatnonzero(low == high)
        values = [f"{channels[i]} ({low[i]:g})" for i in same]
        rest = [channels[i] for i in np.flatnonzero(low != high)]
        msg = (
            f"obsm[{image_key!r}] has one value in every pixel of {', '.join(values)}, in {len(rows)} cells looked at: "
            "an empty channel, or the transparency of a picture, says nothing about cells."
            + (f" To leave it out: channels={rest}." if rest else "")
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
