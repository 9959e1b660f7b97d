"""Principal components of pixels, a linear baseline for the embedding of cell images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._shared.keys import IMAGE_KEY
from scbd.corrections._tables import selected_rows
from scbd.data._input_location import InputLocation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

# maximum number of cells to which the principal components are fitted
_MAX_FIT_CELLS = 5_000
# number of cells whose images are read and embedded at once
_CELLS_PER_PART = 2_048
# approximate number of pixels per side of an image, after averaging over squares of pixels
_PIXELS_PER_SIDE = 16


def pixel_pca(
    adata: AnnData,
    *,
    n_components: int = 50,
    scale_channels: bool = True,
    image_key: str = IMAGE_KEY,
    channels: Sequence[str | int] | Mapping[str, str | int] | None = None,
    fit: ArrayLike | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Embed cells by the principal components of their pixels.

    Images are first reduced to about 16 pixels per side, by averaging over squares of pixels. Principal components are
    fitted to at most 5,000 random cells. All cells are then embedded, in parts of constant size, so that only a small
    part of the images is in memory.

    Parameters
    ----------
    adata
        Cells with images in ``obsm``.
    n_components
        Maximum number of principal components. There are fewer components if there are fewer cells or pixels.
    scale_channels
        Whether to divide each channel by its standard deviation between cells, so that dim and bright stains have equal
        weight.
    image_key
        Key of the images in ``obsm``.
    channels
        Channels to use, by name or number, as in ``setup_anndata``. Default: all channels that are not masks.
    fit
        Cells to which the components are fitted, as a boolean mask ``(N,)`` or row numbers. Default: all cells.
    seed
        Seed of the random choice of cells and of the randomised singular value decomposition.

    Returns
    -------
    Principal components of each cell, float32 ``(N, n_components)``.

    Raises
    ------
    KeyError, TypeError, ValueError
        If the images or a channel are missing or cannot be read, or if ``fit`` is empty or is not a valid selection of
        cells.

    Examples
    --------
    >>> scbd.baselines.pixel_pca(adata, n_components=16).shape
    (240, 16)
    """
    from sklearn.decomposition import PCA

    source = InputLocation(image_key=image_key, channels=channels).source(adata)
    n = source.shape[0]
    known = np.flatnonzero(selected_rows("fit", fit, n))
    rows = np.sort(np.random.default_rng(seed).choice(known, min(len(known), _MAX_FIT_CELLS), replace=False))
    sample = _average_blocks(source.read(rows))
    scale = np.ones((sample.shape[1], 1), dtype=np.float32)
    if scale_channels:
        # the variance of each pixel between cells is averaged over the pixels of a channel
        sd = np.sqrt(sample.var(0, dtype=np.float64).mean(-1, keepdims=True))
        scale = np.where(sd > 0, sd, 1).astype(np.float32)
    pca = PCA(min(n_components, sample[0].size, len(sample)), svd_solver="randomized", random_state=seed)
    pca.fit((sample / scale).reshape(len(sample), -1))
    embedded = []
    for start in range(0, n, _CELLS_PER_PART):
        part = _average_blocks(source.read(slice(start, start + _CELLS_PER_PART))) / scale
        embedded.append(pca.transform(part.reshape(len(part), -1)))
    return np.concatenate(embedded).astype(np.float32)


def _average_blocks(images: np.ndarray) -> np.ndarray:
    """Reduce images by averaging over squares of pixels, and return them as float32 ``(N, C, pixels)``.

    Pixels at the right and lower margins that do not fill a square are dropped.
    """
    n, c, h, w = images.shape
    side = max(1, min(h, w) // _PIXELS_PER_SIDE)
    h, w = h // side * side, w // side * side
    squares = images[:, :, :h, :w].astype(np.float32).reshape(n, c, h // side, side, w // side, side)
    return squares.mean((3, 5)).reshape(n, c, -1)
