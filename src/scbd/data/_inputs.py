"""Inputs of a model in an AnnData: the place of the images or features, and the channels that are used."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from scbd._anndata import IMAGE_KEY, check_anndata, frame_to_array, is_sparse
from scbd._checks import join_first, missing_key_message
from scbd.data._sources import FEATURES, IMAGES, ArraySource, ImageSource, InputKind, ZarrSource, select_columns

if TYPE_CHECKING:
    from anndata import AnnData

logger = logging.getLogger(__name__)

# channels to use: a sequence of names or numbers, or a mapping {new name: name or number}
Channels: TypeAlias = Sequence[str | int] | Mapping[str, str | int]

# value of ``layer`` that stands for ``adata.X``
X_LAYER = "X"


class InputLocation(NamedTuple):
    """Place of the inputs in an AnnData. One of ``image_key``, ``layer`` and ``obsm_key`` is given."""

    image_key: str | None = None
    """Key of the images in ``obsm``."""
    layer: str | None = None
    """Layer with the features, or ``"X"`` for ``adata.X``."""
    obsm_key: str | None = None
    """Key of the features in ``obsm``."""
    channels: Channels | None = None
    """Channels of the images to use; `None` stands for all channels that are not masks."""

    @classmethod
    def found(
        cls,
        adata: AnnData,
        image_key: str | None = None,
        layer: str | None = None,
        obsm_key: str | None = None,
        channels: Channels | None = None,
    ) -> InputLocation:
        """Determine the place of the inputs from the arguments of ``setup_anndata``.

        Without ``image_key``, ``layer`` and ``obsm_key``, the inputs are the images at the default key of ``obsm`` if
        it exists, otherwise the features in ``X``.

        Parameters
        ----------
        adata
            Cells.
        image_key
            Key of the images in ``obsm``.
        layer
            Layer with the features, or ``"X"``.
        obsm_key
            Key of the features in ``obsm``.
        channels
            Channels of the images to use, by name or number.

        Raises
        ------
        KeyError
            If no place is given, and there are neither images at the default key nor features in ``X``; or if images
            exist under another key only.
        ValueError
            If several places are given, or if ``channels`` is given but the inputs are features.
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
            msg = f"channels={channels!r} are those of images, and there are none: leave it out, or name image_key."
            raise ValueError(msg)
        if channels is not None:
            stored = cls(image_key=image_key).stored(adata)
            channels = _channels_by_name(channel_names(adata.var, stored.shape[1], str(image_key)), channels)
        if given or image_key:
            return cls(image_key, layer, obsm_key, channels)
        if _image_keys(adata) or adata.X is None:
            raise KeyError(missing_key_message("obsm", IMAGE_KEY, adata.obsm.keys(), "image_key"))
        return cls(layer=X_LAYER)

    @property
    def kind(self) -> InputKind:
        """Kind of the inputs: images or features."""
        return FEATURES if self.image_key is None else IMAGES

    @property
    def where(self) -> str:
        """Place of the inputs as Python code, for messages: ``obsm['…']``, ``layers['…']`` or ``X``."""
        if self.layer is None:
            return f"obsm[{self.image_key or self.obsm_key!r}]"
        return X_LAYER if self.layer == X_LAYER else f"layers[{self.layer!r}]"

    def array(self, adata: AnnData) -> Any:
        """Return the array at this place, unchecked.

        Raises
        ------
        KeyError
            If the place does not exist.
        """
        if self.layer == X_LAYER:
            if adata.X is None:
                msg = "adata has no X: name the features with layer=… or obsm_key=…, or the images with image_key=…."
                raise KeyError(msg)
            return adata.X
        slot, key = (adata.layers, self.layer) if self.layer else (adata.obsm, self.image_key or self.obsm_key)
        if key not in slot:
            argument = next(name for name, value in self._asdict().items() if value is not None)
            keys = [known for known in slot if known is not None]  # since anndata 0.13, X is the layer None
            raise KeyError(missing_key_message("layers" if self.layer else "obsm", str(key), keys, argument))
        return slot[key]

    def check_present(self, adata: AnnData) -> None:
        """Raise if cells lack the inputs that a trained model embeds.

        A trained model reads its inputs from the place with which it was set up. The message therefore advises to store
        the inputs there.

        Raises
        ------
        KeyError
            If the place does not exist.
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
        """Return the inputs as a source that is read by row; of images, only the channels to use.

        Raises
        ------
        KeyError
            If the place or a channel does not exist.
        TypeError, ValueError
            If the array holds neither images nor features, see :class:`~scbd.data.ArraySource`.
        """
        stored = self.stored(adata)
        return stored if self.image_key is None else select_columns(stored, self.taken(adata, stored.shape[1])[0])

    def taken(self, adata: AnnData, n_channels: int) -> tuple[list[int], list[str]]:
        """Return the positions and names of the channels to use, see :func:`taken_channels`."""
        return taken_channels(adata.var, n_channels, self.image_key or "", self.channels)

    def stored(self, adata: AnnData) -> ImageSource:
        """Return the inputs as a source with all stored channels; the errors are those of :meth:`source`."""
        check_anndata(adata)
        array = self.array(adata)
        if isinstance(array, pd.DataFrame):
            array = frame_to_array(array, self.where)
        if is_sparse(array):
            msg = f"{self.where} is sparse ({type(array).__name__}): make it dense, such as adata.X.toarray()."
            raise TypeError(msg)
        import zarr

        if isinstance(array, zarr.Array):
            return ZarrSource(array, self.where, self.kind)
        return ArraySource(array, self.where, self.kind)

    def names(self, adata: AnnData) -> list[str] | None:
        """Return the names of the features, or `None` if they have no names (images and plain arrays in ``obsm``)."""
        if self.layer is not None:
            return adata.var_names.astype(str).tolist()
        array = self.array(adata)
        return [str(name) for name in array.columns] if isinstance(array, pd.DataFrame) else None


def _image_keys(adata: AnnData) -> list[str]:
    """Return the keys of ``obsm`` whose arrays have four dimensions, like images."""
    return [key for key, values in adata.obsm.items() if len(getattr(values, "shape", ())) == 4]


def image_source(adata: AnnData, image_key: str) -> ImageSource:
    """Return the images at ``obsm[image_key]`` as a source without masks; see :meth:`Inputs.source`."""
    return InputLocation(image_key=image_key).source(adata)


def channel_names(var: pd.DataFrame, n_channels: int, image_key: str) -> list[str]:
    """Return the names of all stored channels.

    The names are those in ``var["channels"]``. Without this column, they are the names of ``var`` if ``var`` has one
    row per channel, otherwise numbers (``channel_0``, …): ``var`` may describe genes or features in ``X`` and not the
    images.

    Raises
    ------
    ValueError
        If ``var["channels"]`` names more or fewer channels than the images have.
    """
    named = "channels" in var
    if len(var) == n_channels:
        return [str(name) for name in (var["channels"] if named else var.index)]
    if named:
        raise ValueError(_var_length_message(var, n_channels, image_key, "channels"))
    return default_channel_names(n_channels)


def taken_channels(
    var: pd.DataFrame, n_channels: int, image_key: str, channels: Channels | None
) -> tuple[list[int], list[str]]:
    """Return the positions and names of the channels to use.

    Parameters
    ----------
    var
        Table of the channels, or of other variables.
    n_channels
        Number of stored channels.
    image_key
        Key of the images in ``obsm``, for messages.
    channels
        Channels to use. Default: all channels that are not masks.

    Raises
    ------
    KeyError, ValueError
        If a channel does not exist, or if ``var["channels"]`` does not have one name per stored channel. Without
        ``channels``, also if ``var`` has fewer names than there are stored channels: it is then unclear which channels
        the names belong to.
    """
    names = channel_names(var, n_channels, image_key)
    if channels is not None:
        return resolve_channels(names, channels, f"obsm[{image_key!r}]")
    if 0 < len(var) < n_channels and not _are_default_names(var.index.astype(str).tolist()):
        raise ValueError(_var_length_message(var, n_channels, image_key, "names"))
    places = np.flatnonzero(~_is_mask(var, n_channels)).tolist()
    return places, [names[place] for place in places]


def _var_length_message(var: pd.DataFrame, n_channels: int, image_key: str, what: str) -> str:
    """Return the message for a ``var`` that does not have one row per channel.

    The usual cause is ``adata[:, names]``, which selects rows of ``var`` but does not select channels of images in
    ``obsm``.
    """
    names = var["channels"] if what == "channels" else var.index
    return (
        f"var has {len(var)} {what} ({join_first(names)}), obsm[{image_key!r}] has {n_channels}: adata[:, names] cuts "
        "var "
        "and no image. Begin with all of them and choose with channels=…, by number where var names something else."
    )


def resolve_channels(names: Sequence[str], channels: Channels, where: str) -> tuple[list[int], list[str]]:
    """Return the positions and names of the requested channels, in the requested order.

    Parameters
    ----------
    names
        Names of all channels.
    channels
        Channels to use, by name or number. A mapping ``{new name: name or number}`` renames them. If the channels have
        no names, a list with one new name per channel names them all.
    where
        Name of the images in messages.

    Raises
    ------
    KeyError
        If a name does not exist.
    ValueError
        If no channel is requested, if one is requested twice, if a number is out of range, or if several channels have
        a requested name.
    """
    asked = [channels] if isinstance(channels, (str, int)) else list(channels)
    if not asked:
        msg = f"channels={channels!r}: name at least one of {', '.join(names)}."
        raise ValueError(msg)
    if isinstance(channels, Mapping):
        return _channel_positions(names, list(channels.values()), where), [str(name) for name in asked]
    if (
        _are_default_names(names)
        and len(asked) == len(names)
        and not any(_is_number(one) or one in names for one in asked)
    ):
        return list(range(len(names))), [str(name) for name in asked]
    places = _channel_positions(names, asked, where)
    return places, [names[place] for place in places]


def _channels_by_name(names: Sequence[str], channels: Channels) -> Channels:
    """Replace channel numbers by names, where a name is unique.

    Other cells, on which the choice is applied later, may have fewer channels, and then other numbers.
    """

    def plain(one: str | int) -> str | int:
        if one in names or not _is_number(one) or not 0 <= int(one) < len(names):
            return one if isinstance(one, str) else int(one)
        return names[int(one)] if names.count(names[int(one)]) == 1 else int(one)

    if isinstance(channels, Mapping):
        return {str(name): plain(one) for name, one in channels.items()}
    return [plain(one) for one in ([channels] if isinstance(channels, (str, int)) else channels)]


def _channel_positions(names: Sequence[str], asked: Sequence[str | int], where: str) -> list[int]:
    """Return the positions of the requested channels.

    Raises
    ------
    KeyError, ValueError
        See :func:`resolve_channels`.
    """
    places = []
    for one in asked:
        found = [place for place, name in enumerate(names) if name == one]
        if len(found) > 1:
            msg = (
                f"{where} has {len(found)} channels of the name {one!r} (numbers {join_first(found)}): choose by "
                "number."
            )
            raise ValueError(msg)
        if not found and not _is_number(one):
            if _are_default_names(names):
                msg = (
                    f"{where} has {len(names)} channels without names: name all of them, or give numbers, not {one!r}."
                )
                raise KeyError(msg)
            raise KeyError(missing_key_message(f"{where} (channels)", str(one), names, "channels"))
        place = found[0] if found else int(one)
        if not 0 <= place < len(names):
            msg = f"{where} has {len(names)} channels, of the numbers 0 to {len(names) - 1}: there is no {place}."
            raise ValueError(msg)
        places.append(place)
    if len(set(places)) < len(places):
        msg = f"channels={list(asked)!r} names one channel twice."
        raise ValueError(msg)
    return places


def log_excluded_masks(var: pd.DataFrame, n_channels: int, image_key: str, channels: Channels | None) -> None:
    """Log a warning that names the masks that are excluded, if ``channels`` is not given."""
    masks = _is_mask(var, n_channels)
    if masks.any() and channels is None:
        names = channel_names(var, n_channels, image_key)
        left = ", ".join(np.array(names)[masks])
        logger.warning("%s are masks (var['channel_mapping']), and are left out; channels=%s takes all.", left, names)


def _is_mask(var: pd.DataFrame, n_channels: int) -> np.ndarray:
    """Return which channels are masks, boolean ``(C,)``.

    scPortrait marks masks in ``var["channel_mapping"]``. If all channels are marked, none is treated as a mask.
    """
    if "channel_mapping" not in var or len(var) != n_channels:
        return np.zeros(n_channels, dtype=bool)
    masks = (var["channel_mapping"].astype(str) == "mask").to_numpy()
    return masks & ~masks.all()


def default_channel_names(n: int) -> list[str]:
    """Return names for channels without names: ``channel_0``, ``channel_1``, and so on."""
    return [f"channel_{i}" for i in range(n)]


def _is_number(channel: str | int) -> bool:
    """Return whether a channel is given by number, which may be text if it comes from the command line."""
    return not isinstance(channel, str) or channel.isdecimal()


def _are_default_names(names: Sequence[str]) -> bool:
    """Return whether names are only numbers, as generated by :func:`default_channel_names` or by pandas."""
    return [name.removeprefix("channel_") for name in names] == [str(i) for i in range(len(names))]


def check_channel_names(var: pd.DataFrame, n_channels: int, registered: dict[str, Any], image_key: str) -> None:
    """Compare the channel names of new cells with those that a model was set up with.

    Names are compared only if both the cells and the model have names. Channels are never reordered automatically:
    ``adata[:, names]`` reorders names but not images, so that the names do not show which of the two was reordered.

    Parameters
    ----------
    var
        Table of the channels of the new cells.
    n_channels
        Number of stored channels of the new cells.
    registered
        Entries that :class:`~scbd.data._fields.ImageField` registered.
    image_key
        Key of the images in ``obsm``, for messages.

    Raises
    ------
    ValueError
        If the names are equal but in another order.

    Warns
    -----
    UserWarning
        If the names differ.
    """
    stored = channel_names(var, n_channels, image_key)
    found = taken_channels(var, n_channels, image_key, registered.get("asked"))[1]
    known = registered["channels"]
    _check_order(stored, registered.get("stored", known), image_key)
    if not registered.get("asked"):
        _check_order(found, known, image_key)
    if found == known or _are_default_names(found) or _are_default_names(known):
        return
    msg = (
        f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: other "
        "names. Channels are taken as they come; where only the names differ, rename them."
    )
    warnings.warn(msg, UserWarning, stacklevel=4)


def _check_order(found: list[str], known: list[str], image_key: str) -> None:
    """Raise ``ValueError`` if channels have the known names in another order."""
    if found == known or sorted(found) != sorted(known):
        return
    msg = (
        f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: the "
        "same in another order. Put names (adata[:, order]) and images (adata.obsm[…][:, order]) in the model's order; "
        "only the names, if the images lie in it already."
    )
    raise ValueError(msg)


def check_images_match_registered(
    source: ImageSource, registered: dict[str, Any], image_key: str, resize: bool | None = None
) -> None:
    """Raise if images differ in kind from the registered ones.

    Parameters
    ----------
    source
        New images.
    registered
        Entries that :class:`~scbd.data._fields.ImageField` registered.
    image_key
        Key of the images in ``obsm``, for messages.
    resize
        Whether the model resizes images. If true, images of another size are accepted if their aspect ratio is equal.
        `None`: not known yet, the size is not checked.

    Raises
    ------
    ValueError
        If dtype or number of channels differ, if ``resize`` is false and the size differs, or if ``resize`` is true and
        the aspect ratio differs.
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
