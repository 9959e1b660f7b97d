"""Names and choice of image channels, and comparison of the images of new cells with the images of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from scbd._shared.checks import join_first, missing_key_message
from scbd._shared.messages import warn_user
from scbd.data._sources import ImageSource

logger = logging.getLogger(__name__)

# Image channels to use, in this order. A sequence holds names or numbers of channels. A mapping {new name: name or
# number} also renames the channels.
Channels: TypeAlias = Sequence[str | int] | Mapping[str, str | int]


def channel_names(var: pd.DataFrame, n_channels: int, image_key: str) -> list[str]:
    """Return the name of each image channel that an AnnData stores.

    The names are those in the column ``var["channels"]``. Without this column, they are the index of ``var``, if
    ``var`` has one row per channel. Otherwise, ``var`` is taken to describe genes or features in ``X`` and not the
    images, and the channels get numbered names (``channel_0``, …).

    Raises
    ------
    ValueError
        If ``var["channels"]`` names more or fewer channels than the images have.
    """
    named = "channels" in var
    if len(var) == n_channels:
        return [str(name) for name in (var["channels"] if named else var.index)]
    if named:
        raise ValueError(var_length_message(var, n_channels, image_key, "channels"))
    return default_channel_names(n_channels)


def taken_channels(
    var: pd.DataFrame, n_channels: int, image_key: str, channels: Channels | None
) -> tuple[list[int], list[str]]:
    """Return the positions and names of the image channels to use.

    Parameters
    ----------
    var
        Table ``var`` of the AnnData, which describes the channels of the images or the features in ``X``.
    n_channels
        Number of channels of the stored images.
    image_key
        Key of the images in ``obsm``, for messages.
    channels
        Channels to use, by name or number. Default: all channels that scPortrait does not mark as segmentation masks.

    Raises
    ------
    KeyError, ValueError
        If a requested channel does not exist, or if ``var["channels"]`` does not have one name per channel of the
        images. An error is also raised if ``channels`` is not given and ``var`` names fewer channels than the images
        have, since it is then unclear which channels have these names.
    """
    names = channel_names(var, n_channels, image_key)
    if channels is not None:
        return resolve_channels(names, channels, f"obsm[{image_key!r}]")
    if 0 < len(var) < n_channels and not _are_default_names(var.index.astype(str).tolist()):
        raise ValueError(var_length_message(var, n_channels, image_key, "names"))
    places = np.flatnonzero(~_is_mask(var, n_channels)).tolist()
    return places, [names[place] for place in places]


def resolve_channels(names: Sequence[str], channels: Channels, where: str) -> tuple[list[int], list[str]]:
    """Return the positions and names of the requested image channels, in the requested order.

    Parameters
    ----------
    names
        Names of all channels of the images, in the order of the images.
    channels
        Channels to use, by name or number. A mapping ``{new name: name or number}`` renames them. If the images have
        only default names (``channel_0``, …), a list with one new name per channel renames all channels.
    where
        Description of the images in error messages.

    Raises
    ------
    KeyError
        If a requested name does not exist.
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


def channels_by_name(names: Sequence[str], channels: Channels) -> Channels:
    """Replace channel numbers by channel names in a choice of image channels.

    A model later applies the choice to images of new cells. In images with fewer channels, a channel may have another
    number, but it has the same name. A channel number is kept if several channels have the same name.
    """

    def plain(one: str | int) -> str | int:
        if one in names or not _is_number(one) or not 0 <= int(one) < len(names):
            return one if isinstance(one, str) else int(one)
        return names[int(one)] if names.count(names[int(one)]) == 1 else int(one)

    if isinstance(channels, Mapping):
        return {str(name): plain(one) for name, one in channels.items()}
    return [plain(one) for one in ([channels] if isinstance(channels, (str, int)) else channels)]


