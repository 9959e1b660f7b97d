"""What `setup_anndata` registers of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rich.table
import torch
from scvi.data.fields import BaseAnnDataField

from scbd.data._channels import channel_names, say_masks
from scbd.data._inputs import Inputs, check_like_registered
from scbd.data._pixels import check_pixels

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.data._channels import Channels


class ImageField(BaseAnnDataField):
    """Images in ``obsm``: registers shape, dtype and channel names, and holds new cells to them.

    Parameters
    ----------
    registry_key
        Name of the input in the registry.
    attr_key
        Key in ``obsm``.
    channels
        Those that are taken; by default all but masks.
    """

    registry_key: str = ""
    attr_name = "obsm"
    attr_key: str = ""
    is_empty = False

    def __init__(self, registry_key: str, attr_key: str, channels: Channels | None = None) -> None:
        self.registry_key = registry_key
        self.attr_key = attr_key
        self.inputs = Inputs(image_key=attr_key, channels=channels)

    def validate_field(self, adata: AnnData) -> None:
        """Check that the images can be read: presence, type, shape, dtype, names. Reads no pixel."""
        self.inputs.source(adata)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Record what the images are, having looked at their pixels once."""
        source, n_stored = self.inputs.source(adata), self.inputs.stored(adata).shape[1]
        names = self.inputs.taken(adata, n_stored)[1]
        say_masks(adata.var, n_stored, self.attr_key, self.inputs.channels)
        check_pixels(source, names, self.attr_key)
        return {
            "image_shape": source.shape[1:],
            "dtype": source.dtype.name,
            "channels": names,
            "stored": channel_names(adata.var, n_stored, self.attr_key),
            "asked": self.inputs.channels,
            "var_names": adata.var_names.astype(str).tolist(),
            # what a network has to make do with, see the model's default; it goes where the model goes
            "accelerated": torch.accelerator.is_available(),
        }

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Check that new images are of the kind that was registered, which stays what the model takes."""
        source = self.inputs.source(adata_target)
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
