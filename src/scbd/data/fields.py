"""What `setup_anndata` registers of images, and their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rich.table
import zarr
from scvi.data.fields import BaseAnnDataField

from scbd._messages import head, missing_key
from scbd.data.sources import ArraySource, ImageSource, ZarrSource, non_finite_rows

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
        """Check that the images can be read: presence, type, shape, dtype, finite values."""
        check_finite(image_source(adata, self.attr_key), self.attr_key)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record what the images are."""
        self.validate_field(adata)
        source = image_source(adata, self.attr_key)
        return {
            "image_shape": source.shape[1:],
            "dtype": source.dtype.name,
            "channels": channel_names(adata, source.shape[1]),
            "var_names": adata.var_names.astype(str).tolist(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check that new images are of the kind that was registered."""
        self.validate_field(adata_target)
        check_like_registered(image_source(adata_target, self.attr_key), state_registry, self.attr_key)
        return self.register_field(adata_target)

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


def check_finite(source: ImageSource, image_key: str) -> None:
    """Raise if an image holds a NaN or an infinity, naming the rows."""
    bad = non_finite_rows(source)
    if bad.size:
        msg = (
            f"obsm[{image_key!r}] has NaN or infinite pixels in {bad.size} of {source.shape[0]} cells (rows "
            f"{head(bad)}): drop these cells or repair their images."
        )
        raise ValueError(msg)


def check_like_registered(source: ImageSource, registered: dict[str, Any], image_key: str, resize: bool = True) -> None:
    """Raise if images differ in kind from the registered ones: dtype, channels and, without resizing, size."""
    c, *size = registered["image_shape"]
    if source.shape[1] != c or source.dtype.name != registered["dtype"]:
        msg = (
            f"obsm[{image_key!r}] holds {source.shape[1]} channels of {source.dtype.name}, the model was set up with "
            f"{c} of {registered['dtype']} ({', '.join(registered['channels'])}): convert the images to match."
        )
        raise ValueError(msg)
    if not resize and list(source.shape[2:]) != size:
        msg = (
            f"obsm[{image_key!r}] holds images of {source.shape[2]} × {source.shape[3]} pixels, the model was trained "
            f"on {size[0]} × {size[1]}: resize them, or train a model with image_size=… that resizes by itself."
        )
        raise ValueError(msg)


def channel_names(adata: AnnData, n_channels: int) -> list[str]:
    """Names of the image channels: ``var['channels']``, else ``var_names``, else numbers."""
    if adata.n_vars != n_channels:
        return [f"channel_{i}" for i in range(n_channels)]
    names = adata.var["channels"] if "channels" in adata.var else adata.var_names
    return [str(name) for name in names]
