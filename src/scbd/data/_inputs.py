"""Inputs of a table, images or features: where they are, and that they are those a model was set up with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import zarr

from scbd._keys import IMAGE_KEY
from scbd._matrices import frame_numbers, is_sparse
from scbd._messages import missing_key
from scbd.data._channels import channel_names, taken_channels, told_by_name
from scbd.data.sources import FEATURES, IMAGES, ArraySource, ImageSource, InputKind, ZarrSource, columns_of

if TYPE_CHECKING:
    from anndata import AnnData

    from scbd.data._channels import Channels

# the layer that is no layer
X = "X"


class Inputs(NamedTuple):
    """Where in a table the inputs are: one of these is given."""

    image_key: str | None = None
    """Key of ``obsm`` with images."""
    layer: str | None = None
    """Layer with features, or ``"X"``."""
    obsm_key: str | None = None
    """Key of ``obsm`` with features."""
    channels: Channels | None = None
    """Of images those that are taken; `None` stands for all but masks."""

    @classmethod
    def found(
        cls,
        adata: AnnData,
        image_key: str | None = None,
        layer: str | None = None,
        obsm_key: str | None = None,
        channels: Channels | None = None,
    ) -> Inputs:
        """As it was said; by default images where ``obsm`` has them, else ``X``.

        Raises
        ------
        KeyError
            If nothing was said, and there is neither, or there are images under another key.
        ValueError
            If several were said, or channels of features.
        """
        said = {"image_key": image_key, "layer": layer, "obsm_key": obsm_key}
        given = [name for name, key in said.items() if key is not None]
        if len(given) > 1:
            msg = f"Give one of {' and '.join(given)}: a model learns from images, or from one table of features."
            raise ValueError(msg)
        if not given and IMAGE_KEY in adata.obsm:
            image_key = IMAGE_KEY
        if channels is not None and image_key is None:
            msg = f"channels={channels!r} are those of images, and there are none: leave it out, or name image_key."
            raise ValueError(msg)
        if channels is not None:
            stored = cls(image_key=image_key).stored(adata)
            channels = told_by_name(channel_names(adata.var, stored.shape[1], str(image_key)), channels)
        if given or image_key:
            return cls(image_key, layer, obsm_key, channels)
        others = _of_four(adata)
        if others or adata.X is None:
            also = " It has no X either, whose features could be learned from (layer='X')." if not others else ""
            raise KeyError(missing_key("obsm", IMAGE_KEY, adata.obsm.keys(), "image_key") + also)
        return cls(layer=X)

    @property
    def kind(self) -> InputKind:
        """Images or features."""
        return FEATURES if self.image_key is None else IMAGES

    @property
    def where(self) -> str:
        """As code."""
        if self.layer is None:
            return f"obsm[{self.image_key or self.obsm_key!r}]"
        return X if self.layer == X else f"layers[{self.layer!r}]"

    def array(self, adata: AnnData) -> Any:
        """What lies there.

        Raises
        ------
        KeyError
            If there is nothing.
        """
        if self.layer == X:
            if adata.X is None:
                msg = "adata has no X: name the features with layer=… or obsm_key=…, or the images with image_key=…."
                raise KeyError(msg)
            return adata.X
        slot, key = (adata.layers, self.layer) if self.layer else (adata.obsm, self.image_key or self.obsm_key)
        if key not in slot:
            argument = next(name for name, value in self._asdict().items() if value is not None)
            keys = [known for known in slot if known is not None]  # that is X since anndata 0.13
            raise KeyError(missing_key("layers" if self.layer else "obsm", str(key), keys, argument))
        return slot[key]

    def check_there(self, adata: AnnData) -> None:
        """Raise if cells lack what a model embeds, which was set up with others, and so cannot be told another key.

        Raises
        ------
        KeyError
            If they do: what is missing, and which cells have it.
        """
        try:
            self.array(adata)
        except KeyError as error:
            what = "features" if self.image_key is None else "images"
            keys = ", ".join(adata.obsm.keys()) or "nothing"
            msg = (
                f"The model embeds {what} at {self.where}, which these cells do not have (obsm has: {keys}). Give the "
                f"cells with their {what}, from the file that they were made from: cells.h5ad of scbd run, and what "
                "embed_to writes, keep all but these."
            )
            others = [] if self.image_key is None else _of_four(adata)
            if others:
                msg += f" If they are at {others[0]!r}: adata.{self.where} = adata.obsm[{others[0]!r}]."
            raise KeyError(msg) from error

    def source(self, adata: AnnData) -> ImageSource:
        """Ready to be read by row; of images the channels that are taken.

        Raises
        ------
        KeyError
            If there is nothing, or no such channel.
        TypeError, ValueError
            If what lies there is neither images nor features, see :class:`~scbd.data.ArraySource`.
        """
        stored = self.stored(adata)
        return stored if self.image_key is None else columns_of(stored, self.taken(adata, stored.shape[1])[0])

    def taken(self, adata: AnnData, n_channels: int) -> tuple[list[int], list[str]]:
        """Places and names of channels, see :func:`taken_channels`."""
        return taken_channels(adata.var, n_channels, self.image_key or "", self.channels)

    def stored(self, adata: AnnData) -> ImageSource:
        """All that lies there; errors are those of :meth:`source`."""
        array = self.array(adata)
        if isinstance(array, pd.DataFrame):
            array = frame_numbers(array, self.where)
        if is_sparse(array):
            msg = (
                f"{self.where} is sparse ({type(array).__name__}), features are read as they are: make it dense, such "
                "as adata.X = adata.X.toarray()."
            )
            raise TypeError(msg)
        if isinstance(array, zarr.Array):
            return ZarrSource(array, self.where, self.kind)
        return ArraySource(array, self.where, self.kind)

    def names(self, adata: AnnData) -> list[str] | None:
        """Names of features; `None` where they have none."""
        if self.layer is not None:
            return adata.var_names.astype(str).tolist()
        array = self.array(adata)
        return [str(name) for name in array.columns] if isinstance(array, pd.DataFrame) else None


def _of_four(adata: AnnData) -> list[str]:
    """Keys of ``obsm`` that images may be at."""
    return [key for key, values in adata.obsm.items() if len(getattr(values, "shape", ())) == 4]


def image_source(adata: AnnData, image_key: str) -> ImageSource:
    """Images of a table, ready to be read by row, without masks; see :meth:`Inputs.source`."""
    return Inputs(image_key=image_key).source(adata)


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
