"""What `setup_anndata` registers of images, and their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rich.table
import zarr
from scvi.data.fields import BaseAnnDataField

from scbd._messages import missing_key
from scbd.data.channels import channel_names, warn_of_channels
from scbd.data.pixels import check_pixels
from scbd.data.sources import ArraySource, ImageSource, ZarrSource

if TYPE_CHECKING:
    from anndata import AnnData


class ImageField(BaseAnnDataField):
    """Images in ``obsm``: registers shape, dtype and channel names, and holds new cells to them.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    attr_key
        Key in ``obsm``.
    """

    registry_key: str = ""
    attr_name = "obsm"
    attr_key: str = ""
    is_empty = False

    def __init__(self, registry_key: str, attr_key: str) -> None:
        self.registry_key = registry_key
        self.attr_key = attr_key

    def validate_field(self, adata: AnnData) -> None:
        """Check that the images can be read: presence, type, shape, dtype, names. Reads no pixel."""
        source = image_source(adata, self.attr_key)
        channel_names(adata.var, source.shape[1], self.attr_key)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record what the images are, having looked at their pixels once."""
        source = image_source(adata, self.attr_key)
        names = channel_names(adata.var, source.shape[1], self.attr_key)
        warn_of_channels(adata.var, source.shape[1], self.attr_key)
        check_pixels(source, names, self.attr_key)
        return {
            "image_shape": source.shape[1:],
            "dtype": source.dtype.name,
            "channels": names,
            "var_names": adata.var_names.astype(str).tolist(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check that new images are of the kind that was registered, which stays what the model takes."""
        source = image_source(adata_target, self.attr_key)
        check_like_registered(source, state_registry, self.attr_key)
        check_pixels(source, state_registry["channels"], self.attr_key)
        return dict(state_registry)

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, Any]:
        """Number of channels, height and width."""
        return dict(zip(("n_channels", "height", "width"), state_registry["image_shape"], strict=True))

    def view_state_registry(self, state_registry: dict[str, Any]) -> rich.table.Table | None:
        """Show what the images are."""
        table = rich.table.Table("image shape", "dtype", "channels", title=f"{self.registry_key} State Registry")
        shape = " × ".join(map(str, state_registry["image_shape"]))
        table.add_row(shape, state_registry["dtype"], ", ".join(state_registry["channels"]))
        return table


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
    said = (
        f"obsm[{image_key!r}] holds images of {height} × {width} pixels, the model was trained on {size[0]} × {size[1]}"
    )
    if resize is False and [height, width] != size:
        msg = f"{said}: resize them, or train a model with image_size=… that resizes by itself."
        raise ValueError(msg)
    if resize and height * size[1] != width * size[0]:
        msg = f"{said}, and resizing would stretch them: crop or pad them to the proportions of those."
        raise ValueError(msg)
