"""Images of a table: found, and held to those that a model was set up with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zarr

from scbd._messages import missing_key
from scbd.data.sources import ArraySource, ImageSource, ZarrSource

if TYPE_CHECKING:
    from anndata import AnnData


def image_source(adata: AnnData, image_key: str) -> ImageSource:
    """Images of a table, ready to be read by row.

    Raises
    ------
    KeyError
        If ``obsm`` has no such key.
    TypeError, ValueError
        If what lies there is no image tensor, see :class:`~scbd.data.ArraySource`.
    """
    if image_key not in adata.obsm:
        raise KeyError(missing_key("obsm", image_key, adata.obsm.keys(), "image_key"))
    images, where = adata.obsm[image_key], f"obsm[{image_key!r}]"
    return ZarrSource(images, where) if isinstance(images, zarr.Array) else ArraySource(images, where)


def check_like_registered(
    source: ImageSource, registered: dict[str, Any], image_key: str, resize: bool | None = None
) -> None:
    """Raise if images differ in kind from the registered ones.

    Parameters
    ----------
    source
        The images.
    registered
        What :class:`ImageField` recorded.
    image_key
        Where they are.
    resize
        Whether the model resizes, and takes other sizes of the same proportions; `None` where that is not known yet,
        and size is not looked at.

    Raises
    ------
    ValueError
        If dtype, number of channels, size or proportions differ.
    """
    c, *size = registered["image_shape"]
    if source.shape[1] != c or source.dtype.name != registered["dtype"]:
        msg = (
            f"obsm[{image_key!r}] holds {source.shape[1]} channels of {source.dtype.name}, the model was set up with "
            f"{c} of {registered['dtype']} ({', '.join(registered['channels'])}): convert the images to match."
        )
        raise ValueError(msg)
    height, width = source.shape[2:]
    fact = (
        f"obsm[{image_key!r}] holds images of {height} × {width} pixels, the model was trained on {size[0]} × {size[1]}"
    )
    if resize is False and [height, width] != size:
        msg = f"{fact}: resize them, or train a model with image_size=… that resizes by itself."
        raise ValueError(msg)
    if resize and height * size[1] != width * size[0]:
        msg = f"{fact}, and resizing would stretch them: crop or pad them to the proportions of those."
        raise ValueError(msg)
