"""Which pixels a crop has: its centre, its window, and what is beyond the edge of a field."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def centre_pixels(yx: np.ndarray) -> np.ndarray:
    """Pixels nearest to positions, half-way ones to the lower right: pixel 3 reaches from 2.5 up to 3.5."""
    return np.floor(yx + 0.5).astype(np.int64)


class Span(NamedTuple):
    """Along one axis, the pixels of several crops."""

    pixels: np.ndarray
    """Of each crop and place in it the pixel of the field, int ``(N, n)``."""
    inside: np.ndarray
    """Of each crop, whether all its places lie in the field, bool ``(N,)``."""
    beyond: np.ndarray
    """Of each crop, whether a place lies outside of it, bool ``(N, n)``."""

    @property
    def box(self) -> slice:
        """All pixels from the first to the last."""
        return slice(int(self.pixels.min()), int(self.pixels.max()) + 1)


def span(centres: np.ndarray, n: int, length: int, *, reflect: bool) -> Span:
    """Windows of ``n`` pixels whose place ``n // 2`` is the centre, in a field of some length.

    Parameters
    ----------
    centres
        Pixels, int ``(N,)``.
    n
        Pixels of a window.
    length
        Of the field.
    reflect
        What lies beyond the edge: the field mirrored at its last pixel (which is not repeated), or that pixel.
    """
    wanted = (centres - n // 2)[:, None] + np.arange(n)
    beyond = (wanted < 0) | (wanted >= length)
    pixels = np.clip(wanted, 0, length - 1)
    if reflect and length > 1:
        period = 2 * (length - 1)
        folded = wanted % period
        pixels = np.minimum(folded, period - folded)
    return Span(pixels, np.asarray(~beyond.any(axis=1)), beyond)


def near_edge(centres: np.ndarray, extent: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Whether windows reach over an edge: centres, window sizes and lengths of fields are all int ``(N, 2)``."""
    first = centres - extent // 2
    return ((first < 0) | (first + extent > lengths)).any(axis=1)
