"""The range of intensities of many crops, from a sample that is read in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd.data.stores._finite import check_finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scbd.data.stores._crops import Crops

_SAMPLED = 2048
_PERCENTILES = (0.1, 99.9)
# that are read at once, and pixels that are counted at once
_PART_BYTES = 32 * 2**20
_COUNTED = 2**20
# of each crop of floats, which cannot be counted
_PIXELS = 1024


def sampled_range(plates: Sequence[Crops], seed: int) -> np.ndarray:
    """Extreme percentiles of each channel, ``(C, 2)``; a channel that never varies keeps its one value as the lowest.

    Of whole numbers they are those of all pixels of 2,048 random crops, of floats those of 1,024 random pixels of each.

    Parameters
    ----------
    plates
        All of one dtype.
    seed
        Of the sample.

    Raises
    ------
    ValueError
        If a crop of the sample has NaN or infinite pixels (which).
    """
    rng = np.random.default_rng(seed)
    of_pixels = rng.spawn(1)[0]
    total = sum(len(plate.obs) for plate in plates)
    n_channels, dtype = plates[0].images.shape[1], plates[0].images.dtype
    counts = np.zeros((n_channels, 0 if dtype.kind == "f" else 2 ** (8 * dtype.itemsize)), np.int64)
    values = []
    for plate in plates:
        n = len(plate.obs)
        rows = np.sort(rng.choice(n, min(n, -(-_SAMPLED * n // total)), replace=False))
        for part in _parts(plate, rows):
            images = plate.images.read(part)
            check_finite(images, plate, part)
            pixels = images.reshape(*images.shape[:2], -1)
            if dtype.kind == "f":
                values.append(np.moveaxis(_some(pixels, of_pixels), 1, 0).reshape(n_channels, -1))
            else:
                _count(pixels, counts)
    if values:
        found = np.percentile(np.concatenate(values, axis=1), _PERCENTILES, axis=1)
    else:
        found = percentiles_of(counts, _PERCENTILES)
    low, high = found.astype(np.float32)
    return np.stack([low, np.where(high > low, high, low + 1)], axis=1)


def percentiles_of(counts: np.ndarray, percentiles: Sequence[float]) -> np.ndarray:
    """What ``np.percentile`` says of the numbers that were counted.

    Parameters
    ----------
    counts
        Of each channel how often each of the numbers 0, 1, … is there, ``(C, K)``; as many in all channels.
    percentiles
        P of them.

    Returns
    -------
    Float64 ``(P, C)``.
    """
    places = np.asarray(percentiles) / 100 * (counts[0].sum() - 1)
    upto = counts.cumsum(axis=1)
    below, above = (
        np.stack([np.searchsorted(channel, ranks, side="right") for channel in upto], axis=1)
        for ranks in (np.floor(places), np.ceil(places))
    )
    return below + (above - below) * (places % 1)[:, None]


def _parts(plate: Crops, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Rising rows, as many as are read at once; not cut in the midst of a chunk, which would be read twice."""
    images = plate.images
    n_rows = max(1, _PART_BYTES // (int(np.prod(images.shape[1:])) * images.dtype.itemsize))
    chunk, start = getattr(images, "chunk_rows", 1), 0
    while start < len(rows):
        stop = min(start + n_rows, len(rows))
        if stop < len(rows):
            edge = int(np.searchsorted(rows, rows[stop] // chunk * chunk))
            stop = edge if edge > start else stop
        yield rows[start:stop]
        start = stop


def _some(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random pixels of each crop, the same in all its channels; all, where there are no more."""
    n, _, size = pixels.shape
    return pixels if size <= _PIXELS else np.take_along_axis(pixels, rng.integers(size, size=(n, 1, _PIXELS)), axis=2)


def _count(pixels: np.ndarray, counts: np.ndarray) -> None:
    step = max(1, _COUNTED // pixels.shape[2])
    for start in range(0, len(pixels), step):
        for channel, of_channel in enumerate(counts):
            of_channel += np.bincount(pixels[start : start + step, channel].ravel(), minlength=len(of_channel))
