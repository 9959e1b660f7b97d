"""Principal components of the pixels: what a linear look at the images holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scbd._anndata import IMAGE_KEY
from scbd.baselines._corrections import learned_from
from scbd.data._inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

_FIT_CELLS = 5_000
_BLOCK = 2_048
_SIDE = 16


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

    Images are averaged to about 16 pixels a side; components are learned on at most 5,000 random cells, and all cells
    are embedded in blocks, so that memory stays constant.

    Parameters
    ----------
    adata
        Cells with images in ``obsm``.
    n_components
        Number of components, at most; fewer cells or pixels give fewer.
    scale_channels
        Divide each channel by its standard deviation between cells, so that a dim stain counts as much as a bright one.
    image_key
        Key of the images.
    channels
        Which are looked at, by name or number, as in ``setup_anndata``; by default all but masks.
    fit
        Cells to learn from, a mask ``(N,)``; all by default.
    seed
        Seed of the subset and of the randomised decomposition.

    Returns
    -------
    float32 ``(N, n_components)``.

    Raises
    ------
    KeyError, TypeError, ValueError
        If the images, or a channel, are missing or cannot be read, or ``fit`` is no mask of the cells or leaves none.

    Examples
    --------
    >>> scbd.baselines.pixel_pca(adata, n_components=16).shape
    (240, 16)
    """
    from sklearn.decomposition import PCA

    source = Inputs(image_key=image_key, channels=channels).source(adata)
    n = source.shape[0]
    known = np.flatnonzero(learned_from("fit", fit, n))
    rows = np.sort(np.random.default_rng(seed).choice(known, min(len(known), _FIT_CELLS), replace=False))
    sample = _averaged(source.read(rows))
    scale = _scale(sample) if scale_channels else np.float32(1)
    pca = PCA(min(n_components, sample[0].size, len(sample)), svd_solver="randomized", random_state=seed)
    pca.fit(_flat(sample, scale))
    parts = (source.read(slice(start, start + _BLOCK)) for start in range(0, n, _BLOCK))
    return np.concatenate([pca.transform(_flat(_averaged(part), scale)) for part in parts]).astype(np.float32)


def _scale(images: np.ndarray) -> np.ndarray:
    """Root of each channel's variance between cells, averaged over pixels, ``(C, 1)``; 1 where nothing varies."""
    sd = np.sqrt(images.var(0, dtype=np.float64).mean(-1, keepdims=True))
    return np.where(sd > 0, sd, 1).astype(np.float32)


def _flat(images: np.ndarray, scale: np.ndarray | np.float32) -> np.ndarray:
    return (images / scale).reshape(len(images), -1)


def _averaged(images: np.ndarray) -> np.ndarray:
    """float32 ``(N, C, pixels)`` after averaging whole squares; margins that fill none are left out."""
    n, c, h, w = images.shape
    side = max(1, min(h, w) // _SIDE)
    h, w = h // side * side, w // side * side
    squares = images[:, :, :h, :w].astype(np.float32).reshape(n, c, h // side, side, w // side, side)
    return squares.mean((3, 5)).reshape(n, c, -1)
