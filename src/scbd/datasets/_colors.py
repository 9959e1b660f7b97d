"""How digits are coloured: a colour an environment, and how pale it is tells the digit."""

from __future__ import annotations

import colorsys

import numpy as np
import pandas as pd


def colorize(grey: np.ndarray, digits: np.ndarray, environments: np.ndarray) -> np.ndarray:
    """Colour grey digits by the paper's recipe (appendix, Colored MNIST).

    Parameters
    ----------
    grey
        Intensities in [0, 1], ``(N, H, W)``.
    digits
        0 to 9, ``(N,)``.
    environments
        ``"red"``: the red channel 1, the others ``y / 10``; ``"green"``: the green channel 1, the others
        ``(9 - y) / 10``; ``"white"``: all channels 1. ``(N,)``.

    Returns
    -------
    uint8 ``(N, 3, H, W)``.
    """
    names, hues, shades = paints(2, seed=0)
    return painted(grey, digits, pd.Categorical(environments, names).codes, hues, shades)


def paints(n: int, seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Name, hue ``(n, 3)``, and how pale each digit is ``(n, 10)``, of n environments."""
    pale = np.arange(10) / 10
    # a third of the circle from red to green, as published
    hues = np.array([colorsys.hsv_to_rgb(k / max(n, 3), 1.0, 1.0) for k in range(n)])
    rng = np.random.default_rng([seed, 2])
    shades = np.stack([pale, pale[::-1], *(rng.permutation(pale) for _ in range(n - 2))])
    return ["red", "green"] if n == 2 else [f"hue_{k}" for k in range(n)], hues, shades


def painted(
    grey: np.ndarray,
    digits: np.ndarray,
    environments: np.ndarray,
    hues: np.ndarray,
    shades: np.ndarray,
    *,
    rounded: bool = True,
) -> np.ndarray:
    """``(N, 3, H, W)``, uint8 or, where they are not rounded, float32 from 0 to 1; environment -1 stays white."""
    hue, shade = hues[environments], shades[environments, digits][:, None]
    color = (hue + shade * (1 - hue)).astype(np.float32)
    color[environments < 0] = 1
    grey, color = grey[:, None].astype(np.float32), color[:, :, None, None]
    return np.rint(255 * grey * color).astype(np.uint8) if rounded else grey * color
