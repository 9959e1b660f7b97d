"""Crops of cells with their table, wherever they lie: what is written into a screen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd

from scbd._keys import IMAGE_KEY
from scbd.data._channels import chosen_channels, say_masks, taken_channels
from scbd.data._inputs import Inputs
from scbd.data.sources import columns_of

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.data._channels import Channels
    from scbd.data.sources import ImageSource


@dataclass(frozen=True, eq=False)
class Crops:
    """Images that are read by row, and what is known of each.

    Attributes
    ----------
    images
        Source of images ``(N, C, H, W)``.
    obs
        Table of the cells, N rows.
    channels
        Names of the channels.
    name
        What errors and progress call them.

    Raises
    ------
    ValueError
        If table and images, or names and channels, differ in number.

    Examples
    --------
    >>> images = scbd.data.ArraySource(adata.obsm["single_cell_images"])
    >>> crops = scbd.data.Crops(images, adata.obs, channels=["DNA damage", "F-actin", "DNA", "microtubules"])
    >>> crops
    Crops 'cells': 240 of 4 × 32 × 32 uint8 (DNA damage, F-actin, DNA, microtubules)
    >>> screen = scbd.data.write_screen("screen.h5ad", crops, y_key="gene")
    """

    images: ImageSource
    obs: pd.DataFrame
    channels: list[str]
    name: str = "cells"

    def __post_init__(self) -> None:
        n, n_channels = self.images.shape[:2]
        if len(self.obs) != n:
            msg = f"{self.name}: the table has {len(self.obs)} rows, there are {n} images."
            raise ValueError(msg)
        if len(self.channels) != n_channels:
            msg = f"{self.name}: {len(self.channels)} names for {n_channels} channels ({', '.join(self.channels)})."
            raise ValueError(msg)

    def to_memory(self, image_key: str = IMAGE_KEY) -> AnnData:
        """All images read into an AnnData, for as few as memory holds; :func:`write_screen` takes any number.

        Parameters
        ----------
        image_key
            Where in ``obsm`` they are put.

        Returns
        -------
        AnnData with the table, the names of the channels in ``var``, and the images.
        """
        from anndata import AnnData

        var = pd.DataFrame({"channels": self.channels}, index=pd.Index(self.channels).astype(str))
        return AnnData(obs=self.obs, var=var, obsm={image_key: self.images.read(slice(None))})

    def __repr__(self) -> str:
        """Shape and channels, for a person."""
        n, *shape = self.images.shape
        size = " × ".join(map(str, shape))
        return f"Crops {self.name!r}: {n:,} of {size} {self.images.dtype} ({', '.join(self.channels)})"


def crops_of(adata: AnnData, image_key: str, name: str = "cells", channels: Channels | None = None) -> Crops:
    """Crops of an AnnData.

    Raises
    ------
    KeyError, TypeError, ValueError
        If there are no images at ``obsm[image_key]``, no such channel, or ``var`` has fewer names than channels.
    """
    stored = Inputs(image_key=image_key).stored(adata)
    return crops_from(stored, adata.obs, adata.var, image_key, name, channels)


def crops_from(
    stored: ImageSource, obs: pd.DataFrame, var: pd.DataFrame, image_key: str, name: str, channels: Channels | None
) -> Crops:
    """The same of the parts of one."""
    say_masks(var, stored.shape[1], image_key, channels)
    places, names = taken_channels(var, stored.shape[1], image_key, channels)
    return Crops(columns_of(stored, places), obs, names, name)


def some_channels(crops: Crops, channels: Channels | None) -> Crops:
    """Crops with those channels alone, see :func:`chosen_channels`; all of them by default."""
    if channels is None:
        return crops
    places, names = chosen_channels(crops.channels, channels, crops.name)
    return replace(crops, images=columns_of(crops.images, places), channels=names)
