"""Simulated cells drawn in four channels, and what a microscope makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.ndimage import gaussian_filter1d

if TYPE_CHECKING:
    import pandas as pd

CHANNELS = ("DNA damage", "F-actin", "DNA", "microtubules")
# what a perturbation can change, and the standard deviation of each between cells of one guide
PHENOTYPES = {
    "nucleus_size": 0.10,
    "nucleus_elongation": 0.12,
    "dna_intensity": 0.12,
    "damage_foci": 0.25,
    "cell_size": 0.10,
    "actin_ring": 0.20,
    "tubulin_intensity": 0.15,
    "tubulin_frequency": 0.12,
}


def draw(rng: np.random.Generator, parameters: np.ndarray, size: int) -> np.ndarray:
    """Ideal images ``(n, 4, size, size)`` of cells with these phenotypes, about 1 at their brightest."""
    n = len(parameters)
    p = dict(zip(PHENOTYPES, parameters.astype(np.float32).T[:, :, None, None], strict=True))
    unit = (np.arange(size, dtype=np.float32) - (size - 1) / 2) / (size / 2)
    shift = 0.08 * rng.normal(size=(2, n, 1, 1)).astype(np.float32)
    x, y = unit[None, None, :] - shift[0], unit[None, :, None] - shift[1]
    angle = rng.uniform(0, 2 * np.pi, (n, 1, 1)).astype(np.float32)
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    stretch = np.sqrt(1.2 * p["nucleus_elongation"])
    nuclear_radius = np.sqrt((along / stretch) ** 2 + (across * stretch) ** 2) / (0.33 * p["nucleus_size"])
    cell_radius = np.sqrt((along / 1.1) ** 2 + (across * 1.1) ** 2) / (0.72 * p["cell_size"])
    nucleus, cell = _disk(nuclear_radius, 12), _disk(cell_radius, 10)
    phase = rng.uniform(0, 2 * np.pi, (2, n, 1, 1)).astype(np.float32)
    chromatin = 1 + 0.15 * np.sin(19 * along + phase[0]) * np.sin(17 * across + phase[1])
    dna = 0.8 * p["dna_intensity"] * nucleus * chromatin
    foci = np.zeros_like(dna)
    for _ in range(4):
        place = 0.18 * rng.normal(size=(2, n, 1, 1)).astype(np.float32)
        foci += np.exp(-((along - place[0]) ** 2 + (across - place[1]) ** 2) / 0.003)
    damage = nucleus * (0.15 + 0.4 * p["damage_foci"] * foci)
    ring = np.exp(-(((cell_radius - 0.93) / 0.1) ** 2))
    actin = 0.25 * cell + 0.6 * p["actin_ring"] * ring
    theta = np.arctan2(across, along)
    fibres = 0.6 + 0.4 * np.sin(
        9 * p["tubulin_frequency"] * (cell_radius + 0.15 * np.sin(3 * theta)) * np.pi + phase[0]
    )
    tubulin = 0.7 * p["tubulin_intensity"] * cell * fibres * (1 - 0.7 * nucleus)
    return np.stack([damage, actin, dna, tubulin], axis=1)


def _disk(radius: np.ndarray, sharpness: float) -> np.ndarray:
    return 1 / (1 + np.exp(np.clip(sharpness * (radius - 1), -30, 30)))


def photograph(rng: np.random.Generator, images: np.ndarray, wells: pd.DataFrame, size: int) -> np.ndarray:
    """What the microscope makes of ideal images in their wells: focus, stain, illumination, background, noise.

    Parameters
    ----------
    rng
        Draws the noise.
    images
        Of one cell or of many, ``(n, 4, side, side)``; overwritten.
    wells
        A row an image.
    size
        Pixels a side of what was drawn as one cell.
    """
    unit = np.linspace(-1, 1, images.shape[-1], dtype=np.float32)
    for blur in wells["blur"].unique():
        of_well = (wells["blur"] == blur).to_numpy()
        sigma = float(blur) * size / 64
        blurred = gaussian_filter1d(images[of_well], sigma, axis=2, truncate=3)
        images[of_well] = gaussian_filter1d(blurred, sigma, axis=3, truncate=3)
    column = {name: wells[name].to_numpy(np.float32)[:, None, None, None] for name in wells}
    light = 1 + column["tilt_x"] * unit + column["tilt_y"] * unit[:, None]
    gain = wells[[f"gain_{channel}" for channel in CHANNELS]].to_numpy(np.float32)[:, :, None, None]
    images = images * gain * np.clip(light, 0.1, None) + column["background"]
    if wells["saturation"].any():
        images /= 1 + column["saturation"] * images
    if (wells["gamma"] != 1).any():
        images **= column["gamma"]
    noise = rng.standard_normal(images.shape, dtype=np.float32)
    images += noise * (0.01 + 0.04 * np.sqrt(np.clip(images, 0, None)))
    return np.clip(np.rint(120 * images), 0, 255).astype(np.uint8)
