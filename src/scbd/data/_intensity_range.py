"""Range of pixel intensities to which images are scaled, estimated from percentiles of a random sample of crops."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._shared.checks import join_first
from scbd.data._sources import iterate_blocks, rows_per_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scbd.data._readers import Crops

logger = logging.getLogger(__name__)

# number of random crops from which the intensity range is estimated
_N_SAMPLED_CROPS = 2048
# Two percentiles of the pixel intensities of a channel. When images are converted to an integer dtype, the first
# becomes the lowest and the second the highest value of this dtype.
_PERCENTILES = (0.1, 99.9)
# number of bytes of crop images that are read at once while the intensity range is estimated
_PART_BYTES = 8 * 2**20
# number of random pixels used per crop if images are floats, which have too many different values for a histogram
_N_PIXELS_PER_CROP = 1024


def output_intensity_range(
    plates: Sequence[Crops], dtype: np.dtype, intensity_range: Any, seed: int
) -> np.ndarray | None:
    """Return the range of intensities of each channel that is scaled to the range of an integer dtype.

    Parameters
    ----------
    plates
        Crops to be converted, all with the same channels and dtype.
    dtype
        Dtype of the images after the conversion.
    intensity_range
        Range given by the user: ``(low, high)``, or one such pair per channel. `None` estimates the range from the
        plates, and a log line states the result.
    seed
        Seed of the random sample of crops for the estimate.

    Returns
    -------
    Lowest and highest intensity of each channel, float32 ``(C, 2)``. `None` if intensities are not scaled, which is the
    case if ``dtype`` is a float dtype or the dtype of the plates.
    """
    n_channels, stored = plates[0].images.shape[1], plates[0].images.dtype
    if dtype.kind == "f" or dtype == stored:
        return None
    if intensity_range is None:
        found = estimate_intensity_range(plates, seed)
        told = (f"{name} {low:g} to {high:g}" for name, (low, high) in zip(plates[0].channels, found, strict=True))
        logger.info(
            "%s holds these intensities, and what is beyond is cut off (intensity_range): %s.",
            dtype,
            join_first(told, 8),
        )
    else:
        found = np.asarray(intensity_range, dtype=np.float32)
    return np.array(np.broadcast_to(found, (n_channels, 2)))


def estimate_intensity_range(plates: Sequence[Crops], seed: int) -> np.ndarray:
    """Estimate the 0.1 % and 99.9 % percentiles of the pixel intensities of each channel.

    The estimate uses about 2,048 random crops: all their pixels if images are integers, and 1,024 random pixels per
    crop if they are floats. If the two percentiles of a channel are equal, the upper one is set to the lower one
    plus 1.

    Parameters
    ----------
    plates
        Crops, all with the same channels and dtype.
    seed
        Seed of the random sample of crops and pixels.

    Returns
    -------
    Lower and upper percentile of each channel, float32 ``(C, 2)``.

    Raises
    ------
    ValueError
        If a sampled crop has NaN or infinite pixels. The message names the crop.
    """
    rng = np.random.default_rng(seed)
    of_pixels = rng.spawn(1)[0]
    total = sum(len(plate.obs) for plate in plates)
    n_channels, dtype = plates[0].images.shape[1], plates[0].images.dtype
    counts = np.zeros((n_channels, 0 if dtype.kind == "f" else 2 ** (8 * dtype.itemsize)), np.int64)
    values = []
    for plate in plates:
        n = len(plate.obs)
        rows = np.sort(rng.choice(n, min(n, -(-_N_SAMPLED_CROPS * n // total)), replace=False))
        step = rows_per_block(plate.images.shape, dtype, _PART_BYTES)
        for part in (rows[block] for block in iterate_blocks(len(rows), step)):
            images = plate.images.read(part)
            check_finite(images, plate, part)
            pixels = images.reshape(*images.shape[:2], -1)
            if dtype.kind != "f":
                for channel, of_channel in enumerate(counts):
                    of_channel += np.bincount(pixels[:, channel].ravel(), minlength=len(of_channel))
                continue
            if pixels.shape[2] > _N_PIXELS_PER_CROP:  # draw with replacement, at the same positions in all channels
                drawn = of_pixels.integers(pixels.shape[2], size=(len(part), 1, _N_PIXELS_PER_CROP))
                pixels = np.take_along_axis(pixels, drawn, axis=2)
            values.append(np.moveaxis(pixels, 1, 0).reshape(n_channels, -1))
    if values:
        found = np.percentile(np.concatenate(values, axis=1), _PERCENTILES, axis=1)
    else:
        found = percentiles_from_counts(counts, _PERCENTILES)
    low, high = found.astype(np.float32)
    return np.stack([low, np.where(high > low, high, low + 1)], axis=1)


def percentiles_from_counts(counts: np.ndarray, percentiles: Sequence[float]) -> np.ndarray:
    """Compute percentiles of pixel intensities from one histogram per channel.

    Parameters
    ----------
    counts
        Histogram of each channel, ``(C, K)``: ``counts[c, k]`` is the number of pixels of channel ``c`` that have the
        intensity ``k``. All channels have the same number of pixels.
    percentiles
        P percentiles to compute, from 0 to 100.

    Returns
    -------
    Intensities, float64 ``(P, C)``. They equal the result of ``np.percentile`` for the pixels of each channel.
    """
    places = np.asarray(percentiles) / 100 * (counts[0].sum() - 1)
    upto = counts.cumsum(axis=1)
    below, above = (
        np.stack([np.searchsorted(channel, ranks, side="right") for channel in upto], axis=1)
        for ranks in (np.floor(places), np.ceil(places))
    )
    return below + (above - below) * (places % 1)[:, None]


def check_finite(images: np.ndarray, plate: Crops, rows: np.ndarray) -> None:
    """Raise an error if images have NaN or infinite pixels.

    Parameters
    ----------
    images
        Images ``(N, C, H, W)``. Integers are always finite, so that only images of floats are checked.
    plate
        Plate that the images were read from. Its name and its names of cells are used in the error message.
    rows
        Row number of each image in this plate, ``(N,)``, for the error message.

    Raises
    ------
    ValueError
        If an image has NaN or infinite pixels. The message names the plate, and the row and the name of each such cell.
    """
    if images.dtype.kind != "f":
        return
    bad = rows[~np.isfinite(images).all(axis=(1, 2, 3))]
    if bad.size:
        names = join_first(f"row {row} ({plate.obs.index[row]})" for row in bad)
        msg = f"{plate.name} has NaN or infinite pixels as {images.dtype}: {names}. Drop these cells or repair them."
        raise ValueError(msg)
