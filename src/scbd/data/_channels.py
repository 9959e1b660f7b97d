"""Names of image channels: where they come from, which are taken, and that cells have those that a model knows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scbd._messages import head, missing_key

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

# names or numbers of those that are taken, or new names for them
Channels: TypeAlias = Sequence[str | int] | Mapping[str, str | int]


def channel_names(var: pd.DataFrame, n_channels: int, image_key: str) -> list[str]:
    """``var['channels']``, else the names of ``var`` if they are as many as channels, else numbers.

    Without a column that says so, ``var`` need not be about images: beside them, X may hold genes or features.

    Raises
    ------
    ValueError
        If ``var['channels']`` names more or fewer channels than the images have.
    """
    named = "channels" in var
    if named and len(var) != n_channels:
        msg = (
            f"var['channels'] names {len(var)} channels ({', '.join(map(str, var['channels']))}), "
            f"obsm[{image_key!r}] has {n_channels}: adata[:, names] cuts var, and no image. Begin with all channels, "
            f"and cut both: {how_to_keep([0, 1], image_key)} for the first two."
        )
        raise ValueError(msg)
    if len(var) != n_channels:
        return numbered(n_channels)
    return [str(name) for name in (var["channels"] if named else var.index)]


def taken_channels(
    var: pd.DataFrame, n_channels: int, image_key: str, channels: Channels | None
) -> tuple[list[int], list[str]]:
    """Places and names of the channels that were asked for; by default of all but masks.

    Raises
    ------
    KeyError, ValueError
        If one is not there, ``var`` is not about the images, or none is asked for and ``var`` has fewer names than
        there are channels.
    """
    names = channel_names(var, n_channels, image_key)
    if channels is not None:
        return chosen_channels(names, channels, f"obsm[{image_key!r}]")
    _check_not_cut(var, n_channels, image_key)
    places = np.flatnonzero(~_masks(var, n_channels)).tolist()
    return places, [names[place] for place in places]


def chosen_channels(names: Sequence[str], channels: Channels, where: str) -> tuple[list[int], list[str]]:
    """Places and names of the channels that were asked for, in that order.

    Parameters
    ----------
    names
        Of all channels.
    channels
        Names or numbers; a mapping gives new names. Channels that have no names get those of a list that is as long.
    where
        What errors call the images.

    Raises
    ------
    KeyError
        If there is no such name.
    ValueError
        If none is asked for, one twice, there is no such number, or several have a name.
    """
    asked = [channels] if isinstance(channels, (str, int)) else list(channels)
    if not asked:
        msg = f"channels={channels!r}: name at least one of {', '.join(names)}."
        raise ValueError(msg)
    if isinstance(channels, Mapping):
        return _places(names, list(channels.values()), where), [str(name) for name in asked]
    if _unnamed(names) and len(asked) == len(names) and not any(_is_number(one) or one in names for one in asked):
        return list(range(len(names))), [str(name) for name in asked]
    places = _places(names, asked, where)
    return places, [names[place] for place in places]


def told_by_name(names: Sequence[str], channels: Channels) -> Channels:
    """The same, plain, and by name where that tells: other cells may have fewer channels, under other numbers."""

    def plain(one: str | int) -> str | int:
        if one in names or not _is_number(one) or not 0 <= int(one) < len(names):
            return one if isinstance(one, str) else int(one)
        return names[int(one)] if names.count(names[int(one)]) == 1 else int(one)

    if isinstance(channels, Mapping):
        return {str(name): plain(one) for name, one in channels.items()}
    return [plain(one) for one in ([channels] if isinstance(channels, (str, int)) else channels)]


def _places(names: Sequence[str], asked: Sequence[str | int], where: str) -> list[int]:
    places = []
    for one in asked:
        found = [place for place, name in enumerate(names) if name == one]
        if len(found) > 1:
            msg = f"{where} has {len(found)} channels of the name {one!r} (numbers {head(found)}): choose by number."
            raise ValueError(msg)
        if not found and not _is_number(one):
            raise KeyError(missing_key(f"{where} (channels)", str(one), names, "channels"))
        place = found[0] if found else int(one)
        if not 0 <= place < len(names):
            msg = f"{where} has {len(names)} channels, of the numbers 0 to {len(names) - 1}: there is no {place}."
            raise ValueError(msg)
        places.append(place)
    if len(set(places)) < len(places):
        msg = f"channels={list(asked)!r} names one channel twice."
        raise ValueError(msg)
    return places


def check_channel_names(var: pd.DataFrame, n_channels: int, registered: dict[str, Any], image_key: str) -> None:
    """Hold names of channels to those a model was set up with, where both have names.

    Raises
    ------
    ValueError
        If they are the same in another order. They are not put in order here: ``adata[:, names]`` moves names and
        leaves images where they are, so that names do not tell which of the two was moved.

    Warns
    -----
    UserWarning
        If there are other names.
    """
    stored = channel_names(var, n_channels, image_key)
    places, found = taken_channels(var, n_channels, image_key, registered.get("asked"))
    known = registered["channels"]
    _check_order(stored, registered.get("stored", known), list(range(n_channels)), image_key)
    if not registered.get("asked"):
        _check_order(found, known, places, image_key)
    if found == known or _unnamed(found) or _unnamed(known):
        return
    msg = (
        f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: other "
        "names. Channels are taken as they come; where only the names differ, rename them."
    )
    warnings.warn(msg, UserWarning, stacklevel=4)


def _check_order(found: list[str], known: list[str], places: list[int], image_key: str) -> None:
    if found == known or sorted(found) != sorted(known):
        return
    order = np.argsort(found, kind="stable")[np.argsort(np.argsort(known, kind="stable"))]
    code = how_to_keep([places[place] for place in order], image_key)
    msg = (
        f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: the "
        f"same in another order. Put both in that order: {code}; or only the first, which moves names and no image, if "
        "the images lie in the model's order already."
    )
    raise ValueError(msg)


def say_masks(var: pd.DataFrame, n_channels: int, image_key: str, channels: Channels | None) -> None:
    """Say which channels are left out, where none are asked for."""
    masks = _masks(var, n_channels)
    if masks.any() and channels is None:
        names = channel_names(var, n_channels, image_key)
        logger.warning(
            "%s are masks (var['channel_mapping']), and are left out; channels=%s takes all.",
            ", ".join(np.array(names)[masks]),
            names,
        )


def _check_not_cut(var: pd.DataFrame, n_channels: int, image_key: str) -> None:
    """Raise if ``var`` has fewer names than there are channels: which they are of, only a user can say."""
    names = [str(name) for name in var.index]
    if 0 < len(names) < n_channels and not _unnamed(names):
        msg = (
            f"var has {len(names)} names ({', '.join(names)}), obsm[{image_key!r}] has {n_channels} channels: "
            f"adata[:, names] cuts var, and no image. Begin with all, and cut both: {how_to_keep([0, 1], image_key)} "
            f"for the first two; or, if var names features, take them by number, channels={list(range(n_channels))}."
        )
        raise ValueError(msg)


def _masks(var: pd.DataFrame, n_channels: int) -> np.ndarray:
    """Which channels are masks, as scPortrait says it; none where that leaves no image."""
    if "channel_mapping" not in var or len(var) != n_channels:
        return np.zeros(n_channels, dtype=bool)
    masks = (var["channel_mapping"].astype(str) == "mask").to_numpy()
    return masks & ~masks.all()


def how_to_keep(channels: list[int], image_key: str) -> str:
    """Code that takes these channels, in this order, of names and images."""
    images = f"adata.obsm[{image_key!r}]"
    return f"adata = adata[:, {channels}].copy(), then {images} = {images}[:, {channels}]"


def numbered(n: int) -> list[str]:
    """How channels are called that have no names."""
    return [f"channel_{i}" for i in range(n)]


def _is_number(channel: str | int) -> bool:
    """Whether this is a number, which may be text where it comes from a command line."""
    return not isinstance(channel, str) or channel.isdecimal()


def _unnamed(names: Sequence[str]) -> bool:
    """Whether these are no names but numbers, ours or those of pandas."""
    return [name.removeprefix("channel_") for name in names] == [str(i) for i in range(len(names))]