def _channel_positions(names: Sequence[str], asked: Sequence[str | int], where: str) -> list[int]:
    """Return the position of each requested channel among all image channels.

    Raises
    ------
    KeyError, ValueError
        If a requested channel does not exist, is requested twice, or has the same name as another channel.
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
    """Log a warning with the names of the image channels that are excluded because they are segmentation masks.

    Without a choice of channels (``channels`` is `None`), all masks are excluded. Otherwise, only requested channels
    are used, and no warning is logged.
    """
    masks = _is_mask(var, n_channels)
    if masks.any() and channels is None:
        names = channel_names(var, n_channels, image_key)
        left = ", ".join(np.array(names)[masks])
        logger.warning(
            "%s are masks (var['channel_mapping']) and are excluded; channels=%s uses all channels.", left, names
        )


def _is_mask(var: pd.DataFrame, n_channels: int) -> np.ndarray:
    """Return, for each image channel, whether it is a segmentation mask, boolean ``(C,)``.

    scPortrait marks masks in the column ``var["channel_mapping"]``. If it marks all channels, no channel is treated as
    a mask.
    """
    if "channel_mapping" not in var or len(var) != n_channels:
        return np.zeros(n_channels, dtype=bool)
    masks = (var["channel_mapping"].astype(str) == "mask").to_numpy()
    return masks & ~masks.all()


def default_channel_names(n: int) -> list[str]:
    """Return the names ``channel_0``, ``channel_1``, … for the ``n`` channels of images without channel names."""
    return [f"channel_{i}" for i in range(n)]


def _is_number(channel: str | int) -> bool:
    """Return whether a user requests an image channel by its number and not by its name.

    Text that consists of digits counts as a number, because numbers from the command line are text.
    """
    return not isinstance(channel, str) or channel.isdecimal()


def _are_default_names(names: Sequence[str]) -> bool:
    """Return whether channel names are only generated numbers, and therefore do not describe the channels.

    Such names are ``channel_0``, ``channel_1``, … from :func:`default_channel_names`, and ``0``, ``1``, … from pandas.
    """
    return [name.removeprefix("channel_") for name in names] == [str(i) for i in range(len(names))]


def check_channel_names(var: pd.DataFrame, n_channels: int, registered: dict[str, Any], image_key: str) -> None:
    """Compare the channel names of the images of new cells with the names with which a model was set up.

    Channels are compared only if both the new images and the images of the model have channel names. Channels are never
    reordered automatically: ``adata[:, names]`` reorders the channel names in ``var`` but not the images in ``obsm``.
    The order of the names therefore does not prove the order of the images.

    Parameters
    ----------
    var
        Table ``var`` of the new cells, with the names of their channels.
    n_channels
        Number of channels of the stored images of the new cells.
    registered
        Properties of the model's images, such as channel names, that :class:`~scbd.data._fields.ImageField` recorded.
    image_key
        Key of the images in ``obsm``, for messages.

    Raises
    ------
    ValueError
        If the new images have the channel names of the model in another order.

    Warns
    -----
    UserWarning
        If the new images have other channel names than the model.
    """
    stored = channel_names(var, n_channels, image_key)
    found = taken_channels(var, n_channels, image_key, registered.get("asked"))[1]
    known = registered["channels"]
    compared = [(stored, registered.get("stored", known))]
    if not registered.get("asked"):
        compared.append((found, known))
    for new, old in compared:
        if new != old and sorted(new) == sorted(old):
            msg = (
                f"obsm[{image_key!r}] has the channels {', '.join(new)}, the model was set up with {', '.join(old)}: "
                "the same in another order. Put names (adata[:, order]) and images (adata.obsm[…][:, order]) in the "
                "model's order; only the names, if the images lie in it already."
            )
            raise ValueError(msg)
    if found == known or _are_default_names(found) or _are_default_names(known):
        return
    msg = (
        f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: other "
        "names. Channels are used in their order, regardless of names; if only the names differ, rename them."
    )
    warn_user(msg)


def check_images_match_registered(
    source: ImageSource, registered: dict[str, Any], image_key: str, resize: bool | None = None
) -> None:
    """Raise if images of new cells differ in dtype, channels or size from the images with which a model was set up.

    Parameters
    ----------
    source
        Images of the new cells.
    registered
        Properties of the model's images, such as channel names, that :class:`~scbd.data._fields.ImageField` recorded.
    image_key
        Key of the images in ``obsm``, for messages.
    resize
        Whether the model resizes images. If true, new images may have another size, but must have the same aspect
        ratio. If false, they must have the same size. If `None`, the size is not checked.

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


def var_length_message(var: pd.DataFrame, n_channels: int, image_key: str, what: str) -> str:
    """Return the error message for a table ``var`` that does not have one row per image channel.

    The usual cause is ``adata[:, names]``, which selects rows of ``var``, whereas the images in ``obsm`` keep all
    channels.
    """
    names = var["channels"] if what == "channels" else var.index
    return (
        f"var has {len(var)} {what} ({join_first(names)}), obsm[{image_key!r}] has {n_channels}: adata[:, names] cuts "
        "var and no image. Begin with all of them and choose with channels=…, by number where var names something else."
    )
