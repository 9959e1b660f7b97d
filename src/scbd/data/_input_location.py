"""Location of the inputs of a model (images or features) in an AnnData."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from scbd._shared.checks import missing_key_message
from scbd._shared.keys import IMAGE_KEY
from scbd._shared.labels import check_anndata
from scbd._shared.numeric_tables import frame_to_array, is_sparse
from scbd.data._channels import Channels, channel_names, channels_by_name, taken_channels
from scbd.data._sources import FEATURES, IMAGES, ArraySource, ImageSource, select_columns
from scbd.data._zarr_source import ZarrSource

if TYPE_CHECKING:
    from anndata import AnnData

# value of the argument ``layer`` that refers to ``adata.X`` instead of a layer
X_LAYER = "X"


class InputLocation(NamedTuple):
    """Location of the inputs of a model (images or features) in an AnnData.

    Exactly one of ``image_key``, ``layer`` and ``obsm_key`` is given, and states the location.
    """

    image_key: str | None = None
    """Key of the images in ``obsm``; `None` if the inputs are features."""
    layer: str | None = None
    """Name of the layer with the features, ``"X"`` for ``adata.X``, or `None` if the inputs are in ``obsm``."""
    obsm_key: str | None = None
    """Key of the features in ``obsm``; `None` if the inputs are images, or features in ``X`` or a layer."""
    channels: Channels | None = None
    """Image channels to use, by name or number; `None` stands for all channels that are not segmentation masks."""

    @classmethod
    def found(
        cls,
        adata: AnnData,
        image_key: str | None = None,
        layer: str | None = None,
        obsm_key: str | None = None,
        channels: Channels | None = None,
    ) -> InputLocation:
        """Determine the location of the inputs from the arguments of ``setup_anndata``.

        If ``image_key``, ``layer`` and ``obsm_key`` are all `None`, the inputs are the images at
        ``obsm["single_cell_images"]`` if this key exists, otherwise the features in ``X``.

        Parameters
        ----------
        adata
            Cells.
        image_key
            Key of the images in ``obsm``.
        layer
            Name of the layer with the features, or ``"X"``.
        obsm_key
            Key of the features in ``obsm``.
        channels
            Image channels to use, by name or number.

        Raises
        ------
        KeyError
            If no location is given, and ``obsm`` has images only under another key than ``"single_cell_images"``, or
            the AnnData has neither images nor ``X``.
        ValueError
            If several locations are given, or if ``channels`` is given but the inputs are features.
        """
        check_anndata(adata)
        said = {"image_key": image_key, "layer": layer, "obsm_key": obsm_key}
        given = [name for name, key in said.items() if key is not None]
        if len(given) > 1:
            msg = f"Give one of {' and '.join(given)}: a model learns from images, or from one table of features."
            raise ValueError(msg)
        if not given and IMAGE_KEY in adata.obsm:
            image_key = IMAGE_KEY
        if channels is not None and image_key is None:
            msg = (
                f"channels={channels!r} selects channels of images, but there are no images: drop channels, or give "
                "image_key."
            )
            raise ValueError(msg)
        if channels is not None:
            stored = cls(image_key=image_key).stored(adata)
            channels = channels_by_name(channel_names(adata.var, stored.shape[1], str(image_key)), channels)
        if given or image_key:
            return cls(image_key, layer, obsm_key, channels)
        if _image_keys(adata) or adata.X is None:
            raise KeyError(missing_key_message("obsm", IMAGE_KEY, adata.obsm.keys(), "image_key"))
        return cls(layer=X_LAYER)

    @property
    def where(self) -> str:
        """Location of the inputs as Python code, for messages: ``obsm['…']``, ``layers['…']`` or ``X``."""
        if self.layer is None:
            return f"obsm[{self.image_key or self.obsm_key!r}]"
        return X_LAYER if self.layer == X_LAYER else f"layers[{self.layer!r}]"

    def array(self, adata: AnnData) -> Any:
        """Return the array of images or features at this location of an AnnData, without checking the array.

        Raises
        ------
        KeyError
            If the AnnData has no array at this location.
        """
        if self.layer == X_LAYER:
            if adata.X is None:
                msg = "adata has no X: name the features with layer=… or obsm_key=…, or the images with image_key=…."
                raise KeyError(msg)
            return adata.X
        slot, key = (adata.layers, self.layer) if self.layer else (adata.obsm, self.image_key or self.obsm_key)
        if key not in slot:
            argument = next(name for name, value in self._asdict().items() if value is not None)
            keys = [known for known in slot if known is not None]  # since anndata 0.13, layers has X at key None
            raise KeyError(missing_key_message("layers" if self.layer else "obsm", str(key), keys, argument))
        return slot[key]

    def check_present(self, adata: AnnData) -> None:
        """Raise if cells lack the images or features that a trained model embeds.

        A trained model reads its inputs from the location in the AnnData that was given at set-up. The message
        therefore advises to store the inputs at this location.

        Raises
        ------
        KeyError
            If the AnnData has no array at this location.
        """
        try:
            self.array(adata)
        except KeyError as error:
            others = [] if self.image_key is None else _image_keys(adata)
            put = f": adata.{self.where} = adata.obsm[{others[0]!r}], if that is it" if others else ""
            msg = (
                f"The model embeds what lies at {self.where}, which these cells do not have (obsm has: "
                f"{', '.join(adata.obsm.keys()) or 'nothing'}). Give the cells with it{put}."
            )
            raise KeyError(msg) from error

    def source(self, adata: AnnData) -> ImageSource:
        """Return the inputs of an AnnData as a source, from which the rows of any cells can be read.

        If the inputs are images, the source has only the channels that the model uses.

        Raises
        ------
        KeyError
            If the AnnData has no array at this location, or if a channel does not exist.
        TypeError, ValueError
            If the array holds neither images nor features, see :class:`~scbd.data.ArraySource`.
        """
        stored = self.stored(adata)
        return stored if self.image_key is None else select_columns(stored, self.taken(adata, stored.shape[1])[0])

    def taken(self, adata: AnnData, n_channels: int) -> tuple[list[int], list[str]]:
        """Return the positions and names of the image channels to use, see :func:`taken_channels`."""
        return taken_channels(adata.var, n_channels, self.image_key or "", self.channels)

    def stored(self, adata: AnnData) -> ImageSource:
        """Return the inputs of an AnnData as a source, with all stored channels; errors are those of :meth:`source`."""
        check_anndata(adata)
        array = self.array(adata)
        if isinstance(array, pd.DataFrame):
            array = frame_to_array(array, self.where)
        if is_sparse(array):
            msg = f"{self.where} is sparse ({type(array).__name__}): make it dense, such as adata.X.toarray()."
            raise TypeError(msg)
        import zarr

        kind = FEATURES if self.image_key is None else IMAGES
        return (ZarrSource if isinstance(array, zarr.Array) else ArraySource)(array, self.where, kind)

    def names(self, adata: AnnData) -> list[str] | None:
        """Return the names of the features, or `None` for inputs without names: images, and arrays in ``obsm``."""
        if self.layer is not None:
            return adata.var_names.astype(str).tolist()
        array = self.array(adata)
        return [str(name) for name in array.columns] if isinstance(array, pd.DataFrame) else None


def _image_keys(adata: AnnData) -> list[str]:
    """Return the keys of ``obsm`` that may hold images: those of arrays with four dimensions."""
    return [key for key, values in adata.obsm.items() if len(getattr(values, "shape", ())) == 4]


def image_source(adata: AnnData, image_key: str) -> ImageSource:
    """Return the images at ``obsm[image_key]`` as a source, without channels that are segmentation masks.

    Errors are those of :meth:`InputLocation.source`.
    """
    return InputLocation(image_key=image_key).source(adata)
